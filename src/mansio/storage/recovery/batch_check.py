"""Validation of the batches in a segment: complete, in order, and with a valid CRC.

Used by recovery and by `Log.verify`. Invariants: nothing is written; nothing after the first invalid batch is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import CorruptLog, RequestError
from mansio.storage.segment import PREFIX_BYTES, read_exactly
from mansio.wire.batch.record_batch import HEADER_BYTES, check_batch, check_stored_batch, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.ports import DiskFile
    from mansio.storage.leader_epochs import LeaderEpochCache
    from mansio.wire.batch.record_batch import BatchHeader

CHECK_CHUNK_BYTES = 1 << 20


def checked_batches(
    file: DiskFile, position: int, size: int, sparse_end_offset: int = 0
) -> Iterator[tuple[int, BatchHeader | str]]:
    """(position, header) of each complete and undamaged batch; (position, problem) if something else follows.

    Only below `sparse_end_offset` may a batch have fewer records than offsets.
    """
    chunk = b""
    chunk_start = position
    while position < size:
        at = position - chunk_start
        if at + HEADER_BYTES > len(chunk):
            chunk_start, at = position, 0
            chunk = read_exactly(file, min(CHECK_CHUNK_BYTES, size - position), position)
            if len(chunk) < HEADER_BYTES:
                yield position, f"{len(chunk)} stray bytes"
                return
        unchecked = read_header(chunk, at)
        length = unchecked.batch_length + PREFIX_BYTES
        if length < HEADER_BYTES or length > size - position:
            yield position, "an incomplete batch"
            return
        if at + length > len(chunk):
            chunk_start, at = position, 0
            chunk = read_exactly(file, min(max(CHECK_CHUNK_BYTES, length), size - position), position)
        try:
            check = check_stored_batch if unchecked.base_offset < sparse_end_offset else check_batch
            header = check(memoryview(chunk)[at : at + length])
        except RequestError as error:
            yield position, error.message
            return
        yield position, header
        position += length


def verify_segment(
    file: DiskFile,
    base_offset: int,
    size: int,
    end_offset: int,
    epochs: LeaderEpochCache,
    sparse_end_offset: int,
) -> int:
    """Check all batches of a segment that should span [base_offset, end_offset). Returns their number.

    Offsets must follow each other without a gap, except for gaps that end at or below `sparse_end_offset`. Raises
    `CorruptLog`.
    """
    count = 0
    offset = base_offset
    if file.size() < size:
        raise CorruptLog(f"{file.path} has {file.size()} bytes, it should have {size}")
    for position, header in checked_batches(file, 0, size, sparse_end_offset):
        if isinstance(header, str):
            raise CorruptLog(f"{file.path} is damaged at {position}: {header}")
        if header.base_offset != offset and not offset < header.base_offset <= sparse_end_offset:
            raise CorruptLog(f"{file.path} has offset {header.base_offset} at {position}, not {offset}")
        if epochs.epoch_at(header.base_offset) not in (header.leader_epoch, -1):
            raise CorruptLog(f"{file.path} has leader epoch {header.leader_epoch} at {position}")
        offset = header.base_offset + header.last_offset_delta + 1
        count += 1
    if offset != end_offset and not offset < end_offset <= sparse_end_offset:
        raise CorruptLog(f"{file.path} ends at offset {offset}, not {end_offset}")
    return count
