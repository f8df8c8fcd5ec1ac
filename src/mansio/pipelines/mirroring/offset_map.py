"""Offset map of a mirrored partition: which offset of the target corresponds to an offset of the source.

The map consists of runs: consecutive offsets of the source that were written to consecutive offsets of the target.
Compaction, aborted transactions and markers leave gaps between the runs of the source; other producers and the markers
of the mirror's own transactions leave gaps between those of the target.

Invariants:
* Runs are in order and do not overlap, neither in the source nor in the target.
* `translate` never returns an offset behind a mirrored record that has the given source offset or a later one, and it
  never decreases when the given offset increases. Where no run was removed, all mirrored records with earlier offsets
  are before the result, too. Records of other producers of the target may be on either side of it.
* A map has at most `RUNS_MAX` runs after `thin`, and none that only describes records that the source has deleted
  after `expire`, except the last one before its log start.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

RUNS_MAX: Final = 16_384
"""Maximum number of runs of a partition. A run takes 24 bytes of memory, and a record of about 100 bytes in the topic.
"""
NO_OFFSET: Final = -1


class Run(NamedTuple):
    """`length` records with the source offsets from `source` on, at the target offsets from `target` on."""

    source: int
    target: int
    length: int


class OffsetMap:
    """The runs of one partition, in order."""

    def __init__(self, runs: Iterable[Run] = (), origin: int = NO_OFFSET) -> None:
        """`origin`: target offset of the first record that was ever mirrored, also if its run was removed."""
        self._sources, self._targets, self._counts = array("q"), array("q"), array("q")
        self.origin = origin
        for run in sorted(runs):
            self.append(run)

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Run]:
        return map(Run, self._sources, self._targets, self._counts)

    def append(self, run: Run) -> None:
        """Add a run after all others."""
        if self.origin == NO_OFFSET:
            self.origin = run.target
        self._sources.append(run.source)
        self._targets.append(run.target)
        self._counts.append(run.length)

    def translate(self, offset: int) -> int | None:
        """Return the target offset at which a reader continues that has read the source up to `offset`, without it;
        None if no record was mirrored yet. For an offset behind the mirrored records this is the end of their copies.
        """
        at = bisect_right(self._sources, offset) - 1
        if at < 0:
            return None if self.origin == NO_OFFSET else self.origin
        return self._targets[at] + min(offset - self._sources[at], self._counts[at])

    def thin(self) -> list[int]:
        """If there are more than `RUNS_MAX` runs, remove every second one of the older half; returns the source offsets
        at which the removed runs began. Offsets in a removed run then translate to the end of the run before it: the
        older a run, the fewer of its neighbours are kept."""
        if len(self) <= RUNS_MAX:
            return []
        return self._remove(range(1, len(self) // 2, 2))

    def expire(self, log_start: int) -> list[int]:
        """Remove runs that no offset from the source's log start on needs; returns where they began."""
        return self._remove(range(bisect_right(self._sources, log_start) - 1))

    def _remove(self, indexes: range) -> list[int]:
        removed = [self._sources[index] for index in indexes]
        if indexes:
            for column in (self._sources, self._targets, self._counts):
                del column[indexes.start : indexes.stop : indexes.step]
        return removed


def find_runs(offsets: NDArray[np.int64], appended: Iterable[tuple[int, int]], runs_max: int) -> list[Run]:
    """Return the runs of records that were just written, at most about `runs_max` of them. `offsets`: their source
    offsets, in order; `appended`: (first target offset, number of records) of each written batch, in order.
    """
    targets = np.concatenate([np.arange(base, base + count) for base, count in appended])
    assert len(targets) == len(offsets), "each record is in one batch"
    breaks = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(targets) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(offsets)])))
    step = -(-len(starts) // runs_max)
    return [
        Run(int(offsets[at]), int(targets[at]), int(count))
        for at, count in zip(starts[::step], counts[::step], strict=True)
    ]
