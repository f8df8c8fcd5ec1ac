"""Copies of records for the dead-letter topic: read from the log, given their headers, and put into one batch.

A batch has as many records as places were reserved for it, however often it is made: what is in the log no more, or
cannot be read, has a copy that says so and where it was. Values are left out when the target would not take the batch
otherwise, the largest first; then keys and the records' own headers.

Always true: the records' own headers come first and unchanged; ours stand behind them, all UTF-8 text.

Source: KIP-1191 (`__dlq.errors.*`). Ours: the record is copied, `mansio-dlq-*`.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import (
    CorruptLog,
    CorruptMessage,
    InvalidRecord,
    OffsetNotAvailable,
    OffsetOutOfRange,
    UnsupportedCompression,
)
from mansio.state.share_partition.types import CAUSE_REJECTED
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch, check_stored_batch, read_header
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.state.share_partition.dead_letters import Batch
    from mansio.state.share_partition.types import ArchivingRange, ShareKey
    from mansio.wire.batch.record_batch import Header, NewRecord

RECORDS_MAX: Final = 500
"""Of one batch of dead letters."""

DECODED_BYTES_MAX: Final = 128 * 1024 * 1024
"""What a stored batch may become when it is opened."""

HEADERS_BYTES: Final = 1024
"""More than our own headers of one record take, but for names and reasons of unusual length."""

ID: Final = "mansio-dlq-id"
OMITTED: Final = "mansio-dlq-value-omitted"

GONE: Final = "it is in the log no more"
UNREADABLE: Final = "it cannot be read"
TOO_LARGE: Final = "it is too large for this topic"
NOT_ASKED: Final = "the group has set errors.deadletterqueue.copy.record.enable=false"

MESSAGES: Final = {True: "Offset rejected by client.", False: "Offset delivery count exceeded the threshold."}


class DeadLetterCopy(NamedTuple):
    """What there is of one record. `omitted`: why the value is left out, "" where it is there."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    omitted: str = ""
    codec: Codec = Codec.NONE

    @property
    def size_bytes(self) -> int:
        own = sum(len(name) + len(value or b"") + 8 for name, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + own + HEADERS_BYTES


def without_records(ranges: Iterable[tuple[int, int]], why: str) -> list[DeadLetterCopy]:
    """Places and nothing else."""
    return [
        DeadLetterCopy(offset, None, None, (), why)
        for first, last in ranges
        for offset in range(first, last + 1)
    ]


def read_copies(
    partition: Partition, ranges: Sequence[tuple[int, int]], bytes_max: float = float("inf")
) -> list[DeadLetterCopy]:
    """One copy for each offset of these ascending ranges; no more of them than fit into `bytes_max`, but one.

    Raises `StorageError` when the disk does not answer, `NotLeaderOrFollower` and `OffsetNotAvailable` where this
    broker cannot tell now.
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
    until = -1  # of what has been looked at
    for first, last in ranges:
        for offset in range(first, last + 1):
            if offset >= until:
                known, until = _batch_at(partition, offset)
            yield known.get(offset) or DeadLetterCopy(offset, None, None, (), GONE)


def _batch_at(partition: Partition, offset: int) -> tuple[dict[int, DeadLetterCopy], int]:
    """The records of the stored batch that holds an offset (or of the next one), and the offset they end before."""
    start = partition.log.start_offset
    if offset < start:
        return {}, min(offset + 1, start)
    try:
        found = partition.read(offset, 1)
        if found is None:
            if offset >= partition.readable_end():
                raise OffsetNotAvailable(
                    f"{partition.name}: it is not known yet whether offset {offset} is committed"
                )
            return {}, offset + 1
        data = memoryview(found.read())
        header = check_stored_batch(data[: read_header(data).size])
        codec = header.codec
        records = read_records(data, max_output_bytes=DECODED_BYTES_MAX)
    except OffsetOutOfRange:
        return {}, offset + 1
    except (CorruptLog, CorruptMessage, InvalidRecord, UnsupportedCompression):
        return {offset: DeadLetterCopy(offset, None, None, (), UNREADABLE)}, offset + 1
    copies = {
        each.offset: DeadLetterCopy(each.offset, each.key, each.value, each.headers, codec=codec)
        for each in records
    }
    return copies, max(header.last_offset, offset) + 1


# Batches


def batch_bytes(
    batch: Batch, copies: Sequence[DeadLetterCopy], topic: str, now_ms: int, bytes_max: int
) -> tuple[bytes, int]:
    """The batch as the target takes it, and how many values had to be left out of it for that.

    It may still be larger than `bytes_max`: where not even the places fit.
    """
    letters = _letters_of(batch)
    codec = next((each.codec for each in copies if each.codec is not Codec.NONE), Codec.NONE)
    largest = sorted(range(len(copies)), key=lambda at: -len(copies[at].value or b""))
    left_out, kept = 0, list(copies)
    while True:
        data = _built(batch, kept, letters, topic, now_ms, codec)
        if len(data) <= bytes_max or left_out >= len(copies):
            break
        more = max(2 * left_out, 1)
        for at in largest[left_out:more]:
            if kept[at].value is not None:
                kept[at] = kept[at]._replace(value=None, omitted=TOO_LARGE)
        left_out = min(more, len(copies))
    if len(data) > bytes_max:
        kept = without_records([(each.offset, each.offset) for each in copies], TOO_LARGE)
        data = _built(batch, kept, letters, topic, now_ms, codec)
    return data, sum(each.omitted == TOO_LARGE for each in kept)


def _letters_of(batch: Batch) -> list[ArchivingRange]:
    """For each record of the batch what is known of it."""
    return [each for each in batch.letters for _ in range(each.first, each.last + 1)]


def _built(
    batch: Batch,
    copies: Sequence[DeadLetterCopy],
    letters: Sequence[ArchivingRange],
    topic: str,
    now_ms: int,
    codec: Codec,
) -> bytes:
    records: list[NewRecord] = [
        (now_ms, copy.key, copy.value, (*copy.headers, *_own_headers(archiving_range, copy, topic)))
        for archiving_range, copy in zip(letters, copies, strict=True)
    ]
    return build_batch(
        records,
        codec=codec,
        producer_id=batch.producer_id,
        producer_epoch=batch.epoch,
        base_sequence=batch.base_sequence,
    )


def _own_headers(archiving_range: ArchivingRange, copy: DeadLetterCopy, topic: str) -> Iterator[Header]:
    key, reservation = archiving_range.key, archiving_range.reservation
    rejected = reservation.cause == CAUSE_REJECTED
    yield "__dlq.errors.topic", topic.encode()
    yield "__dlq.errors.partition", b"%d" % key.partition
    yield "__dlq.errors.offset", b"%d" % copy.offset
    yield "__dlq.errors.group", key.group.encode()
    yield "__dlq.errors.delivery.count", b"%d" % archiving_range.deliveries
    yield "__dlq.errors.message", MESSAGES[rejected].encode()
    yield ID, dead_letter_id(key, copy.offset, archiving_range.deliveries).encode()
    yield "mansio-dlq-consumer", reservation.consumer.encode()
    yield "mansio-dlq-first-ms", b"%d" % reservation.first_ms
    if reservation.reason:
        yield "mansio-dlq-reason", reservation.reason.encode()
    if copy.omitted:
        yield OMITTED, copy.omitted.encode()


def dead_letter_id(key: ShareKey, offset: int, deliveries: int) -> str:
    """What tells one dead letter from any other: `group/topic id/partition/offset/delivery`."""
    uuid = base64.urlsafe_b64encode(key.topic_id).rstrip(b"=").decode()
    return f"{key.group}/{uuid}/{key.partition}/{offset}/{deliveries}"
