"""Validation of the batches in a segment that may be damaged.

`checked_batches` and `verify_segment` validate batches in order (complete, contiguous, with a valid CRC) and stop at
the first damage.

`scan` continues after damage. It yields every intact batch, and every byte range that contains no intact batch. After a
damaged batch it continues at the end of that batch, if the bytes there look like a batch; otherwise it searches for the
next position at which a whole batch with a valid CRC begins.

Invariants: the ranges cover the scanned bytes in order and without gaps; nothing is written; memory is bounded by
`CHUNK_BYTES` and `BATCH_BYTES_WHOLE_MAX`, whatever lengths the file claims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from crc32c import crc32c

from mansio.errors import CorruptLog, RequestError
from mansio.storage.segment import BATCH_MAGIC, PREFIX_BYTES, read_exactly
from mansio.wire.batch.record_batch import HEADER_BYTES, check_stored_batch, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.ports import DiskFile
    from mansio.storage.leader_epochs import LeaderEpochCache
    from mansio.wire.batch.record_batch import BatchHeader

CHUNK_BYTES = 1 << 20
BATCH_BYTES_WHOLE_MAX = 8 << 20
"""The CRC of a larger batch is computed in pieces."""

_MAGIC_POSITION = 16
_CHECKED_FROM = 21  # the CRC covers the bytes from this position of a batch on
_CRC_POSITION = 17


class ReadableFile(Protocol):
    """The part of `DiskFile` that `scan` uses."""

    def read_at(self, length: int, position: int) -> bytes:
        """Read `length` bytes from `position`; fewer at the end of the file."""


class ScannedRange(NamedTuple):
    """`length` bytes of a segment from `position`: an intact batch with `header`, or no intact batch.

    In the second case `header` is None and `problem` describes the damage.
    """

    position: int
    length: int
    header: BatchHeader | None
    problem: str = ""


class _Window:
    """Buffered sequential view of a file's first `size` bytes, which counts the bytes it examines."""

    def __init__(
        self, file: ReadableFile, size: int, on_bytes: Callable[[int], object], examined_bytes_max: int | None
    ) -> None:
        self._file = file
        self._size = size
        self._start = 0
        self._chunk = b""
        self._on_bytes = on_bytes
        self._examined_bytes_max = examined_bytes_max
        self._examined_bytes = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether more than `examined_bytes_max` bytes were examined."""
        return self._examined_bytes_max is not None and self._examined_bytes > self._examined_bytes_max

    def view(self, position: int, length: int) -> memoryview:
        """`length` bytes from `position`, fewer at the end of the file."""
        at = position - self._start
        self._examined_bytes += length
        if at < 0 or at + length > len(self._chunk):
            wanted = min(max(CHUNK_BYTES, length), max(self._size - position, 0))
            self._chunk = self._file.read_at(wanted, position) if wanted else b""
            self._on_bytes(len(self._chunk))
            self._start, at = position, 0
        return memoryview(self._chunk)[at : at + length]

    def find_magic(self, position: int) -> int:
        """Return the first position at or after `position` at which a batch may begin; -1 if there is none.

        A batch may begin where the byte at distance 16 is the magic number of record batches.
        """
        while position + HEADER_BYTES <= self._size:
            self.view(position, HEADER_BYTES)
            at = position - self._start + _MAGIC_POSITION
            found = self._chunk.find(bytes((BATCH_MAGIC,)), at)
            if found >= 0:
                return self._start + found - _MAGIC_POSITION
            position = self._start + len(self._chunk) - _MAGIC_POSITION
        return -1


def scan(
    file: ReadableFile,
    size: int,
    offset_min: int,
    end_offset: int,
    on_bytes: Callable[[int], object] = lambda _: None,
    *,
    position: int = 0,
    examined_bytes_max: int | None = None,
) -> Iterator[ScannedRange]:
    """Yield the ranges of the bytes [position, size) of a file: intact batches, and ranges without an intact batch.

    A batch after damage is accepted only with an offset in [offset_min, end_offset). `on_bytes` is called with the
    number of bytes of each read. With `examined_bytes_max` the scan ends early when it has examined that many bytes;
    bytes that are examined twice count twice. Raises `OSError`.
    """
    window = _Window(file, size, on_bytes, examined_bytes_max)
    lowest = offset_min
    while position < size:
        header, problem = _batch_at(window, position, size)
        if header is not None and not problem:
            yield ScannedRange(position, header.size, header)
            position += header.size
            lowest = header.last_offset + 1
            continue
        end = _next_batch(window, position, size, header, lowest, end_offset)
        if window.is_exhausted:
            return
        yield ScannedRange(position, end - position, None, problem)
        position = end


def _batch_at(window: _Window, position: int, size: int) -> tuple[BatchHeader | None, str]:
    """(header, problem) of the batch at `position`; "" if it is intact, header None if no batch can begin there."""
    data = window.view(position, HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        return None, f"{size - position} stray bytes"
    header = read_header(data)
    if header.magic != BATCH_MAGIC or header.batch_length < HEADER_BYTES - PREFIX_BYTES:
        return None, "no batch begins here"
    if header.size > size - position:
        return None, f"a batch of {header.size} bytes does not fit into the remaining {size - position} bytes"
    if header.size > BATCH_BYTES_WHOLE_MAX:
        intact = _crc_in_pieces(window, position, header.size) == int.from_bytes(
            data[_CRC_POSITION:_CHECKED_FROM], "big"
        )
        return header, "" if intact else "the CRC-32C of the batch does not match"
    try:
        return check_stored_batch(window.view(position, header.size)), ""
    except RequestError as error:
        return header, error.message


def _crc_in_pieces(window: _Window, position: int, size: int) -> int:
    crc = 0
    at, end = position + _CHECKED_FROM, position + size
    while at < end:
        piece = window.view(at, min(CHUNK_BYTES, end - at))
        if not piece:
            break
        crc = crc32c(piece, crc)
        at += len(piece)
    return crc


def _next_batch(
    window: _Window, position: int, size: int, damaged: BatchHeader | None, lowest: int, end_offset: int
) -> int:
    """Position at which to continue after a damaged batch at `position`; the end of the file if there is none."""
    if damaged is not None:
        following = position + damaged.size
        if following == size:
            return following
        header, problem = _batch_at(window, following, size)
        if header is not None and (not problem or lowest < header.base_offset < end_offset):
            return following
    at = window.find_magic(position + 1)
    while at >= 0 and not window.is_exhausted:
        header, problem = _batch_at(window, at, size)
        if header is not None and not problem and lowest <= header.base_offset < end_offset:
            return at
        at = window.find_magic(at + 1)
    return size


def checked_batches(
    file: DiskFile, position: int, size: int, sparse_end_offset: int = 0
) -> Iterator[tuple[int, BatchHeader | str]]:
    """Yield (position, header) of each batch of the bytes [position, size) of a file, up to the first damage.

    At damage it yields (position, description of the problem) and ends. Only below `sparse_end_offset` may a batch have
    fewer records than offsets.
    """
    chunk = b""
    chunk_start = position
    while position < size:
        at = position - chunk_start
        if at + HEADER_BYTES > len(chunk):
            chunk_start, at = position, 0
            chunk = read_exactly(file, min(CHUNK_BYTES, size - position), position)
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
            chunk = read_exactly(file, min(max(CHUNK_BYTES, length), size - position), position)
        try:
            header = check_stored_batch(memoryview(chunk)[at : at + length])
        except RequestError as error:
            yield position, error.message
            return
        if (
            header.base_offset >= sparse_end_offset
            and not header.record_count == header.last_offset_delta + 1 > 0
        ):
            yield (
                position,
                f"a batch of {header.record_count} records that spans {header.last_offset_delta + 1} offsets",
            )
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
    """Check all batches of a segment that should span [base_offset, end_offset). Returns the number of batches.

    Offsets must be contiguous, except for gaps that end at or below `sparse_end_offset`. Raises `CorruptLog`.
    """
    count = 0
    offset = base_offset
    if file.size() < size:
        raise CorruptLog(f"{file.path} has {file.size()} bytes instead of {size}")
    for position, header in checked_batches(file, 0, size, sparse_end_offset):
        if isinstance(header, str):
            raise CorruptLog(f"{file.path} is damaged at {position}: {header}")
        if header.base_offset != offset and not offset < header.base_offset <= sparse_end_offset:
            raise CorruptLog(f"{file.path} has offset {header.base_offset} at {position} instead of {offset}")
        if epochs.epoch_for_offset(header.base_offset) not in (header.leader_epoch, -1):
            raise CorruptLog(f"{file.path} has leader epoch {header.leader_epoch} at {position}")
        offset = header.base_offset + header.last_offset_delta + 1
        count += 1
    if offset != end_offset and not offset < end_offset <= sparse_end_offset:
        raise CorruptLog(f"{file.path} ends at offset {offset} instead of {end_offset}")
    return count
