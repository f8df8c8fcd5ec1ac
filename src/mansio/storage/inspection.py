"""Offline check of a log's files (like fsck): reports which parts are damaged, and the consequences.

Checks every batch of every segment (CRC, and the order of offsets and leader epochs, which the CRC does not cover), and
compares indexes, timestamps, epochs, checkpoint and compaction state with the segments. Unlike recovery it continues
after damage and truncates nothing.

Invariants: segments are never changed. Only with `repair` other files are written, with the content that a broker would
write. Memory is bounded: one segment's index at a time, and `FINDINGS_MAX` findings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.storage.checkpoint import (
    CHECKPOINT_NAME,
    SLOT_DISTANCE_BYTES,
    Checkpoint,
    are_slots_intact,
    load_checkpoint,
    write_checkpoint,
)
from mansio.storage.checksummed_file import TEMPORARY_SUFFIX, write_checksummed
from mansio.storage.compaction_state import COMPACTION_NAME, load_state
from mansio.storage.index import SparseIndex, load_index
from mansio.storage.leader_epochs import EPOCHS_NAME, LeaderEpochCache, load_leader_epochs
from mansio.storage.recovery.quarantine import FileRange, FoundBatches, find_batches, parse_quarantine_name
from mansio.storage.scan import scan
from mansio.storage.segment import (
    INDEX_SUFFIX,
    OFFSET_DIGITS,
    OFFSET_END_MAX,
    Segment,
    base_offset_of,
    contains_only_zeros,
)
from mansio.storage.segment_timestamps import (
    TIMESTAMPS_NAME,
    SegmentTimestamp,
    encode_segment_timestamps,
    load_segment_timestamps,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Disk
    from mansio.storage.index import LoadedIndex
    from mansio.storage.scan import ScannedRange
    from mansio.wire.batch.record_batch import BatchHeader

FINDINGS_MAX: Final = 200
"""Maximum number of findings that are kept per log; more are only counted."""

BAD_RANGES_MAX: Final = 1000
"""Maximum number of bad ranges per log; later ones are merged with the last one."""


class Severity(StrEnum):
    """Severity of a finding.

    `damage`: records are lost or cannot be read. `rebuild`: a file with redundant data is missing or damaged; no record
    is lost, and the broker works without the file. `note`: information; nothing is wrong.
    """

    DAMAGE = "damage"
    REBUILD = "rebuild"
    NOTE = "note"


class Finding(NamedTuple):
    """One finding of an inspection, about the file at `path`.

    `what` describes the problem, `meaning` its consequence, `repaired` the repair that was done ("" if none). The
    finding concerns the records [first_offset, end_offset) and the byte `position`; -1: not applicable.
    """

    severity: Severity
    path: str
    what: str
    meaning: str
    first_offset: int = -1
    end_offset: int = -1
    position: int = -1
    repaired: str = ""


class BadRange(NamedTuple):
    """Bytes [start, end) of a log that contain no intact batch; positions count from the start of the first segment.

    `torn`: the bytes are a torn tail, above the checkpoint.
    """

    start: int
    end: int
    torn: bool


@dataclass(slots=True)
class LogReport:
    """Result of the inspection of one log: its findings, and its size in bytes, segments, batches and offsets.

    `omitted_finding_count` is the number of findings that exceed `FINDINGS_MAX`, `damaged_offset_count` the number of
    offsets in findings of the severity `damage`.
    """

    directory: str
    findings: list[Finding] = field(default_factory=list)
    omitted_finding_count: int = 0
    start_offset: int = 0
    end_offset: int = 0
    size_bytes: int = 0
    segment_count: int = 0
    batch_count: int = 0
    damaged_offset_count: int = 0
    bad_ranges: list[BadRange] = field(default_factory=list)
    other_file_names: list[str] = field(default_factory=list)
    """Names of files that are not part of a log, including those of the broker (producer snapshots)."""
    has_damage: bool = False
    needs_rebuild: bool = False
    """Whether a file with redundant data (such as an index) is missing or damaged and was not repaired."""

    def add_bad_range(self, start: int, end: int, *, torn: bool = False) -> None:
        """Add a bad range; it is merged with the last one if they are adjacent."""
        ranges = self.bad_ranges
        full = len(ranges) >= BAD_RANGES_MAX
        if ranges and ranges[-1].torn == torn and (full or ranges[-1].end >= start):
            ranges[-1] = ranges[-1]._replace(end=end)
        else:
            ranges.append(BadRange(start, end, torn))

    def add(self, finding: Finding) -> None:
        """Add a finding; above `FINDINGS_MAX` it is only counted."""
        if finding.severity is Severity.DAMAGE:
            self.has_damage = True
            self.damaged_offset_count += max(finding.end_offset - finding.first_offset, 0)
        elif finding.severity is Severity.REBUILD and not finding.repaired:
            self.needs_rebuild = True
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)
        else:
            self.omitted_finding_count += 1


def describe_records(first_offset: int, end_offset: int) -> str:
    """Text for the offsets [first_offset, end_offset), for example "record 7" or "records 7 to 9"."""
    last = end_offset - 1
    return f"record {first_offset}" if last <= first_offset else f"records {first_offset} to {last}"


INDEX_INTERVAL_BYTES: Final = 4096


def inspect_log(
    disk: Disk,
    directory: str,
    *,
    repair: bool = False,
    index_interval_bytes: int = INDEX_INTERVAL_BYTES,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> LogReport:
    """Check the log in `directory`, which no broker may have open; `repair` also replaces damaged redundant files.

    `on_bytes` is called with the number of segment bytes of each read. Raises `OSError`.
    """
    return Inspection(disk, directory, repair, index_interval_bytes, on_bytes).run()


def log_size_bytes(disk: Disk, directory: str) -> int:
    """Total size in bytes of all segments in `directory`, which an inspection reads."""
    names = [name for name in disk.list_directory(directory) if base_offset_of(name) is not None]
    return sum(disk.open_readonly(f"{directory}/{name}").size() for name in names)


class Inspection:
    """Inspection of one log. `run` performs it once.

    `expected_offset` is the offset at which the next segment should begin, `preceding_bytes` the total size of the
    segments that were checked already.
    """

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
        """Offsets below it may be missing, because of compaction, or because a trim was followed by a truncation."""
        self.timestamps: list[SegmentTimestamp] = []
        self.expected_offset = 0
        self.preceding_bytes = 0
        self.is_tail_torn = False

    def run(self) -> LogReport:
        segments = self._list_segments()
        self._check_checkpoint()
        self._check_compaction()
        self.epochs = load_leader_epochs(self.disk, self._path(EPOCHS_NAME))
        if segments:
            self._check_beginning(segments[0])
        for number, segment in enumerate(segments):
            next_base_offset = segments[number + 1].base_offset if number + 1 < len(segments) else None
            if self.is_tail_torn:
                self.report_torn_tail(segment.path, 0, segment.size)
            else:
                self._check_segment(segment, next_base_offset)
            self.preceding_bytes += segment.size
        self.report.end_offset = self.expected_offset
        self._check_end(segments)
        self._check_epochs()
        self._check_timestamps()
        self.report.findings.sort(key=lambda finding: list(Severity).index(finding.severity))
        return self.report

    def _path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def _add_finding(self, severity: Severity, path: str, what: str, meaning: str, **more: object) -> None:
        self.report.add(Finding(severity, path, what, meaning, **more))  # type: ignore[arg-type]  # the fields by name

    # The small files

    def _list_segments(self) -> list[Segment]:
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
                self._report_leftover(name, "an unfinished file")
            elif parse_quarantine_name(name) is not None:
                self._check_quarantined(name)
            elif name not in (CHECKPOINT_NAME, EPOCHS_NAME, TIMESTAMPS_NAME, COMPACTION_NAME):
                self.report.other_file_names.append(name)
        segments.sort(key=lambda segment: segment.base_offset)
        known = {f"{segment.base_offset:0{OFFSET_DIGITS}d}{INDEX_SUFFIX}" for segment in segments}
        for name in indexes:
            if name not in known:
                self._report_leftover(name, "an index without a segment")
        self.report.segment_count = len(segments)
        self.report.size_bytes = sum(segment.size for segment in segments)
        return segments

    def _check_quarantined(self, name: str) -> None:
        """Report a quarantine file, with bytes that an earlier start truncated from the end of the log."""
        file = self.disk.open_readonly(self._path(name))
        found = find_batches([FileRange(file, 0, file.size())])
        self._add_finding(
            Severity.NOTE,
            self._path(name),
            f"quarantined by an earlier start after a damaged position: {_describe(found)}",
            "it is not part of the log; examine its content, then move it to another directory",
            first_offset=found.first_offset,
        )

    def _report_leftover(self, name: str, what: str) -> None:
        """Report a leftover file. It is not removed, because only the next start knows whether it still needs it."""
        self._add_finding(Severity.NOTE, self._path(name), what, "the next start removes it")

    def _check_checkpoint(self) -> None:
        path = self._path(CHECKPOINT_NAME)
        self.checkpoint = found = load_checkpoint(self.disk, path)
        if found is None:
            self._add_finding(
                Severity.REBUILD,
                path,
                "missing" if not self.disk.exists(path) else "both slots are damaged",
                "the next start checks the whole log and writes it again; until then it is unknown what was durable",
            )
            return
        self.report.start_offset = self.sparse_end_offset = found.start_offset
        data = self.disk.read_file(path)
        if not all(are_slots_intact(data)):
            other = SLOT_DISTANCE_BYTES * (1 - found.sequence % 2)
            repaired = ""
            if self.repair:
                write_checkpoint(self.disk, path, found._replace(sequence=found.sequence + 1))
                repaired = "replaced by a copy of the intact slot"
            self._add_finding(
                Severity.REBUILD,
                path,
                f"the slot at {other} is damaged",
                "the other slot is used; nothing is lost",
                position=other,
                repaired=repaired,
            )

    def _check_compaction(self) -> None:
        state = load_state(self.disk, self.directory)
        path = self._path(COMPACTION_NAME)
        if state is None:
            self.sparse_end_offset = OFFSET_END_MAX
            self._add_finding(
                Severity.REBUILD,
                path,
                "damaged",
                "the next start compacts the log again; missing offsets look like compacted ones until then",
            )
            return
        self.sparse_end_offset = max(self.sparse_end_offset, state.sparse_end_offset)
        if state.swap is not None:
            self.sparse_end_offset = max(self.sparse_end_offset, state.swap.end_offset)
            self._add_finding(
                Severity.NOTE, path, "a compaction was interrupted", "the next start completes it"
            )

    def _check_beginning(self, first: Segment) -> None:
        start = self.checkpoint.start_offset if self.checkpoint is not None else first.base_offset
        self.expected_offset = first.base_offset
        if first.base_offset > start:
            self._add_finding(
                Severity.DAMAGE,
                first.path,
                f"the first segment begins at offset {first.base_offset}, the log at {start}",
                f"{describe_records(start, first.base_offset)} are lost, and a broker does not open the partition",
                first_offset=start,
                end_offset=first.base_offset,
            )

    def _check_end(self, segments: list[Segment]) -> None:
        checkpoint = self.checkpoint
        if checkpoint is None or self.expected_offset >= checkpoint.durable_end_offset:
            return
        if segments and checkpoint.durable_end_offset == checkpoint.start_offset:
            return  # the log was trimmed to an offset in a batch that was truncated later; no record was left
        path = segments[-1].path if segments else self.directory
        self._add_finding(
            Severity.DAMAGE,
            path,
            f"the log ends at offset {self.expected_offset} instead of {checkpoint.durable_end_offset}",
            f"{describe_records(self.expected_offset, checkpoint.durable_end_offset)} are lost, and a broker does not "
            "open the partition",
            first_offset=self.expected_offset,
            end_offset=checkpoint.durable_end_offset,
        )

    def _check_epochs(self) -> None:
        path = self._path(EPOCHS_NAME)
        if self.epochs is not None or not self.found_epochs.entries():
            return
        repaired = ""
        if self.repair:
            write_checksummed(self.disk, path, self.found_epochs.encode(), durable=True)
            repaired = "rewritten from the batches"
        self._add_finding(
            Severity.REBUILD,
            path,
            "damaged" if self.disk.exists(path) else "missing",
            "the next start reads the leader epochs from the batches",
            repaired=repaired,
        )

    def _check_timestamps(self) -> None:
        path = self._path(TIMESTAMPS_NAME)
        if not self.disk.exists(path):
            return  # optional
        loaded = load_segment_timestamps(self.disk, path)
        what = "damaged"
        if loaded is not None:
            seen = {entry.base_offset: entry for entry in self.timestamps}
            wrong = [
                entry
                for entry in loaded
                if (known := seen.get(entry.base_offset)) is not None
                and known.size_bytes == entry.size_bytes
                and known.max_timestamp_ms != entry.max_timestamp_ms
            ]
            if not wrong or self.report.has_damage:
                return
            what = f"wrong about the segment of offset {wrong[0].base_offset}"
        repaired = ""
        if self.repair:
            write_checksummed(self.disk, path, encode_segment_timestamps(self.timestamps), durable=True)
            repaired = "rewritten from the batches"
        self._add_finding(
            Severity.REBUILD,
            path,
            what,
            "searches by time and retention read the indexes instead"
            if loaded is None
            else "searches by time and retention may be wrong",
            repaired=repaired,
        )

    # Segments

    def _check_segment(self, segment: Segment, next_base_offset: int | None) -> None:
        if segment.base_offset != self.expected_offset:
            self._check_gap(segment)
        segment_inspection = _SegmentInspection(self, segment, next_base_offset)
        for scanned in scan(
            self.disk.open_readonly(segment.path),
            segment.size,
            segment.base_offset,
            next_base_offset if next_base_offset is not None else OFFSET_END_MAX,
            self.on_bytes,
        ):
            if scanned.header is not None:
                segment_inspection.check_batch(scanned.position, scanned.header)
            elif not segment_inspection.record_damaged_range(scanned):
                break
        segment_inspection.finish()
        self.expected_offset = segment_inspection.end_offset

    def _check_gap(self, segment: Segment) -> None:
        if segment.base_offset > self.expected_offset:
            self._add_finding(
                Severity.DAMAGE,
                segment.path,
                f"the segment before it ends at offset {self.expected_offset}",
                f"{describe_records(self.expected_offset, segment.base_offset)} are lost",
                first_offset=self.expected_offset,
                end_offset=segment.base_offset,
            )
        elif self.sparse_end_offset < segment.base_offset:
            self._add_finding(
                Severity.DAMAGE,
                segment.path,
                f"begins below offset {self.expected_offset}, where the segment before it ends",
                "it is undefined from which of the two segments a reader gets the records",
            )

    def is_durable(self, segment: Segment, position: int) -> bool:
        """Whether the bytes at `position` are below the checkpoint, and so were durable; False without a checkpoint."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            return False
        if segment.base_offset != checkpoint.segment_base:
            return segment.base_offset < checkpoint.durable_end_offset
        return position < checkpoint.position

    def report_torn_tail(self, path: str, position: int, size: int) -> None:
        self.add_bad_range(position, size, torn=True)
        found = find_batches([FileRange(self.disk.open_readonly(path), position, size)])
        kept = bool(found.batch_count) or not found.is_complete
        self._add_finding(
            Severity.DAMAGE if kept else Severity.NOTE,
            path,
            f"{size - position} bytes from {position} on are after a damaged position: {_describe(found)}"
            if kept
            else f"{size - position} bytes from {position} on contain no complete batch",
            "they were not known to be durable, and may have been acknowledged; the next start truncates them and "
            "copies them to a quarantine file"
            if kept
            else "they were not known to be durable; the next start truncates them",
            position=position,
            first_offset=self.expected_offset,
        )

    def add_bad_range(self, start: int, end: int, *, torn: bool = False) -> None:
        """Add a bad range; `start` and `end` are positions in the current segment."""
        self.report.add_bad_range(self.preceding_bytes + start, self.preceding_bytes + end, torn=torn)


def _describe(found: FoundBatches) -> str:
    if not found.batch_count:
        return "no complete batch" if found.is_complete else "too much to search for complete batches"
    count = f"{found.batch_count} complete {'batch' if found.batch_count == 1 else 'batches'}"
    records = describe_records(found.first_offset, found.last_offset + 1)
    return f"{count if found.is_complete else f'at least {count}'}, {records}"


class _SegmentInspection:
    """Inspection of one segment: compares its batches with each other, and its index with the batches.

    It receives the scanned ranges of the segment in order and adds its findings to the inspection's report. The CRC of
    a batch does not cover its offset and leader epoch, so damage to these shows only in their order. `next_base_offset`
    is the base offset of the next segment; None for the active segment.
    """

    def __init__(self, inspection: Inspection, segment: Segment, next_base_offset: int | None) -> None:
        self.inspection = inspection
        self.segment = segment
        self.next_base_offset = next_base_offset
        self.end_offset = segment.base_offset
        self.index = SparseIndex(inspection.index_interval_bytes)
        self.loaded: LoadedIndex | None = load_index(inspection.disk, segment.index_path, segment.base_offset)
        self.entries = iter(self.loaded.index.entries()) if self.loaded is not None else iter(())
        self.entry = next(self.entries, None)
        self.index_problem = ""
        self.has_damage = False
        self.pending_range: tuple[ScannedRange, int] | None = None
        """The last damaged range and its first offset, until the next intact batch shows its end offset."""

    def check_batch(self, position: int, header: BatchHeader) -> None:
        """Check offset, leader epoch and index entry of a batch with a valid CRC."""
        inspection, segment = self.inspection, self.segment
        inspection.report.batch_count += 1
        if self.pending_range is not None:
            self._report_pending_range(header.base_offset)
        expected = self.end_offset
        base = header.base_offset
        limit = self.next_base_offset if self.next_base_offset is not None else OFFSET_END_MAX
        count = header.last_offset_delta + 1
        if base < expected or base >= limit or (base > expected and base > inspection.sparse_end_offset):
            self._report_out_of_order_batch(position, header)
            base = expected
        self._check_epoch(position, base, header)
        self._check_index_entries(position, base, header)
        self.index.add(base - segment.base_offset, position, header.max_timestamp_ms)
        self.end_offset = base + count

    def _report_out_of_order_batch(self, position: int, header: BatchHeader) -> None:
        inspection = self.inspection
        end = self.end_offset + header.last_offset_delta + 1
        self.has_damage = True
        inspection.add_bad_range(position, position + header.size)
        inspection.report.add(
            Finding(
                Severity.DAMAGE,
                self.segment.path,
                f"the batch at {position} has offset {header.base_offset} where {self.end_offset} is expected",
                f"readers get {describe_records(self.end_offset, end)} under wrong offsets, or miss them",
                self.end_offset,
                end,
                position,
            )
        )

    def _check_epoch(self, position: int, offset: int, header: BatchHeader) -> None:
        """Check that the leader epoch of the batch with the base offset `offset` is known and does not decrease."""
        inspection = self.inspection
        known = inspection.epochs.epoch_for_offset(offset) if inspection.epochs is not None else -1
        wrong = (
            known not in (header.leader_epoch, -1)
            or header.leader_epoch < inspection.found_epochs.latest_epoch
        )
        if not wrong:
            inspection.found_epochs.assign(header.leader_epoch, self.end_offset)
            return
        if not inspection.is_durable(self.segment, position):
            return  # above the checkpoint recovery checks the leader epoch
        inspection.report.add(
            Finding(
                Severity.DAMAGE,
                self.segment.path,
                f"the batch at {position} has leader epoch {header.leader_epoch}, expected "
                f"{known if known >= 0 else inspection.found_epochs.latest_epoch}",
                f"consumers of {describe_records(offset, offset + header.last_offset_delta + 1)} may get an error "
                "that reports a truncated log; the records are intact",
                offset,
                offset + header.last_offset_delta + 1,
                position,
            )
        )

    def _check_index_entries(self, position: int, base: int, header: BatchHeader) -> None:
        """Check that the entries of the index up to `position` describe existing batches."""
        entry = self.entry
        if entry is not None and entry[1] == position:
            expected = (base - self.segment.base_offset, position, self.index.max_timestamp_ms)
            if entry != expected and not self.has_damage:
                self.index_problem = self.index_problem or f"its entry for position {position} is wrong"
            self.entry = next(self.entries, None)
        elif entry is not None and entry[1] < position:
            if not self.has_damage:
                self.index_problem = (
                    self.index_problem or f"it has an entry for {entry[1]}, where no batch begins"
                )
            while self.entry is not None and self.entry[1] < position + header.size:
                self.entry = next(self.entries, None)

    def record_damaged_range(self, scanned: ScannedRange) -> bool:
        """Record a range without an intact batch. Returns False if it is the end of the log: a torn tail or
        preallocated zeros."""
        inspection, segment = self.inspection, self.segment
        if self.pending_range is not None:
            self._report_pending_range(self.end_offset)
        last = self.next_base_offset is None
        if not inspection.is_durable(segment, scanned.position) and (
            last or inspection.checkpoint is not None
        ):
            if contains_only_zeros(
                inspection.disk.open_readonly(segment.path), scanned.position, segment.size
            ):
                segment.size = scanned.position
                return False
            inspection.expected_offset = self.end_offset
            inspection.is_tail_torn = True
            inspection.report_torn_tail(segment.path, scanned.position, segment.size)
            return False
        self.has_damage = True
        inspection.add_bad_range(scanned.position, scanned.position + scanned.length)
        self.pending_range = (scanned, self.end_offset)
        self.index.next_entry_position = scanned.position  # so that the first batch after it is indexed
        return True

    def _report_pending_range(self, next_offset: int) -> None:
        """Report the pending damaged range, whose end offset is known now."""
        assert self.pending_range is not None
        scanned, first = self.pending_range
        self.pending_range = None
        end = max(next_offset, first)
        self.end_offset = end
        reachable = (
            "all other records can be read"
            if scanned.problem.startswith("the CRC")
            else "later records of the segment only by a read from their offset"
        )
        self.inspection.report.add(
            Finding(
                Severity.DAMAGE,
                self.segment.path,
                f"{scanned.length} bytes at {scanned.position}: {scanned.problem}",
                f"{describe_records(first, end)} cannot be read, {reachable}",
                first,
                max(end, first + 1),
                scanned.position,
            )
        )

    def finish(self) -> None:
        """Check, after the last range, the end offset of the segment and its index."""
        inspection = self.inspection
        if self.pending_range is not None:
            checkpoint = inspection.checkpoint
            durable_end = checkpoint.durable_end_offset if checkpoint is not None else self.end_offset
            self._report_pending_range(
                self.next_base_offset if self.next_base_offset is not None else durable_end
            )
        next_base = self.next_base_offset
        if next_base is not None and self.end_offset < next_base and not inspection.is_tail_torn:
            recorded = self._recorded_end_offset()
            if recorded is not None and self.end_offset <= recorded < next_base:
                self.end_offset = recorded  # the segments that followed it are missing
                self._report_missing_end(next_base)
            elif next_base <= inspection.sparse_end_offset:
                self.end_offset = next_base  # compaction removed its last records
            elif inspection.is_durable(self.segment, self.segment.size):
                self._report_missing_end(next_base)
        self._check_index()
        inspection.timestamps.append(
            SegmentTimestamp(self.segment.base_offset, self.segment.size, self.index.max_timestamp_ms)
        )
        if self.next_base_offset is None:
            inspection.timestamps.pop()

    def _recorded_end_offset(self) -> int | None:
        """End offset of the segment when its index was saved, if that index covers all of it."""
        loaded = self.loaded
        return loaded.end_offset if loaded is not None and loaded.covered_bytes == self.segment.size else None

    def _report_missing_end(self, next_base_offset: int) -> None:
        self.inspection.report.add(
            Finding(
                Severity.DAMAGE,
                self.segment.path,
                f"ends at offset {self.end_offset}, but the next segment begins at {next_base_offset}",
                f"{describe_records(self.end_offset, next_base_offset)} are lost",
                self.end_offset,
                next_base_offset,
                self.segment.size,
            )
        )
        self.inspection.add_bad_range(max(self.segment.size - 1, 0), self.segment.size)
        self.has_damage = True
        self.end_offset = next_base_offset

    def _check_index(self) -> None:
        inspection, segment = self.inspection, self.segment
        disk, path = inspection.disk, segment.index_path
        closed = self.next_base_offset is not None
        if not disk.exists(path):
            if closed and segment.size:
                self._report_index_finding("missing", "readers rebuild it each time")
            return
        if self.loaded is None:
            self._report_index_finding("damaged", "readers rebuild it each time")
        elif closed and not self.has_damage and self.loaded.covered_bytes != segment.size:
            self._report_index_finding(
                f"covers {self.loaded.covered_bytes} bytes of a segment of {segment.size}",
                "readers rebuild it each time",
            )
        elif self.index_problem or (
            closed
            and not self.has_damage
            and self.loaded.index.max_timestamp_ms != self.index.max_timestamp_ms
        ):
            self._report_index_finding(
                self.index_problem or "its largest timestamp is wrong",
                "searches by offset or time may be wrong",
            )

    def _report_index_finding(self, what: str, meaning: str) -> None:
        inspection, segment = self.inspection, self.segment
        repaired = ""
        if inspection.repair:
            if self.next_base_offset is not None:
                data = self.index.encode(segment.base_offset, self.next_base_offset, segment.size)
                write_checksummed(inspection.disk, segment.index_path, data, durable=True)
                repaired = "rebuilt from the segment"
            else:  # the active segment's index is a snapshot, which the next start does not need
                inspection.disk.remove(segment.index_path)
                inspection.disk.sync_directory(inspection.directory)
                repaired = "removed; the next start rebuilds it"
        inspection.report.add(Finding(Severity.REBUILD, segment.index_path, what, meaning, repaired=repaired))
