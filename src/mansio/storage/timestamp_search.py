"""Finding things in segments: where a read has to end, the first record of a moment, the largest timestamp.

Stateless; `Log` hands in itself. Batches are opened only where a timestamp has to be matched to a
record; one that its writer filled with something else than records answers by its header. Always true: a search reads a
few index intervals of three segments at most, however many there are; only batches whose headers promise a time that
their records do not have make it go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import CorruptLog, CorruptMessage, InvalidRecord, RequestError
from mansio.storage.file_cache import max_timestamp_of
from mansio.storage.index import NO_TIMESTAMP
from mansio.storage.segment import read_exactly, walk
from mansio.wire.batch.record_batch import check_stored_batch
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from mansio.ports import DiskFile
    from mansio.storage.file_cache import FileCache
    from mansio.storage.log import Log
    from mansio.storage.segment import Segment
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.batch.record_reader import Record

    Found = tuple[int, int, int]  # offset, timestamp in ms, leader epoch

OPENED_RECORDS_MAX = 100_000
"""A batch of more records is not opened for a look-up, which happens on the broker's loop."""

OPENED_BYTES_MAX = 32 << 20
"""A compressed batch that becomes more than this is not opened for a look-up, whatever the log's own bound is."""


def cut(
    segment: Segment,
    file: DiskFile,
    files: FileCache,
    position: int,
    stop: int,
    max_bytes: int,
    next_offset: int,
) -> tuple[int, int]:
    """(position, offset) of a batch boundary at most `max_bytes` after `position`, but at least one batch after it."""
    relative_offset, boundary = files.index(segment).floor_position(position + max_bytes)
    if boundary > position:
        return boundary, segment.base_offset + relative_offset
    for at, header in walk(file, position, stop, segment.base_offset):
        if at > position and at + header.batch_length + 12 > position + max_bytes:
            return at, header.base_offset
        if at == position and header.batch_length + 12 >= max_bytes:
            following = at + header.batch_length + 12
            return following, header.base_offset + header.last_offset_delta + 1
    return stop, next_offset


def offset_for_time(log: Log, timestamp_ms: int, limit: int) -> Found | None:
    """The first record at or after `timestamp_ms` below `limit`, which is in the log.

    `CorruptLog` when it may be among records that are missing at the end of a segment.
    """
    files, start, output_bytes_max = log.files, log.start_offset, log.settings.open_batch_bytes_max
    for segment in log.table.reaching(timestamp_ms):
        if segment.base_offset >= limit:
            return None
        file = files.file(segment)
        begin = files.index(segment).floor_timestamp(timestamp_ms)
        for position, header in walk(file, begin, segment.size, segment.base_offset):
            if header.base_offset >= limit:
                return None
            if (
                header.max_timestamp_ms < timestamp_ms
                or header.base_offset + header.last_offset_delta < start
            ):
                continue
            found = _record_at(file, position, header, timestamp_ms, start, limit, output_bytes_max)
            if found is not None:
                if position == 0 and segment.base_offset > start:
                    log.table.locate(segment.base_offset - 1)  # says what is missing there
                return found
    return None


def max_timestamp(log: Log, limit: int) -> Found | None:
    """The first record below `limit`, which is in the log, that has the largest timestamp there (KIP-734)."""
    files, start, output_bytes_max = log.files, log.start_offset, log.settings.open_batch_bytes_max
    best: Found | None = None
    for segment in log.table.leading(limit):
        if segment.base_offset >= limit:
            break
        whole = segment.base_offset >= start and segment.end_offset <= limit
        if best is not None and whole and max_timestamp_of(segment, files) <= best[1]:
            continue
        found = _largest_in(segment, files, start, limit, output_bytes_max)
        if found is not None and (best is None or found[1] > best[1]):
            best = found
    return best


def _largest_in(
    segment: Segment, files: FileCache, start: int, limit: int, output_bytes_max: int
) -> Found | None:
    """The same in one segment: the index knows the largest timestamp before the last few batches; those are walked."""
    file = files.file(segment)
    index = files.index(segment)
    before, begin = NO_TIMESTAMP, 0
    if segment.base_offset >= start:
        before, begin = index.max_timestamp_before(index.floor_offset(limit - segment.base_offset))
    best: Found | None = None
    lead: tuple[int, BatchHeader] | None = None
    highest = before
    for position, header in walk(file, begin, segment.size, segment.base_offset):
        last_offset = header.base_offset + header.last_offset_delta
        if header.base_offset >= limit:
            break
        if last_offset < start or header.max_timestamp_ms <= highest:
            continue
        if header.base_offset >= start and last_offset < limit:
            lead, highest, best = (position, header), header.max_timestamp_ms, None
        else:  # a batch that reaches over an edge: its largest timestamp may be outside
            found = _largest_record(file, position, header, start, limit, output_bytes_max)
            if found is not None and found[1] > highest:
                lead, highest, best = None, found[1], found
    if best is not None:
        return best
    if lead is None and before != NO_TIMESTAMP:
        begin = index.floor_timestamp(before)
        lead = next(
            (
                (at, h)
                for at, h in walk(file, begin, segment.size, segment.base_offset)
                if h.max_timestamp_ms == before
            ),
            None,
        )
        if lead is None:
            raise CorruptLog(f"the index of {segment.path} speaks of a timestamp {before} that no batch has")
    if lead is None:
        return None
    header = lead[1]
    found = _record_at(file, *lead, highest, start, limit, output_bytes_max)
    return found or (
        header.base_offset,
        highest,
        header.leader_epoch,
    )  # its records do not have it: by its header


def _largest_record(
    file: DiskFile, position: int, header: BatchHeader, start: int, limit: int, output_bytes_max: int
) -> Found | None:
    best: Found | None = None
    records = _open_batch(file, position, header, output_bytes_max)
    if records is None:
        return max(header.base_offset, start), header.max_timestamp_ms, header.leader_epoch
    for record in records:
        if start <= record.offset < limit and (best is None or record.timestamp_ms > best[1]):
            best = record.offset, record.timestamp_ms, header.leader_epoch
    return best


def _record_at(
    file: DiskFile,
    position: int,
    header: BatchHeader,
    timestamp_ms: int,
    start: int,
    limit: int,
    output_bytes_max: int,
) -> Found | None:
    """Open one batch: its first record at or after `timestamp_ms` in [start, limit)."""
    records = _open_batch(file, position, header, output_bytes_max)
    if records is None:
        return max(header.base_offset, start), header.max_timestamp_ms, header.leader_epoch
    for record in records:
        if record.timestamp_ms >= timestamp_ms and start <= record.offset < limit:
            return record.offset, record.timestamp_ms, header.leader_epoch
    return None


def _open_batch(
    file: DiskFile, position: int, header: BatchHeader, output_bytes_max: int
) -> list[Record] | None:
    """The records of one batch. None when they cannot be had although the batch is as it was written (its CRC).

    A client can write such a batch, and it must not cost others their look-ups, nor their time: one that becomes very
    many records, or very large, is not opened. A wrong CRC is `CorruptLog`.
    """
    data = read_exactly(file, header.batch_length + 12, position)
    try:
        if header.record_count > OPENED_RECORDS_MAX:
            raise InvalidRecord(f"{header.record_count} records are too many to look at")
        if header.codec:
            output_bytes_max = min(output_bytes_max, OPENED_BYTES_MAX)
        return read_records(data, max_output_bytes=output_bytes_max)
    except RequestError as error:
        try:
            check_stored_batch(data)
        except CorruptMessage as damage:
            message = f"{file.path} holds a batch at {position} that cannot be read: {damage}"
            raise CorruptLog(message) from error
        except RequestError:
            return None  # past its CRC: what the header says of the content is wrong as well
        return None
