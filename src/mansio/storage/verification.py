"""Verification of stored batches on their first read after a start, and by the scrubber.

A batch counts as verified if this process received, appended or recovered it, or has compared it with its CRC-32C.
Verification starts at a position whose offset is known (an *anchor*: the start of the segment, an entry of its index,
the end of a range that was checked) and follows the batches from there. Length, CRC-32C, offsets that follow each other
and leader epochs must match, so the 17 bytes that the CRC does not cover are checked, too, except where compaction
leaves gaps between offsets.

A part that the disk cannot read (`UNREADABLE_ERRNOS`) is read again in pieces of `PIECE_BYTES`; a batch with an
unreadable piece is damaged, those before and after it are not.

Invariant: `check_batches` reads `size` bytes at most and keeps one chunk in memory, whatever lengths the file claims.
It changes nothing and runs on any thread.
"""

from __future__ import annotations

from bisect import bisect_right
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from crc32c import crc32c

from mansio.errors import StorageError
from mansio.ports import UNREADABLE_ERRNOS
from mansio.storage.checked_ranges import CheckedRange
from mansio.storage.scan import scan
from mansio.storage.segment import BATCH_MAGIC, OFFSET_END_MAX, PREFIX_BYTES
from mansio.wire.batch.record_batch import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.ports import DiskFile

    ReadAt = Callable[[int, int], bytes]

CHUNK_BYTES: Final = 128 << 10
SEARCH_BYTES_MIN: Final = 1 << 20
SEARCH_WORK_PER_BYTE: Final = 16
"""Bound of a search for the next batch, in bytes examined per byte of the segment."""

PIECE_BYTES: Final = 4 << 10
UNREADABLE_PIECES_MAX: Final = 16
"""So many failed reads of pieces in one check; after that a failed read is not repeated in pieces. A read that fails
may take seconds."""

_HEADER: Final = Struct(">qiibIhiqqqhii")
_CRC_FROM: Final = 21  # what the CRC covers begins here
_CODEC_MASK: Final = 0x07
_CODEC_COUNT: Final = 5


class CheckTask(NamedTuple):
    """What to check of a segment: batches from an anchor up to `end_position`, where `end_offset` should be next.

    `size` is that of the whole segment. Below `sparse_end_offset` compaction may
    have left gaps. `epochs` are (leader epoch, start offset) of the log, `entries` (offset, position) of the index."""

    position: int
    offset: int
    end_position: int
    end_offset: int
    size: int
    sparse_end_offset: int
    epochs: Sequence[tuple[int, int]]
    entries: Sequence[tuple[int, int]] = ()


class CheckResult(NamedTuple):
    """`ranges` follow each other from the anchor on. The check ended before the batch at `position`, at `offset`,
    because of its limits or a `problem`; at the end of what was to be checked if `done`."""

    ranges: list[CheckedRange]
    position: int
    offset: int
    done: bool
    problem: str = ""
    read_bytes: int = 0


def check_batches(
    file: DiskFile,
    task: CheckTask,
    *,
    bytes_max: int,
    batches_max: int,
    delimit: bool,
    read_at: ReadAt | None = None,
    in_pieces: bool = True,
) -> CheckResult:
    """Check batches from the anchor of `task` on, until more than `bytes_max` bytes or `batches_max` batches are
    checked; at least one.

    With `delimit` a damaged range is delimited by the next intact batch, and the check ends after it; otherwise before
    it. `read_at(length, position)` replaces that of the file. Without `in_pieces` a part that the disk cannot read is
    an error (`is_unreadable`). Raises `StorageError`.
    """
    reads = _Reads(file, read_at or file.read_at, in_pieces=in_pieces)
    try:
        return _Check(reads, task, bytes_max, batches_max).run(delimit=delimit)
    except OSError as error:
        raise StorageError(f"cannot read {file.path}: {error}") from error


def is_unreadable(error: StorageError) -> bool:
    """Whether the disk cannot read a part of a file: what is damaged there is found by `check_batches`."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in UNREADABLE_ERRNOS


class _Reads:
    """The reads of one check. Unreadable pieces are zeros; `problem` reports which batches have some."""

    __slots__ = ("_file", "_in_pieces", "_pieces_left", "_read", "_reason", "_unreadable")

    def __init__(self, file: DiskFile, read: ReadAt, *, in_pieces: bool) -> None:
        self._file = file
        self._read = read
        self._in_pieces = in_pieces
        self._pieces_left = UNREADABLE_PIECES_MAX
        self._reason = ""
        self._unreadable: list[tuple[int, int]] = []

    def read(self, length: int, position: int) -> bytes:
        """With the function that the caller of the check gave."""
        return self._read_with(self._read, length, position)

    def read_at(self, length: int, position: int) -> bytes:
        """As a `DiskFile` does."""
        return self._read_with(self._file.read_at, length, position)

    def size(self) -> int:
        """Size of the file."""
        return self._file.size()

    def _read_with(self, read: ReadAt, length: int, position: int) -> bytes:
        try:
            return read(length, position)
        except OSError as error:
            if not self._in_pieces or error.errno not in UNREADABLE_ERRNOS:
                raise
            self._reason = str(error)
        pieces: list[bytes] = []
        end = position + length
        while position < end:
            following = min(end, (position // PIECE_BYTES + 1) * PIECE_BYTES) if self._pieces_left else end
            piece = self._piece(read, position, following)
            pieces.append(piece)
            if len(piece) < following - position:
                break
            position = following
        return b"".join(pieces)

    def _piece(self, read: ReadAt, position: int, end: int) -> bytes:
        if self._pieces_left:
            try:
                return read(end - position, position)
            except OSError as error:
                if error.errno not in UNREADABLE_ERRNOS:
                    raise
                self._pieces_left -= 1
        adjacent = self._unreadable and self._unreadable[-1][1] == position
        first = self._unreadable.pop()[0] if adjacent else position
        self._unreadable.append((first, end))
        return bytes(end - position)

    def problem(self, position: int, end: int) -> str:
        """That a part of the bytes [position, end) cannot be read; "" otherwise."""
        for first, last in self._unreadable:
            if first < end and position < last:
                return f"the disk cannot read the batch at {position}: {self._reason}"
        return ""


class _Check:
    """One call of `check_batches`."""

    __slots__ = ("_batches_max", "_bytes_max", "_read_bytes", "_reads", "_task")

    def __init__(self, reads: _Reads, task: CheckTask, bytes_max: int, batches_max: int) -> None:
        self._reads = reads
        self._task = task
        self._bytes_max = bytes_max
        self._batches_max = batches_max
        self._read_bytes = 0

    def run(self, *, delimit: bool) -> CheckResult:
        end_position = self._task.end_position
        ranges: list[CheckedRange] = []
        while True:
            start_position, start_offset = self._task.position, self._task.offset
            position, offset, problem, skip = self._follow()
            if offset > start_offset:
                ranges.append(CheckedRange(start_position, position, start_offset, offset))
            if not problem or not delimit:
                return CheckResult(
                    ranges,
                    position,
                    offset,
                    not problem and position >= end_position,
                    problem,
                    self._read_bytes,
                )
            following, following_offset = self._next_intact(position, offset, skip)
            if following_offset > offset or following >= end_position:
                break
            # Bytes that belong to no batch; no offset is missing.
            self._task = self._task._replace(position=following, offset=offset)
        if following_offset > offset:
            ranges.append(CheckedRange(position, following, offset, following_offset, problem))
        done = following >= end_position
        return CheckResult(ranges, following, following_offset, done, problem, self._read_bytes)

    def _follow(self) -> tuple[int, int, str, int]:
        """(position, offset, problem, bytes to skip): the end of the intact batches; `skip` is the size of a batch
        there whose CRC matches and whose offsets do not."""
        task, reads = self._task, self._reads
        read = reads.read
        size, sparse_end = task.size, task.sparse_end_offset
        position, offset = task.position, task.offset
        epoch, epoch_end = self._epoch_at(offset)
        bytes_end, batches_left = position + self._bytes_max, self._batches_max
        before = position, offset
        chunk, start, chunk_end = memoryview(b""), position, position
        while position < task.end_position and position < bytes_end and batches_left:
            batches_left -= 1
            if position + HEADER_BYTES > chunk_end:
                wanted = min(CHUNK_BYTES, size - position)
                chunk, start = memoryview(read(wanted, position)), position
                chunk_end = position + len(chunk)
                self._read_bytes += len(chunk)
                if len(chunk) < min(wanted, HEADER_BYTES):
                    return position, offset, f"the file ends at {chunk_end}, it should reach {size}", 0
                if len(chunk) < HEADER_BYTES:
                    return position, offset, f"{len(chunk)} stray bytes at {position}", 0
            if problem := reads.problem(position, position + HEADER_BYTES):
                return position, offset, problem, 0
            at = position - start
            base, length, found_epoch, magic, crc, attributes, delta, *_, count = _HEADER.unpack_from(
                chunk, at
            )
            end = position + PREFIX_BYTES + length
            if magic != BATCH_MAGIC or length < HEADER_BYTES - PREFIX_BYTES or end > size:
                return position, offset, f"no batch begins at {position}", 0
            if end <= chunk_end:
                found = crc32c(chunk[at + _CRC_FROM : end - start])
            else:
                found = crc32c(chunk[at + _CRC_FROM :])
                while chunk_end < end:
                    wanted = min(CHUNK_BYTES, size - chunk_end)
                    chunk, start = memoryview(read(wanted, chunk_end)), chunk_end
                    self._read_bytes += len(chunk)
                    if not chunk:
                        return position, offset, f"the file ends at {start}, it should reach {size}", 0
                    chunk_end = start + len(chunk)
                    found = crc32c(chunk[: end - start], found)
            if problem := reads.problem(position, end):
                return position, offset, problem, 0
            if found != crc:
                return position, offset, f"the CRC-32C of the batch at {position} does not match", 0
            if attributes & _CODEC_MASK >= _CODEC_COUNT or not 0 <= count <= delta + 1:
                return position, offset, f"the batch at {position} is invalid", 0
            if base != offset and not offset < base <= sparse_end:
                return position, offset, f"offset {base} at {position} instead of {offset}", end - position
            if base >= epoch_end or base < offset:
                epoch, epoch_end = self._epoch_at(base)
            if found_epoch != epoch and epoch != -1:
                return (
                    position,
                    offset,
                    f"leader epoch {found_epoch} at {position} instead of {epoch}",
                    end - position,
                )
            before = position, offset
            position, offset = end, base + delta + 1
        if position >= task.end_position and offset != task.end_offset:
            if offset < task.end_offset <= sparse_end and position == task.end_position:
                return position, task.end_offset, "", 0
            if position == size and offset < task.end_offset:
                return position, offset, f"the segment ends at offset {offset}, not {task.end_offset}", 0
            # What follows is known to begin elsewhere: the last batch is not the one that belongs here.
            return (
                *before,
                f"offset {offset} follows at {position} instead of {task.end_offset}",
                position - before[0],
            )
        return position, offset, "", 0

    def _epoch_at(self, offset: int) -> tuple[int, int]:
        """(leader epoch of `offset` or -1, first offset of the next one)."""
        found = -1
        for epoch, start in self._task.epochs:
            if start > offset:
                return found, start
            found = epoch
        return found, OFFSET_END_MAX

    def _next_intact(self, position: int, offset: int, skip: int) -> tuple[int, int]:
        """(position, offset) of the next intact batch after the damage at `position`; the end of what was to be checked
        if there is none before it."""
        task = self._task
        end = min(task.end_position, self._reads.size())
        at, work = position + skip, max(SEARCH_BYTES_MIN, SEARCH_WORK_PER_BYTE * (end - position))
        while at < end and work > 0:
            found = self._first_intact(at, end, offset, work)
            if found is None:
                break
            at, base = found
            if base < task.end_offset and self._matches_index(at, base):
                return found
            work -= end - at  # an intact batch that does not belong here
            at += 1
        for entry_offset, entry_position in task.entries:
            if (
                position < entry_position < end
                and offset < entry_offset < task.end_offset
                and not self._reads.problem(entry_position, entry_position + HEADER_BYTES)
            ):
                return entry_position, entry_offset
        return task.end_position, task.end_offset

    def _first_intact(
        self, position: int, end: int, offset: int, work_bytes_max: int
    ) -> tuple[int, int] | None:
        """(position, offset) of the first batch with a valid CRC from `position` on."""
        for found in scan(
            self._reads,
            end,
            offset,
            self._task.end_offset,
            position=position,
            work_bytes_max=work_bytes_max,
        ):
            if (
                found.header is not None
                and found.header.base_offset >= offset
                and not self._reads.problem(found.position, found.position + found.length)
            ):
                return found.position, found.header.base_offset
        return None

    def _matches_index(self, position: int, offset: int) -> bool:
        """Whether the entries of the index before and after `position` allow this offset there."""
        entries = self._task.entries
        at = bisect_right(entries, position, key=_position_of)
        if at:
            entry_offset, entry_position = entries[at - 1]
            if offset < entry_offset or (entry_position == position) != (entry_offset == offset):
                return False
        return at >= len(entries) or offset < entries[at][0]


def _position_of(entry: tuple[int, int]) -> int:
    return entry[1]
