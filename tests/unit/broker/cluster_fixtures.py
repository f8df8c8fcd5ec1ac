"""Brokers that share the groups of a cluster, on virtual time: production coordinators and handlers over partitions in
memory, whose leaders the test moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator, GroupSettings
from mansio.broker.coordinator.group.topic_resolver import TopicResolver
from mansio.broker.routing.routes import java_string_hash
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.groups import GroupService
from mansio.errors import NotLeaderOrFollower
from support.listeners import broker_state
from support.no_transactions import NoCoordinator
from unit.broker.groups_fixtures import MemoryPartition, VirtualScheduler
from unit.broker.test_groups import Broker, Chance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.errors import MansioError
    from mansio.metadata.model import BrokerState, Topic
    from mansio.wire.internal_records.offset_and_group_records import CommittedOffset

PARTITIONS = 3


class CoordinatorReplica(MemoryPartition):
    """A partition in memory that leads for one epoch. `on_read(number)` is called before each batch is read."""

    def __init__(
        self, scheduler: VirtualScheduler, index: int, leader_epoch: int, batches: list[bytes] | None = None
    ) -> None:
        super().__init__(scheduler, batches)
        self.index = index
        self.leader_epoch = leader_epoch
        self.is_leader = True
        self.closed = False
        self.on_read: Callable[[int], object] = lambda _: None

    def batches(self, from_offset: int) -> Iterator[bytes]:
        for number, batch in enumerate(super().batches(from_offset)):
            self.on_read(number)
            yield batch

    def append(
        self, batch: bytes, *, internal: bool = False, urgent: bool = True, is_intact: bool = False
    ) -> Any:
        if not self.is_leader:
            raise NotLeaderOrFollower
        return super().append(batch, internal=internal, urgent=urgent)

    def step_down(self) -> None:
        self.is_leader = False
        for _, promise in self.waits:
            if not promise.done():
                promise.set_exception(NotLeaderOrFollower("another broker leads"))


class ClusterBroker(Broker):
    """One broker; `call`, `join` and the like as for a single one."""

    def __init__(self, cluster: GroupCluster, node_id: int) -> None:
        self.cluster = cluster
        self.scheduler = cluster.scheduler
        self.node_id = node_id
        self.settings = self
        self.reported: dict[tuple[str, str, int], CommittedOffset | None] = {}
        self.groups = GroupCoordinator(
            settings=GroupSettings(),
            clock=self.scheduler,
            scheduler=self.scheduler,
            random=Chance(),
            create_topic=self.create,
            end_offset=lambda *_: None,
            on_offset=lambda group, topic, index, what: self.reported.__setitem__(
                (group, topic, index), what
            ),
            lookup=cluster,
            topic_resolver=TopicResolver(cluster.live),
        )
        self.group_service = GroupService(
            self.groups, node_id=self.node_id, verifier=NoCoordinator(), authorization=Authorization(None)
        )
        self.scheduler.run(self.groups.start(()))

    async def create(self) -> list[MemoryPartition]:
        self.cluster.make()
        return []


class GroupCluster:
    """See the module. It is its own `CoordinatorLookup`; node 1 to 3 lead partition 0 to 2 when the topic is made."""

    def __init__(self, brokers: int = 3) -> None:
        self.scheduler = VirtualScheduler()
        self.partitions: list[CoordinatorReplica] = []
        self.leaders: list[int] = []
        self.topics = {"t"}
        self.live: dict[str, Topic] = {}  # what members of the new group protocol can subscribe to
        self.fail: MansioError | None = None
        self.made_times = 0
        self.brokers = {node_id: ClusterBroker(self, node_id) for node_id in range(1, brokers + 1)}

    def make(self) -> None:
        self.made_times += 1
        if self.fail is not None:
            raise self.fail
        self.partitions = [CoordinatorReplica(self.scheduler, index, 0) for index in range(PARTITIONS)]
        self.leaders = [index + 1 for index in range(PARTITIONS)]
        for partition in self.partitions:
            self.brokers[self.leaders[partition.index]].groups.handle_role_change(partition)

    def made(self) -> GroupCluster:
        self.make()
        self.scheduler.turn()
        return self

    def move(self, index: int, to: int, *, cut: bool = False) -> CoordinatorReplica:
        """Another leader, which has all that was there; `cut`: but what was not committed."""
        before = self.partitions[index]
        before.step_down()
        self.tell(index)
        batches = before.after_power_loss(self.scheduler).stored if cut else list(before.stored)
        after = CoordinatorReplica(self.scheduler, index, before.leader_epoch + 1, batches)
        self.partitions[index], self.leaders[index] = after, to
        return after

    def tell(self, index: int) -> None:
        """The leader hears of its role."""
        self.brokers[self.leaders[index]].groups.handle_role_change(self.partitions[index])

    # CoordinatorLookup

    def partition_count(self) -> int:
        return len(self.partitions)

    def leader(self, index: int) -> BrokerState | None:
        node_id = self.leaders[index]
        return None if node_id < 0 else broker_state(node_id, f"host{node_id}", 9000 + node_id, None, node_id)

    def leader_id(self, index: int) -> int:
        return self.leaders[index]

    def has_topic(self, topic: str) -> bool:
        return topic in self.topics

    def has_partition(self, topic: str, index: int) -> bool:
        return topic in self.topics and index in (0, 1)


def group_in(index: int, number: int = 0) -> str:
    """A group id that lives in one partition."""
    names = (f"g{count}" for count in range(1000))
    found = [name for name in names if (java_string_hash(name) & 0x7FFFFFFF) % PARTITIONS == index]
    return found[number]
