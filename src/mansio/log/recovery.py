"""Opening a log: what is on the disk, what of it counts, and what has to go.

The rule. Everything below the checkpoint was durable: it is taken as it is, and whatever is wrong with it is reported
(`CorruptLog`), never cut. Above the checkpoint every batch is read and checked; the first one that is not whole, not
next in line or not what its CRC says is where a crash tore the log, and the log is cut there.

Always true: nothing below the checkpoint is changed; what recovery hands out is durable (it syncs what it kept);
cutting is done before anything new is written, and running it twice, or being killed in it, changes nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mansio.errors import CorruptLog, RequestError
from mansio.log.checkpoint import CHECKPOINT_NAME, Checkpoint, load_checkpoint, write_slot
from mansio.log.compaction_recovery import recover_compaction
from mansio.log.compaction_state import NOT_COMPACTED, CompactionState
from mansio.log.epochs import EpochList, load_epochs
from mansio.log.index import SparseIndex, load_index
from mansio.log.sealed import TEMPORARY_SUFFIX, prepare_sealed
from mansio.log.segment import (
    INDEX_SUFFIX,
    PREFIX_BYTES,
    WALK_CHUNK_BYTES,
    Segment,
    base_offset_of,
    only_zeros,
    read_exactly,
    walk,
)
from mansio.log.times import apply_times
from mansio.log.together import Unsynced, run_alone
from mansio.wire.records import HEADER_BYTES, check_batch, check_stored_batch, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.log.settings import LogSettings
    from mansio.log.together import Steps
    from mansio.ports import Disk, DiskFile
    from mansio.wire.records import BatchHeader

EPOCHS_NAME = "epochs"
CHECK_CHUNK_BYTES = 1 << 20

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """What `Log` starts from. Everything in it is durable.

    `checked_bytes` were read and checked; `cut_bytes` (and `cut_segments` whole files) were a torn tail.
    `indexes_due` are closed segments whose index file has to be written. Of the active segment, `index_saved_bytes` are
    in its index file already.
    """

    segments: list[Segment]
    end_offset: int
    start_offset: int
    epochs: EpochList
    checkpoint: Checkpoint
    created: bool = False
    checked_bytes: int = 0
    cut_bytes: int = 0
    cut_segments: int = 0
    cut_reason: str = ""
    indexes_due: list[Segment] = field(default_factory=list)
    index_saved_bytes: int = 0
    times_due: bool = False
    compaction: CompactionState = NOT_COMPACTED


def recover(disk: Disk, directory: str, settings: LogSettings) -> Recovered:
    """Open the log in `directory`, making it when there is none. Raises `CorruptLog`, or `OSError` from the disk."""
    return run_alone(disk, recovery(disk, directory, settings))


def recovery(disk: Disk, directory: str, settings: LogSettings) -> Steps[Recovered]:
    """`recover`, for `run_together`: in steps that many logs can make durable with one sync.

    A log that was closed cleanly takes none.
    """
    recovered = yield from _recover(disk, directory, settings)
    recovered.times_due = not apply_times(disk, directory, recovered.segments)
    return recovered


def _recover(disk: Disk, directory: str, settings: LogSettings) -> Steps[Recovered]:
    if not disk.exists(directory):
        disk.make_directory(directory.rpartition("/")[0] or "/")
        disk.make_directory(directory, durable=False)  # `_create` sees to that
    checkpoint = load_checkpoint(disk, f"{directory}/{CHECKPOINT_NAME}")
    compaction = recover_compaction(
        disk, directory, checkpoint.start_offset if checkpoint is not None else -1
    )
    bases = _clear_and_list(disk, directory)
    if (
        checkpoint is not None
        and bases
        and bases[0] > checkpoint.durable_end_offset == checkpoint.start_offset
    ):
        # The names of later segments survived a crash and that of the first one did not; nothing was durable yet.
        logger.warning("%s: removed %d segments that no durable record leads to", directory, len(bases))
        for base in reversed(bases):
            remove_segment_files(disk, Segment(directory, base))
        disk.sync_directory(directory)
        bases = []
    if not bases:
        return (yield from _create(disk, directory, settings, checkpoint))
    bases = _drop_trimmed(disk, directory, bases, checkpoint)
    segments = [Segment(directory, base) for base in bases]
    for segment, following in zip(segments, [*bases[1:], None], strict=True):
        file = disk.open(segment.path)
        segment.size = file.size()
        if following is not None:
            segment.end_offset = following
        segment.file = file if following is None else None
    return (yield from _Opening(disk, directory, settings, segments, checkpoint, compaction).run())


def _clear_and_list(disk: Disk, directory: str) -> list[int]:
    """Remove files that were never finished; the base offsets of the segments, sorted."""
    bases = []
    for name in disk.list_directory(directory):
        base = base_offset_of(name)
        if base is not None:
            bases.append(base)
        elif name.endswith(TEMPORARY_SUFFIX):
            disk.remove(f"{directory}/{name}")
    return sorted(bases)


def _create(
    disk: Disk, directory: str, settings: LogSettings, checkpoint: Checkpoint | None
) -> Steps[Recovered]:
    """A new log; or one whose last trim removed everything below an active segment that never reached the disk."""
    start = checkpoint.start_offset if checkpoint is not None else 0
    if checkpoint is not None and checkpoint.durable_end_offset != start:
        raise CorruptLog(
            f"{directory} has no segment, but records {start} to {checkpoint.durable_end_offset} were durable"
        )
    sequence = checkpoint.sequence + 1 if checkpoint is not None else 1
    checkpoint = Checkpoint(sequence, start, start, 0, start)
    # A segment never exists without a checkpoint.
    checkpoint = yield from _both_slots(disk, directory, checkpoint)
    segment = Segment(directory, start)
    segment.file = disk.open(segment.path, create=True)
    segment.index = SparseIndex(settings.index_interval_bytes)
    epochs = load_epochs(disk, f"{directory}/{EPOCHS_NAME}") or EpochList()
    epochs.truncate_to(start + 1)
    return Recovered([segment], start, start, epochs, checkpoint, created=True)


def _slot(disk: Disk, directory: str, checkpoint: Checkpoint, *named_in: str) -> Unsynced:
    """Write one slot. `named_in`: the directories whose names it needs, for a file that may be new."""
    file = disk.open(f"{directory}/{CHECKPOINT_NAME}", create=True)
    write_slot(file, checkpoint)
    return Unsynced((file,), named_in)


def _both_slots(disk: Disk, directory: str, checkpoint: Checkpoint) -> Steps[Checkpoint]:
    """Make the checkpoint the only one the file holds; the newer of the two slots."""
    yield lambda: _slot(disk, directory, checkpoint, directory, directory.rpartition("/")[0] or "/")
    second = checkpoint._replace(sequence=checkpoint.sequence + 1)
    yield lambda: _slot(disk, directory, second)
    return second


def _drop_trimmed(disk: Disk, directory: str, bases: list[int], checkpoint: Checkpoint | None) -> list[int]:
    """Finish a trim that a crash interrupted: segments wholly below the start are removed."""
    if checkpoint is None:
        return bases
    keep = 0
    while keep + 1 < len(bases) and bases[keep + 1] <= checkpoint.start_offset:
        remove_segment_files(disk, Segment(directory, bases[keep]))
        keep += 1
    return bases[keep:]


def remove_segment_files(disk: Disk, segment: Segment) -> None:
    """Remove a segment and its index; a missing one is fine. The index goes first: it is nothing without the other."""
    for path in (segment.index_path, segment.path):
        if disk.exists(path):
            disk.remove(path)


class _Opening:
    """One run of recovery over existing segments."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        settings: LogSettings,
        segments: list[Segment],
        checkpoint: Checkpoint | None,
        compaction: CompactionState,
    ) -> None:
        self.compaction = compaction
        self.disk = disk
        self.directory = directory
        self.settings = settings
        self.segments = segments
        self.checkpoint = checkpoint
        self.epochs = EpochList()
        self.epochs_changed = False
        self.checked_bytes = 0
        self.checked: list[tuple[Segment, int, int]] = []
        self.index_saved_bytes = 0
        self.indexes_due: list[Segment] = []
        self.unsure_lengths: list[Segment] = []
        """Their files may still be longer than their batches, or may be so again after a crash."""

    def run(self) -> Steps[Recovered]:
        first, position, offset = self._where_to_begin()
        self._load_epochs(first, position, offset)
        durable_end = self.checkpoint.durable_end_offset if self.checkpoint is not None else offset
        cut = ""
        for at in range(first, len(self.segments)):
            segment = self.segments[at]
            if offset < segment.base_offset <= self.compaction.sparse_end_offset:
                offset = segment.base_offset
            if offset != segment.base_offset and at > first:
                cut = f"the next segment begins at offset {segment.base_offset} instead of {offset}"
                return (yield from self._finish(at, None, offset, durable_end, cut))
            position, offset, cut = self._check(segment, position if at == first else 0, offset)
            if cut:
                return (yield from self._finish(at, position, offset, durable_end, cut))
        return (yield from self._finish(len(self.segments) - 1, position, offset, durable_end, cut))

    def _where_to_begin(self) -> tuple[int, int, int]:
        """(segment number, position in it, offset there) from which on everything has to be checked."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            logger.warning("%s has no readable checkpoint: the whole log is checked", self.directory)
            return 0, 0, self.segments[0].base_offset
        end = checkpoint.durable_end_offset
        if self.segments[0].base_offset > end or self.segments[0].base_offset > checkpoint.start_offset:
            raise CorruptLog(
                f"{self.directory} begins at {self.segments[0].base_offset}, it should hold "
                f"{checkpoint.start_offset} to {end}"
            )
        at = max(n for n, segment in enumerate(self.segments) if segment.base_offset <= end)
        segment = self.segments[at]
        if segment.base_offset == end:
            if at and self.segments[at - 1].base_offset == checkpoint.segment_base:
                if not self._leave_out_room(self.segments[at - 1], checkpoint.position):
                    return at - 1, checkpoint.position, end
                self.unsure_lengths.append(self.segments[at - 1])
            return at, 0, end
        if segment.base_offset != checkpoint.segment_base:
            # The segment the checkpoint speaks of is gone, or the log was closed exactly at a segment's end.
            return at, 0, segment.base_offset
        if segment.size < checkpoint.position:
            raise CorruptLog(
                f"{segment.path} has {segment.size} bytes, {checkpoint.position} of it were durable"
            )
        return at, checkpoint.position, end

    def _load_epochs(self, first: int, position: int, offset: int) -> None:
        """The epochs below `offset`, from their file, or from the batches when the file is no good.

        `offset` is at `position` of segment number `first`: what follows there may be torn.
        """
        loaded = load_epochs(self.disk, f"{self.directory}/{EPOCHS_NAME}")
        if loaded is not None:
            # Epochs above are read from the batches again: their records may not have survived as the file has.
            self.epochs_changed = loaded.truncate_to(offset + 1)
            self.epochs = loaded
            return
        for segment in self.segments[: first + 1]:
            file = segment.file or self.disk.open_readonly(segment.path)
            end = segment.size if segment is not self.segments[first] else position
            for _, header in walk(file, 0, end, segment.base_offset, WALK_CHUNK_BYTES):
                self.epochs.assign(header.leader_epoch, header.base_offset)
        self.epochs_changed = self.epochs.last >= 0  # a log that nobody has written to has no file

    def _check(self, segment: Segment, position: int, offset: int) -> tuple[int, int, str]:
        """Check a segment from `position` on; (where it stops, the offset there, why it stops early or "")."""
        file = segment.file or self.disk.open(segment.path)
        segment.file = file
        index = segment.index = self._index_below(segment, file, position)
        reason = ""
        began = position
        sparse_end = self.compaction.sparse_end_offset
        for batch_position, header in checked_batches(file, position, segment.size, sparse_end):
            if isinstance(header, str):
                reason = "" if self._leave_out_room(segment, position) else header
                break
            if offset < header.base_offset <= sparse_end:
                offset = header.base_offset
            if header.base_offset != offset:
                reason = f"a batch begins at offset {header.base_offset} instead of {offset}"
                break
            if header.leader_epoch < self.epochs.last:
                reason = f"a batch of the old leader epoch {header.leader_epoch}"
                break
            if self.epochs.assign(header.leader_epoch, offset):
                self.epochs_changed = True
            index.add(offset - segment.base_offset, batch_position, header.max_timestamp_ms)
            position = batch_position + header.batch_length + PREFIX_BYTES
            self.checked_bytes += header.batch_length + PREFIX_BYTES
            offset += header.last_offset_delta + 1
        self.checked.append((segment, began, position))
        self.unsure_lengths.append(segment)
        return position, offset, reason

    def _leave_out_room(self, segment: Segment, position: int) -> bool:
        """Does the segment end here, with only the room that was made ahead of its batches behind? Then that is left
        out from now on; the file is shortened once all is known to be well.
        """
        file = segment.file = segment.file or self.disk.open(segment.path)
        if not only_zeros(file, position, segment.size):
            return False
        segment.size = min(segment.size, position)
        return True

    def _index_below(self, segment: Segment, file: DiskFile, position: int) -> SparseIndex:
        """The index of a segment's first `position` bytes, from its file as far as that is good, then from headers."""
        index = SparseIndex(self.settings.index_interval_bytes)
        start, lowest = 0, segment.base_offset
        loaded = load_index(self.disk, segment.index_path, segment.base_offset) if position else None
        if loaded is not None and loaded.covered_bytes <= position:
            index, start, lowest = loaded.index, loaded.covered_bytes, loaded.end_offset
        self.index_saved_bytes = start
        for at, header in walk(file, start, position, lowest, WALK_CHUNK_BYTES):
            index.add(header.base_offset - segment.base_offset, at, header.max_timestamp_ms)
        return index

    def _finish(
        self, last: int, position: int | None, offset: int, durable_end: int, cut: str
    ) -> Steps[Recovered]:
        """Cut what is torn, sync what stays, write the checkpoint. `position` None: segment `last` goes as a whole."""
        if cut and (offset < durable_end or (self.checkpoint is None and last < len(self.segments) - 1)):
            raise CorruptLog(f"{self.segments[last].path} is damaged below its durable end: {cut}")
        if offset < durable_end:
            raise CorruptLog(f"{self.directory} ends at offset {offset}, {durable_end} was durable")
        kept = self.segments[: last + 1] if position is not None else self.segments[:last]
        torn = self.segments[len(kept) :]
        active = kept[-1]
        size = position if position is not None else active.size
        cut_bytes = active.size - size + sum(segment.size for segment in torn)
        if cut:
            logger.warning(
                "%s: cut %d bytes that were not known to be durable, at offset %d: %s",
                self.directory, cut_bytes, offset, cut,
            )  # fmt: skip
        self._cut(active, size, torn)
        self._settle_lengths(kept[-1:], anew=False)
        previous = self.checkpoint
        rolled = any(segment is not active for segment in self.unsure_lengths)
        if self.checked_bytes or cut or previous is None or self.epochs_changed or rolled:
            yield from self._make_durable(kept, offset)
        start_offset = previous.start_offset if previous is not None else kept[0].base_offset
        sequence = previous.sequence + 1 if previous is not None else 1
        checkpoint = Checkpoint(sequence, offset, active.base_offset, size, start_offset)
        if previous is None:
            checkpoint = yield from _both_slots(self.disk, self.directory, checkpoint)
        elif checkpoint != previous._replace(sequence=sequence):
            yield lambda: _slot(self.disk, self.directory, checkpoint)
        else:
            checkpoint = previous
        for segment in kept[:-1]:
            if segment.index is not None:
                self.indexes_due.append(segment)
        return Recovered(
            kept,
            offset,
            start_offset,
            self.epochs,
            checkpoint,
            checked_bytes=self.checked_bytes,
            cut_bytes=cut_bytes,
            cut_segments=len(torn),
            cut_reason=cut,
            indexes_due=self.indexes_due,
            index_saved_bytes=self.index_saved_bytes,
            compaction=self.compaction,
        )

    def _cut(self, active: Segment, size: int, torn: list[Segment]) -> None:
        """Remove the torn segments, newest first; the last kept one ends at `size` (see `_settle_lengths`)."""
        for segment in reversed(torn):
            segment.file = None
            remove_segment_files(self.disk, segment)
        file = active.file or self.disk.open(active.path)
        active.file = file
        if active.index is None:
            active.index = self._index_below(active, file, size)
        active.size = size
        if self._drop_stale_indexes(active, size) or torn:
            # An index or segment that came back would describe bytes that will have been written anew by then.
            self.disk.sync_directory(self.directory)

    def _settle_lengths(self, kept: list[Segment], *, anew: bool) -> None:
        """End each file where its batches end.

        `anew`: each gets a new length to be synced, also the one that seems right: its sync may have failed before.
        """
        for segment in self.unsure_lengths:
            if segment not in kept or segment.file is None:
                continue
            if anew:
                segment.file.truncate(segment.size + 1)
            if segment.file.size() > segment.size:
                segment.file.truncate(segment.size)

    def _drop_stale_indexes(self, active: Segment, size: int) -> bool:
        """Remove index files that no longer, or not yet, belong to what is on the disk. True when there were any."""
        removed = False
        kept = {segment.base_offset for segment in self.segments}
        for name in self.disk.list_directory(self.directory):
            if not name.endswith(INDEX_SUFFIX):
                continue
            base = int(name.removesuffix(INDEX_SUFFIX))
            path = f"{self.directory}/{name}"
            if base == active.base_offset:
                loaded = load_index(self.disk, path, base)
                stale = loaded is None or loaded.covered_bytes > size
            else:
                stale = base not in kept or base > active.base_offset
            if stale:
                self.disk.remove(path)
                removed = True
        return removed

    def _make_durable(self, kept: list[Segment], offset: int) -> Steps[None]:
        """What was checked, durable; then the leader epochs.

        The epochs are durable before their file takes the place of the one before: a crash leaves either.
        """
        self.epochs.truncate_to(offset + 1)
        path = f"{self.directory}/{EPOCHS_NAME}"

        def write_again() -> Unsynced:
            self._settle_lengths(
                kept, anew=True
            )  # here, so that it is done again when a sync of many logs fails
            return Unsynced((*self._write_again(kept), self._epochs_file(path)))

        def rename() -> Unsynced:
            if self.disk.exists(path + TEMPORARY_SUFFIX):
                self.disk.rename(path + TEMPORARY_SUFFIX, path)
            return Unsynced((), (self.directory,))

        yield write_again
        yield rename

    def _epochs_file(self, path: str) -> DiskFile:
        """The epochs, written; over the same bytes where they are, for on a full disk there is no room for others."""
        data = self.epochs.encode()
        if not self.disk.exists(path) or self.disk.read_file(path) != data:
            return prepare_sealed(self.disk, path, data)
        file = self.disk.open(path)
        file.write_at([data], 0)
        return file

    def _write_again(self, kept: list[Segment]) -> list[DiskFile]:
        """Write what was checked once more; the files.

        Were these bytes left over from a sync that failed before a restart, the page cache would hold them as clean
        although the disk never got them: syncing alone would succeed and do nothing.
        """
        written = []
        for segment, position, end in self.checked:
            file = segment.file
            if file is None or segment not in kept:
                continue
            while position < end:
                data = read_exactly(file, min(CHECK_CHUNK_BYTES, end - position), position)
                file.write_at([data], position)
                position += len(data)
            written.append(file)
        for segment in self.unsure_lengths:
            if segment in kept and segment.file is not None and segment.file not in written:
                written.append(segment.file)
        return written


def checked_batches(
    file: DiskFile, position: int, size: int, sparse_end_offset: int = 0
) -> Iterator[tuple[int, BatchHeader | str]]:
    """(position, header) of each whole and undamaged batch; (position, what is wrong) when something else follows.

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
    file: DiskFile, base_offset: int, size: int, end_offset: int, epochs: EpochList, sparse_end_offset: int
) -> int:
    """Check all batches of a segment that should span [base_offset, end_offset); their number, or `CorruptLog`.

    Offsets follow each other without a gap, but for gaps that end at or below `sparse_end_offset`.
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
