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
from mansio.log.checkpoint import (
    CHECKPOINT_NAME,
    Checkpoint,
    load_checkpoint,
    write_both_slots,
    write_checkpoint,
)
from mansio.log.epochs import EpochList, load_epochs
from mansio.log.index import SparseIndex, load_index
from mansio.log.sealed import TEMPORARY_SUFFIX, write_sealed
from mansio.log.segment import (
    INDEX_SUFFIX,
    PREFIX_BYTES,
    WALK_CHUNK_BYTES,
    Segment,
    base_offset_of,
    read_exactly,
    walk,
)
from mansio.log.times import apply_times
from mansio.wire.records import HEADER_BYTES, check_batch, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.log.settings import LogSettings
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


def recover(disk: Disk, directory: str, settings: LogSettings) -> Recovered:
    """Open the log in `directory`, making it when there is none. Raises `CorruptLog`, or `OSError` from the disk."""
    recovered = _recover(disk, directory, settings)
    recovered.times_due = not apply_times(disk, directory, recovered.segments)
    return recovered


def _recover(disk: Disk, directory: str, settings: LogSettings) -> Recovered:
    disk.make_directory(directory)
    bases = _clear_and_list(disk, directory)
    checkpoint = load_checkpoint(disk, f"{directory}/{CHECKPOINT_NAME}")
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
        return _create(disk, directory, settings, checkpoint)
    bases = _drop_trimmed(disk, directory, bases, checkpoint)
    segments = [Segment(directory, base) for base in bases]
    for segment, following in zip(segments, [*bases[1:], None], strict=True):
        file = disk.open(segment.path)
        segment.size = file.size()
        if following is not None:
            segment.end_offset = following
        segment.file = file if following is None else None
    return _Opening(disk, directory, settings, segments, checkpoint).run()


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


def _create(disk: Disk, directory: str, settings: LogSettings, checkpoint: Checkpoint | None) -> Recovered:
    """A new log; or one whose last trim removed everything below an active segment that never reached the disk."""
    start = checkpoint.start_offset if checkpoint is not None else 0
    if checkpoint is not None and checkpoint.durable_end_offset != start:
        raise CorruptLog(
            f"{directory} has no segment, but records {start} to {checkpoint.durable_end_offset} were durable"
        )
    sequence = checkpoint.sequence + 1 if checkpoint is not None else 1
    checkpoint = Checkpoint(sequence, start, start, 0, start)
    checkpoint = write_both_slots(disk, f"{directory}/{CHECKPOINT_NAME}", checkpoint)
    disk.sync_directory(directory)  # a segment never exists without a checkpoint
    segment = Segment(directory, start)
    segment.file = disk.open(segment.path, create=True)
    segment.index = SparseIndex(settings.index_interval_bytes)
    epochs = load_epochs(disk, f"{directory}/{EPOCHS_NAME}") or EpochList()
    epochs.truncate_to(start + 1)
    return Recovered([segment], start, start, epochs, checkpoint, created=True)


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
    ) -> None:
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

    def run(self) -> Recovered:
        first, position, offset = self._where_to_begin()
        self._load_epochs(offset)
        durable_end = self.checkpoint.durable_end_offset if self.checkpoint is not None else offset
        cut = ""
        for at in range(first, len(self.segments)):
            segment = self.segments[at]
            if offset != segment.base_offset and at > first:
                cut = f"the next segment begins at offset {segment.base_offset} instead of {offset}"
                return self._finish(at, None, offset, durable_end, cut)
            position, offset, cut = self._check(segment, position if at == first else 0, offset)
            if cut:
                return self._finish(at, position, offset, durable_end, cut)
        return self._finish(len(self.segments) - 1, position, offset, durable_end, cut)

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
            return at, 0, end
        if segment.base_offset != checkpoint.segment_base:
            # The segment the checkpoint speaks of is gone, or the log was closed exactly at a segment's end.
            return at, 0, segment.base_offset
        if segment.size < checkpoint.position:
            raise CorruptLog(
                f"{segment.path} has {segment.size} bytes, {checkpoint.position} of it were durable"
            )
        return at, checkpoint.position, end

    def _load_epochs(self, offset: int) -> None:
        """The epochs below `offset`, from their file, or from the batches when the file is no good."""
        loaded = load_epochs(self.disk, f"{self.directory}/{EPOCHS_NAME}")
        if loaded is not None:
            # Epochs above are read from the batches again: their records may not have survived as the file has.
            self.epochs_changed = loaded.truncate_to(offset + 1)
            self.epochs = loaded
            return
        self.epochs_changed = True
        for segment in self.segments:
            if segment.base_offset >= offset:
                break
            file = segment.file or self.disk.open_readonly(segment.path)
            for _, header in walk(file, 0, segment.size, segment.base_offset, WALK_CHUNK_BYTES):
                if header.base_offset >= offset:
                    break
                self.epochs.assign(header.leader_epoch, header.base_offset)

    def _check(self, segment: Segment, position: int, offset: int) -> tuple[int, int, str]:
        """Check a segment from `position` on; (where it stops, the offset there, why it stops early or "")."""
        file = segment.file or self.disk.open(segment.path)
        segment.file = file
        index = segment.index = self._index_below(segment, file, position)
        reason = ""
        began = position
        for batch_position, header in checked_batches(file, position, segment.size):
            if isinstance(header, str):
                reason = header
                break
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
        return position, offset, reason

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

    def _finish(self, last: int, position: int | None, offset: int, durable_end: int, cut: str) -> Recovered:
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
                "%s: cut %d bytes that were never acknowledged as durable, at offset %d: %s",
                self.directory, cut_bytes, offset, cut,
            )  # fmt: skip
        self._cut(active, size, torn)
        previous = self.checkpoint
        if self.checked_bytes or cut or previous is None or self.epochs_changed:
            self._make_durable(kept, offset)
        start_offset = previous.start_offset if previous is not None else kept[0].base_offset
        sequence = previous.sequence + 1 if previous is not None else 1
        checkpoint = Checkpoint(sequence, offset, active.base_offset, size, start_offset)
        path = f"{self.directory}/{CHECKPOINT_NAME}"
        if previous is None:
            checkpoint = write_both_slots(self.disk, path, checkpoint)
            self.disk.sync_directory(self.directory)
        elif checkpoint != previous._replace(sequence=sequence):
            write_checkpoint(self.disk, path, checkpoint)
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
        )

    def _cut(self, active: Segment, size: int, torn: list[Segment]) -> None:
        """Remove the torn segments, newest first, then shorten the last kept one (which `_make_durable` syncs)."""
        for segment in reversed(torn):
            segment.file = None
            remove_segment_files(self.disk, segment)
        file = active.file or self.disk.open(active.path)
        active.file = file
        if active.index is None:
            active.index = self._index_below(active, file, size)
        if active.size != size:
            file.truncate(size)
            active.size = size
        if self._drop_stale_indexes(active, size) or torn:
            # An index or segment that came back would describe bytes that will have been written anew by then.
            self.disk.sync_directory(self.directory)

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

    def _make_durable(self, kept: list[Segment], offset: int) -> None:
        """Write what was checked once more, and sync it.

        Were these bytes left over from a sync that failed before a restart, the page cache would hold them as clean
        although the disk never got them: syncing alone would succeed and do nothing.
        """
        for segment, position, end in self.checked:
            file = segment.file
            if file is None or segment not in kept:
                continue
            while position < end:
                data = read_exactly(file, min(CHECK_CHUNK_BYTES, end - position), position)
                file.write_at([data], position)
                position += len(data)
            file.sync()
        self.epochs.truncate_to(offset + 1)
        path = f"{self.directory}/{EPOCHS_NAME}"
        write_sealed(self.disk, path, self.epochs.encode(), durable=True)  # syncs the directory too


def checked_batches(file: DiskFile, position: int, size: int) -> Iterator[tuple[int, BatchHeader | str]]:
    """(position, header) of each whole and undamaged batch; (position, what is wrong) when something else follows."""
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
        length = read_header(chunk, at).batch_length + PREFIX_BYTES
        if length < HEADER_BYTES or length > size - position:
            yield position, "an incomplete batch"
            return
        if at + length > len(chunk):
            chunk_start, at = position, 0
            chunk = read_exactly(file, min(max(CHECK_CHUNK_BYTES, length), size - position), position)
        try:
            header = check_batch(memoryview(chunk)[at : at + length])
        except RequestError as error:
            yield position, error.message
            return
        yield position, header
        position += length


def verify_segment(file: DiskFile, base_offset: int, size: int, end_offset: int, epochs: EpochList) -> int:
    """Check all batches of a segment that should span [base_offset, end_offset); their number, or `CorruptLog`."""
    count = 0
    offset = base_offset
    if file.size() < size:
        raise CorruptLog(f"{file.path} has {file.size()} bytes, it should have {size}")
    for position, header in checked_batches(file, 0, size):
        if isinstance(header, str):
            raise CorruptLog(f"{file.path} is damaged at {position}: {header}")
        if header.base_offset != offset:
            raise CorruptLog(f"{file.path} has offset {header.base_offset} at {position}, not {offset}")
        if epochs.epoch_at(header.base_offset) not in (header.leader_epoch, -1):
            raise CorruptLog(f"{file.path} has leader epoch {header.leader_epoch} at {position}")
        offset = header.base_offset + header.last_offset_delta + 1
        count += 1
    if offset != end_offset:
        raise CorruptLog(f"{file.path} ends at offset {offset}, not {end_offset}")
    return count
