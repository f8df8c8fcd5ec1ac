"""What a share partition's stored state comes to: updates, one after the other, folded into one list of ranges.

Owns `FoldedState`, the state as it is folded so far, cheap to change, and `fold`, the same as a function of values.

Always true: * Ranges are ascending and disjoint, none lies wholly below the start, neighbours that say the same are
one. An offset that no range holds is AVAILABLE and was never delivered.
* The start goes back in a snapshot only; the lease horizon never goes back, so that two updates that were under way at
once come to the same in either order.
* A ticket goes with its offsets: what is left of a range that is cut has the sequence of its own first offset.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.dead_ranges import insert
from mansio.state.share_partition.types import ACKNOWLEDGED, ARCHIVED, AVAILABLE, LoadedState, StateBatch

if TYPE_CHECKING:
    from mansio.state.share_partition.types import DeadLetterReservation, DeadRange, Producer, Redrive, Update

SEQUENCE_MASK: Final = 0x7FFFFFFF
_NOTHING: Final = StateBatch(0, 0, AVAILABLE, 0)[2:]


class FoldedState:
    """See the module. `apply` takes over updates; the rest is to be read."""

    __slots__ = (
        "_changes",
        "_dead",
        "_firsts",
        "done_count",
        "lease_bound",
        "producer",
        "redrives",
        "start_offset",
    )

    def __init__(self, start_offset: int = 0) -> None:
        self.start_offset = start_offset
        self.lease_bound = 0
        self.done_count = 0
        self._dead: list[DeadRange] = []
        self.redrives: tuple[Redrive, ...] = ()
        self.producer: Producer | None = None
        self._firsts: list[int] = []
        self._changes: list[StateBatch] = []

    def __len__(self) -> int:
        """In ranges."""
        return len(self._changes)

    @property
    def changes(self) -> tuple[StateBatch, ...]:
        """The ranges, in their order."""
        return tuple(self._changes)

    @property
    def dead(self) -> tuple[DeadRange, ...]:
        """What is dead, the lowest first."""
        return tuple(self._dead)

    @dead.setter
    def dead(self, ranges: tuple[DeadRange, ...]) -> None:
        self._dead = list(ranges)

    def is_in(self, state: int) -> bool:
        """Is any range in that state?"""
        return any(change.state == state for change in self._changes)

    def progress(self) -> tuple[int, int]:
        """(first offset that is not done, how many behind it are). Counted: what updates say of it is as old as their
        making, and of two that are under way at once neither knows of the other."""
        start, done = self.start_offset, 0
        for change in self._changes:
            if change.state not in (ACKNOWLEDGED, ARCHIVED):
                continue
            if change.first <= start:
                start = change.last + 1
            else:
                done += change.last - change.first + 1
        return start, done

    def apply(self, update: Update) -> None:
        """What the update says holds from now on."""
        if update.snapshot:
            self._firsts.clear()
            self._changes.clear()
            self.start_offset = update.start_offset
        start = self.start_offset = max(self.start_offset, update.start_offset)
        for change in update.changes:
            if change.last >= start:  # what is below goes at once
                self._put(change)
        self._prune()
        self.lease_bound = max(self.lease_bound, update.lease_bound)
        if update.done_count >= 0:
            self.done_count = update.done_count
        if update.dead is not None:
            self.dead = update.dead
        for each in update.dead_added:
            insert(self._dead, each)
        if update.redrives is not None:
            self.redrives = update.redrives
        if update.producer is not None:
            self.producer = update.producer

    def _put(self, change: StateBatch) -> None:
        firsts, changes = self._firsts, self._changes
        if not changes or changes[-1].last < change.first:
            self._append(change)
            return
        low = bisect_right(firsts, change.first) - 1
        if low < 0 or changes[low].last < change.first:
            low += 1
        high = bisect_right(firsts, change.last, low)
        between = [change] if _says_something(change) else []
        if low < high:
            before, after = changes[low], changes[high - 1]
            if before.first < change.first:
                between.insert(0, before._replace(last=change.first - 1))
            if after.last > change.last:
                between.append(_from(after, change.last + 1))
        if low > 0:
            low -= 1
            between.insert(0, changes[low])
        if high < len(changes):
            between.append(changes[high])
            high += 1
        merged = _merged(between)
        changes[low:high] = merged
        firsts[low:high] = [each.first for each in merged]

    def _append(self, change: StateBatch) -> None:
        """It lies above all there is."""
        if not _says_something(change):
            return
        merged = _merged([*self._changes[-1:], change])
        self._changes[-1:] = merged
        self._firsts[-1:] = [each.first for each in merged]

    def _prune(self) -> None:
        changes, start = self._changes, self.start_offset
        gone = 0
        while gone < len(changes) and changes[gone].last < start:
            gone += 1
        if gone:
            del changes[:gone]
            del self._firsts[:gone]
        if changes and changes[0].first < start:
            changes[0] = _from(changes[0], start)
            self._firsts[0] = start


def from_state(state: LoadedState) -> FoldedState:
    """The same, to be folded on."""
    folded = FoldedState(state.start_offset)
    folded.lease_bound, folded.done_count = state.lease_bound, state.done_count
    folded.dead, folded.redrives, folded.producer = state.dead, state.redrives, state.producer
    for change in state.changes:
        folded._put(change)
    folded._prune()
    return folded


def to_state(
    folded: FoldedState,
    *,
    state_epoch: int,
    leader_epoch: int,
    snapshot_epoch: int,
    is_complete: bool = True,
    withheld_ms: int = 0,
) -> LoadedState:
    """What is folded, as a value."""
    return LoadedState(
        state_epoch,
        leader_epoch,
        snapshot_epoch,
        folded.start_offset,
        folded.lease_bound,
        folded.done_count,
        folded.changes,
        folded.dead,
        folded.redrives,
        folded.producer,
        is_complete,
        withheld_ms,
    )


def fold(state: LoadedState, update: Update) -> LoadedState:
    """The state after an update."""
    folded = from_state(state)
    folded.apply(update)
    return to_state(
        folded,
        state_epoch=state.state_epoch,
        leader_epoch=state.leader_epoch,
        snapshot_epoch=state.snapshot_epoch,
        is_complete=state.is_complete,
        withheld_ms=state.withheld_ms,
    )


def _says_something(change: StateBatch) -> bool:
    """More than what holds for an offset that nothing is said of."""
    return change[2:] != _NOTHING


def _from(change: StateBatch, first: int) -> StateBatch:
    """What is left of it from an offset on."""
    return change._replace(first=first, reservation=_ticket_at(change, first))


def _ticket_at(change: StateBatch, offset: int) -> DeadLetterReservation | None:
    """As a range has it that begins at that offset: one that has a place counts up."""
    reservation = change.reservation
    if reservation is None or reservation.producer_id < 0:
        return reservation
    return reservation._replace(sequence=(reservation.sequence + offset - change.first) & SEQUENCE_MASK)


def _merged(changes: list[StateBatch]) -> list[StateBatch]:
    merged = changes[:1]
    for change in changes[1:]:
        last = merged[-1]
        if (
            last.last + 1 == change.first
            and last[2:-1] == change[2:-1]
            and _ticket_at(last, change.first) == change.reservation
        ):
            merged[-1] = last._replace(last=change.last)
        else:
            merged.append(change)
    return merged
