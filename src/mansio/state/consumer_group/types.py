"""What goes into and comes out of a consumer group of the new protocol: requests, answers, views, settings.

Only data. The rules are in `consumer_group`. A topic is known by the 16 bytes of its id in here, because a topic made
anew under an old name is another topic; names turn up where a client speaks of them.

Source: KIP-848.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TopicPartition = tuple[bytes, int]
"""A partition: the 16 bytes of its topic's id, and its index."""

Records = list[tuple[bytes, bytes | None]]
"""Keys and values (None deletes) to append to `__consumer_offsets`, all in one batch and in this order."""

NO_PARTITIONS: Final[frozenset[TopicPartition]] = frozenset()

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2
"""Epochs a heartbeat may carry that are no epochs: join anew, leave for good, leave and keep the place."""

NEVER_RESOLVED: Final = -1

CLASSIC_PROTOCOL_TYPE: Final = "consumer"
"""The protocol type of classic members that this group can take in: those that say what they subscribe to."""

RECONCILING_HEARTBEAT_INTERVAL_MS: Final = 300
"""How soon a member is to be heard of again while it gives up partitions, or awaits some."""


class ConsumerGroupState(StrEnum):
    """The five states, under the names that `ListGroups` and `ConsumerGroupDescribe` show."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class MemberState(IntEnum):
    """Where a member stands, by the numbers of Kafka's record."""

    STABLE = 0
    UNREVOKED = 1  # it has to give partitions up, and has not said yet that it did
    UNRELEASED = 2  # some of its target is still held by others


class ConsumerGroupSettings(NamedTuple):
    """What is in force for one group. `size_max`: members at most."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 500
    size_max: int = 1_000


class Topics(NamedTuple):
    """The topics there are, as the group is to see them.

    `ids`: name -> id; `partitions`: id -> how many; `matches`: regular expression -> the names it matches, for every
    expression the group's members and the request have (`ConsumerGroup.expressions`). Give the same object for as
    long as nothing of it changed: a group looks into it only when it is another one.
    """

    ids: Mapping[str, bytes]
    partitions: Mapping[bytes, int]
    matches: Mapping[str, tuple[str, ...]]


class Heartbeat(NamedTuple):
    """A ConsumerGroupHeartbeat request. None (and -1 for the time) means: as before.

    `member_id` is never empty: where the client has none (version 0), the caller makes one. `topic_regex` is "" where
    the member subscribes by an expression no more. `owned`: what the member has now.
    """

    member_id: str
    member_epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topic_names: tuple[str, ...] | None = None
    topic_regex: str | None = None
    assignor: str | None = None
    owned: frozenset[TopicPartition] | None = None


class HeartbeatResponse(NamedTuple):
    """What the member is told. `assignment`: everything it may read from now on, in order; None: as before."""

    member_id: str
    member_epoch: int
    heartbeat_interval_ms: int
    assignment: tuple[TopicPartition, ...] | None


class ClassicSubscription(NamedTuple):
    """What the metadata of a classic member's protocol say: topics by name, partitions it has, its rack."""

    topics: tuple[str, ...]
    owned: tuple[tuple[str, int], ...]
    rack_id: str | None


class ClassicCodec(Protocol):
    """The bytes of classic members (Kafka's "consumer" embedded protocol). Malformed ones raise `WireError`."""

    def subscription(self, metadata: bytes) -> ClassicSubscription:
        """A Subscription."""

    def assigned(self, assignment: bytes) -> Sequence[tuple[str, int]]:
        """An Assignment; no bytes are no partitions."""

    def assignment(self, partitions: Sequence[tuple[str, int]]) -> bytes:
        """The bytes of an Assignment."""


EMPTY, ASSIGNING, RECONCILING, STABLE, DEAD = ConsumerGroupState

TRANSITIONS: Final[dict[ConsumerGroupState, frozenset[ConsumerGroupState]]] = {
    EMPTY: frozenset({ASSIGNING, RECONCILING, STABLE, DEAD}),
    ASSIGNING: frozenset({RECONCILING, STABLE, EMPTY}),
    RECONCILING: frozenset({ASSIGNING, STABLE, EMPTY}),
    STABLE: frozenset({ASSIGNING, RECONCILING, EMPTY}),
    DEAD: frozenset({EMPTY}),  # only when deleting it failed
}
"""From a state to those that may follow it, seen between two calls."""
