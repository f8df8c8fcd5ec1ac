"""Quarantine of the bytes that recovery truncates from the end of a log, if they contain complete batches.

If they contain only an incomplete batch (a torn tail), no acknowledged record is lost. Complete batches after a damaged
position may have been acknowledged, because the checkpoint is up to a second old. Then all truncated bytes are first
copied, segment after segment, into one quarantine file beside the segments, named
`<offset of the truncation, 20 digits>.cut-<number>`.

Invariants:
* The quarantine file and its name are on stable storage before anything is truncated.
* This module never removes or changes a segment or a quarantine file.
* A directory contains at most `QUARANTINE_FILES_MAX` quarantine files. If recovery needs another one, or more disk
  space than is available, it raises `StorageError`. A crash leaves at worst two quarantine files with equal content.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import StorageError
from mansio.logs import fields
from mansio.storage.checksummed_file import TEMPORARY_SUFFIX
from mansio.storage.recovery.batch_sync import PendingSync
from mansio.storage.scan import scan
from mansio.storage.segment import OFFSET_DIGITS, OFFSET_END_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.ports import Disk, DiskFile
    from mansio.storage.recovery.batch_sync import SyncSteps
    from mansio.storage.segment import Segment

QUARANTINE_INFIX: Final = ".cut-"
QUARANTINE_FILES_MAX: Final = 100
"""Maximum number of quarantine files per log. A broker never removes them; an operator should examine each."""

COPY_CHUNK_BYTES: Final = 256 << 10
SEARCH_BYTES_MIN: Final = 64 << 20
SEARCH_FACTOR: Final = 16
"""A search examines at most this number of bytes per byte of the range, plus `SEARCH_BYTES_MIN`; otherwise records that
imitate the beginnings of batches could prevent a broker from starting. A range that was not searched completely is
quarantined."""

logger = logging.getLogger(__name__)


class TruncatedTail(NamedTuple):
    """Bytes that recovery truncated from a log. The log ends at `offset` now, and later offsets are assigned again.

    `size_bytes` were removed, including `segment_count` whole segments, because of `reason`. They contained
    `batch_count` complete batches with the records `first_offset` to `last_offset` (-1: none); if the search ended
    early there may be more. `path` is the quarantine file, "" if there is none.
    """

    offset: int
    reason: str
    size_bytes: int
    segment_count: int
    batch_count: int = 0
    first_offset: int = -1
    last_offset: int = -1
    path: str = ""


class FileRange(NamedTuple):
    """The bytes [position, end) of a file."""

    file: DiskFile
    position: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.position


class FoundBatches(NamedTuple):
    """Complete batches that a search found: their number and their first and last offset (-1: none).

    `is_complete`: the search examined all bytes, so there are no other batches.
    """

    batch_count: int
    first_offset: int
    last_offset: int
    is_complete: bool


def find_batches(ranges: Sequence[FileRange]) -> FoundBatches:
    """Search byte ranges for batches with a valid CRC that begin at any position. Raises `OSError`."""
    count, first, last, searched = 0, OFFSET_END_MAX, -1, True
    for one in ranges:
        work = SEARCH_BYTES_MIN + SEARCH_FACTOR * one.size_bytes
        covered = one.position
        for scanned in scan(one.file, one.end, 0, OFFSET_END_MAX, position=covered, examined_bytes_max=work):
            covered += scanned.length
            if scanned.header is not None:
                count += 1
                first = min(first, scanned.header.base_offset)
                last = max(last, scanned.header.last_offset)
        searched = searched and covered >= one.end
    return FoundBatches(count, first if count else -1, last, searched)


def file_ranges_of(disk: Disk, ends: Iterable[tuple[Segment, int]]) -> list[FileRange]:
    """Return the bytes from `position` to the end of the segment, for each (segment, position). Raises `OSError`."""
    return [
        FileRange(segment.file or disk.open_readonly(segment.path), position, segment.size)
        for segment, position in ends
        if segment.size > position
    ]


def quarantine_name(offset: int, number: int) -> str:
    """Name of a quarantine file with the bytes truncated at `offset`. Each new file of a log has a higher number."""
    return f"{offset:0{OFFSET_DIGITS}d}{QUARANTINE_INFIX}{number}"


def parse_quarantine_name(name: str) -> tuple[int, int] | None:
    """(offset, number) that the name of a quarantine file contains; None if `name` is not such a name."""
    stem, infix, number = name.partition(QUARANTINE_INFIX)
    digits = stem.isdigit() and number.isdigit() and name.isascii()
    if not infix or len(stem) != OFFSET_DIGITS or not digits:
        return None
    return int(stem), int(number)


def quarantine(
    disk: Disk, directory: str, offset: int, ranges: Sequence[FileRange], *, reason: str, segments: int
) -> SyncSteps[TruncatedTail]:
    """Copy `ranges` to a quarantine file if they contain complete batches, and log the truncation that follows.

    `ranges` are the end of the log from `offset` on, `segments` the number of whole segments among them. Raises
    `OSError`, `StorageError`; then the caller must not truncate anything.
    """
    size_bytes = sum(one.size_bytes for one in ranges)
    found = find_batches(ranges)
    path = ""
    if found.batch_count or not found.is_complete:
        path = yield from _copy_to_quarantine(disk, directory, offset, ranges)
    tail = TruncatedTail(
        offset, reason, size_bytes, segments, found.batch_count, found.first_offset, found.last_offset, path
    )
    logger.log(
        logging.ERROR if path else logging.WARNING,
        "log_truncated",
        extra=fields(
            directory=directory,
            offset=offset,
            reason=reason,
            size_bytes=size_bytes,
            segments=segments,
            batches=tail.batch_count,
            first_offset=tail.first_offset,
            last_offset=tail.last_offset,
            quarantine=path,
        ),
    )
    return tail


def _copy_to_quarantine(
    disk: Disk, directory: str, offset: int, ranges: Sequence[FileRange]
) -> SyncSteps[str]:
    """Copy the ranges to a durable quarantine file; returns its path.

    If an interrupted recovery has left a file with the same content, that file is returned.
    """
    names = {
        name: parsed
        for name in disk.list_directory(directory)
        if (parsed := parse_quarantine_name(name)) is not None
    }
    for name, (at, _) in names.items():
        if at == offset and _begins_with(kept := disk.open(f"{directory}/{name}"), ranges):
            yield partial(PendingSync, (kept,), (directory,))
            return kept.path
    if len(names) >= QUARANTINE_FILES_MAX:
        raise StorageError(
            f"{directory} contains {len(names)} quarantine files (*{QUARANTINE_INFIX}*), the maximum, and needs one "
            "more; nothing was truncated; move these files to another directory"
        )
    path = (
        f"{directory}/{quarantine_name(offset, 1 + max((number for _, number in names.values()), default=0))}"
    )
    temporary = path + TEMPORARY_SUFFIX

    def write() -> PendingSync:
        try:
            return PendingSync((_copy(disk, temporary, ranges),))
        except OSError as error:
            if disk.exists(temporary):
                disk.remove(temporary)  # frees the disk space that it takes
            size_bytes = sum(one.size_bytes for one in ranges)
            raise StorageError(
                f"cannot quarantine {size_bytes} bytes of {directory}, which contain complete batches after a damaged "
                f"position; nothing was truncated: {error}"
            ) from error

    def rename() -> PendingSync:
        if disk.exists(temporary):
            disk.rename(temporary, path)
        return PendingSync((), (directory,))

    yield write
    yield rename
    return path


def _copy(disk: Disk, path: str, ranges: Sequence[FileRange]) -> DiskFile:
    """Write the ranges to the file at `path`, one after the other, without a sync. Chunks of zeros become holes."""
    file = disk.open(path, create=True)
    file.truncate(0)
    position = 0
    for one in ranges:
        for at in range(one.position, one.end, COPY_CHUNK_BYTES):
            data = one.file.read_at(min(COPY_CHUNK_BYTES, one.end - at), at)
            if data.count(0) != len(data):
                file.write_at([data], position + at - one.position)
        position += one.size_bytes
    file.truncate(position)
    return file


def _begins_with(file: DiskFile, ranges: Sequence[FileRange]) -> bool:
    """Whether a quarantine file begins with the bytes of the ranges.

    Recovery removes segments newest first, so after an interruption the remaining ranges are the beginning of the file.
    """
    position = 0
    for one in ranges:
        for at in range(one.position, one.end, COPY_CHUNK_BYTES):
            data = one.file.read_at(min(COPY_CHUNK_BYTES, one.end - at), at)
            if file.read_at(len(data), position + at - one.position) != data:
                return False
        position += one.size_bytes
    return True
