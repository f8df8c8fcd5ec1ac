"""Clients of a consumer group as its tests need them: what each believes it may read, and how it behaves.

A client here is a small model of a real one. `owned` is what it reads; it changes only by what the client was told, or
gave up. The group sees nothing of a client but its requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import (
    FencedInstanceId,
    FencedMemberEpoch,
    IllegalGeneration,
    MansioError,
    RebalanceInProgress,
    UnknownMember,
    UnreleasedInstanceId,
)
from mansio.state.assignors.range import RangeAssignor
from mansio.state.assignors.uniform import UniformAssignor
from mansio.state.classic_group.types import Join, Protocol, Sync
from mansio.state.consumer_group.types import ClassicSubscription, Heartbeat, Topics
from mansio.wire.internal_records import consumer_protocol
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.state.assignors import Assignor
    from mansio.state.consumer_group.types import HeartbeatResponse
    from mansio.wire.topic_partition import TopicIdPartition

ASSIGNORS: dict[str, Assignor] = {"uniform": UniformAssignor(), "range": RangeAssignor()}
SESSION_MS = 6_000
REBALANCE_MS = 5_000


class Codec:
    """The bytes of classic members, by `wire.internal_records.consumer_protocol`."""

    def decode_subscription(self, metadata: bytes) -> ClassicSubscription:
        read = consumer_protocol.decode_subscription(metadata)
        return ClassicSubscription(read.topics, read.owned_partitions, read.rack_id)

    def decode_assignment(self, assignment: bytes) -> Sequence[tuple[str, int]]:
        return consumer_protocol.decode_assignment(assignment).partitions

    def encode_assignment(self, partitions: Sequence[tuple[str, int]]) -> bytes:
        named = tuple(TopicPartition(*each) for each in partitions)
        return consumer_protocol.encode_assignment(consumer_protocol.Assignment(named))


PATTERNS: dict[str, Callable[[str], bool]] = {"^.*": lambda _: True, "^[ab]": lambda name: name in "ab"}


class World:
    """The topics there are; they come, go and grow."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.made = 0
        self.counts: dict[str, int] = {}
        self.ids: dict[str, bytes] = {}
        for name, count in counts.items():
            self.set(name, count)

    def set(self, name: str, count: int) -> None:
        """0 deletes the topic; a smaller count makes it again."""
        if count < self.counts.get(name, 0) or name not in self.ids:
            self.made += 1
            self.ids[name] = b"%-4b%012d" % (name.encode(), self.made)
        self.counts[name] = count
        if count == 0:
            del self.ids[name], self.counts[name]
        ids = dict(self.ids)
        matches = {
            pattern: tuple(each for each in ids if matching(each)) for pattern, matching in PATTERNS.items()
        }
        self.topics = Topics(ids, {ids[each]: self.counts[each] for each in ids}, matches)

    def name_of(self, topic_id: bytes) -> str:
        return topic_id[:4].decode().strip()


class ModernClient:
    """A member of the new protocol."""

    is_classic = False

    def __init__(self, name: str, instance_id: str | None = None) -> None:
        self.name = name
        self.instance_id = instance_id
        self.incarnation = 0
        self.epoch = 0
        self.owned: frozenset[TopicIdPartition] = frozenset()
        self.to_give_up: frozenset[TopicIdPartition] = frozenset()
        self.assigned: frozenset[TopicIdPartition] = frozenset()
        self.reported: frozenset[TopicIdPartition] | None = None
        self.names: tuple[str, ...] | None = ("a", "b")
        self.regex: str | None = None
        self.assignor: str | None = None
        self.must_say_all = True
        self.joined = False

    @property
    def member_id(self) -> str:
        return f"{self.name}{self.incarnation}"

    def request(self) -> Heartbeat:
        """What it would send now: everything, when it joins or has missed an answer; else what is new."""
        if self.epoch == 0:
            self.owned = self.to_give_up = self.assigned = frozenset()
        if self.epoch == 0 or self.must_say_all:
            return Heartbeat(
                self.member_id,
                self.epoch,
                self.instance_id,
                None,
                "client",
                "/host",
                REBALANCE_MS,
                self.names,
                self.regex if self.regex is not None else "",
                self.assignor,
                self.owned,
            )
        owned = self.owned if self.owned != self.reported else None
        return Heartbeat(self.member_id, self.epoch, self.instance_id, owned=owned)

    def hear(self, request: Heartbeat, answer: HeartbeatResponse, *, slow: bool) -> None:
        """Take an answer in; a slow client goes on reading what it is to give up."""
        self.joined = True
        self.must_say_all = False
        if request.owned is not None:
            self.reported = request.owned
        self.epoch = answer.member_epoch
        if answer.assignment is not None:
            self.assigned = frozenset(answer.assignment)
            self.to_give_up = self.owned - self.assigned
        if not slow:
            self.give_up()

    def give_up(self) -> None:
        """Let go of what it is not to have any more; only then it takes what is new."""
        if self.joined and self.epoch > 0:
            self.owned = self.assigned
            self.to_give_up = frozenset()

    def fail(self, error: MansioError) -> None:
        if isinstance(error, FencedMemberEpoch | UnknownMember):
            self.reset()
        elif isinstance(error, FencedInstanceId | UnreleasedInstanceId):
            self.reset()
            self.incarnation += 1

    def reset(self) -> None:
        self.epoch = 0
        self.owned = self.to_give_up = self.assigned = frozenset()
        self.reported = None
        self.must_say_all = True
        self.joined = False

    def restart(self) -> None:
        self.reset()
        self.incarnation += 1


class ClassicClient:
    """A member of the classic protocol, eager or cooperative."""

    is_classic = True

    def __init__(self, name: str, world: World, *, cooperative: bool, instance_id: str | None = None) -> None:
        self.name = name
        self.world = world
        self.instance_id = instance_id
        self.cooperative = cooperative
        self.incarnation = 0
        self.member_id = ""
        self.generation = -1
        self.names: tuple[str, ...] = ("a", "b")
        self.owned: frozenset[TopicIdPartition] = frozenset()
        self.must_join = True

    def join_request(self) -> Join:
        """An eager client lets go of all it has; a cooperative one sends what it has."""
        if not self.cooperative:
            self.owned = frozenset()
        ids = {topic_id: name for name, topic_id in self.world.ids.items()}
        self.owned = frozenset(each for each in self.owned if each[0] in ids)
        owned = tuple(TopicPartition(ids[topic_id], index) for topic_id, index in sorted(self.owned))
        metadata = consumer_protocol.encode_subscription(consumer_protocol.Subscription(self.names, owned))
        name = "cooperative-sticky" if self.cooperative else "range"
        protocols = (Protocol(name, metadata), Protocol("both", metadata))
        return Join(
            self.member_id,
            self.instance_id,
            "client",
            "/host",
            SESSION_MS,
            REBALANCE_MS,
            "consumer",
            protocols,
        )

    def sync_request(self) -> Sync:
        return Sync(self.member_id, self.instance_id, self.generation, {}, "consumer")

    def hear(self, assignment: bytes) -> None:
        named = Codec().decode_assignment(assignment)
        assigned = frozenset((self.world.ids[name], index) for name, index in named)
        self.must_join = self.cooperative and not self.owned <= assigned  # to say that it has let go
        self.owned = assigned

    def fail(self, error: MansioError) -> None:
        if isinstance(error, RebalanceInProgress):
            self.must_join = True
        elif isinstance(error, IllegalGeneration):
            self.owned = frozenset()
            self.must_join = True
        else:
            self.restart()

    def reset(self) -> None:
        self.owned = frozenset()
        self.must_join = True

    def restart(self) -> None:
        self.reset()
        self.member_id = ""
        self.generation = -1
