"""One broker process in a simulated cluster, from start to stop or kill: the production `BrokerRuntime` and
`ClusterMember`.

The order of steps at start and stop is that of `node.broker`; sockets, threads and etcd are the simulator's. A disk
outlives its broker; a broker that died is kept until the run is over, so that nothing of it ends at a time of the
collector's choosing.
"""

from __future__ import annotations

import functools
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mansio.api.kafka.connections.limits import ServerLimits
from mansio.api.kafka.server.listener import KafkaServer
from mansio.config.settings import Settings
from mansio.errors import MansioError
from mansio.host.host_ports import HostPorts
from mansio.metadata.image import MetadataImage
from mansio.net.broker_handshake import BrokerCredentials
from mansio.node.broker_runtime import BrokerRuntime
from mansio.node.cluster_member import ClusterMember
from mansio.ports import RequestClass
from mansio.testing.scheduler import (
    WALL_START_MS,
    SimulatedBackground,
    SimulatedRandom,
    SimulatedScheduler,
    Simulation,
    Task,
)
from mansio.wire.apis import produce as produce_wire
from sim import workload_clients
from sim.etcd import KeepAliveTurns, SimulatedEtcdClient
from sim.network import SimulatedPeerLinks, SimulatedPeers
from support.listeners import served_listener

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mansio.broker.partition.partition import Partition
    from mansio.metadata.broker_lifecycle import BrokerLifecycle
    from mansio.testing.disk import SimulatedDisk
    from sim.world import World

TTL_MS = 3000
LAG_MS_MAX = 2500

LIMITS = ServerLimits(
    socket_request_max_bytes=1 << 22,
    requests_max=16,
    backlog_bytes_max=1 << 22,
    unsent_bytes_max=1 << 22,
    queued_max_request_bytes=1 << 24,
    max_connections=1000,
    max_connections_per_ip=0,
    idle_ms_max=600_000,
)


def settings_of(node_id: int, **more: Any) -> Settings:
    more = {"broker_hand_over_enable": False, **more}  # `World(hand_over=True)`
    return Settings(
        data_dir="data",
        node_id=node_id,
        etcd_endpoints="http://etcd:2379",
        broker_session_timeout_ms=TTL_MS,
        replica_lag_time_max_ms=LAG_MS_MAX,
        retention_hold_disk_free_bytes_min=0,
        offsets_topic_num_partitions=2,
        group_min_session_timeout_ms=500,
        group_consumer_session_timeout_ms=2500,
        group_consumer_heartbeat_interval_ms=500,
        shutdown_drain_ms=2000,
        log_flush_offset_checkpoint_interval_ms=500,
        log_cleaner_backoff_ms=5000,
        hot_partition_window_ms=0,
        replica_fetch_max_bytes=4096,
        **more,
    )


class DriftingClock:
    """`mansio.ports.Clock`: the wall's time is wrong and jumps, the steady one goes a little too fast or too slow."""

    def __init__(self, simulation: Simulation, *, rate: float, wall_offset_ms: float) -> None:
        self._simulation = simulation
        self._rate = rate
        self._offsets = [(-1.0, wall_offset_ms)]

    @property
    def wall_offset_ms(self) -> float:
        return self._offsets[-1][1]

    @wall_offset_ms.setter
    def wall_offset_ms(self, offset_ms: float) -> None:
        self._offsets.append((self._simulation.now_ms, offset_ms))

    def wall_offsets_ms(self, first_ms: float, until_ms: float) -> list[float]:
        """The errors that the wall's time had in a part of the history."""
        before = max(at for at, (since_ms, _) in enumerate(self._offsets) if since_ms < first_ms or not at)
        return [offset for since_ms, offset in self._offsets[before:] if since_ms <= until_ms]

    def wall_ms(self) -> int:
        return int(WALL_START_MS + self._simulation.now_ms + self.wall_offset_ms)

    def monotonic(self) -> float:
        return 1000.0 + self._rate * self._simulation.now_ms / 1000


class BrokerScheduler(SimulatedScheduler):
    """A broker's loop. Work that fails is reported, as on a real one; only what is no error of ours ends the run."""

    def __init__(
        self, simulation: Simulation, name: str, failed: Callable[[str, BaseException], None]
    ) -> None:
        super().__init__(simulation, name)
        self._failed = failed
        self._tasks: list[_Work] = []

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Task:
        task = _Work(self, work, name, is_error_stored=True)
        self._tasks.append(task)
        return task

    def ended(self, task: _Work) -> None:
        self._tasks.remove(task)
        if isinstance(task.error, (MansioError, OSError)):
            self._failed(task.name, task.error)
        elif task.error is not None:
            task.error.add_note(f"in {task.name!r} of {self.name!r}")
            raise task.error

    async def close(self) -> None:
        """Cancel what runs, and wait until it has ended."""
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            promise = self.promise()
            self.call_later(1, promise.set_result, None)
            await promise


class _Work(Task):
    def ended(self) -> None:
        self._scheduler.ended(self)  # type: ignore[attr-defined]


class LoopOnPorts:
    """What the Kafka port asks of an asyncio loop."""

    def __init__(self, scheduler: SimulatedScheduler, clock: DriftingClock) -> None:
        self._scheduler = scheduler
        self._clock = clock

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        self._scheduler.call_soon(call, *args)

    def call_later(self, delay_s: float, call: Callable[..., object], *args: Any) -> Any:
        return self._scheduler.call_later(delay_s * 1000, call, *args)

    def call_at(self, when_s: float, call: Callable[..., object], *args: Any) -> Any:
        return self.call_later(when_s - self.time(), call, *args)

    def time(self) -> float:
        return self._clock.monotonic()


class SimulatedBroker:
    """See the module. `listening`: connections are taken."""

    is_clustered = True

    server: KafkaServer
    core: BrokerRuntime
    cluster_member: ClusterMember
    etcd_client: SimulatedEtcdClient

    def __init__(self, world: World, node_id: int, disk: SimulatedDisk, life: int) -> None:
        simulation = world.simulation
        self.world = world
        self.node_id = node_id
        self.disk = disk
        self.name = f"broker {node_id}.{life}"
        self.clock = world.clocks[node_id]
        self.scheduler = BrokerScheduler(simulation, self.name, world.work_failed)
        self.thread = simulation.scheduler(f"{self.name} keep-alive")
        self.listening = self._listener_lost = False
        self.ready = False
        self.stopping = False
        self.closed: list[Partition] = []
        """What was open when it was stopped in order."""
        self.disk_ms = world.disk_ms
        self._stack: AsyncExitStack | None = None
        disk.locks.clear()
        world.network.brokers[node_id] = self
        Task(self.scheduler, self._live(), "start")  # not spawned: what fails there ends all that was spawned

    @property
    def running(self) -> bool:
        return not self.scheduler.stopped

    # Life

    async def _live(self) -> None:
        stack = AsyncExitStack()
        try:
            await self._start(stack)
        except (MansioError, OSError) as error:
            self.world.tell("start failed", self.node_id, repr(error))
            await self._close(stack)
        self._stack = stack

    async def _start(self, stack: AsyncExitStack) -> None:
        world, settings = self.world, settings_of(self.node_id, **self.world.settings)
        self.disk.make_directory(settings.data_dir)
        stack.callback(self.disk.lock(f"{settings.data_dir}/lock").release)
        host_ports = self._host_ports()
        random = host_ports.random
        etcd_client = self.etcd_client = SimulatedEtcdClient(world.etcd, self.scheduler, world.etcd_scheduler)
        world.set_up_etcd_client(self.node_id, etcd_client)
        stack.push_async_callback(etcd_client.close)
        state = await MetadataImage.load(etcd_client, "", random, has_feature_level=True)
        credentials = BrokerCredentials(
            self.node_id,
            state.cluster_id,
            secret=lambda: state.cluster_secret,
            broker_epoch=lambda: self.cluster_member.broker_epoch(),
            random=random,
        )

        @functools.cache
        def peers(request_class: RequestClass) -> SimulatedPeers:
            return SimulatedPeers(
                self,
                lambda node_id: node_id in state.brokers,
                credentials,
                is_unordered=request_class.is_unordered,
                on_link_change=links.handle_link_change,
            )

        links = SimulatedPeerLinks(self, lambda: peers(RequestClass.HAND_OVER))
        self.cluster_member = ClusterMember(
            settings,
            host_ports,
            store=etcd_client,
            leases=etcd_client,
            state=state,
            peers=peers,
            links=links,
            keep_alive=self._keep_alive,
        )
        core = self.core = BrokerRuntime(
            settings, host_ports, etcd_client, state, self.cluster_member, limits=self.world.limits
        )
        await core.open(stack, self.scheduler.close)
        stack.push_async_callback(self.cluster_member.leave)
        self._listen()
        await self.cluster_member.join(self.server.endpoints)
        core.start_background_work()
        self.ready = True

    def _host_ports(self) -> HostPorts:
        return HostPorts(
            self.disk,
            self.clock,
            SimulatedRandom(self.world.simulation),
            self.scheduler,
            sync_thread=self._background(),
            file_thread=self._background(),
            compaction_thread=self._background(),
            verification_thread=self._background(),
            batch_thread=self._background(),
            request_thread=self._background(),
            password_thread=self._background(),
        )

    def _listen(self) -> None:
        self.server = KafkaServer(
            self.core.service,
            LIMITS,
            LoopOnPorts(self.scheduler, self.clock),  # type: ignore[arg-type]  # what of it is used
        )
        listener = served_listener(f"host-{self.node_id}", node_id=self.node_id)
        self.server.use_listeners([listener], inter_broker_name=listener.name)
        self.server._sweep_idle()
        self.listening = True

    def _background(self) -> SimulatedBackground:
        random = self.world.simulation.random
        return SimulatedBackground(self.scheduler, lambda: random.uniform(*self.disk_ms))

    def _keep_alive(self, membership: BrokerLifecycle) -> KeepAliveTurns:
        return KeepAliveTurns(
            membership,
            self.etcd_client,
            clock=self.clock,
            scheduler=self.scheduler,
            thread=self.thread,
            ttl_s=TTL_MS / 1000,
        )

    def terminate(self) -> None:
        """As SIGTERM does."""
        if self._stack is not None and not self.stopping:
            self.stopping = True
            Task(self.scheduler, self._stop(self._stack), "stop")

    async def _stop(self, stack: AsyncExitStack) -> None:
        service = self.core.service
        self.ready = False
        service.quotas.stop()
        await self._transfer_leaderships()
        service.fetch.stop()
        self.listening = False
        for connection in list(self.server._connections):
            connection.close()
        self.closed = list(workload_clients.partitions_of(self))
        await self._close(stack)

    async def _transfer_leaderships(self) -> None:
        await self.cluster_member.transfer_leaderships(2000)

    async def _close(self, stack: AsyncExitStack) -> None:
        try:
            await stack.aclose()
        except (MansioError, OSError) as error:
            self.world.tell("stop failed", self.node_id, repr(error))
        self.die()

    def die(self, *, ends_connections: bool = True) -> None:
        """Nothing happens in this process any more. `ends_connections`: its machine goes on."""
        self.listening = False
        self.scheduler.stop()
        self.thread.stop()
        self.world.network.died(self, ends_connections=ends_connections)

    def lose_listener(self) -> None:
        """Its listener ends, and with it all connections that it has accepted."""
        self.listening = False
        self._listener_lost = True
        for connection in list(self.server._connections):
            connection.link.end_soon()  # type: ignore[attr-defined]
            self.scheduler.call_soon(connection.end)  # type: ignore[attr-defined]

    def listen_again(self) -> None:
        """After `lose_listener`."""
        if self._listener_lost and self.running and not self.stopping:
            self.listening, self._listener_lost = True, False

    @property
    def epoch(self) -> int:
        """Of the session that it thinks it has."""
        return self.cluster_member.broker_epoch() if hasattr(self, "cluster_member") else 0

    def pause(self) -> None:
        """As SIGSTOP does."""
        self.scheduler.pause()
        self.thread.pause()

    def hang(self) -> None:
        """The main loop stands still, threads go on."""
        self.scheduler.pause()

    def resume(self) -> None:
        for scheduler in (self.scheduler, self.thread):
            if scheduler.paused and not scheduler.stopped:
                scheduler.resume()

    # What it promises

    def confirms(self, version: int, answer: bytes) -> None:
        """It answers a produce request now, after a wait. What acks=all means (docs/how-to/cluster.md, 5 and 6), seen
        from above: the session lives, and enough brokers have the batch on stable storage. Of several partitions
        that was so when each of them was committed, which need not be now."""
        topics = produce_wire.decode_response(version, answer[4:]).topics
        if sum(len(results) for _, _, results in topics) > 1:
            return
        for name, topic_id, results in topics:
            for result in results:
                if result.error_code == 0:
                    self._check_session()
                    partition = self.core.partitions.find(name, topic_id, result.index)
                    workload_clients.check_durable(self.world, self, partition, result.base_offset)

    def _check_session(self) -> None:
        session = self.cluster_member.session
        if session is None:
            self.world.checker.broken(f"{self.name} acknowledges without a session")
        model = self.world.etcd
        late_ms = model.simulation.now_ms - model.renewed_ms[session.lease] - model.ttl_ms[session.lease]
        if late_ms >= 0:
            self.world.checker.broken(f"{self.name} acknowledges {late_ms:.0f} ms after its lease was over")


class SingleNode(SimulatedBroker):
    """A single node: the production `BrokerRuntime` without a cluster. Its metadata are always durable."""

    is_clustered = False

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = replace(settings_of(self.node_id, **self.world.settings), etcd_endpoints="")
        self.disk.make_directory(settings.data_dir)
        stack.callback(self.disk.lock(f"{settings.data_dir}/lock").release)
        host_ports = self._host_ports()
        store = self.world.metadata.store_client(self.scheduler)
        stack.push_async_callback(store.close)
        state = await MetadataImage.load(store, "", host_ports.random)
        core = self.core = BrokerRuntime(settings, host_ports, store, state, limits=self.world.limits)
        await core.open(stack, self.scheduler.close)
        self._listen()
        core.start_background_work()
        self.ready = True

    async def _transfer_leaderships(self) -> None:
        """There is no other broker."""

    def _check_session(self) -> None:
        """There is no session."""
