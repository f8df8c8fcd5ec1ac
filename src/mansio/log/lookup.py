"""Finding things in segments: where a read has to end, the first record of a moment, the largest timestamp.

Stateless; `Log` hands in its segments as (segment, size in bytes, end offset). Batches are opened only where a
timestamp has to be matched to a record. Always true: a search costs a few index intervals per segment it cannot rule
out by the segment's largest timestamp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import CorruptLog, RequestError
from mansio.log.files import max_timestamp_of
from mansio.log.index import NO_TIMESTAMP
from mansio.log.segment import read_exactly, walk
from mansio.wire.records import read_records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.log.files import FileCache
    from mansio.log.segment import Segment
    from mansio.ports import DiskFile
    from mansio.wire.records import BatchHeader

    Extents = Iterator[tuple[Segment, int, int]]
    Found = tuple[int, int, int]  # offset, timestamp in ms, leader epoch


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


def offset_for_time(
    extents: Extents, files: FileCache, timestamp_ms: int, start: int, limit: int, output_bytes_max: int
) -> Found | None:
    """The first record at or after `timestamp_ms` whose offset is in [start, limit)."""
    for segment, size, _ in extents:
        if segment.base_offset >= limit:
            return None
        if max_timestamp_of(segment, files) < timestamp_ms:
            continue
        file = files.file(segment)
        begin = files.index(segment).floor_timestamp(timestamp_ms)
        for position, header in walk(file, begin, size, segment.base_offset):
            if header.base_offset >= limit:
                return None
            if (
                header.max_timestamp_ms < timestamp_ms
                or header.base_offset + header.last_offset_delta < start
            ):
                continue
            found = _record_at(file, position, header, timestamp_ms, start, limit, output_bytes_max)
            if found is not None:
                return found
    return None


def max_timestamp(
    extents: Extents, files: FileCache, start: int, limit: int, output_bytes_max: int
) -> Found | None:
    """The first record in [start, limit) that has the largest timestamp there."""
    best = NO_TIMESTAMP
    where: tuple[DiskFile, int, BatchHeader] | None = None
    for segment, size, end in extents:
        if segment.base_offset >= limit:
            break
        if segment.base_offset >= start and end <= limit and max_timestamp_of(segment, files) <= best:
            continue
        found = _largest_in(segment, size, files, start, limit)
        if found is not None and found[2].max_timestamp_ms > best:
            best, where = found[2].max_timestamp_ms, found
    if where is None:
        return None
    file, position, header = where
    return _record_at(file, position, header, best, start, limit, output_bytes_max)


def _largest_in(
    segment: Segment, size: int, files: FileCache, start: int, limit: int
) -> tuple[DiskFile, int, BatchHeader] | None:
    """The first batch with the largest timestamp among those of a segment that are in [start, limit)."""
    file = files.file(segment)
    index = files.index(segment)
    before, begin = NO_TIMESTAMP, 0
    if segment.base_offset >= start:
        before, begin = index.max_timestamp_before(index.floor_offset(limit - segment.base_offset))
    best = _largest_batch(file, begin, size, segment.base_offset, start, limit)
    if before == NO_TIMESTAMP or (best is not None and best[2].max_timestamp_ms > before):
        return best
    begin = index.floor_timestamp(before)
    for position, header in walk(file, begin, size, segment.base_offset):
        if header.max_timestamp_ms == before:
            return file, position, header
    raise CorruptLog(f"the index of {segment.path} speaks of a timestamp {before} that no batch has")


def _largest_batch(
    file: DiskFile, begin: int, size: int, lowest: int, start: int, limit: int
) -> tuple[DiskFile, int, BatchHeader] | None:
    best: tuple[DiskFile, int, BatchHeader] | None = None
    for position, header in walk(file, begin, size, lowest):
        if header.base_offset + header.last_offset_delta >= limit:
            break
        if header.base_offset + header.last_offset_delta < start:
            continue
        if best is None or header.max_timestamp_ms > best[2].max_timestamp_ms:
            best = file, position, header
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
    data = read_exactly(file, header.batch_length + 12, position)
    try:
        records = read_records(data, max_output_bytes=output_bytes_max)
    except RequestError as error:
        raise CorruptLog(f"{file.path} holds a batch at {position} that cannot be read: {error}") from error
    for record in records:
        if record.timestamp_ms >= timestamp_ms and start <= record.offset < limit:
            return record.offset, record.timestamp_ms, header.leader_epoch
    return None
