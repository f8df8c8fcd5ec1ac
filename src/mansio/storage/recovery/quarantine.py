"""What an opening cuts off the end of a log, and where that is kept when whole batches are in it.

A torn tail is half a batch, and nothing is lost with it. Where whole batches lie behind a damaged place they may have
been acknowledged: the checkpoint is up to a second old. Then everything that is cut is copied first, as it lies,
segment after segment, into one file `<offset of the cut, 20 digits>.cut-<number>` beside the segments.

Always true: that file is on stable storage, name and all, before anything is cut. Nothing here removes or changes a
segment or such a file; a directory holds `QUARANTINE_FILES_MAX` of them at most, and an opening that would need
another one, or room that is not there, is refused. A crash in between leaves at worst two files that hold the same.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import StorageError
from mansio.logs import fields
from mansio.storage.checksummed_file import TEMPORARY_SUFFIX
from mansio.storage.flush.batch_sync import PendingSync
from mansio.storage.scan import scan
from mansio.storage.segment import OFFSET_DIGITS, OFFSET_END_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.ports import Disk, DiskFile
    from mansio.storage.flush.batch_sync import SyncSteps
    from mansio.storage.segment import Segment

QUARANTINE_INFIX: Final = ".cut-"
QUARANTINE_FILES_MAX: Final = 100
"""In one log. Each is the trace of a damage that somebody should look at; they are never removed by a broker."""

COPY_CHUNK_BYTES: Final = 256 << 10
SEARCH_BYTES_MIN: Final = 64 << 20
SEARCH_FACTOR: Final = 16
"""A search looks at so many bytes for each byte there is, and at `SEARCH_BYTES_MIN` more; bytes that were made to look
like the beginnings of batches would otherwise keep a broker from starting. What was not searched is set aside."""

logger = logging.getLogger(__name__)


class TruncatedTail(NamedTuple):
    """What an opening took off a log, which ends at `offset` since: offsets from there on are given out again.

    `size_bytes` went, with them `segments` whole files, for `reason`. Whole batches among them: `batches`, with the
    records `first_offset` to `last_offset` (-1: none); then `path` is the file that all of it was set aside in
    (otherwise ""). Where that was too much to search, only what was found is counted.
    """

    offset: int
    reason: str
    size_bytes: int
    segments: int
    batches: int = 0
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
    """Whole batches found somewhere; `searched`: there are no others."""

    batches: int
    first_offset: int
    last_offset: int
    searched: bool


def find_batches(pieces: Sequence[FileRange]) -> FoundBatches:
    """The batches with a right CRC in some pieces, wherever they begin. Raises `OSError`."""
    count, first, last, searched = 0, OFFSET_END_MAX, -1, True
    for piece in pieces:
        work = SEARCH_BYTES_MIN + SEARCH_FACTOR * piece.size_bytes
        covered = piece.position
        for scanned in scan(piece.file, piece.end, 0, OFFSET_END_MAX, position=covered, work_bytes_max=work):
            covered += scanned.length
            if scanned.header is not None:
                count += 1
                first = min(first, scanned.header.base_offset)
                last = max(last, scanned.header.last_offset)
        searched = searched and covered >= piece.end
    return FoundBatches(count, first if count else -1, last, searched)


def file_ranges_of(disk: Disk, ends: Iterable[tuple[Segment, int]]) -> list[FileRange]:
    """(segment, position): each from there on. Raises `OSError`."""
    return [
        FileRange(segment.file or disk.open_readonly(segment.path), position, segment.size)
        for segment, position in ends
        if segment.size > position
    ]


def quarantine_name(offset: int, number: int) -> str:
    """The name of the file with what was cut at `offset`. Numbers rise from file to file of a log."""
    return f"{offset:0{OFFSET_DIGITS}d}{QUARANTINE_INFIX}{number}"


def parse_quarantine_name(name: str) -> tuple[int, int] | None:
    """(offset, number) in the name of such a file; None for any other name."""
    stem, infix, number = name.partition(QUARANTINE_INFIX)
    digits = stem.isdigit() and number.isdigit() and name.isascii()
    if not infix or len(stem) != OFFSET_DIGITS or not digits:
        return None
    return int(stem), int(number)


def quarantine(
    disk: Disk, directory: str, offset: int, pieces: Sequence[FileRange], *, reason: str, segments: int
) -> SyncSteps[TruncatedTail]:
    """Before `pieces` (in their order the end of the log, from `offset` on) are cut: keep them if they may be needed.

    Says so in the broker's log. Raises `OSError`, `StorageError`; then nothing may be cut.
    """
    size_bytes = sum(piece.size_bytes for piece in pieces)
    whole = find_batches(pieces)
    path = ""
    if whole.batches or not whole.searched:
        path = yield from _keep(disk, directory, offset, pieces)
    cut = TruncatedTail(
        offset, reason, size_bytes, segments, whole.batches, whole.first_offset, whole.last_offset, path
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
            batches=cut.batches,
            first_offset=cut.first_offset,
            last_offset=cut.last_offset,
            quarantine=path,
        ),
    )
    return cut


def _keep(disk: Disk, directory: str, offset: int, pieces: Sequence[FileRange]) -> SyncSteps[str]:
    """A file with the bytes of the pieces, durable; its path. One that an interrupted opening left is taken."""
    names = {
        name: cut
        for name in disk.list_directory(directory)
        if (cut := parse_quarantine_name(name)) is not None
    }
    for name, (at, _) in names.items():
        if at == offset and _begins_with(kept := disk.open(f"{directory}/{name}"), pieces):
            yield partial(PendingSync, (kept,), (directory,))
            return kept.path
    if len(names) >= QUARANTINE_FILES_MAX:
        raise StorageError(
            f"{directory} holds {len(names)} files with what was cut at earlier starts "
            f"(*{QUARANTINE_INFIX}*), and needs "
            "another one; nothing was cut, move those away"
        )
    path = (
        f"{directory}/{quarantine_name(offset, 1 + max((number for _, number in names.values()), default=0))}"
    )
    temporary = path + TEMPORARY_SUFFIX

    def write() -> PendingSync:
        try:
            return PendingSync((_copy(disk, temporary, pieces),))
        except OSError as error:
            if disk.exists(temporary):
                disk.remove(temporary)  # it would keep the room that others need
            size_bytes = sum(piece.size_bytes for piece in pieces)
            raise StorageError(
                f"cannot set {size_bytes} bytes of {directory} aside, in which whole batches lie behind a damaged "
                f"place; nothing was cut: {error}"
            ) from error

    def rename() -> PendingSync:
        if disk.exists(temporary):
            disk.rename(temporary, path)
        return PendingSync((), (directory,))

    yield write
    yield rename
    return path


def _copy(disk: Disk, path: str, pieces: Sequence[FileRange]) -> DiskFile:
    """Write the pieces to a file, one after the other; it is not synced. Zeros take no room."""
    file = disk.open(path, create=True)
    file.truncate(0)
    position = 0
    for piece in pieces:
        for at in range(piece.position, piece.end, COPY_CHUNK_BYTES):
            data = piece.file.read_at(min(COPY_CHUNK_BYTES, piece.end - at), at)
            if data.count(0) != len(data):
                file.write_at([data], position + at - piece.position)
        position += piece.size_bytes
    file.truncate(position)
    return file


def _begins_with(file: DiskFile, pieces: Sequence[FileRange]) -> bool:
    """Does a file begin with the bytes of the pieces? Segments go newest first: what is left to be cut is what it
    begins with.
    """
    position = 0
    for piece in pieces:
        for at in range(piece.position, piece.end, COPY_CHUNK_BYTES):
            data = piece.file.read_at(min(COPY_CHUNK_BYTES, piece.end - at), at)
            if file.read_at(len(data), position + at - piece.position) != data:
                return False
        position += piece.size_bytes
    return True
