"""One segment: a file of whole batches, one after the other, and the iteration over its batch headers.

Owns the names of a segment's files and the reading of batch headers from them.

Invariant: a walk never goes beyond the given bytes, never backwards, and raises `CorruptLog` instead of guessing where
the next batch might begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import CorruptLog, StorageError
from mansio.wire.batch.record_batch import HEADER_BYTES, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.ports import Disk, DiskFile
    from mansio.storage.checked_ranges import CheckedRanges
    from mansio.storage.index import SparseIndex
    from mansio.wire.batch.record_batch import BatchHeader

SEGMENT_SUFFIX = ".log"
INDEX_SUFFIX = ".index"
OFFSET_DIGITS = 20
OFFSET_END_MAX = (1 << 63) - 1
LOOKUP_CHUNK_BYTES = 8 << 10  # a search usually walks one index interval
WALK_CHUNK_BYTES = 256 << 10
ZEROS_CHUNK_BYTES = 1 << 20
BATCH_MAGIC = 2
PREFIX_BYTES = 12  # base offset and length, which a batch's length field does not count


class Segment:
    """A segment of one log. `file` is held while the segment is written or not yet durable, `index` likewise.
    `replaced`: compaction has removed it from the log; it keeps its file for current readers, and the index file of its
    name belongs to another segment.

    `end_offset` and `size` are final once the segment is closed; for the active one the log updates `end_offset`.
    `recorded_end_offset`: the end that the index of a closed segment was saved with, if that is below `end_offset`: the
    segments between the two are missing.
    `checked`: what is known about its batches; None if all are verified, as in a segment that this process wrote.
    """

    __slots__ = (
        "base_offset",
        "checked",
        "directory",
        "end_offset",
        "file",
        "index",
        "max_timestamp_ms",
        "recorded_end_offset",
        "replaced",
        "size",
    )

    def __init__(self, directory: str, base_offset: int, size: int = 0) -> None:
        self.directory = directory
        self.base_offset = base_offset
        self.end_offset = base_offset
        self.size = size
        self.file: DiskFile | None = None
        self.index: SparseIndex | None = None
        self.max_timestamp_ms: int | None = None
        self.recorded_end_offset: int | None = None
        self.replaced = False
        self.checked: CheckedRanges | None = None

    @property
    def path(self) -> str:
        return segment_path(self.directory, self.base_offset)

    @property
    def index_path(self) -> str:
        return f"{self.directory}/{self.base_offset:0{OFFSET_DIGITS}d}{INDEX_SUFFIX}"

    def __repr__(self) -> str:
        return f"Segment({self.path!r}, {self.size} bytes)"


def segment_path(directory: str, base_offset: int) -> str:
    """Path of the segment file that begins at `base_offset`."""
    return f"{directory}/{base_offset:0{OFFSET_DIGITS}d}{SEGMENT_SUFFIX}"


def base_offset_of(name: str) -> int | None:
    """The base offset in a segment file's name; None for any other name."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix != SEGMENT_SUFFIX or len(stem) != OFFSET_DIGITS or not stem.isdigit():
        return None
    return int(stem)


def remove_segment_files(disk: Disk, segment: Segment) -> None:
    """Remove a segment and its index, if they exist. The index goes first: it is useless without the segment."""
    for path in (segment.index_path, segment.path):
        if disk.exists(path):
            disk.remove(path)


def read_exactly(file: DiskFile, length: int, position: int) -> bytes:
    """`length` bytes from `position`. Raises `CorruptLog` if the file ends before, `StorageError` if the disk fails."""
    try:
        data = file.read_at(length, position)
    except OSError as error:
        raise StorageError(f"cannot read {file.path} at {position}: {error}") from error
    if len(data) != length:
        raise CorruptLog(f"{file.path} ends at {position + len(data)}, it should reach {position + length}")
    return data


def contains_only_zeros(file: DiskFile, position: int, end: int) -> bool:
    """Whether [position, end) consists of preallocated zeros only. Raises as `read_exactly` does."""
    for at in range(position, end, ZEROS_CHUNK_BYTES):
        chunk = read_exactly(file, min(ZEROS_CHUNK_BYTES, end - at), at)
        if chunk.count(0) != len(chunk):
            return False
    return True


def walk(
    file: DiskFile, position: int, end: int, lowest_offset: int, chunk_bytes: int = LOOKUP_CHUNK_BYTES
) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of every batch from `position` (a batch boundary) up to `end` bytes.

    Reads headers only and skips over large batches. The first batch begins at `lowest_offset` or above.
    """
    chunk = b""
    chunk_start = position
    while position < end:
        if position + HEADER_BYTES > chunk_start + len(chunk):
            chunk_start = position
            chunk = read_exactly(file, min(chunk_bytes, end - position), position)
        if len(chunk) - (position - chunk_start) < HEADER_BYTES:
            raise CorruptLog(f"{file.path} has {end - position} stray bytes at {position}")
        header = read_header(chunk, position - chunk_start)
        following = position + header.batch_length + PREFIX_BYTES
        if (
            header.batch_length < HEADER_BYTES - PREFIX_BYTES
            or following > end
            or header.magic != BATCH_MAGIC
            or header.base_offset < lowest_offset
            or header.last_offset_delta < 0
        ):
            raise CorruptLog(f"{file.path} has no batch at {position}, where one should begin")
        yield position, header
        lowest_offset = header.base_offset + header.last_offset_delta + 1
        position = following
