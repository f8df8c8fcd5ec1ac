"""Coordinator runtime: maintains a view of an internal topic by append, apply, load and checkpoint.

A coordinator keeps its state as a view of an internal topic and never changes the view itself. It appends records to
the topic by the runtime, which applies each record to the view in the order of the log. A load applies the log again,
so the view after a crash equals the view before, except for records that were not durable.

A single node has all partitions of the topic from `start` on. In a cluster the runtime loads and unloads single
partitions with their leadership: `lead` loads the view from the log of the new leader, `resign` removes exactly that
part of the view.

Invariants:
* A record is applied right after its append, so the view follows the order of the log. Clients receive the response to
  a request only when its records are committed. Readers wait for `wait_until_committed` first, so no client sees state
  that a power loss, or the next leader, could revert.
* A checkpoint only saves time at a start. It holds the view up to an offset that is committed. If the checkpoint is
  missing, torn, or beyond the end of the log, the log is read from its start. In a cluster there are no checkpoints:
  the next leader is another broker, whose checkpoint would be outdated and valid only if its log is identical up to
  that offset, and every follower would have to retain all tombstones.
* The owner of the view decides which records of a topic with `replays_every_record` are pruned: the remaining records
  must produce the same view.
* An unreadable record stops the load of its partition, and requests for the partition are rejected; no record is
  skipped. In a cluster the load is retried with exponential backoff as long as the leadership lasts.
* A load applies records only while the leadership lasts.
* A record whose bytes do not match its CRC is not applied.
* A record of a transaction is pending in a `TransactionalView` until the end marker of its producer. A load computes
  the pending records and the latest values in the order of the log, so the result is the same as before.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.checkpoint import RECORDS_PER_YIELD, CheckpointStorage, CheckpointStore
from mansio.broker.coordinator.latest_records import LatestRecords
from mansio.broker.coordinator.view import (
    CoordinatorContext,
    CoordinatorPartition,
    CoordinatorReplica,
    CoordinatorView,
    TransactionalView,
)
from mansio.errors import (
    UNREADABLE_OR_DAMAGED,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    FeatureNotFinalized,
    MansioError,
    MessageTooLarge,
    NotCoordinator,
    StorageError,
)
from mansio.host.item_turns import ItemTurns, Work
from mansio.logs import fields
from mansio.ports import Backoff, complete
from mansio.tracebacks import without_traceback
from mansio.wire.batch.end_marker import decode_end_marker
from mansio.wire.batch.record_batch import (
    build_batch,
    build_single_record_batch,
    check_stored_batch,
    read_header,
)
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from mansio.ports import Clock, Promise, Scheduler
    from mansio.wire.batch.end_marker import EndMarker
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.batch.record_reader import Record

logger = logging.getLogger(__name__)

RECORDS_PER_BATCH: Final = 1000
"""Maximum number of records that `append` writes as one batch, unless `atomic`."""

BATCH_OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum uncompressed size of a batch of an internal topic. Only brokers write such batches, so a larger size shows
damage."""

UPDATES_PER_YIELD: Final = 100
"""Maximum number of records between two yields of a load that applies each record at once. Smaller than
`RECORDS_PER_YIELD`, because applying takes ten times as long: an event loop that is blocked for longer than a broker
session costs the broker its leaderships, and the next leader has to load the same records."""

LOAD_ATTEMPTS_MAX: Final = 3
"""Attempts to load a partition before the backoff begins. In a cluster, compaction may replace segments while they are
read."""

LOAD_RETRY_MS: Final = 200
"""Pause between the first `LOAD_ATTEMPTS_MAX` attempts."""

LOAD_BACKOFF_MS: Final = 1000
"""Pause after the first `LOAD_ATTEMPTS_MAX` attempts, doubled each time up to `LOAD_BACKOFF_MS_MAX`. The disk may
recover, and no other broker can load the view."""
LOAD_BACKOFF_MS_MAX: Final = 60_000
LOAD_BACKOFF: Final = Backoff(LOAD_BACKOFF_MS, LOAD_BACKOFF_MS_MAX, jitter=0)

KeyValue = tuple[bytes, bytes | None]
"""Key and value of a record of an internal topic; the value None deletes the key."""


class CoordinatorRuntime:
    """Runtime of one internal topic and its view. Callers call all methods on the broker's event loop.

    `create` creates the topic if it does not exist and returns its open partitions; the runtime calls it before the
    first write, never twice at the same time. `partition_count`: in a cluster, returns the number of partitions
    according to the metadata, 0 while the topic does not exist; None on a single node. In a cluster the result of
    `create` is ignored, and `lead` adds partitions.

    `replays_every_record`: a record may refer to earlier ones, so a load applies all records in order, and the log is
    kept from the offset of the last `prune` on. Such a view has no checkpoints.

    `transactions`: the view, if producers add records to the topic in transactions.
    """

    def __init__(
        self,
        name: str,
        *,
        view: CoordinatorView,
        create: Callable[[], Awaitable[Sequence[CoordinatorPartition | StorageError]]],
        scheduler: Scheduler,
        clock: Clock,
        checkpoints: CheckpointStorage | None = None,
        partition_count: Callable[[], int] | None = None,
        replays_every_record: bool = False,
        transactions: TransactionalView | None = None,
    ) -> None:
        self.name = name
        self._replays_every_record = replays_every_record
        self._view = view
        self._transactions = transactions
        self._create = create
        self._scheduler = scheduler
        self._clock = clock
        self._cluster_partition_count = partition_count
        self._checkpoints: CheckpointStore | None = None
        if checkpoints is not None and partition_count is None and not replays_every_record:
            self._checkpoints = CheckpointStore(
                checkpoints,
                name,
                scheduler,
                view,
                *(() if transactions is None else (transactions.first_pending_offset,)),
            )
        self._contexts: dict[int, CoordinatorContext] = {}
        self._started = False
        self._creation: Promise[None] | None = None
        self._load_queue: deque[CoordinatorContext] = deque()
        self._is_loading = False

    # ------------------------------------------------------------------ creation and leadership

    @property
    def partition_count(self) -> int:
        """Number of partitions of the topic; 0 while it does not exist."""
        return (
            len(self._contexts) if self._cluster_partition_count is None else self._cluster_partition_count()
        )

    async def start(self, partitions: Sequence[CoordinatorPartition | StorageError]) -> None:
        """Start the runtime. On a single node, load the given partitions; the list is empty if the topic does not
        exist."""
        if self._cluster_partition_count is None:
            await self._load_partitions(partitions)
        self._started = True

    async def ensure_topic_exists(self) -> None:
        """Create the topic if it does not exist. Must be called before a write. Raises `CoordinatorNotAvailable` if an
        earlier attempt to create it is not rolled back yet, and in a cluster also if creation fails or is in progress.
        """
        if self._cluster_partition_count is not None:
            await self._ensure_topic_exists_in_cluster()
            return
        self.check_available()
        while not self._contexts:
            if self._creation is not None:
                await self._creation
                continue
            await self._create_once()
            if not self._contexts:
                raise CoordinatorNotAvailable(f"{self.name} is being created")

    async def _ensure_topic_exists_in_cluster(self) -> None:
        if self.partition_count:
            return
        if self._creation is not None:
            await self._creation
        else:
            try:
                await self._create_once()
            except FeatureNotFinalized:
                raise
            except MansioError as error:
                logger.warning("internal_topic_not_created", extra=fields(topic=self.name, reason=error))
                raise CoordinatorNotAvailable(f"{self.name} cannot be created: {error}") from error
        if not self.partition_count:
            raise CoordinatorNotAvailable(f"{self.name} is being created")

    async def _create_once(self) -> None:
        self._creation = self._scheduler.promise()
        try:
            partitions = await self._create()
            if self._cluster_partition_count is None:
                await self._load_partitions(partitions)
        finally:
            creating, self._creation = self._creation, None
            complete(creating, None)

    def apply_role(self, partition: CoordinatorReplica, *, is_closed: bool) -> None:
        """In a cluster, load or unload the view of a partition according to this broker's role; idempotent.
        `is_closed`: the coordinator stops, so it leads no partition any more."""
        index, leader_epoch = partition.index, partition.leader_epoch
        if is_closed or not partition.is_leader or partition.closed:
            self.resign(index)
        elif not self.is_leader(index, partition, leader_epoch):
            self.lead(index, partition, leader_epoch)

    def lead(self, index: int, partition: CoordinatorPartition, leader_epoch: int) -> None:
        """In a cluster, load the view of partition `index`, which this broker leads in a new epoch, after the loads
        that were requested before. Unloads the state of an earlier leadership."""
        self.resign(index)
        context = self._contexts[index] = CoordinatorContext(index, partition, leader_epoch)
        self._schedule_load(context)

    def resign(self, index: int) -> None:
        """In a cluster, unload the view of partition `index`, which this broker does not lead any more."""
        context = self._contexts.pop(index, None)
        if context is not None:
            context.has_ended = True
            self._view.unload(index)

    def is_leader(self, index: int, partition: CoordinatorPartition, leader_epoch: int) -> bool:
        """Whether the view of this partition is loaded, or being loaded, for the leadership with this epoch."""
        context = self._contexts.get(index)
        return context is not None and context.partition is partition and context.leader_epoch == leader_epoch

    def check_available(self) -> None:
        """Raise `CoordinatorLoadInProgress` or, in a cluster, `NotCoordinator` while this broker does not know whether
        the topic exists."""
        if self._cluster_partition_count is not None:
            if not self._cluster_partition_count():
                raise NotCoordinator(f"{self.name} is unknown to this broker")
        elif not self._started:
            raise CoordinatorLoadInProgress(f"{self.name} is being loaded")

    def check_loaded(self, index: int) -> None:
        """Raise `CoordinatorLoadInProgress`, `CoordinatorNotAvailable` or, in a cluster, `NotCoordinator` unless the
        view of partition `index` is completely loaded."""
        context = self._contexts.get(index)
        if context is not None and context.is_loaded:
            partition = context.partition
            if (
                self._cluster_partition_count is not None
                and not isinstance(partition, StorageError)
                and partition.is_leadership_uncertain
            ):
                raise NotCoordinator(
                    f"another broker may lead {self.name}-{index} now and have newer records"
                )
            return
        if context is None and self._cluster_partition_count is not None:
            raise NotCoordinator(f"this broker does not lead {self.name}-{index}")
        if context is not None and context.failure is not None:
            message = f"{self.name}-{index} could not be loaded: {context.failure}"
            raise CoordinatorNotAvailable(message) from context.failure
        raise CoordinatorLoadInProgress(f"{self.name}-{index} is being loaded")

    def check_all_loaded(self, led_partitions: Iterable[int] = ()) -> None:
        """Raise the errors of `check_loaded` unless the view of every local partition is loaded. `led_partitions`: in a
        cluster, the partitions that this broker leads according to the metadata; the runtime may not know the
        leadership of all of them yet."""
        if self._cluster_partition_count is None:
            self.check_available()
        for index in led_partitions:
            if index not in self._contexts:
                raise CoordinatorLoadInProgress(f"{self.name}-{index} is about to be loaded")
        for index in list(self._contexts):
            self.check_loaded(index)

    @property
    def is_loaded(self) -> bool:
        """Whether every partition of the topic is loaded. True if the topic has no partitions; in a cluster true only
        on a broker that leads all partitions."""
        started = self._started or self._cluster_partition_count is not None
        loaded = sum(1 for context in self._contexts.values() if context.is_loaded)
        return started and loaded == self.partition_count

    # ------------------------------------------------------------------ loading

    async def _load_partitions(self, partitions: Sequence[CoordinatorPartition | StorageError]) -> None:
        self._contexts = {
            index: CoordinatorContext(index, partition) for index, partition in enumerate(partitions)
        }
        for context in list(self._contexts.values()):
            await self._try_load(context)

    def _schedule_load(self, context: CoordinatorContext) -> None:
        if context.has_ended:
            return
        self._load_queue.append(context)
        if not self._is_loading:
            self._is_loading = True
            self._scheduler.spawn(self._load_queued(), name=f"load {self.name}")

    async def _load_queued(self) -> None:
        """Load the partitions of the queue one after the other, so that the first ones are available early."""
        try:
            while self._load_queue:
                await self._load_with_retries(self._load_queue.popleft())
        finally:
            self._is_loading = False

    async def _load_with_retries(self, context: CoordinatorContext) -> None:
        """Try to load a partition `LOAD_ATTEMPTS_MAX` times in succession, later once after each backoff."""
        while not context.has_ended and not await self._try_load(context):
            context.failed_loads += 1
            if (beyond := context.failed_loads - LOAD_ATTEMPTS_MAX) >= 0:
                pause_ms = LOAD_BACKOFF.delay_ms(beyond + 1)
                self._scheduler.call_later(pause_ms, self._schedule_load, context)
                return
            await self._scheduler.sleep(LOAD_RETRY_MS)

    async def _try_load(self, context: CoordinatorContext) -> bool:
        try:
            await self._load(context)
            if not context.has_ended:
                context.is_loaded, context.failure = True, None
                self._end_transactions(context)
                self._view.finish_load(context.index)
        except (MansioError, OSError) as error:
            context.is_loaded = False
            if not context.has_ended:
                context.failure = (
                    without_traceback(error) if isinstance(error, MansioError) else StorageError(str(error))
                )
                known = fields(topic=self.name, partition=context.index, reason=error)
                logger.error("view_not_loaded", extra=known)
                if self._cluster_partition_count is not None:
                    self._view.unload(context.index)
            return False
        return True

    async def _load(self, context: CoordinatorContext) -> None:
        """Read the log of a partition and apply it; returns early when the leadership ends."""
        if self._replays_every_record:
            await self._replay_every_record(context)
        else:
            await self._replay_latest_values(context)

    async def _replay_latest_values(self, context: CoordinatorContext) -> None:
        """Read the whole log of a compacted topic, then add the pending records of transactions and apply the latest
        value of each key."""
        position = context.require_partition().log.start_offset
        latest = LatestRecords()
        checkpoint = None if self._checkpoints is None else self._checkpoints.read(context)
        if checkpoint is not None:
            position, pairs = checkpoint
            latest.values = {key: (value, position - 1) for key, value in pairs}
        context.replay_start_offset = position
        is_transactional = self._transactions is not None

        def consume(record: Record, header: BatchHeader) -> None:
            if record.key is None:
                return
            if is_transactional and header.is_transactional and record.value is not None:
                latest.add_pending(
                    header.producer_id, header.producer_epoch, record.key, record.value, record.offset
                )
            else:
                latest.add(record.key, record.value, record.offset)

        await self._read_records(context, position, consume, RECORDS_PER_YIELD, latest.end)
        if self._transactions is not None and not context.has_ended:
            for pending in latest.pending_records():
                self._transactions.add_pending(context.index, *pending)
        turns = ItemTurns(self._scheduler, Work.GROUP_LOAD, items_max=RECORDS_PER_YIELD)
        for key, (value, offset) in latest.values.items():
            if context.has_ended:
                return
            self._view.apply(context.index, key, value, offset)
            await turns.next()
        turns.end()

    async def _replay_every_record(self, context: CoordinatorContext) -> None:
        """Apply each record of the log to the view in the order of the log."""
        position = context.replay_start_offset = context.require_partition().log.start_offset

        def consume(record: Record, _: BatchHeader) -> None:
            if record.key is not None:
                self._view.apply(context.index, record.key, record.value, record.offset)

        await self._read_records(context, position, consume, UPDATES_PER_YIELD)

    async def _read_records(
        self,
        context: CoordinatorContext,
        position: int,
        consume: Callable[[Record, BatchHeader], None],
        records_per_yield: int,
        end_transaction: Callable[[EndMarker], None] | None = None,
    ) -> None:
        """Pass the records from `position` on with the headers of their batches to `consume`, and the end markers to
        `end_transaction`, as long as the leadership lasts."""
        if position >= context.require_partition().end_offset:
            return
        turns = ItemTurns(self._scheduler, Work.GROUP_LOAD, items_max=records_per_yield)
        for header, batch in self._stored_batches(context.require_partition(), position):
            items = 1
            if header.is_control:
                if end_transaction is not None and (marker := decode_end_marker(batch)) is not None:
                    end_transaction(marker)
            else:
                for record in read_records(batch, output_bytes_max=BATCH_OUTPUT_BYTES_MAX):
                    items += 1
                    if record.offset >= position:
                        consume(record, header)
            context.appended_bytes += len(batch)
            if turns.is_over(items):
                await turns.pause()
                if context.has_ended:  # the log may have been truncated since
                    return

    def _stored_batches(
        self, partition: CoordinatorPartition, position: int
    ) -> Iterator[tuple[BatchHeader, bytes]]:
        """Yield the batches of a partition from `position` on, with their headers. Damage is reported to the partition,
        which starts the repair."""
        try:
            for batch in partition.log.batches(position):
                check_stored_batch(batch)  # a flipped bit must not change an offset
                header = read_header(batch)
                position = header.last_offset + 1
                yield header, batch
        except (StorageError, *UNREADABLE_OR_DAMAGED) as error:
            partition.report_damage(position, error)
            raise

    def replay_start_offset(self, index: int) -> int | None:
        """Return the offset from which the next start reads the log of a partition. Tombstones from this offset on must
        be retained, because the checkpoint may contain the keys that they delete. None if every load reads the whole
        log."""
        if self._checkpoints is None:
            return None
        context = self._contexts.get(index)
        return 0 if context is None else context.replay_start_offset

    # ------------------------------------------------------------------ append and commit

    def append(self, index: int, records: Sequence[KeyValue], *, atomic: bool = False) -> Promise[None]:
        """Append records and apply them to the view; the promise completes when they are committed. The topic must be
        created (`ensure_topic_exists`) and the partition loaded.

        Records are written in batches of 1,000, or, if `atomic`, in one batch. Raises the errors of the partition, and
        `MessageTooLarge` for a batch that a load would reject; then that batch and later ones are neither appended nor
        applied.
        """
        self.begin_append(index, records, atomic=atomic)
        return self.commit_promise(index)

    def begin_append(self, index: int, records: Sequence[KeyValue], *, atomic: bool = False) -> None:
        """As `append`, for a caller that asks for the commit by `when_committed` or `commit_promise`."""
        self._append(index, records, atomic=atomic, urgent=True)

    def commit_promise(self, index: int) -> Promise[None]:
        """Return a promise that completes when all records that were appended to a loaded partition are committed."""
        partition = self._contexts[index].require_partition()
        return partition.commit_promise(partition.end_offset)

    def when_committed(self, index: int, callback: Callable[[MansioError | None], None]) -> None:
        """Call `callback` once when all records that were appended to a loaded partition are committed: with None, or
        with the error for which they are not. Possibly before this returns."""
        partition = self._contexts[index].require_partition()
        partition.report_commit(partition.end_offset, callback)

    def append_without_flush(self, index: int, records: Sequence[KeyValue], *, atomic: bool = False) -> None:
        """Append records like `append`, but without requesting a flush: they survive the end of this process at once,
        but a power loss or the loss of this broker only after the next flush."""
        partition = self._append(index, records, atomic=atomic, urgent=False)
        self._contexts[index].unflushed_end = partition.end_offset

    def append_in_transaction(
        self, index: int, records: Sequence[tuple[bytes, bytes]], *, producer_id: int, producer_epoch: int
    ) -> Promise[None]:
        """Append records as one batch of a producer's transaction; they are pending until the end marker. The promise
        completes when the batch is committed. Raises the errors of `append`, and `InvalidProducerEpoch`."""
        if self._transactions is None:
            raise ValueError(f"{self.name} has no transactions")
        context, partition = self._loaded_context(index)
        now_ms = self._clock.wall_ms()
        batch = build_batch(
            [(now_ms, key, value, ()) for key, value in records],
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            transactional=True,
        )
        base_offset = self._append_batch(partition, batch, urgent=True)
        for offset, (key, value) in enumerate(records, start=base_offset):
            self._transactions.add_pending(index, producer_id, producer_epoch, key, value, offset)
        self._count_appended(context, len(batch))
        return partition.commit_promise(partition.end_offset)

    def apply_marker(self, index: int, marker: EndMarker) -> None:
        """Apply a committed end marker of partition `index` to the view. During a load, the marker is applied at the
        end, whether or not the load has read it; without a leadership, the next load reads it."""
        context = self._contexts.get(index)
        if self._transactions is None or context is None or context.has_ended:
            return
        if context.is_loaded:
            self._transactions.end_transaction(index, marker.producer_id, is_commit=marker.is_commit)
        else:
            context.late_markers.append(marker)

    def _end_transactions(self, context: CoordinatorContext) -> None:
        """Apply the markers that were committed during the load. A producer has no later transaction yet, because its
        records would be appended after the load only."""
        markers, context.late_markers = context.late_markers, []
        for marker in markers:
            self.apply_marker(context.index, marker)

    def _loaded_context(self, index: int) -> tuple[CoordinatorContext, CoordinatorPartition]:
        self.check_loaded(index)
        context = self._contexts[index]
        return context, context.require_partition()

    def _append_batch(self, partition: CoordinatorPartition, batch: bytes, *, urgent: bool) -> int:
        if len(batch) > BATCH_OUTPUT_BYTES_MAX:
            raise MessageTooLarge(
                f"{self.name}: a batch of {len(batch)} bytes; the maximum is {BATCH_OUTPUT_BYTES_MAX}"
            )
        base_offset: int = partition.append(batch, internal=True, urgent=urgent, is_intact=True).base_offset
        return base_offset

    def _count_appended(self, context: CoordinatorContext, size_bytes: int) -> None:
        context.appended_bytes += size_bytes
        if self._checkpoints is not None and self._checkpoints.is_due(context):
            name = f"checkpoint of {self.name}-{context.index}"
            self._scheduler.spawn(self._checkpoints.write(context), name=name)

    def _append(
        self, index: int, records: Sequence[KeyValue], *, atomic: bool, urgent: bool
    ) -> CoordinatorPartition:
        context, partition = self._loaded_context(index)
        now_ms = self._clock.wall_ms()
        appended_bytes = 0
        per_batch = max(len(records), 1) if atomic else RECORDS_PER_BATCH
        for first in range(0, len(records), per_batch):
            part = records[first : first + per_batch]
            if len(part) == 1:
                batch = build_single_record_batch(now_ms, *part[0])
            else:
                batch = build_batch([(now_ms, key, value, ()) for key, value in part])
            base_offset = self._append_batch(partition, batch, urgent=urgent)
            for delta, (key, value) in enumerate(part):
                self._view.apply(index, key, value, base_offset + delta)
            appended_bytes += len(batch)
        self._count_appended(context, appended_bytes)
        return partition

    def is_committed(self, index: int) -> bool:
        """Whether all records of the view of partition `index` are committed."""
        partition = self._contexts[index].require_partition()
        return partition.high_watermark >= partition.end_offset

    async def wait_until_committed(self, index: int) -> None:
        """Wait until the current view of partition `index` is committed. Raises the errors of the commit, and
        `NotCoordinator` if the leadership has ended."""
        self.check_loaded(index)
        context = self._contexts[index]
        partition = context.require_partition()
        if partition.high_watermark < partition.end_offset:
            if partition.high_watermark < context.unflushed_end:
                partition.request_flush()  # no append may have requested it
            await partition.commit_promise(partition.end_offset)
        if context.has_ended:
            raise NotCoordinator(f"this broker does not lead {self.name}-{index} any more")

    def segment_base_offsets(self, index: int) -> list[int]:
        """Return the base offsets of the log segments of a loaded partition; all segments but the last can be
        deleted."""
        self.check_loaded(index)
        bases: list[int] = self._contexts[index].require_partition().log.segment_base_offsets()
        return bases

    def end_offset_of(self, index: int) -> int:
        """Return the log end offset of a loaded partition."""
        self.check_loaded(index)
        return self._contexts[index].require_partition().end_offset

    def leader_epoch_of(self, index: int) -> int:
        """Return the leader epoch of a loaded partition; constant on a single node."""
        self.check_loaded(index)
        return self._contexts[index].leader_epoch

    def loaded_partitions(self) -> list[int]:
        """Return the indexes of the loaded partitions."""
        return [index for index, context in self._contexts.items() if context.is_loaded]

    def prune(self, index: int, below_offset: int) -> None:
        """Delete the committed records below an offset, which the view does not need any more; a segment without other
        records is deleted. Raises the errors of the partition."""
        self.check_loaded(index)
        partition = self._contexts[index].require_partition()
        below_offset = min(below_offset, partition.high_watermark)
        if below_offset > partition.log.start_offset:
            partition.trim(below_offset)

    # ------------------------------------------------------------------ closing

    async def close(self) -> None:
        """Write outdated checkpoints, so that the next start reads only a small part of the log. In a cluster, resign
        all partitions."""
        if self._cluster_partition_count is not None:
            for index in list(self._contexts):
                self.resign(index)
            return
        for context in [one for one in self._contexts.values() if one.is_loaded]:
            if (
                self._checkpoints is not None
                and context.replay_start_offset != self._checkpoints.replay_start(context)
            ):
                try:
                    await self._checkpoints.write(context)
                except (MansioError, OSError) as error:
                    logger.warning(
                        "view_checkpoint_not_written",
                        extra=fields(topic=self.name, partition=context.index, reason=error),
                    )
        for context in self._contexts.values():
            context.is_loaded = False
