"""Comparison of delivered records with acknowledged ones. Pure: no client, no clock.

Invariants:
* A record counts as delivered once per (partition, offset). Reading an offset again is a redelivery, which is allowed
  after a rebalance; the same line at two offsets is a duplicate, which is never allowed.
* A record must arrive with the offset that its acknowledgement contained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class RecordLocation(NamedTuple):
    """Where a record is."""

    partition: int
    offset: int


class CheckResult(NamedTuple):
    """What the checker found. Everything but the first four must be 0."""

    acknowledged: int
    delivered: int
    keys: int
    redelivered: int
    missing: int
    duplicates: int
    misplaced: int
    out_of_order: int
    gaps: int

    @property
    def good(self) -> bool:
        return not any(self[4:])


@dataclass(slots=True)
class Checker:
    """Feed it every acknowledgement and every delivery, in the order each consumer saw them."""

    acknowledged: dict[int, RecordLocation] = field(default_factory=dict)
    delivered: dict[int, RecordLocation] = field(default_factory=dict)
    redelivered: int = 0
    duplicates: int = 0
    out_of_order: int = 0
    gaps: int = 0
    _next_offset: dict[int, int] = field(default_factory=dict)
    _last_line: dict[bytes, int] = field(default_factory=dict)

    def on_acknowledged(self, line: int, partition: int, offset: int) -> None:
        self.acknowledged[line] = RecordLocation(partition, offset)

    def on_delivered(self, partition: int, offset: int, key: bytes | None, value: bytes) -> None:
        expected = self._next_offset.get(partition, 0)
        if offset < expected:
            self.redelivered += 1
            return
        self.gaps += offset > expected
        self._next_offset[partition] = offset + 1
        line = int(value[: value.index(b",")])
        if line in self.delivered:
            self.duplicates += 1
            return
        self.delivered[line] = RecordLocation(partition, offset)
        if key is not None:
            self.out_of_order += line <= self._last_line.get(key, 0)
            self._last_line[key] = line

    def result(self) -> CheckResult:
        seen = self.delivered
        return CheckResult(
            acknowledged=len(self.acknowledged),
            delivered=len(seen),
            keys=len(self._last_line),
            redelivered=self.redelivered,
            missing=sum(line not in seen for line in self.acknowledged),
            duplicates=self.duplicates,
            misplaced=sum(
                line in seen and place.offset >= 0 and seen[line] != place
                for line, place in self.acknowledged.items()
            ),
            out_of_order=self.out_of_order,
            gaps=self.gaps,
        )
