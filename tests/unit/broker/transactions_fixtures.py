"""A transaction coordinator on virtual time, with partitions in memory that store markers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.transaction.batch_committer import BatchCommitter
from mansio.broker.coordinator.transaction.marker_sender import MarkerSender
from mansio.broker.coordinator.transaction.routed_ender import RoutedEnder
from mansio.broker.coordinator.transaction.settings import TransactionSettings
from mansio.broker.coordinator.transaction.transaction_coordinator import TransactionCoordinator
from mansio.errors import NotLeaderOrFollower
from unit.broker.groups_fixtures import MemoryPartition, VirtualScheduler

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from mansio.errors import MansioError
    from mansio.metadata.model import BrokerState
    from mansio.state.transactions.transaction import Transaction
    from mansio.wire.batch.end_marker import EndMarker

TOPIC_PARTITIONS = 2


class MarkerLog:
    """The partitions of the cluster: which markers each one has stored, and what they refuse."""

    def __init__(self, scheduler: VirtualScheduler) -> None:
        self.scheduler = scheduler
        self.leaders: dict[tuple[str, int], int] = {("a", 0): 0, ("a", 1): 0, ("b", 0): 0}
        self.stored: list[tuple[tuple[str, int], EndMarker]] = []
        self.refusals: list[MansioError] = []
        self.held = False
        self.attempts = 0

    def leader_id(self, topic: str, index: int) -> int | None:
        return self.leaders.get((topic, index))

    async def write(
        self, marker: EndMarker, partitions: Sequence[tuple[str, int]]
    ) -> list[MansioError | None]:
        self.attempts += 1
        await self.scheduler.sleep(1)
        outcomes: list[MansioError | None] = []
        for each in partitions:
            if self.held:
                outcomes.append(NotLeaderOrFollower())
            elif self.refusals:
                outcomes.append(self.refusals.pop(0))
            else:
                self.stored.append((each, marker))
                outcomes.append(None)
        return outcomes

    def results(self) -> dict[tuple[str, int], list[bool]]:
        found: dict[tuple[str, int], list[bool]] = {}
        for partition, marker in self.stored:
            found.setdefault(partition, []).append(marker.is_commit)
        return found


class Lookup:
    """The metadata of `__transaction_state` in a cluster: this broker leads everything."""

    def __init__(self) -> None:
        self.brokers: dict[int, BrokerState] = {}

    def partition_count(self) -> int:
        return TOPIC_PARTITIONS

    def leader(self, index: int) -> BrokerState | None:
        return self.brokers.get(index)

    def leader_id(self, index: int) -> int:
        return 0

    def has_topic(self, topic: str) -> bool:
        return True

    def has_partition(self, topic: str, index: int) -> bool:
        return True


class CoordinatorRoom:
    """One coordinator; `cluster`: it leads partitions by `lead` instead of having them all."""

    def __init__(
        self,
        *,
        scheduler: VirtualScheduler | None = None,
        markers: MarkerLog | None = None,
        partitions: list[MemoryPartition] | None = None,
        cluster: bool = False,
        peers: Any = None,
        **settings: Any,
    ) -> None:
        self.scheduler = scheduler or VirtualScheduler()
        self.markers = markers or MarkerLog(self.scheduler)
        self.partitions = partitions or []
        self.lookup = Lookup()  # of a cluster
        self.next_id = 1000
        self.sender = MarkerSender(
            node_id=0, scheduler=self.scheduler, leaders=self.markers, local=self.markers, peers=peers
        )
        self.coordinator = TransactionCoordinator(
            settings=TransactionSettings(**settings),
            node_id=0,
            clock=self.scheduler,
            scheduler=self.scheduler,
            new_producer_id=self.new_producer_id,
            create_topic=self.create,
            markers=self.sender,
            remove_expired_decisions=lambda: self.batches.remove_expired(),
            resume_decisions=lambda entries: self.batches.resume(entries),
            lookup=self.lookup if cluster else None,
        )
        self.ender = RoutedEnder(self.coordinator, node_id=0, lookup=self.coordinator.lookup, peers=peers)
        self.batches = BatchCommitter(
            store=self.coordinator.store,
            ender=self.ender,
            settings=TransactionSettings(**settings),
            clock=self.scheduler,
            scheduler=self.scheduler,
        )
        if not cluster:
            self.run(self.coordinator.start(self.partitions))

    async def new_producer_id(self) -> int:
        self.next_id += 1
        return self.next_id

    async def create(self) -> list[MemoryPartition]:
        self.partitions = [MemoryPartition(self.scheduler) for _ in range(TOPIC_PARTITIONS)]
        return self.partitions

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.scheduler.run(work)

    def begin(self, name: str = "orders", timeout_ms: int = 60_000) -> tuple[int, int]:
        found = self.run(self.coordinator.initialize(name, timeout_ms, -1, -1))
        return found.producer_id, found.producer_epoch

    def bump(self, producer: tuple[int, int], name: str = "orders") -> tuple[int, int]:
        found = self.run(self.coordinator.initialize(name, 60_000, *producer))
        return found.producer_id, found.producer_epoch

    async def store(self, transaction: Transaction, name: str = "orders") -> None:
        await self.coordinator.store.append(name, transaction)

    def add(
        self, producer: tuple[int, int], *partitions: tuple[str, int], name: str = "orders", version: int = 2
    ) -> list[MansioError | None]:
        wanted = partitions or (("a", 0), ("b", 0))
        outcomes: list[MansioError | None] = self.run(
            self.coordinator.add_partitions(name, *producer, wanted, client_version=version)
        )
        return outcomes

    def end(
        self, producer: tuple[int, int], *, is_commit: bool = True, bumps: bool = True, name: str = "orders"
    ) -> tuple[int, int]:
        ended = self.run(self.coordinator.end(name, *producer, is_commit=is_commit, bumps_epoch=bumps))
        next_producer: tuple[int, int] = ended.current_producer
        return next_producer

    def state(self, name: str = "orders") -> str:
        return self.coordinator.store.entries[name].transaction.state.title

    def run_for(self, ms: float = 100) -> None:
        self.scheduler.pass_time(ms)

    def index(self, name: str = "orders") -> int:
        return self.coordinator.store.partition_for(name)

    def restarted(self, **settings: Any) -> CoordinatorRoom:
        """A new coordinator with what a power loss left; the partitions with the markers are the same."""
        scheduler = VirtualScheduler()
        scheduler.now_ms = self.scheduler.now_ms
        self.markers.scheduler = scheduler
        kept = [each.after_power_loss(scheduler) for each in self.partitions]
        room = CoordinatorRoom(scheduler=scheduler, markers=self.markers, partitions=kept, **settings)
        room.next_id = self.next_id + 100
        return room
