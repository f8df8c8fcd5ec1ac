"""One broker, put together: ports, metadata, logs, coordinators, the Kafka door; and taken apart in the right order.

Start: lock the data directory, read the metadata, recover every log, load the groups, and only then listen.
Stop: listen no more, answer what is being worked on, sync everything once more, close. A step that fails while
starting undoes those before it.

Owns every other part; none of them knows this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from mansio.broker import descriptors
from mansio.broker.compactor import Compactor
from mansio.broker.coordinators.groups import GroupCoordinator
from mansio.broker.coordinators.settings import OFFSETS_TOPIC, GroupSettings
from mansio.broker.holds import DiskLimit
from mansio.broker.loop import AsyncioScheduler
from mansio.broker.partitions import PartitionSet
from mansio.broker.producer_ids import ProducerIds
from mansio.broker.quotas import Quotas
from mansio.broker.records import RecordService
from mansio.broker.retention import RetentionKeeper
from mansio.broker.server import Limits, Server
from mansio.broker.service import Service
from mansio.broker.statistics import Statistics
from mansio.broker.topics import NewTopic, TopicAdmin
from mansio.broker.view_checkpoint import CheckpointRoom
from mansio.broker.warm_up import WarmUp
from mansio.cluster.sqlite_store import SqliteStore
from mansio.cluster.state import ClusterState
from mansio.config import Address
from mansio.errors import StorageError, TopicAlreadyExists
from mansio.host import BackgroundThread, HostClock, HostDisk, HostRandom
from mansio.log.files import FileCache
from mansio.log.sync import Syncer
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.partition import Partition
    from mansio.cluster.state import Topic, TopicChange
    from mansio.config import Settings

logger = logging.getLogger(__name__)

IDLE_NEVER_MS = 1 << 50
SYNC_POLL_S = 0.001


class Broker:
    """See the module. `start` and `stop` are called once each, on the same running loop."""

    def __init__(self, settings: Settings, *, warm_up: bool = False) -> None:
        """`warm_up`: once ready, import what first requests would otherwise wait for; it takes about a second."""
        self.settings = settings
        self._warm_up = warm_up
        self.kafka_address = Address("", 0)
        self._stack = AsyncExitStack()
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
        if self._server is not None:
            await self._server.stop(self.settings.shutdown_drain_ms)
        await self._stack.aclose()
        if was_ready:
            logger.info("broker stopped", extra=fields(node=self.settings.node_id))

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        loop = asyncio.get_running_loop()
        scheduler = AsyncioScheduler(loop)
        clock = HostClock()
        random = HostRandom()
        disk = HostDisk()
        stack.callback(disk.close)
        disk.make_directory(settings.data_dir)
        stack.callback(disk.lock(f"{settings.data_dir}/lock").release)
        sync_thread = BackgroundThread(scheduler.call_from_thread, name="mansio-sync")
        stack.callback(sync_thread.close)
        file_thread = BackgroundThread(scheduler.call_from_thread, name="mansio-files")
        stack.callback(file_thread.close)

        store = await _opened_store(f"{settings.data_dir}/metadata.sqlite3", file_thread, scheduler)
        stack.push_async_callback(store.close)
        state = await ClusterState.load(store, settings.cluster_id, random)

        statistics = Statistics(clock)
        syncer = Syncer(
            disk,
            sync_thread,
            settings.data_dir,
            scheduler=scheduler,
            background_sync_interval_ms=settings.background_sync_interval_ms,
            checkpoint_interval_ms=settings.checkpoint_interval_ms,
            clock=clock,
            observe_s=statistics.sync.observe,
        )
        partitions = PartitionSet(
            settings=settings,
            disk=disk,
            clock=clock,
            scheduler=scheduler,
            syncer=syncer,
            files=FileCache(disk, files_max=settings.open_files_max),
            sync_thread=sync_thread,
            file_thread=file_thread,
        )
        stack.push_async_callback(_close_partitions, partitions, syncer, settings.shutdown_drain_ms)
        await partitions.open_known(tuple(state.topics.values()))
        partitions.report_unknown_directories()
        state.on_change(partitions.follow)
        state.start(store, scheduler)
        stack.callback(state.stop)
        stack.push_async_callback(scheduler.close)

        compaction_thread = BackgroundThread(scheduler.call_from_thread, name="mansio-compaction")
        stack.callback(compaction_thread.close)
        compactor = Compactor(
            partitions,
            disk=disk,
            clock=clock,
            scheduler=scheduler,
            background=compaction_thread,
            interval_ms=settings.log_cleaner_interval_ms,
            map_bytes_max=settings.log_cleaner_map_bytes_max,
            bytes_per_second=settings.log_cleaner_bytes_per_second,
            tombstone_floor=lambda partition: (
                groups.topic.replay_start(partition.index) if partition.topic == OFFSETS_TOPIC else None
            ),
        )
        topics = TopicAdmin(
            store=store,
            state=state,
            settings=settings,
            scheduler=scheduler,
            random=random,
            open_partitions=partitions.open_partitions,
            close_partitions=partial(_close_partitions_of, compactor, partitions),
        )
        await topics.recover()
        shortened = partitions.shortened()
        await topics.begin_leader_epochs([(partition.topic, partition.index) for partition in shortened])
        for partition in shortened:
            partition.log.epoch_begun()
        records = RecordService(
            partitions, ProducerIds(store, state.keys, random).take, settings.produce_wait_ms_max
        )
        groups = GroupCoordinator(
            settings=_group_settings(settings),
            clock=clock,
            scheduler=scheduler,
            random=random,
            create_topic=partial(_offsets_partitions, topics, partitions, settings.offsets_topic_partitions),
            end_offset=partial(_high_watermark, partitions),
            checkpoints=CheckpointRoom(disk, file_thread, f"{settings.data_dir}/views"),
            on_offset=partitions.holds.note,
        )
        partitions.holds.follow(lambda: groups.topic.is_loaded)
        await groups.start(partitions.of(OFFSETS_TOPIC))
        stack.push_async_callback(groups.close)
        state.on_change(partial(_forget_offsets, groups, scheduler))
        quotas = Quotas(
            store=store,
            state=state,
            scheduler=scheduler,
            random=random,
            clock=clock,
            burst_ms=settings.quota_burst_ms,
        )
        service = Service(
            settings=settings,
            clock=clock,
            scheduler=scheduler,
            partitions=partitions,
            records=records,
            topics=topics,
            groups=groups,
            quotas=quotas,
            statistics=statistics,
        )
        self._service = service
        service.retention = RetentionKeeper(
            partitions,
            clock=clock,
            scheduler=scheduler,
            check_interval_ms=settings.retention_check_interval_ms,
        )
        stack.callback(service.retention.stop)
        disk_limit = DiskLimit(
            partitions.holds,
            scheduler=scheduler,
            background=file_thread,
            free_bytes=partial(disk.free_bytes, settings.data_dir),
            free_bytes_min=settings.hold_disk_free_bytes_min,
            on_low=service.retention.check_soon,
        )
        stack.callback(disk_limit.stop)
        service.compactor = compactor
        stack.push_async_callback(compactor.stop)
        await self._listen(service, loop)
        if self._warm_up:
            stack.callback(WarmUp(scheduler.call_from_thread).stop)
        disk_limit.start()
        service.retention.start()
        compactor.start()

    async def _listen(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        settings = self.settings
        server = Server(service, _limits(settings, len(service.partitions)), loop)
        host, port = settings.kafka_address
        self.kafka_address = Address(*await server.start(host, port, advertised=settings.advertised_address))
        self._server = service.server = server
        service.ready = True
        logger.info("broker ready", extra=fields(kafka=self.kafka_address, node=settings.node_id))


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


def _group_settings(settings: Settings) -> GroupSettings:
    return GroupSettings(
        session_timeout_ms_min=settings.group_session_timeout_ms_min,
        session_timeout_ms_max=settings.group_session_timeout_ms_max,
        initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms,
        members_max=settings.group_members_max,
        offset_metadata_bytes_max=settings.offset_metadata_bytes_max,
        offsets_retention_ms=settings.offsets_retention_ms,
    )


async def _opened_store(path: str, thread: BackgroundThread, scheduler: AsyncioScheduler) -> SqliteStore:
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


async def _offsets_partitions(
    topics: TopicAdmin, partitions: PartitionSet, count: int
) -> Sequence[Partition | StorageError]:
    """The partitions of `__consumer_offsets`, made on the first commit or join."""
    with contextlib.suppress(TopicAlreadyExists):
        await topics.create(NewTopic(OFFSETS_TOPIC, count), internal=True)
    return partitions.of(OFFSETS_TOPIC)


def _forget_offsets(groups: GroupCoordinator, scheduler: AsyncioScheduler, change: TopicChange) -> None:
    """The offsets of a deleted topic mean nothing to the next one of its name."""
    before, after = change.before, change.after
    if before is not None and (after is None or after.topic_id != before.topic_id):
        scheduler.spawn(groups.offsets.forget_topic(before.name), name=f"forget offsets of {before.name}")


def _high_watermark(partitions: PartitionSet, topic: str, index: int) -> int | None:
    partition = partitions.get(topic, index)
    return None if partition is None else partition.high_watermark


async def _close_partitions_of(compactor: Compactor, partitions: PartitionSet, topic: Topic) -> None:
    await compactor.leave(topic.topic_id)
    await partitions.close_partitions(topic)


async def _close_partitions(partitions: PartitionSet, syncer: Syncer, wait_ms: int) -> None:
    """One last sync of everything, then close the logs. A disk that hangs is not waited for longer than `wait_ms`."""
    for partition in partitions:
        syncer.request(partition.log, urgent=True)
    try:
        async with asyncio.timeout(wait_ms / 1000):
            while not syncer.idle:  # noqa: ASYNC110 - once per broker, for some milliseconds
                await asyncio.sleep(SYNC_POLL_S)
    except TimeoutError:
        logger.error("the last sync did not end in time; closing without it", extra=fields(waited_ms=wait_ms))
        partitions.close(save=False)
        return
    partitions.close(save=True)
    syncer.close()
