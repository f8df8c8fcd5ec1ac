"""Looking at a log that nobody has open: what is damaged, where, and what that means.

Reads everything: every batch of every segment (CRC, and the order of offsets and leader epochs, which lie outside it),
the indexes, times, epochs, checkpoint and compaction state against what the segments say. Unlike recovery it does not
stop at damage and cuts nothing.

Three severities: `damage` (records are lost or cannot be read), `rebuild` (a file that only repeats what the segments
say; nothing is lost, and the broker does without it), `note` (nothing is wrong).

Always true: segments are never written to, with `repair` or without; without it nothing is. What `repair` writes is
what the broker would write itself. Memory is bounded: one segment's index at a time, and `FINDINGS_MAX` findings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.storage.checkpoint import (
    CHECKPOINT_NAME,
    SLOT_DISTANCE_BYTES,
    Checkpoint,
    intact_slots,
    load_checkpoint,
    write_checkpoint,
)
from mansio.storage.checksummed_file import TEMPORARY_SUFFIX, write_checksummed
from mansio.storage.cleaner.compaction_state import COMPACTION_NAME, load_state
from mansio.storage.inspect.report import Finding, LogReport, Severity, records_text
from mansio.storage.inspect.segment_inspection import SegmentInspection
from mansio.storage.leader_epochs import EPOCHS_NAME, LeaderEpochCache, load_leader_epochs
from mansio.storage.recovery.quarantine import FileRange, FoundBatches, find_batches, parse_quarantine_name
from mansio.storage.scan import scan
from mansio.storage.segment import INDEX_SUFFIX, OFFSET_DIGITS, OFFSET_END_MAX, Segment, base_offset_of
from mansio.storage.segment_timestamps import (
    TIMESTAMPS_NAME,
    SegmentTimestamp,
    encode_segment_timestamps,
    load_segment_timestamps,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Disk
INDEX_INTERVAL_BYTES: Final = 4096


def inspect_log(
    disk: Disk,
    directory: str,
    *,
    repair: bool = False,
    index_interval_bytes: int = INDEX_INTERVAL_BYTES,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> LogReport:
    """Look at the log in `directory`. `on_bytes` hears how many bytes of segments were read. Raises `OSError`."""
    return Inspection(disk, directory, repair, index_interval_bytes, on_bytes).run()


def log_bytes(disk: Disk, directory: str) -> int:
    """Bytes of all segments in `directory`: what an inspection is going to read."""
    names = [name for name in disk.list_directory(directory) if base_offset_of(name) is not None]
    return sum(disk.open_readonly(f"{directory}/{name}").size() for name in names)


class Inspection:
    """One run over one log."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        repair: bool,
        index_interval_bytes: int,
        on_bytes: Callable[[int], object],
    ) -> None:
        self.disk = disk
        self.directory = directory
        self.repair = repair
        self.index_interval_bytes = index_interval_bytes
        self.on_bytes = on_bytes
        self.report = LogReport(directory)
        self.checkpoint: Checkpoint | None = None
        self.epochs: LeaderEpochCache | None = None
        self.found_epochs = LeaderEpochCache()
        self.sparse_end_offset = 0
        """Below it offsets may be missing: compaction took them, or a trim into a batch that a truncation took."""
        self.times: list[SegmentTimestamp] = []
        self.expected = 0
        self.read_before = 0
        self.torn = False

    def run(self) -> LogReport:
        segments = self._list()
        self._check_checkpoint()
        self._check_compaction()
        self.epochs = load_leader_epochs(self.disk, self._path(EPOCHS_NAME))
        if segments:
            self._check_beginning(segments[0])
        for number, segment in enumerate(segments):
            following = segments[number + 1].base_offset if number + 1 < len(segments) else None
            if self.torn:
                self.note_torn(segment.path, 0, segment.size)
            else:
                self._check_segment(segment, following)
            self.read_before += segment.size
        self.report.end_offset = self.expected
        self._check_end(segments)
        self._check_epochs()
        self._check_times()
        self.report.findings.sort(key=lambda finding: list(Severity).index(finding.severity))
        return self.report

    def _path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def _add(self, severity: Severity, path: str, what: str, meaning: str, **more: object) -> None:
        self.report.add(Finding(severity, path, what, meaning, **more))  # type: ignore[arg-type]  # the fields by name

    # The small files

    def _list(self) -> list[Segment]:
        segments = []
        indexes = []
        for name in self.disk.list_directory(self.directory):
            base = base_offset_of(name)
            if base is not None:
                file = self.disk.open_readonly(self._path(name))
                segments.append(Segment(self.directory, base, file.size()))
            elif name.endswith(INDEX_SUFFIX):
                indexes.append(name)
            elif name.endswith(TEMPORARY_SUFFIX):
                self._leftover(name, "a file that was never finished")
            elif parse_quarantine_name(name) is not None:
                self._set_aside(name)
            elif name not in (CHECKPOINT_NAME, EPOCHS_NAME, TIMESTAMPS_NAME, COMPACTION_NAME):
                self.report.other_names.append(name)
        segments.sort(key=lambda segment: segment.base_offset)
        known = {f"{segment.base_offset:0{OFFSET_DIGITS}d}{INDEX_SUFFIX}" for segment in segments}
        for name in indexes:
            if name not in known:
                self._leftover(name, "an index without a segment")
        self.report.segments = len(segments)
        self.report.size_bytes = sum(segment.size for segment in segments)
        return segments

    def _set_aside(self, name: str) -> None:
        """What an earlier start took off the end of the log because it lay behind damage."""
        file = self.disk.open_readonly(self._path(name))
        whole = find_batches([FileRange(file, 0, file.size())])
        self._add(
            Severity.NOTE,
            self._path(name),
            f"set aside by an earlier start, from behind a damaged place: {_in_words(whole)}",
            "it is no part of the log; look at what is in it, then move it away",
            first_offset=whole.first_offset,
        )

    def _leftover(self, name: str, what: str) -> None:
        """Not removed: the next start does that, and knows which ones it still needs."""
        self._add(Severity.NOTE, self._path(name), what, "the next start removes it")

    def _check_checkpoint(self) -> None:
        path = self._path(CHECKPOINT_NAME)
        self.checkpoint = found = load_checkpoint(self.disk, path)
        if found is None:
            self._add(
                Severity.REBUILD,
                path,
                "missing" if not self.disk.exists(path) else "both slots are damaged",
                "the next start checks the whole log and writes it anew; until then nobody knows what was durable",
            )
            return
        self.report.start_offset = self.sparse_end_offset = found.start_offset
        data = self.disk.read_file(path)
        if not all(intact_slots(data)):
            other = SLOT_DISTANCE_BYTES * (1 - found.sequence % 2)
            repaired = ""
            if self.repair:
                write_checkpoint(self.disk, path, found._replace(sequence=found.sequence + 1))
                repaired = "copied the sound slot over it"
            self._add(
                Severity.REBUILD,
                path,
                f"the slot at {other} is damaged",
                "the other slot counts; nothing is lost",
                position=other,
                repaired=repaired,
            )

    def _check_compaction(self) -> None:
        state = load_state(self.disk, self.directory)
        path = self._path(COMPACTION_NAME)
        if state is None:
            self.sparse_end_offset = OFFSET_END_MAX
            self._add(
                Severity.REBUILD,
                path,
                "damaged",
                "the next start compacts the log anew; missing offsets cannot be told from compacted ones here",
            )
            return
        self.sparse_end_offset = max(self.sparse_end_offset, state.sparse_end_offset)
        if state.swap is not None:
            self.sparse_end_offset = max(self.sparse_end_offset, state.swap.end_offset)
            self._add(Severity.NOTE, path, "a compaction was interrupted", "the next start finishes it")

    def _check_beginning(self, first: Segment) -> None:
        start = self.checkpoint.start_offset if self.checkpoint is not None else first.base_offset
        self.expected = first.base_offset
        if first.base_offset > start:
            self._add(
                Severity.DAMAGE,
                first.path,
                f"the first segment begins at offset {first.base_offset}, the log at {start}",
                f"{records_text(start, first.base_offset)} are gone, and the partition is not opened",
                first_offset=start,
                end_offset=first.base_offset,
            )

    def _check_end(self, segments: list[Segment]) -> None:
        checkpoint = self.checkpoint
        if checkpoint is None or self.expected >= checkpoint.durable_end_offset:
            return
        if segments and checkpoint.durable_end_offset == checkpoint.start_offset:
            return  # trimmed into a batch that a truncation then took: nothing of it was left
        path = segments[-1].path if segments else self.directory
        self._add(
            Severity.DAMAGE,
            path,
            f"the log ends at offset {self.expected}, {checkpoint.durable_end_offset} was durable",
            f"{records_text(self.expected, checkpoint.durable_end_offset)} are gone, and the partition is not opened",
            first_offset=self.expected,
            end_offset=checkpoint.durable_end_offset,
        )

    def _check_epochs(self) -> None:
        path = self._path(EPOCHS_NAME)
        if self.epochs is not None or not self.found_epochs.entries():
            return
        repaired = ""
        if self.repair:
            write_checksummed(self.disk, path, self.found_epochs.encode(), durable=True)
            repaired = "written anew from the batches"
        self._add(
            Severity.REBUILD,
            path,
            "damaged" if self.disk.exists(path) else "missing",
            "the next start reads the leader epochs from the batches",
            repaired=repaired,
        )

    def _check_times(self) -> None:
        path = self._path(TIMESTAMPS_NAME)
        if not self.disk.exists(path):
            return  # it only saves time
        loaded = load_segment_timestamps(self.disk, path)
        what = "damaged"
        if loaded is not None:
            seen = {time.base_offset: time for time in self.times}
            wrong = [
                time
                for time in loaded
                if (known := seen.get(time.base_offset)) is not None
                and known.size_bytes == time.size_bytes
                and known.max_timestamp_ms != time.max_timestamp_ms
            ]
            if not wrong or self.report.has_damage:
                return
            what = f"wrong about the segment of offset {wrong[0].base_offset}"
        repaired = ""
        if self.repair:
            write_checksummed(self.disk, path, encode_segment_timestamps(self.times), durable=True)
            repaired = "written anew from the batches"
        self._add(
            Severity.REBUILD,
            path,
            what,
            "look-ups by time and retention read the indexes instead"
            if loaded is None
            else "look-ups by time and retention may go wrong",
            repaired=repaired,
        )

    # Segments

    def _check_segment(self, segment: Segment, following: int | None) -> None:
        if segment.base_offset != self.expected:
            self._gap_between(segment)
        look = SegmentInspection(self, segment, following)
        for scanned in scan(
            self.disk.open_readonly(segment.path),
            segment.size,
            segment.base_offset,
            following if following is not None else OFFSET_END_MAX,
            self.on_bytes,
        ):
            if scanned.header is not None:
                look.sound(scanned.position, scanned.header)
            elif not look.broken(scanned):
                break
        look.finish()
        self.expected = look.end_offset

    def _gap_between(self, segment: Segment) -> None:
        if segment.base_offset > self.expected:
            self._add(
                Severity.DAMAGE,
                segment.path,
                f"the segment before it ends at offset {self.expected}",
                f"{records_text(self.expected, segment.base_offset)} are gone",
                first_offset=self.expected,
                end_offset=segment.base_offset,
            )
        elif self.sparse_end_offset < segment.base_offset:
            self._add(
                Severity.DAMAGE,
                segment.path,
                f"it begins below offset {self.expected}, where the segment before it ends",
                "which of the two a reader sees is not certain",
            )

    def is_durable(self, segment: Segment, position: int) -> bool:
        """Bytes at `position` lie below the checkpoint, where nothing may be torn. Without one: not in the last."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            return False
        if segment.base_offset != checkpoint.segment_base:
            return segment.base_offset < checkpoint.durable_end_offset
        return position < checkpoint.position

    def note_torn(self, path: str, position: int, size: int) -> None:
        self.mark(position, size, torn=True)
        whole = find_batches([FileRange(self.disk.open_readonly(path), position, size)])
        kept = bool(whole.batches) or not whole.searched
        self._add(
            Severity.DAMAGE if kept else Severity.NOTE,
            path,
            f"{size - position} bytes from {position} on lie behind a damaged place: {_in_words(whole)}"
            if kept
            else f"{size - position} bytes from {position} on are no whole batch",
            "they were not known to be durable, and may have been acknowledged; the next start cuts them off the log "
            "and sets them aside in a file of their own"
            if kept
            else "they were not known to be durable; the next start cuts them",
            position=position,
            first_offset=self.expected,
        )

    def mark(self, start: int, end: int, *, torn: bool = False) -> None:
        """Remember a bad stretch of the segment at hand, for the picture."""
        self.report.mark(self.read_before + start, self.read_before + end, torn=torn)


def _in_words(whole: FoundBatches) -> str:
    if not whole.batches:
        return "no whole batch" if whole.searched else "too much to search for whole batches"
    count = f"{whole.batches} whole {'batch' if whole.batches == 1 else 'batches'}"
    records = records_text(whole.first_offset, whole.last_offset + 1)
    return f"{count if whole.searched else f'at least {count}'}, {records}"
