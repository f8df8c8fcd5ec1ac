"""One segment of a log under inspection: its batches against each other, and its index against them.

Fed with the stretches of the segment in order; says what is wrong to the inspection's report. Offsets and leader epochs
lie outside a batch's CRC, so their order is all that can tell damage to them.

Always true: the segment is not written to; its index is, when the inspection repairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.storage.checksummed_file import write_checksummed
from mansio.storage.index import SparseIndex, load_index
from mansio.storage.inspect.report import Finding, Severity, records_text
from mansio.storage.segment import OFFSET_END_MAX, only_zeros
from mansio.storage.segment_timestamps import SegmentTimestamp

if TYPE_CHECKING:
    from mansio.storage.index import LoadedIndex
    from mansio.storage.inspect.inspection import Inspection
    from mansio.storage.scan import ScannedRange
    from mansio.storage.segment import Segment
    from mansio.wire.batch.record_batch import BatchHeader


class SegmentInspection:
    """One segment against its index, and its batches against each other."""

    def __init__(self, inspection: Inspection, segment: Segment, following: int | None) -> None:
        self.inspection = inspection
        self.segment = segment
        self.following = following
        self.end_offset = segment.base_offset
        self.index = SparseIndex(inspection.index_interval_bytes)
        self.loaded: LoadedIndex | None = load_index(inspection.disk, segment.index_path, segment.base_offset)
        self.entries = iter(self.loaded.index.entries()) if self.loaded is not None else iter(())
        self.entry = next(self.entries, None)
        self.index_wrong = ""
        self.damaged = False
        self.pending: tuple[ScannedRange, int] | None = None
        """A broken stretch whose last offset only the next sound batch tells, and the offset it begins at."""

    def sound(self, position: int, header: BatchHeader) -> None:
        """A batch with a right CRC."""
        inspection, segment = self.inspection, self.segment
        inspection.report.batches += 1
        if self.pending is not None:
            self._settle(header.base_offset)
        expected = self.end_offset
        base = header.base_offset
        limit = self.following if self.following is not None else OFFSET_END_MAX
        count = header.last_offset_delta + 1
        if base < expected or base >= limit or (base > expected and base > inspection.sparse_end_offset):
            self._out_of_order(position, header)
            base = expected
        self._check_epoch(position, base, header)
        self._check_entry(position, base, header)
        self.index.add(base - segment.base_offset, position, header.max_timestamp_ms)
        self.end_offset = base + count

    def _out_of_order(self, position: int, header: BatchHeader) -> None:
        inspection = self.inspection
        end = self.end_offset + header.last_offset_delta + 1
        self.damaged = True
        inspection.mark(position, position + header.size)
        inspection.report.add(
            Finding(
                Severity.DAMAGE,
                self.segment.path,
                f"the batch at {position} says offset {header.base_offset} where {self.end_offset} should follow",
                f"readers get {records_text(self.end_offset, end)} under wrong offsets, or miss them",
                self.end_offset,
                end,
                position,
            )
        )

    def _check_epoch(self, position: int, offset: int, header: BatchHeader) -> None:
        """`offset` is where the batch belongs; compaction may have taken the end of an epoch before it."""
        inspection = self.inspection
        known = inspection.epochs.epoch_at(offset) if inspection.epochs is not None else -1
        wrong = known not in (header.leader_epoch, -1) or header.leader_epoch < inspection.found_epochs.last
        if not wrong:
            inspection.found_epochs.assign(header.leader_epoch, self.end_offset)
            return
        if not inspection.is_durable(self.segment, position):
            return  # recovery decides
        inspection.report.add(
            Finding(
                Severity.DAMAGE,
                self.segment.path,
                f"the batch at {position} says leader epoch {header.leader_epoch}, "
                f"{known if known >= 0 else inspection.found_epochs.last} wrote there",
                f"consumers of {records_text(offset, offset + header.last_offset_delta + 1)} may be told that their "
                "log was truncated; the records are sound",
                offset,
                offset + header.last_offset_delta + 1,
                position,
            )
        )

    def _check_entry(self, position: int, base: int, header: BatchHeader) -> None:
        """The index's entries must be batches that are there."""
        entry = self.entry
        if entry is not None and entry[1] == position:
            expected = (base - self.segment.base_offset, position, self.index.max_timestamp_ms)
            if entry != expected and not self.damaged:
                self.index_wrong = self.index_wrong or f"its entry for position {position} is wrong"
            self.entry = next(self.entries, None)
        elif entry is not None and entry[1] < position:
            if not self.damaged:
                self.index_wrong = self.index_wrong or f"it names position {entry[1]}, where no batch begins"
            while self.entry is not None and self.entry[1] < position + header.size:
                self.entry = next(self.entries, None)

    def broken(self, scanned: ScannedRange) -> bool:
        """Bytes that are no sound batch. False when the segment ends before them."""
        inspection, segment = self.inspection, self.segment
        if self.pending is not None:
            self._settle(self.end_offset)
        last = self.following is None
        if not inspection.is_durable(segment, scanned.position) and (
            last or inspection.checkpoint is not None
        ):
            if only_zeros(inspection.disk.open_readonly(segment.path), scanned.position, segment.size):
                segment.size = scanned.position
                return False
            inspection.expected = self.end_offset
            inspection.torn = True
            inspection.note_torn(segment.path, scanned.position, segment.size)
            return False
        self.damaged = True
        inspection.mark(scanned.position, scanned.position + scanned.length)
        self.pending = (scanned, self.end_offset)
        self.index.due_position = scanned.position  # so that the first batch behind it can be found
        return True

    def _settle(self, next_offset: int) -> None:
        """Now it is known where the broken stretch ends."""
        assert self.pending is not None
        scanned, first = self.pending
        self.pending = None
        end = max(next_offset, first)
        self.end_offset = end
        reachable = (
            "all others can" if scanned.problem.startswith("the CRC") else "those behind it by their offset"
        )
        self.inspection.report.add(
            Finding(
                Severity.DAMAGE,
                self.segment.path,
                f"{scanned.length} bytes at {scanned.position}: {scanned.problem}",
                f"{records_text(first, end)} cannot be read, {reachable}",
                first,
                max(end, first + 1),
                scanned.position,
            )
        )

    def finish(self) -> None:
        """The segment is over: does it reach where it should, and is its index about it?"""
        inspection = self.inspection
        if self.pending is not None:
            checkpoint = inspection.checkpoint
            durable_end = checkpoint.durable_end_offset if checkpoint is not None else self.end_offset
            self._settle(self.following if self.following is not None else durable_end)
        if self.following is not None and self.end_offset < self.following and not inspection.torn:
            recorded = self._recorded_end()
            if recorded is not None and self.end_offset <= recorded < self.following:
                self.end_offset = recorded  # from there on it is other segments that are missing
                self._short_of(self.following)
            elif self.following <= inspection.sparse_end_offset:
                self.end_offset = self.following  # compaction took the last records of it
            elif inspection.is_durable(self.segment, self.segment.size):
                self._short_of(self.following)
        self._check_index()
        inspection.times.append(
            SegmentTimestamp(self.segment.base_offset, self.segment.size, self.index.max_timestamp_ms)
        )
        if self.following is None:
            inspection.times.pop()

    def _recorded_end(self) -> int | None:
        """Where the segment ended when its index was saved, if that index is about all of it."""
        loaded = self.loaded
        return loaded.end_offset if loaded is not None and loaded.covered_bytes == self.segment.size else None

    def _short_of(self, following: int) -> None:
        self.inspection.report.add(
            Finding(
                Severity.DAMAGE,
                self.segment.path,
                f"it ends at offset {self.end_offset}, the next one begins at {following}",
                f"{records_text(self.end_offset, following)} are gone",
                self.end_offset,
                following,
                self.segment.size,
            )
        )
        self.inspection.mark(max(self.segment.size - 1, 0), self.segment.size)
        self.damaged = True
        self.end_offset = following

    def _check_index(self) -> None:
        inspection, segment = self.inspection, self.segment
        disk, path = inspection.disk, segment.index_path
        closed = self.following is not None
        if not disk.exists(path):
            if closed and segment.size:
                self._index_finding("missing", "readers build it again, each time")
            return
        if self.loaded is None:
            self._index_finding("damaged", "readers build it again, each time")
        elif closed and not self.damaged and self.loaded.covered_bytes != segment.size:
            self._index_finding(
                f"about {self.loaded.covered_bytes} bytes of a segment of {segment.size}",
                "readers build it again, each time",
            )
        elif self.index_wrong or (
            closed and not self.damaged and self.loaded.index.max_timestamp_ms != self.index.max_timestamp_ms
        ):
            self._index_finding(
                self.index_wrong or "its largest timestamp is wrong",
                "look-ups by offset or time may go wrong",
            )

    def _index_finding(self, what: str, meaning: str) -> None:
        inspection, segment = self.inspection, self.segment
        repaired = ""
        if inspection.repair:
            if self.following is not None:
                data = self.index.encode(segment.base_offset, self.following, segment.size)
                write_checksummed(inspection.disk, segment.index_path, data, durable=True)
                repaired = "built anew from the segment"
            else:  # of the newest segment it is a snapshot, which the next start does without
                inspection.disk.remove(segment.index_path)
                inspection.disk.sync_directory(inspection.directory)
                repaired = "removed; the next start builds it"
        inspection.report.add(Finding(Severity.REBUILD, segment.index_path, what, meaning, repaired=repaired))
