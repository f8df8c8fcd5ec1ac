"""What one broker knows of a record: the rows in the partitions of the trace that it leads, and, if it leads the
partition of the record, the facts about it.
"""

from __future__ import annotations

import logging
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.broker.features.delays.delay_manager import DelayManager
from mansio.broker.features.delays.schedule_manager import SCHEDULE_HEADER
from mansio.broker.partition.verified_read import read_when_verified
from mansio.broker.trace.trace_index import BLOCKS_PER_GROUP, ROWS_MAX, FailedRecord, TraceIndex
from mansio.config.topic_names import TRACE_TOPIC
from mansio.errors import MansioError
from mansio.host.run_in_thread import run_in_thread
from mansio.logs import fields
from mansio.state.trace.timeline import NOT_WRITTEN, RecordFacts
from mansio.storage.retention import UNLIMITED
from mansio.wire.batch.delay_headers import DELAYED_ID_HEADER, DUE_AT_HEADER
from mansio.wire.batch.isolation_filter import aborted_batches
from mansio.wire.batch.record_batch import read_header
from mansio.wire.batch.record_reader import read_records
from mansio.wire.internal_records.dead_letter_headers import parse_dead_letter_headers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.topics.topics import TopicService
    from mansio.broker.trace.trace_writer import TraceWriter
    from mansio.metadata.model import PartitionState
    from mansio.ports import Background, Scheduler
    from mansio.state.trace.coverage import Coverage, TracedRow
    from mansio.storage.segment_list import SegmentInfo
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.batch.record_reader import Record

logger = logging.getLogger(__name__)

FLUSH_MS: Final = 3_000.0
"""Time that a look-up waits until what this broker has reported is written."""

BATCH_BYTES_MAX: Final = 64 << 20
"""Decompressed size of the batch with the record up to which the facts that are in the record are read."""


FAILED_BLOCKS_MAX: Final = 20_000
"""Number of the last blocks in which the last failed record of a group is looked for: those of about six hours, or more
if little happens."""


class LocalTrace(NamedTuple):
    """What a broker knows. `facts`: None if it was not asked for them. `missing`: what could not be read. `broker_id`,
    `incarnation`: of its process, which has written all that it has reported, up to `written_ms`, -1 if that was
    nothing."""

    facts: RecordFacts | None
    rows: Sequence[TracedRow]
    coverage: Sequence[Coverage]
    missing: Sequence[str]
    broker_id: int
    incarnation: int
    written_ms: int


class TraceReader:
    """Reads the trace of one broker. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        topics: TopicService,
        partitions: PartitionSet,
        writer: TraceWriter,
        scheduler: Scheduler,
        batch_thread: Background,
    ) -> None:
        self._topics = topics
        self._partitions = partitions
        self.writer = writer
        self._scheduler = scheduler
        self._batch_thread = batch_thread
        self._indexes: dict[Partition, TraceIndex] = {}
        self._stores_index = False
        writer.listen(self._on_block)

    async def read(
        self, topic_id: UUID, index: int, offset: int, *, accepted_offset: int, needs_facts: bool
    ) -> LocalTrace:
        """Return what this broker knows of a record. Raises the errors of `facts` if these are needed."""
        facts = await self.facts(topic_id, index, offset) if needs_facts else None
        if facts is not None:
            accepted_offset = facts.accepted_offset
        missing: list[str] = []
        writer = self.writer
        if not await writer.flush(FLUSH_MS):
            missing.append(NOT_WRITTEN.format(writer.node_id))
        written_ms = writer.written_ms
        rows: list[TracedRow] = []
        coverage: list[Coverage] = []
        offsets = [each for each in sorted({offset, accepted_offset}) if each >= 0]
        for partition in self._led_partitions():
            try:
                trace_index = self._index_of(partition)
                await trace_index.update()
                found, is_complete = await trace_index.find(topic_id.bytes, index, offsets)
            except MansioError as error:
                missing.append(f"{partition.name} cannot be read: {error.message}")
                continue
            rows += found
            if not is_complete:
                missing.append(f"{partition.name} has more than {ROWS_MAX} rows about the record")
            coverage += trace_index.coverage
        return LocalTrace(facts, rows, coverage, missing, writer.node_id, writer.incarnation, written_ms)

    async def last_failed(self, group: str) -> FailedRecord | None:
        """Return the record that a share group has rejected, or used up the attempts of, last, as far as the last
        blocks of the partitions of the trace tell that this broker leads. Raises the errors of `Partition.read`."""
        await self.writer.flush(FLUSH_MS)
        found: list[FailedRecord] = []
        for partition in self._led_partitions():
            trace_index = self._index_of(partition)
            await trace_index.update()
            if (failed := await trace_index.last_failed(group, FAILED_BLOCKS_MAX)) is not None:
                found.append(failed)
        return max(found, key=attrgetter("time_ms"), default=None)

    def _index_of(self, partition: Partition) -> TraceIndex:
        trace_index = self._indexes.get(partition)
        if trace_index is None:
            trace_index = self._indexes[partition] = TraceIndex(
                partition, self._scheduler, self._batch_thread, self.writer.append_index
            )
        return trace_index

    def _on_block(self) -> None:
        if self.writer.block_count % BLOCKS_PER_GROUP == 0 and not self._stores_index:
            self._stores_index = True
            self._scheduler.spawn(self._store_indexes(), name="index of the trace")

    async def _store_indexes(self) -> None:
        """Append the missing index records to the partitions of the trace that this broker leads."""
        try:
            for partition in self._led_partitions():
                try:
                    await self._index_of(partition).store()
                except MansioError as error:  # the next time, or the next leader, does it
                    logger.info(
                        "trace_index_not_written", extra=fields(partition=partition.name, reason=error)
                    )
        finally:
            self._stores_index = False

    def _led_partitions(self) -> list[Partition]:
        topic = self._topics.state.topics.get(TRACE_TOPIC)
        count = 0 if topic is None else len(topic.partitions)
        found = [self._partitions.get(TRACE_TOPIC, index) for index in range(count)]
        led = [each for each in found if each is not None and each.is_leader]
        for partition in tuple(self._indexes):
            if partition not in led:
                del self._indexes[partition]
        return led

    # ------------------------------------------------------------------ facts

    async def facts(self, topic_id: UUID, index: int, offset: int) -> RecordFacts:
        """Return what this broker, which leads the partition, knows of the record.

        Raises `UnknownTopicId`, `UnknownTopicOrPartition`, `NotLeaderOrFollower`, `StorageError`."""
        topic = self._topics.find_by_id(topic_id)
        partition = self._partitions.find(None, topic_id.bytes, index)
        partition.ensure_leader()
        state = topic.partitions[index]
        pending = self._pending_due_ms(partition, offset)
        if pending is not None:
            return _facts(partition, state, is_pending=True, accepted_offset=offset, due_ms=pending)
        if not partition.start_offset <= offset < partition.end_offset:
            return _facts(partition, state)
        part = await read_when_verified(
            self._scheduler, lambda: partition.log.read(offset, 1, partition.end_offset)
        )
        if part is None:
            return _facts(partition, state)
        batch = bytes(part.read())
        header = read_header(batch)
        if not header.base_offset <= offset <= header.last_offset or header.is_control:
            return _facts(partition, state)
        producers = partition.producers
        aborted = [] if producers is None else producers.aborted_between(offset, offset + 1)
        is_aborted = bool(aborted) and any(
            first <= offset <= last for first, last in aborted_batches(memoryview(batch), aborted)
        )
        record = await run_in_thread(
            self._scheduler, self._batch_thread, partial(_find_record, batch, offset)
        )
        if record is None:
            return _facts(partition, state)
        return _facts(partition, state, header=header, record=record, is_aborted=is_aborted)

    def _pending_due_ms(self, partition: Partition, offset: int) -> int | None:
        delays = partition.find_feature(DelayManager)
        found = None if delays is None else delays.view.pending.find(offset)
        return None if found is None else found.due_ms


def _find_record(batch: bytes, offset: int) -> Record | None:
    found = read_records(batch, output_bytes_max=BATCH_BYTES_MAX)
    return next((each for each in found if each.offset == offset), None)


def _facts(
    partition: Partition,
    state: PartitionState,
    *,
    header: BatchHeader | None = None,
    record: Record | None = None,
    is_aborted: bool = False,
    is_pending: bool = False,
    accepted_offset: int = -1,
    due_ms: int = -1,
) -> RecordFacts:
    known: dict[str, Any] = {
        "leader": partition.broker_id,
        "replicas": tuple(state.replicas),
        "in_sync": tuple(state.isr),
        "log_start": partition.start_offset,
        "log_end": partition.end_offset,
    }
    if header is None or record is None:
        return RecordFacts(**known, is_pending=is_pending, accepted_offset=accepted_offset, due_ms=due_ms)
    headers = {name: value or b"" for name, value in record.headers}
    return RecordFacts(
        **known,
        is_stored=True,
        timestamp_ms=record.timestamp_ms,
        leader_epoch=header.leader_epoch,
        size_bytes=len(record.key or b"") + len(record.value or b""),
        origin=_origin(record, headers),
        accepted_offset=_number(headers.get(DELAYED_ID_HEADER)),
        due_ms=_number(headers.get(DUE_AT_HEADER)),
        is_aborted=is_aborted,
        kept_until_ms=_kept_until_ms(partition, record.offset),
    )


def _origin(record: Record, headers: dict[str, bytes]) -> str:
    """Return why the broker has appended a record, "" if a client has."""
    dead_letter = parse_dead_letter_headers(record.headers)
    if dead_letter is not None:
        return (
            f"dead letter of group {dead_letter.group!r}: {dead_letter.topic}/{dead_letter.partition}/"
            f"{dead_letter.offset}"
        )
    schedule = headers.get(SCHEDULE_HEADER)
    return "" if schedule is None else f"schedule {schedule.decode(errors='replace')!r}"


def _number(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() else -1


def _kept_until_ms(partition: Partition, offset: int) -> int:
    """Return when retention deletes the segment of a record at the earliest, -1 if age does not delete it."""
    settings = partition.settings
    if not settings.deletes or settings.retention_ms == UNLIMITED:
        return -1
    log = partition.log
    segments: list[SegmentInfo] = [*log.closed_segments(), log.active_segment()]
    for segment in segments:
        if segment.base_offset <= offset < segment.end_offset:
            return segment.max_timestamp_ms + settings.retention_ms
    return -1
