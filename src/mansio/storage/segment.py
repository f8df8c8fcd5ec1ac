"""One segment: a file of whole batches, one after the other, and the iteration over its batch headers.

Defines the names of a segment's files and reads batch headers from them.

Invariant: `walk` reads only the given bytes, in order, and raises `CorruptLog` where no batch begins; it does not
search for the next batch.
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
    """A segment of one log.

    `size` (bytes) and `end_offset` are final once the segment is closed; `Log` updates them for the active segment.
    `file` and `index` are set while the segment is active or not yet durable; otherwise `FileCache` provides them.
    `max_timestamp_ms` is the largest timestamp; None if it has not been read yet.
    `recorded_end_offset` is the end offset in the index file of a closed segment, if that is below `end_offset`: then
    the segments between the two offsets are missing.
    `replaced`: compaction or a repair has removed the segment from the log. Current readers continue with its file; the
    index file of its name belongs to the segment that replaced it.
    `checked`: the ranges whose batches were checked; None if all batches are verified, as in a segment that this
    process wrote.
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
    """Return the base offset that the file name of a segment contains; None if `name` is not such a file name."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix != SEGMENT_SUFFIX or len(stem) != OFFSET_DIGITS or not stem.isdigit():
        return None
    return int(stem)


def remove_segment_files(disk: Disk, segment: Segment) -> None:
    """Remove the index file and then the file of a segment, if they exist. Raises `OSError`."""
    for path in (segment.index_path, segment.path):
        if disk.exists(path):
            disk.remove(path)


def read_exactly(file: DiskFile, length: int, position: int) -> bytes:
    """Read `length` bytes from `position`. Raises `CorruptLog` if the file is too short, else `StorageError`."""
    try:
        data = file.read_at(length, position)
    except OSError as error:
        raise StorageError(f"cannot read {file.path} at {position}: {error}") from error
    if len(data) != length:
        raise CorruptLog(f"{file.path} ends at byte {position + len(data)} instead of {position + length}")
    return data


def contains_only_zeros(file: DiskFile, position: int, end: int) -> bool:
    """Whether all bytes [position, end) are zeros, as after preallocation. Raises the errors of `read_exactly`."""
    for at in range(position, end, ZEROS_CHUNK_BYTES):
        chunk = read_exactly(file, min(ZEROS_CHUNK_BYTES, end - at), at)
        if chunk.count(0) != len(chunk):
            return False
    return True


def walk(
    file: DiskFile, position: int, end: int, lowest_offset: int, chunk_bytes: int = LOOKUP_CHUNK_BYTES
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of every batch between the byte positions `position` (a batch boundary) and `end`.

    Reads only headers and does not check CRCs. `lowest_offset` is the lowest valid offset of the first batch. Raises
    `CorruptLog` where no batch begins, `StorageError` if the disk fails.
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
