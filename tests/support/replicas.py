"""Replicating brokers on virtual time: the production partitions, followers, ISR managers and Fetch handler over
simulated disks, a network in memory and a model of the metadata store.

There is no controller: the test elects leaders (`Cluster.elect`) and decides which broker receives which change when.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from mansio.api.kafka.handlers.fetch import fetch
from mansio.broker.maintenance.log_scrubber import LogScrubber
from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.batch_processing import BatchProcessor
from mansio.broker.partition.batch_verifier import BatchVerifier
from mansio.broker.partition.storage_health import StorageHealth
from mansio.broker.replication.isr_manager import IsrManager
from mansio.broker.replication.leadership_applier import LeadershipApplier
from mansio.broker.replication.log_repairer import LogRepairer
from mansio.broker.replication.replica_fetcher import ReplicaFetcherManager, ReplicaFetcherSettings
from mansio.broker.routing.caller import ANONYMOUS_SESSION
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.broker_authenticator import BrokerAuthenticator
from mansio.broker.services.fetch import FetchService
from mansio.broker.services.follower_reads import FollowerReads
from mansio.broker.services.produce import ProduceService
from mansio.broker.services.records import RecordService
from mansio.broker.services.statistics import Statistics
from mansio.errors import ConnectionLost, MansioError, RequestTimedOut, UnknownTopicId
from mansio.metadata.feature_level import SUPPORTED
from mansio.metadata.metadata_store import Compare, Keys, Put, decode, encode
from mansio.metadata.model import (
    BROKER_ACTIVE,
    BrokerChange,
    BrokerState,
    PartitionState,
    Registration,
    partition_document,
)
from mansio.state.broker_handshake import BrokerIdentity
from mansio.storage.file_cache import FileCache
from mansio.storage.settings import LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.testing.metadata import InMemoryStore, InMemoryStoreClient
from mansio.testing.scheduler import SimulatedBackground, SimulatedClock, SimulatedRandom, Simulation
from mansio.wire.batch.record_batch import TimestampType, build_batch
from mansio.wire.batch.record_reader import read_records
from mansio.wire.headers import read_request_header
from support.no_transactions import NoCoordinator
from support.partition_bench import PartitionBench

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.metadata.feature_level import LevelRange
    from mansio.metadata.image import MetadataImage
    from mansio.storage.log import Log

RULES = AppendRules(1 << 20, TimestampType.CREATE, 1 << 62, 1 << 62)
TOPIC = UUID(int=7)
KEYS = Keys("test")
LAG_MS_MAX = 3000


class Network:
    """Delivers frames between brokers. `cut` contains the (from, to) pairs without a connection."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.nodes: dict[int, Node] = {}
        self.cut: set[tuple[int, int]] = set()
        self.delay_ms: Callable[[], float] = lambda: simulation.random.uniform(0.2, 1.5)
        self.spy: Callable[[int, int, bytes], None] | None = None
        self.late_copies = 0.0
        """So many of the requests come a second time, much later: what an old connection had under way."""

    def isolate(self, node_id: int) -> None:
        for other in self.nodes:
            if other != node_id:
                self.cut |= {(node_id, other), (other, node_id)}


class MemoryPeers:
    """`mansio.ports.Peers` of one broker. An answer is lent, and gone with the next request."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self._node = node
        self._lent: dict[int, bytearray] = {}

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        network, node = self._network, self._node
        if (gone := self._lent.get(node_id)) is not None:
            gone[:] = b"\xff" * len(gone)
        if network.spy is not None:
            network.spy(node.node_id, node_id, request)
        promise = node.scheduler.promise()

        def fail(error: MansioError) -> None:
            if not promise.done():
                promise.set_exception(error)

        timer = node.scheduler.call_later(timeout_ms, fail, RequestTimedOut(f"broker {node_id}"))
        target = network.nodes[node_id]
        sender = BrokerIdentity(node.node_id, node.broker_epoch)

        def answer(frame: bytes) -> None:
            if (node_id, node.node_id) not in network.cut:
                node.scheduler.call_later(network.delay_ms(), arrive, frame)

        def arrive(frame: bytes) -> None:
            if not promise.done():
                promise.set_result(frame)

        if target.scheduler.stopped:
            node.scheduler.call_later(network.delay_ms(), fail, ConnectionLost(f"broker {node_id} is down"))
        elif (node.node_id, node_id) not in network.cut:
            target.scheduler.call_later(network.delay_ms(), target.receive, request, answer, sender)
            if network.late_copies and network.simulation.random.random() < network.late_copies:
                late_ms = network.simulation.random.uniform(1, 4000)
                target.scheduler.call_later(late_ms, target.receive, request, lambda _: None, sender)
        try:
            lent = self._lent[node_id] = bytearray(await promise)
        finally:
            timer.cancel()
        return cast("bytes", memoryview(lent))


class MemorySlot:
    """The handler's view of a connection that waits for a response."""

    def __init__(self, answer: Callable[[Sequence[Any]], None]) -> None:
        self._answer = answer
        self.is_abandoned = False

    def on_lost(self, callback: Callable[[], None] | None) -> None:
        """Do nothing: this connection is never lost."""

    def answer(self, pieces: Sequence[Any]) -> None:
        self._answer(pieces)


class MemoryConnection:
    """`peer`: the broker at the other end, which has authenticated."""

    def __init__(self, answer: Callable[[Sequence[Any]], None], peer: BrokerIdentity) -> None:
        self._answer = answer
        self.peer = peer
        self.client_host = "memory"
        self.session = ANONYMOUS_SESSION
        self.grants = None

    def defer_response(self) -> MemorySlot:
        return MemorySlot(self._answer)


class SlowStore:
    """A store client with delays; `held` keeps transactions from reaching the store."""

    def __init__(self, store_client: InMemoryStoreClient, node: Node) -> None:
        self.store_client = store_client
        self._node = node
        self.held = False
        self._waiting: list[Any] = []

    def release(self) -> None:
        self.held = False
        waiting, self._waiting = self._waiting, []
        for promise in waiting:
            promise.set_result(None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def operations_max(self) -> int:
        return self.store_client.operations_max

    async def _way(self) -> None:
        promise = self._node.scheduler.promise()
        self._node.scheduler.call_later(self._node.cluster.network.delay_ms(), promise.set_result, None)
        await promise

    async def get(self, key: str) -> Any:
        await self._way()
        return await self.store_client.get(key)

    async def transact(self, compares: Any, operations: Any) -> Any:
        await self._way()
        if self.held:
            promise = self._node.scheduler.promise()
            self._waiting.append(promise)
            await promise
        done = await self.store_client.transact(compares, operations)
        await self._way()
        return done


def rack_of(node_id: int) -> str:
    """Each broker has a rack of its own."""
    return f"rack {node_id}"


class StoredState:
    """What is in the store, as a broker's image that is never late."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def brokers(self) -> dict[int, BrokerState]:
        epochs = self._cluster.epochs.items()
        return {node_id: BrokerState(node_id, "", 0, rack_of(node_id), epoch) for node_id, epoch in epochs}

    @property
    def registrations(self) -> dict[int, Registration]:
        levels = self._cluster.levels
        return {
            node_id: Registration(BROKER_ACTIVE, 1, levels.get(node_id, SUPPORTED))
            for node_id in self._cluster.node_ids
        }

    @property
    def topics(self) -> StoredState:
        return self

    def get(self, topic: str) -> Any:
        del topic
        states = [self._cluster.state(index) for index in range(self._cluster.partition_count)]
        return SimpleNamespace(partitions=states)


class Node:
    """One broker. `disk` survives its crash as far as a disk does."""

    def __init__(self, cluster: Cluster, node_id: int, disk: SimulatedDisk) -> None:
        simulation = cluster.simulation
        self.cluster = cluster
        self.node_id = node_id
        self.disk = disk
        self.clock = SimulatedClock(simulation)
        self.scheduler = simulation.scheduler(f"node {node_id}")
        self.background = SimulatedBackground(self.scheduler, lambda: simulation.random.uniform(0.5, 3))
        self.batch_processor = BatchProcessor(self.background)
        self.storage_health = StorageHealth(self.clock)
        self.bench = PartitionBench(
            disk,
            directory="data/t",
            settings=(),
            features=("producers",),
            is_follower=True,
            leader_epoch=-1,
            log_settings=cluster.log_settings,
            rules=RULES,
            topic_id=TOPIC,
            broker_id=node_id,
            replicas=len(cluster.node_ids),
            clock=self.clock,
            scheduler=self.scheduler,
            background=self.background,
        )
        self.store = SlowStore(cluster.store.store_client(), self)
        self.session_until_s = float("inf")
        self.ended_sessions: dict[int, int] = {}
        """As `MetadataImage.ended_sessions`."""
        self.broker_epoch = cluster.register(node_id)
        random = SimulatedRandom(simulation)
        self.partitions: dict[tuple[bytes, int], Partition] = {}
        self.verifier = BatchVerifier(self.background, self.scheduler)
        self.fetcher_manager = ReplicaFetcherManager(
            node_id,
            MemoryPeers(cluster.network, self),
            MemoryPeers(cluster.network, self),
            scheduler=self.scheduler,
            clock=self.clock,
            random=random,
            broker_epoch=lambda: self.broker_epoch,
            settings=cluster.follower_settings,
        )
        self.isr_manager = IsrManager(
            self.store,  # type: ignore[arg-type]  # enough of one
            KEYS,
            node_id=node_id,
            scheduler=self.scheduler,
            random=random,
            broker_epoch_of=lambda other: (
                self.broker_epoch if other == node_id else cluster.epochs.get(other, 0)
            ),
            can_join_isr=lambda _: True,
            is_session_valid=self.is_session_valid,
            lag_ms_max=LAG_MS_MAX,
        )
        self.replication = LeadershipApplier(
            node_id,
            fetcher_manager=self.fetcher_manager,
            isr_manager=self.isr_manager,
            broker_epoch=lambda: self.broker_epoch,
            is_session_valid=self.is_session_valid,
            ended_sessions=self.ended_sessions,
        )
        quotas: Any = SimpleNamespace(active=None)
        partitions: Any = self  # it only finds
        statistics = Statistics(self.clock)
        produce = ProduceService(
            partitions,
            clock=self.clock,
            scheduler=self.scheduler,
            statistics=statistics,
            verifier=NoCoordinator(),
            wait_ms_max=30_000,
        )
        registry: Any = SimpleNamespace(epoch_of=lambda other: cluster.epochs.get(other, 0))
        authenticator = BrokerAuthenticator(node_id, registry, random)
        self.service = SimpleNamespace(
            produce=produce,
            fetch=FetchService(
                partitions,
                produce=produce,
                quotas=quotas,
                clock=self.clock,
                scheduler=self.scheduler,
                response_bytes_max=50 << 20,
                wait_ms_max=500,
                authenticator=authenticator,
                files=FileCache(self.disk),
                follower_reads=FollowerReads(
                    cast("MetadataImage", StoredState(cluster)),
                    node_id,
                    rack_of(node_id),
                    self.is_session_valid,
                ),
            ),
            authenticator=authenticator,
            authorization=Authorization(None),
            records=RecordService(
                partitions,
                scheduler=self.scheduler,
                wait_ms_max=30_000,
                authorization=Authorization(None),
            ),
            quotas=quotas,
            statistics=statistics,
        )
        self.replication.on_leader_elected(self.service.fetch.complete_follower_fetches)
        self.replication.on_session_end(self.service.fetch.sessions.end_all_of)
        cluster.network.nodes[node_id] = self
        for _ in range(cluster.partition_count):
            self._open()
        self.replication.start()
        self.repairer = LogRepairer(
            node_id,
            partitions=partitions,
            sources=lambda partition: [
                other for other in cluster.state(partition.index).isr if other != node_id
            ],
            peers=MemoryPeers(cluster.network, self),
            disk=disk,
            clock=self.clock,
            scheduler=self.scheduler,
            background=self.background,
            broker_epoch=lambda: self.broker_epoch,
        )
        self.repairer.start()

    def is_session_valid(self) -> bool:
        return self.clock.monotonic() < self.session_until_s

    def _open(self) -> None:
        partition = self.bench.open_partition(
            self.cluster.topic_configs, storage_health=self.storage_health, verifier=self.verifier
        )
        self.partitions[TOPIC.bytes, partition.index] = partition

    def scrub(self) -> None:
        """Begin a round of a scrubber over all closed segments."""
        scrubber = LogScrubber(
            list(self.partitions.values()),
            disk=self.disk,
            clock=self.clock,
            scheduler=self.scheduler,
            background=self.background,
            interval_ms=1 << 40,
            bytes_per_second=1 << 40,
            verify_again_ms=1 << 40,
        )
        self.scheduler.spawn(scrubber.run_round(), name="scrub")

    def find(self, topic: str | None, topic_id: bytes | None, index: int) -> Partition:
        """As `PartitionSet.find`."""
        del topic
        found = self.partitions.get((topic_id or b"", index))
        if found is None:
            raise UnknownTopicId("no such partition")
        return found

    def get(self, topic: str, index: int) -> Partition | None:
        """As `PartitionSet.get`."""
        del topic
        return self.partitions.get((TOPIC.bytes, index))

    @property
    def partition(self) -> Partition:
        return self.partitions[TOPIC.bytes, 0]

    @property
    def log(self) -> Log:
        return self.partition.log

    def receive(self, request: bytes, answer: Callable[[bytes], None], sender: BrokerIdentity) -> None:
        """Process a frame of this broker; `answer` sends the response."""

        def send(pieces: Sequence[Any]) -> None:
            whole = b"".join(piece if isinstance(piece, bytes) else piece.read() for piece in pieces)
            answer(whole[4:])

        frame = memoryview(request)[4:]
        header = read_request_header(frame)
        connection = MemoryConnection(send, sender)
        pieces = fetch(self.service, connection, header, frame)  # type: ignore[arg-type]  # enough of them
        if pieces is not None:
            send(pieces)

    def append(self, *values: bytes, index: int = 0) -> Ack:
        """Append as a client with acks=all; whether and how it was acknowledged."""
        partition = self.partitions[TOPIC.bytes, index]
        batch = build_batch([(0, None, value, ()) for value in values])
        ack = Ack(list(values))
        appended = partition.append(batch)
        ack.offset = appended.base_offset
        if partition.when_committed(appended.end_offset, ack.complete):
            ack.complete(None)
        return ack

    def values(self, index: int = 0, *, committed: bool = False) -> list[bytes | None]:
        """All values in its log; `committed`: as readers see them."""
        partition = self.partitions[TOPIC.bytes, index]
        end = partition.high_watermark if committed else partition.end_offset
        return [
            record.value
            for batch in partition.log.batches(partition.start_offset)
            for record in read_records(batch, output_bytes_max=1 << 24)
            if partition.start_offset <= record.offset < end
        ]


class Ack:
    """The result of an append for a client with acks=all."""

    def __init__(self, values: list[bytes]) -> None:
        self.values = values
        self.offset = -1
        self.settled = False
        self.error: MansioError | None = None

    def complete(self, error: MansioError | None) -> None:
        assert not self.settled, "a wait is answered once"
        self.settled, self.error = True, error

    @property
    def acknowledged(self) -> bool:
        return self.settled and self.error is None


class Cluster:
    """See the module."""

    def __init__(
        self,
        brokers: int = 3,
        *,
        seed: int = 0,
        partitions: int = 1,
        configs: dict[str, str] | None = None,
        log_settings: LogSettings | None = None,
        follower_settings: ReplicaFetcherSettings | None = None,
    ) -> None:
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation)
        self.store = InMemoryStore(SimulatedClock(self.simulation), self.simulation.scheduler("store"))
        self.topic_configs = configs or {}
        self.log_settings = log_settings or LogSettings()
        self.follower_settings = follower_settings or ReplicaFetcherSettings()
        self.partition_count = partitions
        self.levels: dict[int, LevelRange] = {}
        """Of brokers of other versions."""
        self.epochs: dict[int, int] = {}
        """Of the sessions that live, as every broker sees them."""
        self.node_ids = tuple(range(1, brokers + 1))
        for node_id in self.node_ids:
            Node(self, node_id, SimulatedDisk())
        for index in range(partitions):
            state = PartitionState(self.node_ids, 1, 0, self.node_ids, 0, leader_broker_epoch=self.epochs[1])
            self._write(index, state)
        self.tell()

    def __getitem__(self, node_id: int) -> Node:
        return self.network.nodes[node_id]

    # The store, and who is told what

    def register(self, node_id: int) -> int:
        key = KEYS.session(node_id)
        self.store.transact([Compare(key, create_revision=0)], [Put(key, encode({}, "r"))])
        entry = self.store.get(key)
        assert entry is not None
        self.epochs[node_id] = entry.create_revision
        return entry.create_revision

    def end_session(self, node_id: int) -> None:
        """End the broker's session in the store; other brokers act on it when the change is delivered to them."""
        from mansio.metadata.metadata_store import Delete

        epoch = self.epochs.pop(node_id)
        self.store.transact([], [Delete(KEYS.session(node_id))])
        before = BrokerState(node_id, "", 0, None, epoch)
        for node in self.network.nodes.values():
            if node.node_id != node_id and not node.scheduler.stopped:
                node.scheduler.call_soon(
                    node.replication.handle_broker_change, BrokerChange(node_id, before, None)
                )

    def state(self, index: int = 0) -> PartitionState:
        entry = self.store.get(KEYS.partition(TOPIC, index))
        assert entry is not None
        document = decode(entry.key, entry.value)
        return PartitionState(
            tuple(document["replicas"]),
            document["leader"],
            document["leader_epoch"],
            tuple(document["isr"]),
            document["part_epoch"],
            leader_broker_epoch=document["leader_broker_epoch"],
            mod_revision=entry.mod_revision,
        )

    def _write(self, index: int, state: PartitionState) -> None:
        self.store.transact(
            [], [Put(KEYS.partition(TOPIC, index), encode(partition_document(state), "test"))]
        )

    def elect(self, leader: int, *, isr: Sequence[int] | None = None, index: int = 0) -> None:
        """Elect a leader of the in-sync replicas in a new epoch, as the controller does. No broker receives it yet."""
        state = self.state(index)
        members = tuple(isr) if isr is not None else state.isr
        assert leader in state.isr, "an unclean election"
        self._write(
            index,
            state._replace(
                leader=leader,
                leader_epoch=state.leader_epoch + 1,
                isr=members,
                partition_epoch=state.partition_epoch + 1,
                leader_broker_epoch=self.epochs[leader],
            ),
        )

    def tell(self, *node_ids: int) -> None:
        """Deliver the current state of the store to these brokers (default: all)."""
        for node_id in node_ids or self.node_ids:
            node = self[node_id]
            if not node.scheduler.stopped:
                for index in range(self.partition_count):
                    partition = node.partitions[TOPIC.bytes, index]
                    node.scheduler.call_soon(node.replication.apply, partition, self.state(index))

    # What happens to brokers

    def kill(self, node_id: int, *, power: bool = False) -> None:
        """SIGKILL; with `power`, unsynced data may be lost, too."""
        node = self[node_id]
        node.scheduler.stop()
        if power:
            node.disk = node.disk.crash(self.simulation.random)

    def restart(self, node_id: int) -> Node:
        """Restart a broker whose session has ended, with a new session and the current state of the store."""
        if node_id in self.epochs:
            self.end_session(node_id)
        node = Node(self, node_id, self[node_id].disk)
        self.tell(node_id)
        return node

    def run_for(self, duration_ms: float) -> None:
        self.simulation.run_for(duration_ms)

    def run_until(self, condition: Callable[..., object], within_ms: float = 30_000) -> None:
        self.simulation.run_until(condition, within_ms=within_ms)

    def settled(self) -> bool:
        """Whether all running brokers have the same log, committed everywhere."""
        nodes = [node for node in self.network.nodes.values() if not node.scheduler.stopped]
        return all(
            len(
                {
                    (n.partitions[TOPIC.bytes, i].end_offset, n.partitions[TOPIC.bytes, i].high_watermark)
                    for n in nodes
                }
            )
            == 1
            and nodes[0].partitions[TOPIC.bytes, i].end_offset
            == nodes[0].partitions[TOPIC.bytes, i].high_watermark
            for i in range(self.partition_count)
        )

    def check_same(self, index: int = 0) -> None:
        """Check that every running replica has the same bytes, and that every log is intact."""
        logs = [
            node.partitions[TOPIC.bytes, index].log
            for node in self.network.nodes.values()
            if not node.scheduler.stopped
        ]
        start = max(log.start_offset for log in logs)
        first = list(logs[0].batches(start))
        for log in logs:
            assert list(log.batches(start)) == first
            log.verify()
