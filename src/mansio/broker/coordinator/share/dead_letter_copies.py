"""Copies of dead-lettered records, which are read from the log, get additional headers and form one batch.

A batch has as many records as sequences were reserved for it, also when it is built again. The copy of a record that
was deleted or cannot be read has headers with the position of the record and the reason, and no value. If a batch
exceeds `max.message.bytes` of the dead-letter topic, values are omitted, the largest first, then keys and the headers
of the records.

Invariant: the headers of the record come first and unchanged; the added headers follow, with values in UTF-8.

Source: KIP-1191 (the headers `__dlq.errors.*`). Extensions: the copy of the record, and the headers `mansio-dlq-*`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import (
    DAMAGED_BATCH,
    UNREADABLE_CONTENT,
    CorruptLog,
    OffsetNotAvailable,
    OffsetOutOfRange,
)
from mansio.state.share_partition.types import CAUSE_REJECTED
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch, check_stored_batch, read_header
from mansio.wire.batch.record_reader import read_record_slices
from mansio.wire.internal_records.dead_letter_headers import (
    CONSUMER_HEADER,
    DELIVERIES_EXCEEDED_MESSAGE,
    DELIVERY_COUNT_HEADER,
    FIRST_MS_HEADER,
    GROUP_HEADER,
    ID_HEADER,
    MESSAGE_HEADER,
    OFFSET_HEADER,
    PARTITION_HEADER,
    REASON_HEADER,
    REJECTED_MESSAGE,
    TOPIC_HEADER,
    VALUE_OMITTED_HEADER,
    dead_letter_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.state.share_partition.dead_letters import DeadLetterBatch
    from mansio.state.share_partition.types import ArchivingRange
    from mansio.wire.batch.record_batch import Header, NewRecord

COPIES_MAX: Final = 500
"""Maximum number of records in one batch of a dead-letter topic."""

ADDED_HEADERS_BYTES_MAX: Final = 1024
"""Upper bound of the size in bytes of the headers added to one record, unless group name or reason is very long."""

REASON_DELETED: Final = "the record was deleted from the log"
REASON_UNREADABLE: Final = "the record cannot be read"
REASON_TOO_LARGE: Final = "the record is too large for the dead-letter topic"
REASON_COPY_DISABLED: Final = "errors.deadletterqueue.copy.record.enable=false is set for the group"


class DeadLetterCopy(NamedTuple):
    """Copy of one record for the dead-letter topic.

    `omitted_reason`: the reason why the value is omitted, "" if it is included. `codec`: the compression of the batch
    that contained the record.
    """

    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    omitted_reason: str = ""
    codec: Codec = Codec.NONE

    @property
    def size_bytes(self) -> int:
        own = sum(len(name) + len(value or b"") + 8 for name, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + own + ADDED_HEADERS_BYTES_MAX


def copies_without_records(ranges: Iterable[tuple[int, int]], reason: str) -> list[DeadLetterCopy]:
    """Return one copy without key, value and headers for each offset of the ranges (first and last offset)."""
    return [
        DeadLetterCopy(offset, None, None, (), reason)
        for first, last in ranges
        for offset in range(first, last + 1)
    ]


def read_copies(
    partition: Partition, ranges: Sequence[tuple[int, int]], bytes_max: float = float("inf")
) -> list[DeadLetterCopy]:
    """Return one copy for each offset of the ranges, as many as fit into `bytes_max`, at least one.

    Raises `StorageError`, `NotLeaderOrFollower` if the partition is not led by this broker, and `OffsetNotAvailable` if
    an offset is not below the high watermark.
    """
    partition.ensure_leader()
    copies: list[DeadLetterCopy] = []
    size = 0
    for copy in _read(partition, ranges):
        size += copy.size_bytes
        if copies and size > bytes_max:
            break
        copies.append(copy)
    return copies


def _read(partition: Partition, ranges: Sequence[tuple[int, int]]) -> Iterator[DeadLetterCopy]:
    known: dict[int, DeadLetterCopy] = {}
    missing = REASON_DELETED  # why an offset has no copy in `known`
    begin = until = -1  # the offsets of which `known` has the copies
    for first, last in ranges:
        for offset in range(first, last + 1):
            if (
                not begin <= offset < until
            ):  # records may have died in another order than that of their offsets
                begin = offset
                known, until, missing = _read_batch_at(partition, offset)
            yield known.get(offset) or DeadLetterCopy(offset, None, None, (), missing)


def _read_batch_at(partition: Partition, offset: int) -> tuple[dict[int, DeadLetterCopy], int, str]:
    """Return copies of the records of the first batch that ends above `offset`, by offset, its end offset, and why the
    other offsets below it have no copy. Of a batch that can be read in part the records before the rest are copied."""
    start = partition.log.start_offset
    if offset < start:
        return {}, min(offset + 1, start), REASON_DELETED
    end = offset + 1
    copies: dict[int, DeadLetterCopy] = {}
    try:
        found = partition.read(offset, 1)
        if found is None:
            if offset >= partition.readable_end():
                raise OffsetNotAvailable(
                    f"{partition.name}: offset {offset} is not known to be committed yet"
                )
            return {}, end, REASON_DELETED
        data = memoryview(found.read())
        header = read_header(data)
        check_stored_batch(data[: header.size])
        codec = header.codec
        for rows in read_record_slices(data, tuple, "", 0):
            for _, _, position, _, key, value, headers in rows:
                copies[position] = DeadLetterCopy(position, key, value, headers, codec=codec)
    except OffsetOutOfRange:
        return {}, end, REASON_DELETED
    except UNREADABLE_CONTENT:
        return copies, max(header.last_offset + 1, end), REASON_UNREADABLE
    except (CorruptLog, *DAMAGED_BATCH):
        return {}, end, REASON_UNREADABLE
    return copies, max(header.last_offset + 1, end), REASON_DELETED


# Batches


def encode_dead_letter_batch(
    batch: DeadLetterBatch, copies: Sequence[DeadLetterCopy], topic: str, now_ms: int, bytes_max: int
) -> tuple[bytes, int]:
    """Return the encoded batch, and the number of values omitted so that it fits into `bytes_max`.

    The batch exceeds `bytes_max` if it does so even without the keys, values and headers of all records.
    """
    ranges = _range_of_each_record(batch)
    codec = next((each.codec for each in copies if each.codec is not Codec.NONE), Codec.NONE)
    largest = sorted(range(len(copies)), key=lambda at: -len(copies[at].value or b""))
    omitted, kept = 0, list(copies)
    while True:
        data = _encode(batch, kept, ranges, topic, now_ms, codec)
        if len(data) <= bytes_max or omitted >= len(copies):
            break
        more = max(2 * omitted, 1)
        for at in largest[omitted:more]:
            if kept[at].value is not None:
                kept[at] = kept[at]._replace(value=None, omitted_reason=REASON_TOO_LARGE)
        omitted = min(more, len(copies))
    if len(data) > bytes_max:
        kept = copies_without_records([(each.offset, each.offset) for each in copies], REASON_TOO_LARGE)
        data = _encode(batch, kept, ranges, topic, now_ms, codec)
    return data, sum(each.omitted_reason == REASON_TOO_LARGE for each in kept)


def _range_of_each_record(batch: DeadLetterBatch) -> list[ArchivingRange]:
    """Return the archiving range of each record of the batch."""
    return [each for each in batch.ranges for _ in range(each.first, each.last + 1)]


def _encode(
    batch: DeadLetterBatch,
    copies: Sequence[DeadLetterCopy],
    ranges: Sequence[ArchivingRange],
    topic: str,
    now_ms: int,
    codec: Codec,
) -> bytes:
    records: list[NewRecord] = [
        (now_ms, copy.key, copy.value, (*copy.headers, *_added_headers(archiving_range, copy, topic)))
        for archiving_range, copy in zip(ranges, copies, strict=True)
    ]
    return build_batch(
        records,
        codec=codec,
        producer_id=batch.producer_id,
        producer_epoch=batch.epoch,
        base_sequence=batch.base_sequence,
    )


def _added_headers(archiving_range: ArchivingRange, copy: DeadLetterCopy, topic: str) -> Iterator[Header]:
    key, reservation, deliveries = (
        archiving_range.key,
        archiving_range.reservation,
        archiving_range.deliveries,
    )
    is_rejected = reservation.cause == CAUSE_REJECTED
    yield TOPIC_HEADER, topic.encode()
    yield PARTITION_HEADER, b"%d" % key.partition
    yield OFFSET_HEADER, b"%d" % copy.offset
    yield GROUP_HEADER, key.group.encode()
    yield DELIVERY_COUNT_HEADER, b"%d" % deliveries
    yield MESSAGE_HEADER, (REJECTED_MESSAGE if is_rejected else DELIVERIES_EXCEEDED_MESSAGE).encode()
    yield ID_HEADER, dead_letter_id(key.group, key.topic_id, key.partition, copy.offset, deliveries).encode()
    yield CONSUMER_HEADER, reservation.consumer.encode()
    yield FIRST_MS_HEADER, b"%d" % reservation.archiving_since_ms
    if reservation.reason:
        yield REASON_HEADER, reservation.reason.encode()
    if copy.omitted_reason:
        yield VALUE_OMITTED_HEADER, copy.omitted_reason.encode()
