"""One broker on a real machine: ports, metadata store, the Kafka door; and taken apart in the right order.

Start: lock the data directory, open the metadata store (a file, or etcd), recover every log, load the groups, listen;
in a cluster, register under the address listened on. Stop: hand over what others can lead, listen no more, answer what
is being worked on, end the session, sync everything once more, close. A step that fails while starting undoes those
before it.

Owns the real implementations of the ports and the order of steps; what a broker consists of is in `core`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from mansio.broker import descriptors
from mansio.broker.core import Core
from mansio.broker.data_kind import SINGLE, check_kind
from mansio.broker.loop import AsyncioScheduler
from mansio.broker.machine import Machine
from mansio.broker.server import Limits, Server
from mansio.broker.warm_up import WarmUp
from mansio.cluster.sqlite_store import SqliteStore
from mansio.cluster.state import ClusterState
from mansio.config import Address
from mansio.config_cluster import EVERYWHERE
from mansio.host import BackgroundThread, HostClock, HostDisk, HostRandom, boot_id
from mansio.logs import fields

if TYPE_CHECKING:
    from mansio.broker.clustering import Clustering
    from mansio.broker.service import Service
    from mansio.cluster.metadata import MetadataStore
    from mansio.config import Settings
    from mansio.ports import Background

logger = logging.getLogger(__name__)

IDLE_NEVER_MS = 1 << 50


class Broker:
    """See the module. `start` and `stop` are called once each, on the same running loop."""

    def __init__(self, settings: Settings, *, warm_up: bool = False) -> None:
        """`warm_up`: once ready, import what first requests would otherwise wait for; it takes about a second."""
        self.settings = settings
        self._warm_up = warm_up
        self.kafka_address = Address("", 0)
        self._stack = AsyncExitStack()
        self._clustering: Clustering | None = None
        self._service: Service | None = None
        self._server: Server | None = None

    @property
    def service(self) -> Service:
        """What the doors call. There from `start` on."""
        assert self._service is not None, "the broker has not been started"
        return self._service

    async def start(self) -> None:
        """Return when clients can connect; raise what kept it from starting."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Drain, sync, close; see the module. Does nothing the second time."""
        if self._service is not None and self._service.ready:
            logger.info("broker stopping", extra=fields(drain_ms=self.settings.shutdown_drain_ms))
        was_ready = self._service is not None and self._service.ready
        if self._service is not None:
            self._service.ready = False
            self._service.quotas.stop()
        if self._clustering is not None:
            await self._clustering.hand_off(self.settings.shutdown_drain_ms)
        if self._server is not None:
            await self._server.stop(self.settings.shutdown_drain_ms)
        await self._stack.aclose()
        if was_ready:
            logger.info("broker stopped", extra=fields(node=self.settings.node_id))

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        loop = asyncio.get_running_loop()
        scheduler = AsyncioScheduler(loop)
        disk = HostDisk()
        stack.callback(disk.close)
        disk.make_directory(settings.data_dir)
        stack.callback(disk.lock(f"{settings.data_dir}/lock").release)
        check_kind(disk, settings.data_dir, clustered=settings.clustered)
        machine = Machine(
            disk,
            HostClock(),
            HostRandom(),
            scheduler,
            sync_thread=_thread(stack, scheduler, "mansio-sync"),
            file_thread=_thread(stack, scheduler, "mansio-files"),
            compaction_thread=_thread(stack, scheduler, "mansio-compaction"),
            boot_id=boot_id(),
        )
        store: MetadataStore
        if settings.clustered:
            from mansio.broker import cluster_door  # needs gRPC, which a single node does without

            store, state, self._clustering = await cluster_door.open_cluster(settings, machine, stack)
        else:
            path = f"{settings.data_dir}/{SINGLE}"
            store = await _opened_store(path, machine.file_thread, scheduler)
            stack.push_async_callback(store.close)
            state = await ClusterState.load(store, settings.cluster_id, machine.random)
        core = Core(settings, machine, store, state, self._clustering)
        self._service = core.service
        await core.open(stack, scheduler.close)
        if self._clustering is not None:
            stack.push_async_callback(self._clustering.leave)
        await self._listen(core.service, loop)
        if self._warm_up:
            stack.callback(WarmUp(scheduler.call_from_thread).stop)
        if self._clustering is not None:
            await self._clustering.join(*(settings.advertised_address or self.kafka_address))
        core.service.ready = True
        logger.info("broker ready", extra=fields(kafka=self.kafka_address, node=settings.node_id))
        core.look_after()

    async def _listen(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        settings = self.settings
        server = Server(service, _limits(settings, len(service.partitions)), loop)
        host, port = settings.kafka_address
        self.kafka_address = Address(*await server.start(host, port, advertised=settings.advertised_address))
        self._server = service.server = server
        if server.listener[0] in EVERYWHERE:
            told = fields(told=Address(*server.listener))
            logger.warning(
                "clients elsewhere are told an address that is not ours: set kafka_advertise", extra=told
            )


def _limits(settings: Settings, partitions: int) -> Limits:
    connections_max = descriptors.connections_allowed(
        settings.connections_max, settings.open_files_max + partitions
    )
    return Limits(
        frame_bytes_max=settings.frame_bytes_max,
        requests_max=settings.in_flight_requests_per_connection_max,
        backlog_bytes_max=settings.in_flight_bytes_per_connection_max,
        unsent_bytes_max=settings.in_flight_bytes_per_connection_max,
        in_flight_bytes_max=settings.in_flight_bytes_max,
        connections_max=connections_max,
        connections_per_ip_max=settings.connections_per_ip_max,
        idle_ms_max=settings.connection_idle_ms_max or IDLE_NEVER_MS,
    )


def _thread(stack: AsyncExitStack, scheduler: AsyncioScheduler, name: str) -> BackgroundThread:
    thread = BackgroundThread(scheduler.call_from_thread, name=name)
    stack.callback(thread.close)
    return thread


async def _opened_store(path: str, thread: Background, scheduler: AsyncioScheduler) -> SqliteStore:
    """The metadata, opened off the loop: a new file is synced several times, an old one read from end to end."""
    promise = scheduler.promise()

    def done(store: SqliteStore | None, error: BaseException | None) -> None:
        if promise.done():  # nobody waits any more
            return
        if error is None:
            promise.set_result(store)
        else:
            promise.set_exception(error)

    thread.submit(partial(SqliteStore.open, path, thread, scheduler.promise), done)
    store: SqliteStore = await promise
    return store
