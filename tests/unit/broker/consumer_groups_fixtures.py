"""Members of consumer groups on virtual time: each does what a good client of KIP-848 does, through the wire codec.

A `Member` believes what it is told and nothing else: `owned` is what it reads. The room keeps all of them, so that a
test can ask at any moment whether two read one partition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from mansio.api.kafka.handlers import configs as config_handlers
from mansio.api.kafka.handlers import consumer_groups as consumer_handlers
from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator, GroupSettings
from mansio.broker.coordinator.group.topic_resolver import TopicResolver
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.groups import GroupService
from mansio.metadata.model import TOPIC_LIVE, PartitionState, Topic, TopicChange
from mansio.wire.api_versions import ApiKey
from support.no_transactions import NoCoordinator
from unit.broker import test_groups
from unit.broker.groups_fixtures import MemoryPartition, VirtualScheduler
from unit.broker.test_groups import Broker, Chance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.state.authorization.authorizer import Authorizer

test_groups.GROUP_APIS.update(
    {
        ApiKey.CONSUMER_GROUP_HEARTBEAT: consumer_handlers.consumer_group_heartbeat,
        ApiKey.CONSUMER_GROUP_DESCRIBE: consumer_handlers.consumer_group_describe,
        ApiKey.LIST_CONFIG_RESOURCES: config_handlers.list_config_resources,
    }
)

REBALANCE_MS = 60_000
UNKNOWN_MEMBER, FENCED_EPOCH, STALE_EPOCH, GROUP_NOT_FOUND = 25, 110, 113, 69
JOINS_AGAIN = (UNKNOWN_MEMBER, FENCED_EPOCH)

Place = tuple[str, int]


class Catalogue:
    """The topics there are; `set` makes them, lets them grow, makes them again, or (None) deletes them."""

    def __init__(self, **topics: int) -> None:
        self.live: dict[str, Topic] = {}
        self.listeners: list[Any] = []
        self.made = 0
        for name, count in topics.items():
            self.set(name, count)

    def set(self, name: str, count: int | None, *, again: bool = False, internal: bool = False) -> None:
        before = self.live.pop(name, None)
        after = None
        if count is not None:
            self.made += 1
            topic_id = UUID(int=self.made) if before is None or again else before.topic_id
            one = PartitionState((1,), 1, 0, (1,))
            after = self.live[name] = Topic(
                name, topic_id, (one,) * count, 1, {}, internal, TOPIC_LIVE, self.made
            )
        for tell in self.listeners:
            tell(TopicChange(before, after))


class ConsumerBroker(Broker):
    """A coordinator that knows the topics of a catalogue. `overrides`: settings of single groups. `authorizer`: None
    allows everything."""

    def __init__(
        self,
        catalogue: Catalogue | None = None,
        partitions: list[MemoryPartition] | None = None,
        authorizer: Authorizer | None = None,
        **settings: Any,
    ) -> None:
        self.scheduler = VirtualScheduler()
        if partitions is not None:
            partitions = [each.after_power_loss(self.scheduler) for each in partitions]
        self.partitions = partitions or []
        self.node_id = 1
        self.settings = self
        self.given = settings
        self.catalogue = catalogue or Catalogue(t=4)
        self.overrides: dict[str, Mapping[str, str]] = {}
        subscriptions = TopicResolver(self.catalogue.live)
        self.catalogue.listeners = [subscriptions.update]
        self.groups = GroupCoordinator(
            settings=GroupSettings(**settings),
            clock=self.scheduler,
            scheduler=self.scheduler,
            random=Chance(),
            create_topic=self.create,
            end_offset=lambda *_: 100,
            topic_resolver=subscriptions,
            overrides=lambda group_id: self.overrides.get(group_id, {}),
            hides_topics=authorizer is not None,
        )
        self.group_service = GroupService(
            self.groups,
            node_id=self.node_id,
            verifier=NoCoordinator(),
            authorization=Authorization(authorizer),
        )
        self.scheduler.run(self.groups.start(self.partitions))

    def restarted(self) -> ConsumerBroker:
        return ConsumerBroker(self.catalogue, self.partitions, **self.given)

    @property
    def home(self) -> MemoryPartition:
        """The partition that group "g" lives in."""
        if not self.partitions:
            self.scheduler.run(self.groups.ensure_topic_exists())
        return self.partitions[self.groups.store.partition_for("g")]

    def describe_consumer(self, group_id: str = "g") -> Any:
        return self.call(ApiKey.CONSUMER_GROUP_DESCRIBE, group_ids=[group_id]).groups[0]

    def stored(self, group_id: str = "g") -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        """What the machine of a group consists of, and what is stored of it: to be the same."""
        entry = self.groups.store.entries[group_id]
        return dict(entry.group.snapshot()), dict(entry.group_records)  # type: ignore[union-attr]


class Member:
    """One client. `beat` sends what it has to say; `stabilize` lets several do so until nothing moves."""

    def __init__(
        self,
        broker: Any,
        member_id: str,
        topics: Sequence[str] | None = ("t",),
        *,
        regex: str | None = None,
        instance_id: str | None = None,
        assignor: str | None = None,
        group_id: str = "g",
    ) -> None:
        self.broker = broker
        self.group_id = group_id
        self.member_id = member_id
        self.topics = topics
        self.regex = regex
        self.instance_id = instance_id
        self.assignor = assignor
        self.epoch = 0
        self.owned: frozenset[Place] = frozenset()
        self.interval_ms = 0
        self.error = 0
        self.sends_owned = self.is_full_request = False

    def request(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "group_id": self.group_id,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "topic_partitions": None,
        }
        if self.instance_id is not None:
            fields["instance_id"] = self.instance_id
        if self.epoch == 0:
            self.owned = frozenset()
        if self.epoch >= 0 and (self.epoch == 0 or self.is_full_request):
            fields |= {
                "rebalance_timeout_ms": REBALANCE_MS,
                "subscribed_topic_names": self.topics,
                "subscribed_topic_regex": self.regex,
                "server_assignor": self.assignor,
                "topic_partitions": self._shown(),
            }
        elif self.sends_owned:
            fields["topic_partitions"] = self._shown()
        return fields

    def _shown(self) -> list[dict[str, Any]]:
        ids = {name: topic.topic_id for name, topic in self.broker.catalogue.live.items()}
        by_topic: dict[str, list[int]] = {}
        for name, index in sorted(self.owned):
            by_topic.setdefault(name, []).append(index)
        return [
            {"topic_id": ids[name], "partitions": indexes}
            for name, indexes in by_topic.items()
            if name in ids
        ]

    def beat(self) -> int:
        """One heartbeat, answered; the error it got."""
        return self.answered(self.broker.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, **self.request()))

    def begin(self) -> Any:
        """One heartbeat; the promise of its answer, which `answered` takes."""
        return self.broker.begin(ApiKey.CONSUMER_GROUP_HEARTBEAT, **self.request())

    def answered(self, answer: Any) -> int:
        self.error = answer.error_code
        self.sends_owned = self.is_full_request = False
        if self.error in JOINS_AGAIN:
            self.epoch, self.owned = 0, frozenset()
        elif self.error == 0:
            self.epoch = answer.member_epoch
            self.interval_ms = answer.heartbeat_interval_ms
            if answer.assignment is not None:
                self._take(answer.assignment.topic_partitions)
        else:
            self.is_full_request = True  # the answer before may have got lost
        return self.error

    def _take(self, topics: Any) -> None:
        names = {topic.topic_id.bytes: name for name, topic in self.broker.catalogue.live.items()}
        reported = frozenset(
            (names[each.topic_id], index)
            for each in topics
            for index in each.partitions
            if each.topic_id in names
        )
        self.sends_owned = True
        self.owned = reported

    def leave(self) -> int:
        self.epoch = -2 if self.instance_id is not None else -1
        self.owned = frozenset()
        answer = self.broker.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, **self.request())
        return int(answer.error_code)

    def commit(self, offset: int, *, epoch: int | None = None, topic: str = "t") -> int:
        partition = {"partition_index": 0, "committed_offset": offset, "committed_metadata": ""}
        answer = self.broker.call(
            ApiKey.OFFSET_COMMIT,
            group_id=self.group_id,
            generation_id_or_member_epoch=self.epoch if epoch is None else epoch,
            member_id=self.member_id,
            topics=[{"name": topic, "partitions": [partition]}],
        )
        return int(answer.topics[0].partitions[0].error_code)


def check_alone(members: Sequence[Member]) -> None:
    """No partition is read by two."""
    seen: dict[Place, str] = {}
    for member in members:
        for place in member.owned:
            assert place not in seen, f"{place} is read by {seen[place]} and {member.member_id}"
            seen[place] = member.member_id


def stabilize(members: Sequence[Member], *, rounds: int = 12) -> None:
    """Heartbeats of all, until no member receives anything new."""
    for _ in range(rounds):
        before = [(each.epoch, each.owned) for each in members]
        for member in members:
            member.beat()
            check_alone(members)
        if before == [(each.epoch, each.owned) for each in members] and not any(
            each.sends_owned or each.error for each in members
        ):
            return
    raise AssertionError(
        f"the group does not settle: {[(each.epoch, each.owned, each.error) for each in members]}"
    )
