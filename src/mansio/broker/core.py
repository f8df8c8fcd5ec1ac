"""One broker without its sockets: metadata, logs, coordinators and what looks after them, on ports alone.

`broker` puts it on a real machine and listens; a simulator runs the same object on a simulated one. Owns every part of
a broker that no socket, thread or process is needed for; none of them knows this one.

Always true: a part is closed after those that use it, because each step that opens one puts its closing on the stack
of the caller.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from mansio.broker.compactor import Compactor
from mansio.broker.coordinators.group_settings import GroupConfigs
from mansio.broker.coordinators.groups import GroupCoordinator
from mansio.broker.coordinators.places import ClusterPlaces
from mansio.broker.coordinators.settings import OFFSETS_TOPIC, group_settings
from mansio.broker.coordinators.subscriptions import Subscriptions
from mansio.broker.handlers.fetch import followers_ask_anew
from mansio.broker.holds import DiskLimit
from mansio.broker.leftovers import Leftovers
from mansio.broker.partitions import PartitionSet
from mansio.broker.producer_ids import ProducerIds
from mansio.broker.quotas import Quotas
from mansio.broker.records import RecordService
from mansio.broker.retention import RetentionKeeper
from mansio.broker.service import Service
from mansio.broker.share.boot_mark import BootMark
from mansio.broker.share.dead_letters import dead_letters
from mansio.broker.share.letter_calls import LetterCalls
from mansio.broker.share.places import ClusterStatePlaces
from mansio.broker.share.share_state import ShareState
from mansio.broker.share.state_peers import StatePeers
from mansio.broker.share.state_store import StoreSettings
from mansio.broker.share.wiring import share_partitions
from mansio.broker.statistics import Statistics
from mansio.broker.topics import NewTopic, TopicAdmin
from mansio.broker.view_checkpoint import CheckpointRoom
from mansio.cluster.share_group_config import LOCK_DURATION, in_force
from mansio.errors import MansioError, StorageError, TopicAlreadyExists
from mansio.log.files import FileCache
from mansio.log.sync import Syncer
from mansio.logs import fields
from mansio.state.share_records import TOPIC as SHARE_STATE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AsyncExitStack

    from mansio.broker.clustering import Clustering
    from mansio.broker.machine import Machine
    from mansio.broker.partition import Partition
    from mansio.cluster.metadata import MetadataStore
    from mansio.cluster.model import Topic, TopicChange
    from mansio.cluster.state import ClusterState
    from mansio.config import Settings
    from mansio.ports import Promise
    from mansio.state.group_records import CommittedOffset

logger = logging.getLogger(__name__)

SYNC_POLL_MS = 1
SHARE_STATE_PARTITIONS_ALONE = 4
"""On a single node: more would only be more files to sync."""


class Core:
    """See the module. `open` once, on the loop; closing the stack that it was given closes it."""

    def __init__(
        self,
        settings: Settings,
        machine: Machine,
        store: MetadataStore,
        state: ClusterState,
        clustering: Clustering | None = None,
    ) -> None:
        """`state` is loaded from `store` and not followed yet. `clustering` is None on a single node."""
        self.settings = settings
        self.machine = machine
        self.store = store
        self.state = state
        self.clustering = clustering
        self.statistics = Statistics(machine.clock)
        self._cut: Sequence[int] = ()
        self.syncer = Syncer(
            machine.disk,
            machine.sync_thread,
            settings.data_dir,
            scheduler=machine.scheduler,
            background_sync_interval_ms=settings.background_sync_interval_ms,
            checkpoint_interval_ms=settings.checkpoint_interval_ms,
            clock=machine.clock,
            observe_s=self.statistics.sync.observe,
        )
        self.partitions = PartitionSet(
            settings=settings,
            disk=machine.disk,
            clock=machine.clock,
            scheduler=machine.scheduler,
            syncer=self.syncer,
            files=FileCache(machine.disk, files_max=settings.open_files_max),
            sync_thread=machine.sync_thread,
            file_thread=machine.file_thread,
        )
        self.leftovers = Leftovers(machine.disk, machine.file_thread, machine.scheduler, settings.data_dir)
        self.compactor = Compactor(
            self.partitions,
            disk=machine.disk,
            clock=machine.clock,
            scheduler=machine.scheduler,
            background=machine.compaction_thread,
            interval_ms=settings.log_cleaner_interval_ms,
            map_bytes_max=settings.log_cleaner_map_bytes_max,
            bytes_per_second=settings.log_cleaner_bytes_per_second,
            tombstone_floor=self._tombstone_floor,
        )
        self.topics = TopicAdmin(
            store=store,
            state=state,
            settings=settings,
            scheduler=machine.scheduler,
            random=machine.random,
            open_partitions=self.partitions.open_partitions,
            close_partitions=self._close_partitions_of,
            broker_epoch=None if clustering is None else clustering.broker_epoch,
        )
        records = RecordService(
            self.partitions,
            ProducerIds(store, state.keys, machine.random).take,
            settings.produce_wait_ms_max,
        )
        group_configs = GroupConfigs(
            store=store, state=state, scheduler=machine.scheduler, random=machine.random, settings=settings
        )
        self.groups = self._groups(group_configs.overrides)
        self.share_state = self._share_state(group_configs.overrides)
        self.dead_letters = dead_letters(
            settings,
            machine,
            topics=self.topics,
            partitions=self.partitions,
            records=records,
            overrides=group_configs.overrides,
            peers=None if clustering is None else clustering.more_peers(),
        )
        self.shares = share_partitions(
            settings,
            machine,
            self.partitions,
            group_configs.overrides,
            self.share_state.persister,
            self.dead_letters,
        )
        self._tie_groups_to_shares()
        # In a cluster the offsets of a pipeline may be known to another broker only, so holds are not offered there.
        self.partitions.holds.follow(lambda: clustering is not None or self.groups.topic.is_loaded)
        self.service = self._service(records, group_configs)

    def _groups(self, overrides: Callable[[str], Mapping[str, str]]) -> GroupCoordinator:
        settings, machine, state, clustering = self.settings, self.machine, self.state, self.clustering
        subscriptions = Subscriptions(state.topics)
        state.on_change(subscriptions.changed)
        groups = GroupCoordinator(
            settings=group_settings(settings),
            clock=machine.clock,
            scheduler=machine.scheduler,
            random=machine.random,
            create_topic=partial(self._made, OFFSETS_TOPIC, settings.offsets_topic_partitions),
            places=None if clustering is None else ClusterPlaces(state),
            end_offset=self._high_watermark,
            checkpoints=CheckpointRoom(machine.disk, machine.file_thread, f"{settings.data_dir}/views"),
            on_offset=self.partitions.holds.note if clustering is None else _nothing_is_held,
            subscriptions=subscriptions,
            overrides=overrides,
        )
        state.on_group_config_change(groups.modern.settings_changed)
        return groups

    def _share_state(self, overrides: Callable[[str], Mapping[str, str]]) -> ShareState:
        settings, machine, clustering = self.settings, self.machine, self.clustering
        partitions = settings.share_state_topic_partitions
        mark, remote = None, None
        if clustering is None:
            partitions = min(partitions, SHARE_STATE_PARTITIONS_ALONE)
            mark = BootMark(
                machine.disk, machine.file_thread, machine.scheduler, settings.data_dir, machine.boot_id
            )
        else:
            remote = StatePeers(
                clustering.more_peers(),
                clustering.more_peers(),
                node_id=settings.node_id,
                broker_epoch=clustering.broker_epoch,
                scheduler=machine.scheduler,
            ).door
        return ShareState(
            settings=StoreSettings(
                updates_per_snapshot=settings.share_state_updates_per_snapshot,
                cold_ms=settings.share_state_prune_interval_ms,
            ),
            prune_interval_ms=settings.share_state_prune_interval_ms,
            node_id=settings.node_id,
            clock=machine.clock,
            scheduler=machine.scheduler,
            create_topic=partial(self._made, SHARE_STATE_TOPIC, partitions),
            lock_ms=lambda group: int(in_force(LOCK_DURATION, overrides(group))),
            mark=mark,
            places=None if clustering is None else ClusterStatePlaces(self.state),
            remote=remote,
        )

    def _tie_groups_to_shares(self) -> None:
        """What share groups decide is done to their partitions; settings and topics that change are told to both."""
        state, clustering = self.state, self.clustering
        if clustering is not None:
            calls = LetterCalls(
                node_id=self.settings.node_id,
                state=state,
                peers=clustering.more_peers(),
                scheduler=self.machine.scheduler,
                take_up=lambda key: self.shares.find(*key),
            )
            self.share_state.on_archiving = calls.call
        self.groups.share.delete_state = self.shares.delete
        self.groups.share.letters_written = self.shares.letters_written
        self.groups.share.begin_state = self.shares.persister.initialize
        state.on_group_config_change(self.groups.share.settings_changed)
        state.on_group_config_change(self.shares.settings_changed)
        state.on_group_config_change(self.dead_letters.settings_changed)
        state.on_change(self.dead_letters.topic_changed)

    def _service(self, records: RecordService, group_configs: GroupConfigs) -> Service:
        settings, machine = self.settings, self.machine
        quotas = Quotas(
            store=self.store,
            state=self.state,
            scheduler=machine.scheduler,
            random=machine.random,
            clock=machine.clock,
            burst_ms=settings.quota_burst_ms,
        )
        service = Service(
            settings=settings,
            clock=machine.clock,
            scheduler=machine.scheduler,
            partitions=self.partitions,
            records=records,
            topics=self.topics,
            groups=self.groups,
            quotas=quotas,
            shares=self.shares,
            statistics=self.statistics,
        )
        service.compactor = self.compactor
        service.group_configs = group_configs
        service.share_state = self.share_state
        service.dead_letters = self.dead_letters
        return service

    async def open(self, stack: AsyncExitStack, end_work: Callable[[], Awaitable[object]]) -> None:
        """Recover every log and load the groups. Clients may come then; `look_after` comes after them.

        `end_work` ends what the scheduler still runs, when this is closed.
        """
        settings, partitions, scheduler = self.settings, self.partitions, self.machine.scheduler
        stack.push_async_callback(self._close_partitions)
        known = tuple(self.state.topics.values())
        if self.clustering is None:
            await partitions.open_known(known)
            self.state.on_change(partitions.follow)
            partitions.report_unknown_directories()
        else:
            await partitions.open_known(known, await self.clustering.may_be_new())
            await self.leftovers.look(self.store, self.state)
        self.state.start(self.store, scheduler, shared=self.clustering is not None)
        stack.callback(self.state.stop)
        stack.push_async_callback(end_work)
        stack.push_async_callback(self.compactor.stop)
        if self.clustering is None:
            await self._lead_everything()
            await self.groups.start(partitions.of(OFFSETS_TOPIC))
            await self.share_state.start(partitions.of(SHARE_STATE_TOPIC), self._cut)
        else:
            self.clustering.live_with(
                partitions,
                remove=self._close_partitions_of,
                on_role=self._role_changed,
                on_made=self.leftovers.note,
            )
            scheduler.spawn(self._remove_leftovers(), name="remove directories of deleted topics")
            self.service.cluster = self.clustering
            self.service.controller = self.clustering.controller
            self.service.broker_epoch_of = self.clustering.broker_epoch_of
            self.clustering.replication.on_lead = partial(followers_ask_anew, self.service)
        stack.push_async_callback(self.groups.close)
        stack.push_async_callback(self.share_state.close)
        stack.callback(self.shares.close)
        stack.callback(self.dead_letters.close)
        self.state.on_change(self._forget_offsets)
        self.service.retention = RetentionKeeper(
            partitions,
            clock=self.machine.clock,
            scheduler=scheduler,
            check_interval_ms=settings.retention_check_interval_ms,
        )
        stack.callback(self.service.retention.stop)
        self._disk_limit = DiskLimit(
            partitions.holds,
            scheduler=scheduler,
            background=self.machine.file_thread,
            free_bytes=partial(self.machine.disk.free_bytes, settings.data_dir),
            free_bytes_min=settings.hold_disk_free_bytes_min,
            on_low=self.service.retention.check_soon,
        )
        stack.callback(self._disk_limit.stop)

    def look_after(self) -> None:
        """Begin what goes on beside requests: retention, compaction, the disk's room."""
        assert self.service.retention is not None, "open comes first"
        self._disk_limit.start()
        self.service.retention.start()
        self.compactor.start()
        for key in self.share_state.store.archiving():  # dead letters go on although nobody uses the group
            with contextlib.suppress(MansioError):
                self.shares.find(*key)

    async def _remove_leftovers(self) -> None:
        try:
            await self.leftovers.remove()
        except StorageError as error:  # the next start tries again
            logger.error("directories of deleted topics not removed", extra=fields(reason=error))

    async def _lead_everything(self) -> None:
        """A single node leads what it has; in a new epoch where a recovery cut the log."""
        await self.topics.recover()
        shortened = self.partitions.shortened()
        self._cut = [each.index for each in shortened if each.topic == SHARE_STATE_TOPIC]
        await self.topics.begin_leader_epochs([(partition.topic, partition.index) for partition in shortened])
        for partition in shortened:
            partition.log.epoch_begun()

    def _role_changed(self, partition: Partition) -> None:
        """In a cluster: a partition leads, follows or rests here from now on."""
        if partition.topic == OFFSETS_TOPIC:
            self.groups.role_changed(partition)
        elif partition.topic == SHARE_STATE_TOPIC:
            self.share_state.role_changed(partition)
        self.shares.role_changed(partition)

    async def _made(self, topic: str, partitions: int) -> Sequence[Partition | StorageError]:
        """The partitions of an internal topic, made when somebody needs it first. In a cluster they come one by one, as
        this broker is to lead them (`_role_changed`)."""
        with contextlib.suppress(TopicAlreadyExists):
            new = NewTopic(topic, partitions, self.settings.replication_factor)
            await self.topics.create(new, internal=True)
        return self.partitions.of(topic) if self.clustering is None else ()

    def _forget_offsets(self, change: TopicChange) -> None:
        """The offsets of a deleted topic mean nothing to the next one of its name."""
        before, after = change.before, change.after
        if before is not None and (after is None or after.topic_id != before.topic_id):
            work = self.groups.offsets.forget_topic(before.name)
            self.machine.scheduler.spawn(work, name=f"forget offsets of {before.name}")
            self.groups.share.resume(list(self.groups.store.entries.values()))

    def _high_watermark(self, topic: str, index: int) -> int | None:
        partition = self.partitions.get(topic, index)
        return None if partition is None else partition.high_watermark

    def _tombstone_floor(self, partition: Partition) -> int | None:
        if partition.topic != OFFSETS_TOPIC:
            return None
        return self.groups.topic.replay_start(partition.index)

    async def _close_partitions_of(self, topic: Topic) -> None:
        await self.compactor.leave(topic.topic_id)
        await self.partitions.close_partitions(topic)

    async def _close_partitions(self) -> None:
        """One last sync of everything, then close the logs. A disk that hangs is not waited for longer than the
        drain."""
        wait_ms, clock = self.settings.shutdown_drain_ms, self.machine.clock
        for partition in self.partitions:
            self.syncer.request(partition.log, urgent=True)
        end = clock.monotonic() + wait_ms / 1000
        while not self.syncer.idle:
            if clock.monotonic() >= end:
                known = fields(waited_ms=wait_ms)
                logger.error("the last sync did not end in time; closing without it", extra=known)
                self.partitions.close(save=False)
                return
            await self._sleep(SYNC_POLL_MS)
        self.partitions.close(save=True)
        self.syncer.close()

    async def _sleep(self, delay_ms: float) -> None:
        promise: Promise[None] = self.machine.scheduler.promise()
        self.machine.scheduler.call_later(delay_ms, promise.set_result, None)
        await promise


def _nothing_is_held(group_id: str, topic: str, partition: int, committed: CommittedOffset | None) -> None:
    del group_id, topic, partition, committed
