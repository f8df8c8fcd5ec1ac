"""Result of the inspection of a log.

Invariant: a report is bounded: `FINDINGS_MAX` findings and `BAD_RANGES_MAX` ranges are kept, more are counted or
merged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

FINDINGS_MAX: Final = 200
"""Per log."""

BAD_RANGES_MAX: Final = 1000


class Severity(StrEnum):
    """`damage`: records are lost or cannot be read. `rebuild`: a file with redundant data is damaged. `note`: nothing
    is wrong.
    """

    DAMAGE = "damage"
    REBUILD = "rebuild"
    NOTE = "note"


class Finding(NamedTuple):
    """One finding. Offsets [first_offset, end_offset) if it concerns records, `position` in bytes; -1: not applicable.

    `what` is the problem of the file, `meaning` its consequence, `repaired` the repair that was done.
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
    """Bytes [start, end) of the concatenated segments that contain no intact batch; `torn`: they were never durable."""

    start: int
    end: int
    torn: bool


@dataclass(slots=True)
class LogReport:
    """Findings of one log."""

    directory: str
    findings: list[Finding] = field(default_factory=list)
    findings_left_out: int = 0
    start_offset: int = 0
    end_offset: int = 0
    size_bytes: int = 0
    segments: int = 0
    batches: int = 0
    damaged_offsets: int = 0
    bad_ranges: list[BadRange] = field(default_factory=list)
    other_names: list[str] = field(default_factory=list)
    """Files that are no part of a log, including those of the broker (producer snapshots)."""
    has_damage: bool = False
    has_rebuilds: bool = False
    """Whether a `rebuild` finding was not repaired."""

    def mark(self, start: int, end: int, *, torn: bool = False) -> None:
        """Record a bad range, for the map of the log; adjacent ranges are merged."""
        ranges = self.bad_ranges
        full = len(ranges) >= BAD_RANGES_MAX
        if ranges and ranges[-1].torn == torn and (full or ranges[-1].end >= start):
            ranges[-1] = ranges[-1]._replace(end=end)
        else:
            ranges.append(BadRange(start, end, torn))

    def add(self, finding: Finding) -> None:
        """Keep a finding, or count it."""
        if finding.severity is Severity.DAMAGE:
            self.has_damage = True
            self.damaged_offsets += max(finding.end_offset - finding.first_offset, 0)
        elif finding.severity is Severity.REBUILD and not finding.repaired:
            self.has_rebuilds = True
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)
        else:
            self.findings_left_out += 1


def records_text(first_offset: int, end_offset: int) -> str:
    """ "record 7" or "records 7 to 9"."""
    last = end_offset - 1
    return f"record {first_offset}" if last <= first_offset else f"records {first_offset} to {last}"
