"""Quarantine of what recovery truncates from the end of a log, if it contains complete batches.

A torn tail is an incomplete batch, and nothing is lost with it. Complete batches after a damaged position may have been
acknowledged: the checkpoint is up to a second old. Then everything that is truncated is copied first, byte by byte,
segment after segment, into one file `<offset of the truncation, 20 digits>.cut-<number>` beside the segments.

Invariants:
* That file, with its name, is on stable storage before anything is truncated.
* Nothing here removes or changes a segment or such a file.
* A directory contains at most `QUARANTINE_FILES_MAX` of them; a recovery that would need another one, or space that is
  not available, is refused. A crash in between leaves at worst two files with the same content.
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
"""In one log. Each shows damage that an operator should examine; a broker never removes them."""

COPY_CHUNK_BYTES: Final = 256 << 10
SEARCH_BYTES_MIN: Final = 64 << 20
SEARCH_FACTOR: Final = 16
"""A search examines at most this number of bytes per byte of the range, plus `SEARCH_BYTES_MIN`; content crafted to
look like the beginnings of batches would otherwise keep a broker from starting. What was not searched is
quarantined."""

logger = logging.getLogger(__name__)


class TruncatedTail(NamedTuple):
    """What recovery truncated from a log, which ends at `offset` now: offsets from there on are assigned again.

    `size_bytes` were removed, including `segments` whole files, for `reason`. They contained `batches` complete batches
    with the records `first_offset` to `last_offset` (-1: none); then `path` is the quarantine file (otherwise ""). If
    there was too much to search, only the batches found are counted.
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
    """The bytes [position, end) of a segment."""

    file: DiskFile
    position: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.position


class FoundBatches(NamedTuple):
    """Complete batches found in byte ranges; `is_complete`: there are no others."""

    batch_count: int
    first_offset: int
    last_offset: int
    is_complete: bool


def find_batches(ranges: Sequence[FileRange]) -> FoundBatches:
    """Search byte ranges for batches with a valid CRC, at any position. Raises `OSError`."""
    count, first, last, searched = 0, OFFSET_END_MAX, -1, True
    for one in ranges:
        work = SEARCH_BYTES_MIN + SEARCH_FACTOR * one.size_bytes
        covered = one.position
        for scanned in scan(one.file, one.end, 0, OFFSET_END_MAX, position=covered, work_bytes_max=work):
            covered += scanned.length
            if scanned.header is not None:
                count += 1
                first = min(first, scanned.header.base_offset)
                last = max(last, scanned.header.last_offset)
        searched = searched and covered >= one.end
    return FoundBatches(count, first if count else -1, last, searched)


def file_ranges_of(disk: Disk, ends: Iterable[tuple[Segment, int]]) -> list[FileRange]:
    """The ranges from `position` to the end of each (segment, position). Raises `OSError`."""
    return [
        FileRange(segment.file or disk.open_readonly(segment.path), position, segment.size)
        for segment, position in ends
        if segment.size > position
    ]


def quarantine_name(offset: int, number: int) -> str:
    """Name of the file with what was truncated at `offset`. Numbers increase from file to file of a log."""
    return f"{offset:0{OFFSET_DIGITS}d}{QUARANTINE_INFIX}{number}"


def parse_quarantine_name(name: str) -> tuple[int, int] | None:
    """(offset, number) of a quarantine file's name; None for any other name."""
    stem, infix, number = name.partition(QUARANTINE_INFIX)
    digits = stem.isdigit() and number.isdigit() and name.isascii()
    if not infix or len(stem) != OFFSET_DIGITS or not digits:
        return None
    return int(stem), int(number)


def quarantine(
    disk: Disk, directory: str, offset: int, ranges: Sequence[FileRange], *, reason: str, segments: int
) -> SyncSteps[TruncatedTail]:
    """Copy `ranges` (in their order the end of the log, from `offset` on) before they are truncated, if they contain
    complete batches, and log the truncation. Raises `OSError`, `StorageError`; then nothing may be truncated.
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
    """Copy the ranges to a durable file; returns its path. A file that an interrupted recovery left is used again."""
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
            f"{directory} contains {len(names)} files with data truncated at earlier starts (*{QUARANTINE_INFIX}*), "
            "and needs another one; nothing was truncated, move those away"
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
                disk.remove(temporary)  # it would occupy space that others need
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
    """Write the ranges to a file, one after the other; it is not synced. Zeros become holes."""
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
    """Whether a file begins with the bytes of the ranges. Segments are removed newest first, so what is left to be
    truncated after an interruption is the beginning of the file.
    """
    position = 0
    for one in ranges:
        for at in range(one.position, one.end, COPY_CHUNK_BYTES):
            data = one.file.read_at(min(COPY_CHUNK_BYTES, one.end - at), at)
            if file.read_at(len(data), position + at - one.position) != data:
                return False
        position += one.size_bytes
    return True
