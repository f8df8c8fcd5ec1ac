"""Searches by timestamp (ListOffsets): the first record at or after a timestamp, the record with the largest one.

A batch is decoded only if the search has to find the record within it; if the records of a batch cannot be decoded, the
timestamps in its header are used. In a segment that is not completely verified, the search checks the CRC-32C of each
batch that it reads, because a reader would miss records after a damaged timestamp.

Invariant: a search reads a few index intervals of at most three segments. It reads more only if the header of a batch
contains a timestamp that no record of the batch has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import CorruptLog, CorruptMessage, DamagedRange, InvalidRecord, RequestError
from mansio.storage.index import NO_TIMESTAMP
from mansio.storage.segment import read_exactly, walk
from mansio.tracebacks import copied
from mansio.wire.batch.record_batch import check_stored_batch
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.ports import DiskFile
    from mansio.storage.file_cache import FileCache
    from mansio.storage.segment import Segment
    from mansio.storage.segment_list import SegmentList
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.batch.record_reader import Record

    FoundRecord = tuple[int, int, int]  # offset, timestamp in ms, leader epoch

DECODED_RECORDS_MAX = 100_000
"""Maximum number of records of a batch that a search decodes, because a search runs on the event loop."""

DECODED_BYTES_MAX = 16 << 20
"""Maximum decompressed size of a batch that a search decodes. The answer for a larger one is its first offset."""


def offset_for_time(
    segments: SegmentList,
    files: FileCache,
    timestamp_ms: int,
    *,
    start: int,
    limit: int,
) -> FoundRecord | None:
    """Return the first record with a timestamp of at least `timestamp_ms` and an offset in [start, limit).

    Raises `CorruptLog` if that record may be one of those that are missing at the end of a segment.
    """
    for segment in segments.segments_reaching(timestamp_ms):
        if segment.base_offset >= limit:
            return None
        file = files.file(segment)
        begin = files.index(segment).position_before_timestamp(timestamp_ms)
        for position, header in _walk(segment, file, begin):
            if header.base_offset >= limit:
                return None
            if (
                header.max_timestamp_ms < timestamp_ms
                or header.base_offset + header.last_offset_delta < start
            ):
                continue
            found = _record_at(file, position, header, timestamp_ms, start, limit)
            if found is not None:
                if position == 0 and segment.base_offset > start:
                    segments.locate(segment.base_offset - 1)  # raises if records are missing there
                return found
    return None


def max_timestamp(segments: SegmentList, files: FileCache, *, start: int, limit: int) -> FoundRecord | None:
    """Return the first record with the largest timestamp of all records with offsets in [start, limit) (KIP-734)."""
    best: FoundRecord | None = None
    for segment in segments.max_timestamp_candidates(limit):
        if segment.base_offset >= limit:
            break
        whole = segment.base_offset >= start and segment.end_offset <= limit
        if best is not None and whole and files.max_timestamp(segment) <= best[1]:
            continue
        found = _largest_in_segment(segment, files, start, limit)
        if found is not None and (best is None or found[1] > best[1]):
            best = found
    return best


def _largest_in_segment(segment: Segment, files: FileCache, start: int, limit: int) -> FoundRecord | None:
    """`max_timestamp` in one segment: combines the last index entry's timestamp with those of the batches after it."""
    file = files.file(segment)
    index = files.index(segment)
    before, begin = NO_TIMESTAMP, 0
    if segment.base_offset >= start:
        before, begin = index.max_timestamp_before(index.position_before_offset(limit - segment.base_offset))
    best: FoundRecord | None = None
    lead: tuple[int, BatchHeader] | None = None
    highest = before
    for position, header in _walk(segment, file, begin):
        last_offset = header.base_offset + header.last_offset_delta
        if header.base_offset >= limit:
            break
        if last_offset < start or header.max_timestamp_ms <= highest:
            continue
        if header.base_offset >= start and last_offset < limit:
            lead, highest, best = (position, header), header.max_timestamp_ms, None
        else:  # a batch that extends beyond `start` or `limit`: its largest timestamp may be outside
            found = _largest_record(file, position, header, start, limit)
            if found is not None and found[1] > highest:
                lead, highest, best = None, found[1], found
    if best is not None:
        return best
    if lead is None and before != NO_TIMESTAMP:
        begin = index.position_before_timestamp(before)
        lead = next(
            ((at, h) for at, h in _walk(segment, file, begin) if h.max_timestamp_ms == before),
            None,
        )
        if lead is None:
            raise CorruptLog(f"the index of {segment.path} names a timestamp {before} that no batch has")
    if lead is None:
        return None
    header = lead[1]
    found = _record_at(file, *lead, highest, start, limit)
    # If no record has the timestamp, the header decides.
    return found or (header.base_offset, highest, header.leader_epoch)


def _walk(segment: Segment, file: DiskFile, position: int) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of the batches of a segment from `position` on. Raises `CorruptLog` at damage."""
    for at, header in walk(file, position, segment.size, segment.base_offset):
        if segment.checked is not None:
            found = segment.checked.find(header.base_offset)
            if found is None or found.damage:
                _check_batch_crc(file, at, header)
        yield at, header


def _check_batch_crc(file: DiskFile, position: int, header: BatchHeader) -> None:
    try:
        check_stored_batch(read_exactly(file, header.size, position))
    except RequestError as damage:
        error = DamagedRange(f"{file.path} has an unreadable batch at {position}: {damage}")
        error.first_offset, error.end_offset = header.base_offset, header.last_offset + 1
        raise copied(error) from damage


def _largest_record(
    file: DiskFile, position: int, header: BatchHeader, start: int, limit: int
) -> FoundRecord | None:
    best: FoundRecord | None = None
    records = _decode_batch(file, position, header)
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
) -> FoundRecord | None:
    """Return the first record of one batch with a timestamp of at least `timestamp_ms` and an offset in [start,
    limit)."""
    records = _decode_batch(file, position, header)
    if records is None:
        return max(header.base_offset, start), header.max_timestamp_ms, header.leader_epoch
    for record in records:
        if record.timestamp_ms >= timestamp_ms and start <= record.offset < limit:
            return record.offset, record.timestamp_ms, header.leader_epoch
    return None


def _decode_batch(file: DiskFile, position: int, header: BatchHeader) -> list[Record] | None:
    """Return the records of one batch; None if they cannot be decoded, or exceed a limit, although the CRC is valid.

    A client can write such a batch, which must not make the searches of other clients fail or slow. Raises `CorruptLog`
    for a wrong CRC.
    """
    data = read_exactly(file, header.batch_length + 12, position)
    try:
        if header.record_count > DECODED_RECORDS_MAX:
            raise InvalidRecord(f"{header.record_count} records are too many to decode")
        return read_records(data, output_bytes_max=max(DECODED_BYTES_MAX, len(data)))
    except RequestError as error:
        try:
            check_stored_batch(data)
        except CorruptMessage as damage:
            message = f"{file.path} has an unreadable batch at {position}: {damage}"
            raise CorruptLog(message) from error
        except RequestError:
            return None  # the CRC is valid: the header's other fields do not match the content either
        return None
