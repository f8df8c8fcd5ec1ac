"""Verification of stored batches, on their first read after a start and by the scrubber.

A batch counts as verified if this process appended or recovered it, or has compared it with its CRC-32C. Verification
starts at an *anchor*, which is a position whose offset is known: the start of the segment, an entry of its index, or
the end of a checked range. From there it checks one batch after the other: length, CRC-32C, contiguous offsets and
leader epoch. So the 17 bytes of a batch that the CRC does not cover are checked, too, except where compaction leaves
gaps between offsets.

If the disk cannot read a part of the file (`UNREADABLE_ERRNOS`), that part is read again in pieces of `PIECE_BYTES`. A
batch with an unreadable piece is damaged; the batches before and after it are not.

Invariant: `check_batches` keeps at most one chunk in memory, whatever lengths the file claims. It changes nothing and
runs on any thread.
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
SEARCH_EXAMINED_BYTES_PER_BYTE: Final = 16
"""Maximum work of a search for the next intact batch: bytes examined per byte of the searched range."""

PIECE_BYTES: Final = 4 << 10
UNREADABLE_PIECES_MAX: Final = 16
"""Maximum number of failed reads of pieces in one check; after that a failed read is not repeated in pieces, because
each failed read may take seconds."""

_HEADER: Final = Struct(">qiibIhi30xi")
"""Header of a batch, without the fields that this module does not use."""

_CRC_FROM: Final = 21  # the CRC covers the bytes from this position of a batch on
_CODEC_MASK: Final = 0x07
_CODEC_COUNT: Final = 5


class CheckTask(NamedTuple):
    """A check of the batches of a segment from the anchor (`position`, `offset`) to (`end_position`, `end_offset`).

    `size` is the size of the whole segment. Below `sparse_end_offset` compaction may have left gaps. `epochs` are the
    (leader epoch, start offset) entries of the log, `entries` the (offset, position) entries of the segment's index.
    """

    position: int
    offset: int
    end_position: int
    end_offset: int
    size: int
    sparse_end_offset: int
    epochs: Sequence[tuple[int, int]]
    entries: Sequence[tuple[int, int]] = ()


class CheckResult(NamedTuple):
    """Result of a check: adjacent `ranges` from the anchor up to the new anchor (`position`, `offset`).

    `done`: the check reached the end of its task. Otherwise it ended because of its limits, or because of a `problem`
    in the batch at `position`. `read_bytes` is the number of bytes read.
    """

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
    """Check batches from the anchor of `task` on, until `bytes_max` bytes or `batches_max` batches have been checked.

    The check ends at the first damage: with `delimit` after the damaged range, which ends at the next intact batch;
    without `delimit` before the damaged batch. `read_at(length, position)` replaces the file's function of that name.
    Raises `StorageError` if the disk fails; without `in_pieces` also if it cannot read a part of the file (see
    `is_unreadable`).
    """
    reads = _CheckReader(file, read_at or file.read_at, in_pieces=in_pieces)
    try:
        return _Check(reads, task, bytes_max, batches_max).run(delimit=delimit)
    except OSError as error:
        raise StorageError(f"cannot read {file.path}: {error}") from error


def is_unreadable(error: StorageError) -> bool:
    """Whether the disk cannot read a part of a file; `check_batches` with `in_pieces` then finds the damaged range."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in UNREADABLE_ERRNOS


class _CheckReader:
    """The reads of one check. An unreadable piece is returned as zeros, and `problem` reports the batches with one."""

    __slots__ = ("_file", "_in_pieces", "_read", "_reason", "_unreadable_pieces_left", "unreadable")

    def __init__(self, file: DiskFile, read: ReadAt, *, in_pieces: bool) -> None:
        self._file = file
        self._read = read
        self._in_pieces = in_pieces
        self._unreadable_pieces_left = UNREADABLE_PIECES_MAX
        self._reason = ""
        self.unreadable: list[tuple[int, int]] = []
        """Ranges of the file that the disk cannot read."""

    def read(self, length: int, position: int) -> bytes:
        """Read with the function passed to the constructor."""
        return self._read_with(self._read, length, position)

    def read_at(self, length: int, position: int) -> bytes:
        """Read with the file's own function, as `scan` requires."""
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
            following = (
                min(end, (position // PIECE_BYTES + 1) * PIECE_BYTES) if self._unreadable_pieces_left else end
            )
            piece = self._read_piece(read, position, following)
            pieces.append(piece)
            if len(piece) < following - position:
                break
            position = following
        return b"".join(pieces)

    def _read_piece(self, read: ReadAt, position: int, end: int) -> bytes:
        if self._unreadable_pieces_left:
            try:
                return read(end - position, position)
            except OSError as error:
                if error.errno not in UNREADABLE_ERRNOS:
                    raise
                self._unreadable_pieces_left -= 1
        adjacent = self.unreadable and self.unreadable[-1][1] == position
        first = self.unreadable.pop()[0] if adjacent else position
        self.unreadable.append((first, end))
        return bytes(end - position)

    def problem(self, position: int, end: int) -> str:
        """Return a description of the error if a part of the bytes [position, end) is unreadable; "" otherwise."""
        for first, last in self.unreadable:
            if first < end and position < last:
                return f"the disk cannot read the batch at {position}: {self._reason}"
        return ""


class _Check:
    """One call of `check_batches`."""

    __slots__ = ("_batches_max", "_bytes_max", "_read_bytes", "_reads", "_task")

    def __init__(self, reads: _CheckReader, task: CheckTask, bytes_max: int, batches_max: int) -> None:
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
            position, offset, problem, skip = self._check_until_problem()
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
            following, following_offset = self._next_intact_batch(position, offset, skip)
            if following_offset > offset or following >= end_position:
                break
            # Bytes that belong to no batch; no offset is missing.
            self._task = self._task._replace(position=following, offset=offset)
        if following_offset > offset:
            ranges.append(CheckedRange(position, following, offset, following_offset, problem))
        done = following >= end_position
        return CheckResult(ranges, following, following_offset, done, problem, self._read_bytes)

    def _check_until_problem(self) -> tuple[int, int, str, int]:
        """Check batches up to the first problem; returns (position, offset, problem, bytes to skip).

        Position and offset are the end of the intact batches. Bytes to skip is the size of the batch there if its CRC
        is valid but its offset or leader epoch is wrong; otherwise 0.
        """
        task, reads = self._task, self._reads
        read, unreadable = reads.read, reads.unreadable
        size, sparse_end = task.size, task.sparse_end_offset
        position, offset = task.position, task.offset
        unpack = _HEADER.unpack_from
        epoch, epoch_end = self._epoch_at(offset)
        bytes_end, batches_left = position + self._bytes_max, self._batches_max
        before = position, offset
        chunk, start, chunk_end = memoryview(b""), position, position
        limit = min(task.end_position, bytes_end)
        while position < limit and batches_left:
            batches_left -= 1
            if position + HEADER_BYTES > chunk_end:
                wanted = min(CHUNK_BYTES, size - position, max(limit - position, HEADER_BYTES))
                chunk, start = memoryview(read(wanted, position)), position
                chunk_end = position + len(chunk)
                self._read_bytes += len(chunk)
                if len(chunk) < min(wanted, HEADER_BYTES):
                    return position, offset, f"the file ends at byte {chunk_end} instead of {size}", 0
                if len(chunk) < HEADER_BYTES:
                    return position, offset, f"{len(chunk)} stray bytes at {position}", 0
            if unreadable and (problem := reads.problem(position, position + HEADER_BYTES)):
                return position, offset, problem, 0
            at = position - start
            base, length, found_epoch, magic, crc, attributes, delta, count = unpack(chunk, at)
            end = position + PREFIX_BYTES + length
            if magic != BATCH_MAGIC or length < HEADER_BYTES - PREFIX_BYTES or end > size:
                return position, offset, f"no batch begins at {position}", 0
            if end <= chunk_end:
                found = crc32c(chunk[at + _CRC_FROM : end - start])
            else:
                found = crc32c(chunk[at + _CRC_FROM :])
                while chunk_end < end:
                    # What follows the last batch of this check is not read.
                    wanted = min(CHUNK_BYTES, size - chunk_end, max(end, limit) - chunk_end)
                    chunk, start = memoryview(read(wanted, chunk_end)), chunk_end
                    self._read_bytes += len(chunk)
                    if not chunk:
                        return position, offset, f"the file ends at byte {start} instead of {size}", 0
                    chunk_end = start + len(chunk)
                    found = crc32c(chunk[: end - start], found)
            if unreadable and (problem := reads.problem(position, end)):
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
            # The next range is known to begin at another offset or position, so the last batch is not a valid one.
            return (
                *before,
                f"offset {offset} follows at {position} instead of {task.end_offset}",
                position - before[0],
            )
        return position, offset, "", 0

    def _epoch_at(self, offset: int) -> tuple[int, int]:
        """(leader epoch of `offset` or -1, start offset of the next leader epoch)."""
        found = -1
        for epoch, start in self._task.epochs:
            if start > offset:
                return found, start
            found = epoch
        return found, OFFSET_END_MAX

    def _next_intact_batch(self, position: int, offset: int, skip: int) -> tuple[int, int]:
        """(position, offset) of the next intact batch after the damage at `position`; the end of the task if none."""
        task = self._task
        end = min(task.end_position, self._reads.size())
        at, work = position + skip, max(SEARCH_BYTES_MIN, SEARCH_EXAMINED_BYTES_PER_BYTE * (end - position))
        while at < end and work > 0:
            found = self._first_intact_batch(at, end, offset, work)
            if found is None:
                break
            at, base = found
            if base < task.end_offset and self._matches_index(at, base):
                return found
            work -= end - at  # an intact batch, but not one of this segment
            at += 1
        for entry_offset, entry_position in task.entries:
            if (
                position < entry_position < end
                and offset < entry_offset < task.end_offset
                and not self._reads.problem(entry_position, entry_position + HEADER_BYTES)
            ):
                return entry_position, entry_offset
        return task.end_position, task.end_offset

    def _first_intact_batch(
        self, position: int, end: int, offset: int, examined_bytes_max: int
    ) -> tuple[int, int] | None:
        """(position, offset) of the first batch with a valid CRC between `position` and `end`, if any."""
        for found in scan(
            self._reads,
            end,
            offset,
            self._task.end_offset,
            position=position,
            examined_bytes_max=examined_bytes_max,
        ):
            if (
                found.header is not None
                and found.header.base_offset >= offset
                and not self._reads.problem(found.position, found.position + found.length)
            ):
                return found.position, found.header.base_offset
        return None

    def _matches_index(self, position: int, offset: int) -> bool:
        """Whether a batch with `offset` at `position` is consistent with the index entries before and after it."""
        entries = self._task.entries
        at = bisect_right(entries, position, key=_position_of)
        if at:
            entry_offset, entry_position = entries[at - 1]
            if offset < entry_offset or (entry_position == position) != (entry_offset == offset):
                return False
        return at >= len(entries) or offset < entries[at][0]


def _position_of(entry: tuple[int, int]) -> int:
    return entry[1]
