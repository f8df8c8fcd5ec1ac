"""The state of share groups on several brokers, on virtual time: shipped stores, ways, messages and handlers, over
partitions in memory that move when the test says so, and a network that delays, loses and repeats.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mansio.api.kafka.connections.request_context import RequestContext
from mansio.api.kafka.handlers.share import share_state as handlers
from mansio.broker.coordinator.share.share_coordinator import ShareCoordinator
from mansio.broker.coordinator.share.state_client import RemoteStateClients
from mansio.broker.coordinator.share.state_store import ShareStateSettings
from mansio.broker.services.broker_authenticator import BrokerAuthenticator
from mansio.errors import ConnectionLost, NotLeaderOrFollower, RequestTimedOut
from mansio.state.broker_handshake import BrokerIdentity
from mansio.testing.scheduler import SimulatedClock, SimulatedRandom, Simulation
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.batch.record_batch import read_header
from mansio.wire.headers import read_request_header
from support.listeners import served_listener

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from mansio.errors import MansioError

PARTITIONS = 3
LOCK_MS = 2000
COMMIT_MS = 5.0
REQUESTS_MAX = 2
"""Requests in flight to one broker: one of each queue."""


class MovingPartition:
    """One leadership of a partition of the topic on one broker."""

    def __init__(self, cluster: StateCluster, index: int, leader_epoch: int, stored: list[bytes]) -> None:
        self.cluster = cluster
        self.index = index
        self.leader_epoch = leader_epoch
        self.is_leader = True
        self.closed = False
        self.is_leadership_uncertain = False
        self.stored = list(stored)
        self.start_offset = self.base_offset = 0
        self.end_offset = self.high_watermark = sum(read_header(each).record_count for each in stored)
        self.waits: list[tuple[int, Any]] = []

    def segment_base_offsets(self) -> list[int]:
        return [self.base_offset]

    @property
    def log(self) -> MovingPartition:
        return self

    def append(
        self, batch: bytes, *, internal: bool = False, urgent: bool = True, is_intact: bool = False
    ) -> Any:
        assert internal
        if not self.is_leader:
            raise NotLeaderOrFollower
        base_offset = self.end_offset
        self.stored.append(base_offset.to_bytes(8, "big") + batch[8:])
        self.end_offset += read_header(batch).record_count
        if urgent:
            self.request_flush()
        return SimpleNamespace(base_offset=base_offset)

    def request_flush(self) -> None:
        self.cluster.simulation.scheduler("disk").call_later(COMMIT_MS, self._commit, self.end_offset)

    def _commit(self, end_offset: int) -> None:
        if self.is_leader:
            self.high_watermark = max(self.high_watermark, end_offset)
            for end, promise in self.waits:
                if end <= self.high_watermark and not promise.done():
                    promise.set_result(None)

    def commit_promise(self, end_offset: int) -> Any:
        promise = self.cluster.simulation.scheduler("disk").promise()
        self.waits.append((end_offset, promise))
        if not self.is_leader:
            promise.set_exception(NotLeaderOrFollower())
        elif end_offset <= self.high_watermark:
            promise.set_result(None)
        return promise

    def report_commit(self, end_offset: int, callback: Callable[[MansioError | None], None]) -> None:
        self.commit_promise(end_offset).add_done_callback(lambda promise: callback(promise.exception()))

    def trim(self, start_offset: int) -> None:
        self.start_offset = start_offset

    def report_damage(self, offset: int, error: MansioError) -> None: ...

    def batches(self, from_offset: int) -> Iterator[bytes]:
        return iter([each for each in self.stored if read_header(each).last_offset >= from_offset])

    def step_down(self) -> None:
        self.is_leader = False
        for _, promise in self.waits:
            if not promise.done():
                promise.set_exception(NotLeaderOrFollower())


class StatePlacesInMemory:
    def __init__(self, cluster: StateCluster) -> None:
        self._cluster = cluster

    def partition_count(self) -> int:
        return len(self._cluster.partitions)

    def leader(self, index: int) -> Any:
        node_id = self._cluster.leaders[index]
        return None if node_id < 0 else SimpleNamespace(node_id=node_id)


class StateNode:
    """One broker."""

    def __init__(self, cluster: StateCluster, node_id: int) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.scheduler = cluster.simulation.scheduler(f"broker {node_id}")
        peers = NetworkPeers(cluster, self)
        self.state = ShareCoordinator(
            settings=ShareStateSettings(updates_per_snapshot=cluster.updates_per_snapshot),
            prune_interval_ms=1 << 40,
            node_id=node_id,
            clock=SimulatedClock(cluster.simulation),
            scheduler=self.scheduler,
            create_topic=cluster.create,
            lock_ms=lambda _: LOCK_MS,
            lookup=StatePlacesInMemory(cluster),
            remote_client=RemoteStateClients(
                peers,
                node_id=node_id,
                broker_epoch=lambda: cluster.epochs[node_id],
                scheduler=self.scheduler,
            ).client,
        )
        self.persister = self.state.persister
        self.refused: list[int] = []
        registry: Any = SimpleNamespace(epoch_of=lambda sender: cluster.epochs.get(sender, 0))
        self.service = SimpleNamespace(
            share_coordinator=self.state,
            scheduler=self.scheduler,
            authenticator=BrokerAuthenticator(node_id, registry, SimulatedRandom(cluster.simulation)),
            statistics=SimpleNamespace(count_error=lambda _, code: self.refused.append(code)),
        )

    async def serve(self, request: bytes, peer: BrokerIdentity | None) -> bytes:
        """Handle a request on a connection on which `peer` has authenticated."""
        header = read_request_header(request[4:])
        api = SUPPORTED_APIS[ApiKey(header.api_key)]
        assert api.min_version <= header.api_version <= api.max_version
        handler = getattr(handlers, (api.handler or "").rpartition(".")[2])
        context = RequestContext(
            header.api_key,
            header.api_version,
            header.correlation_id,
            header.client_id,
            "broker",
            served_listener(),
            peer,
        )
        answer: bytes = await handler(self.service, request[4:][header.body_position :], context)
        return answer[4:]


class NetworkPeers:
    """`mansio.ports.Peers`: unordered, two requests to each broker at a time, one of each queue; a request without a
    response may arrive later."""

    def __init__(self, cluster: StateCluster, node: StateNode) -> None:
        self._cluster = cluster
        self._node = node
        self._in_flight: Counter[int] = Counter()

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        cluster, random = self._cluster, self._cluster.simulation.random
        assert self._in_flight[node_id] < REQUESTS_MAX
        self._in_flight[node_id] += 1
        cluster.requests += 1
        scheduler = self._node.scheduler
        promise = scheduler.promise()
        sender = BrokerIdentity(self._node.node_id, cluster.epochs[self._node.node_id])

        def answered(answer: bytes) -> None:
            if not promise.done():
                promise.set_result(answer)

        async def carried(*, answer: bool) -> None:
            frame = await cluster.nodes[node_id].serve(request, sender)
            if answer:
                scheduler.call_later(random.uniform(0.1, 1), answered, frame)

        def arrive(*, answer: bool = True) -> None:
            cluster.nodes[node_id].scheduler.spawn(carried(answer=answer), name="request")

        fate = random.random()
        if fate < cluster.lost:
            scheduler.call_later(1, lambda: promise.done() or promise.set_exception(ConnectionLost("")))
            if fate < cluster.lost * 0.7:  # only its answer was; it comes soon, or late
                scheduler.call_later(random.uniform(0, 300), lambda: arrive(answer=False))
        else:
            scheduler.call_later(random.uniform(0.1, 1), arrive)
            if random.random() < cluster.repeated:
                scheduler.call_later(random.uniform(1, 300), lambda: arrive(answer=False))
        timer = scheduler.call_later(
            timeout_ms, lambda: promise.done() or promise.set_exception(RequestTimedOut(""))
        )
        try:
            result: bytes = await promise
            return result
        finally:
            timer.cancel()
            self._in_flight[node_id] -= 1


class StateCluster:
    """Brokers 1 to 3. `lost` and `repeated`: shares of requests."""

    def __init__(
        self, seed: int = 0, *, lost: float = 0.0, repeated: float = 0.0, updates_per_snapshot: int = 5
    ) -> None:
        self.simulation = Simulation(seed)
        self.updates_per_snapshot = updates_per_snapshot
        self.lost, self.repeated = lost, repeated
        self.epochs = {1: 11, 2: 12, 3: 13}
        self.partitions: list[MovingPartition] = []
        self.leaders: list[int] = []
        self.requests = 0
        self.nodes = {node_id: StateNode(self, node_id) for node_id in (1, 2, 3)}

    async def create(self) -> list[Any]:
        for index in range(PARTITIONS):
            self.partitions.append(MovingPartition(self, index, 0, []))
            self.leaders.append(index % 3 + 1)
            self.nodes[self.leaders[index]].state.handle_role_change(self.partitions[index])
        return []

    def move(self, index: int, node_id: int, *, truncated: bool = False) -> None:
        """Another broker leads now. `truncated`: it does not have what was not committed."""
        old = self.partitions[index]
        old.step_down()
        kept = [
            each for each in old.stored if not truncated or read_header(each).last_offset < old.high_watermark
        ]
        self.nodes[self.leaders[index]].state.handle_role_change(old)
        self.partitions[index] = new = MovingPartition(self, index, old.leader_epoch + 1, kept)
        self.leaders[index] = node_id
        self.nodes[node_id].state.handle_role_change(new)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.simulation.run(work)
