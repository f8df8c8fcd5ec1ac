"""Stored state of a share partition: updates are applied (folded) to a snapshot, and in-flight batches are restored.

`FoldedState` is mutable: the result of all updates applied so far. `fold` applies one update to an immutable state.
`restore_in_flight_batches` creates the in-flight batches of a loaded state; `stored_batches` and `full_update` convert
them back into stored state.

Invariants of a folded state:
* Ranges are ascending and disjoint, none lies wholly below the start offset, and adjacent ranges with equal state are
  one range. An offset in no range is AVAILABLE and was never delivered.
* The start offset decreases in a snapshot only and the lease bound never decreases, so that two updates that were
  pending concurrently give the same result in either order.
* A range with a dead-letter reservation whose lower offsets are cut off has the sequence of its new first offset.

Invariants of a restore:
* A restored lease runs for its whole duration again; deadlines of leases are not stored.
* After a loss of updates, an offset below the lease bound without a stored delivery may be leased. It is WITHHELD for
  as long as such a lease could last, with one delivery that does not count as an attempt. No offset at or above the
  bound was ever leased.
* A withheld range is stored as AVAILABLE with a backoff until the withholding ends, so that a restart keeps that time.
* A leader that led before and after a loss knows every lease that the loss could affect: then nothing is withheld.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.dead_letters import insert_dead_range
from mansio.state.share_partition.in_flight import InFlightBatches, state_batches
from mansio.state.share_partition.types import (
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    AVAILABLE,
    WITHHELD,
    LoadedState,
    StateBatch,
    Update,
)
from mansio.wire.field_values import SEQUENCE_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.state.share_partition.share_index import OwnOffsets
    from mansio.state.share_partition.types import (
        DeadLetterReservation,
        DeadRange,
        Isolation,
        Producer,
        RedrivenRanges,
    )


_DEFAULT_STATE: Final = StateBatch(0, 0, AVAILABLE, 0)[2:]


class FoldedState:
    """State of a share partition computed by applying the stored updates in order. Only `apply` changes it."""

    __slots__ = (
        "_changes",
        "_dead",
        "_firsts",
        "done_count",
        "isolations",
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
        self.redrives: tuple[RedrivenRanges, ...] = ()
        self.producer: Producer | None = None
        self.isolations: tuple[Isolation, ...] = ()
        self._firsts: list[int] = []
        self._changes: list[StateBatch] = []

    def __len__(self) -> int:
        """Return the number of state ranges."""
        return len(self._changes)

    @property
    def changes(self) -> tuple[StateBatch, ...]:
        """State ranges, ascending."""
        return tuple(self._changes)

    @property
    def dead_ranges(self) -> tuple[DeadRange, ...]:
        """Ranges of dead-lettered offsets, ascending."""
        return tuple(self._dead)

    @dead_ranges.setter
    def dead_ranges(self, ranges: tuple[DeadRange, ...]) -> None:
        self._dead = list(ranges)

    def has_range_in(self, state: int) -> bool:
        """Whether any range has this state."""
        return any(change.state == state for change in self._changes)

    def progress(self) -> tuple[int, int]:
        """Return the first offset that is not done, and the number of later offsets that are done.

        Both are computed from the ranges, because the start offset and the done count of two concurrent updates do not
        include each other.
        """
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
        """Apply an update to the state; a snapshot replaces all ranges."""
        if update.is_snapshot:
            self._firsts.clear()
            self._changes.clear()
            self.start_offset = update.start_offset
        self.apply_all((update,))

    def apply_all(self, updates: Sequence[Update]) -> None:
        """Apply updates, none of which is a whole state, in order. Ranges that a later one of them drops are not added:
        of records that were leased and acknowledged meanwhile nothing remains, so most updates of a queue cost
        little."""
        start = self.start_offset = max([self.start_offset, *[each.start_offset for each in updates]])
        for each in updates:
            for change in each.changes:
                if change.last >= start:  # batches below the start are dropped
                    self._put_change(change)
            self.lease_bound = max(self.lease_bound, each.lease_bound)
            if each.done_count >= 0:
                self.done_count = each.done_count
            if each.dead_ranges is not None:
                self.dead_ranges = each.dead_ranges
            for dead in each.added_dead_ranges:
                insert_dead_range(self._dead, dead)
            if each.redrives is not None:
                self.redrives = each.redrives
            if each.producer is not None:
                self.producer = each.producer
            if each.isolations is not None:
                self.isolations = each.isolations
        self._prune()

    def _put_change(self, change: StateBatch) -> None:
        firsts, changes = self._firsts, self._changes
        if not changes or changes[-1].last < change.first:
            self._append_change(change)
            return
        low = bisect_right(firsts, change.first) - 1
        if low < 0 or changes[low].last < change.first:
            low += 1
        high = bisect_right(firsts, change.last, low)
        between = [change] if _is_stored(change) else []
        if low < high:
            before, after = changes[low], changes[high - 1]
            if before.first < change.first:
                between.insert(0, before._replace(last=change.first - 1))
            if after.last > change.last:
                between.append(_part_from(after, change.last + 1))
        if low > 0:
            low -= 1
            between.insert(0, changes[low])
        if high < len(changes):
            between.append(changes[high])
            high += 1
        merged = _merge_adjacent(between)
        changes[low:high] = merged
        firsts[low:high] = [each.first for each in merged]

    def _append_change(self, change: StateBatch) -> None:
        """Add a range that lies above all others."""
        if not _is_stored(change):
            return
        merged = _merge_adjacent([*self._changes[-1:], change])
        self._changes[-1:] = merged
        self._firsts[-1:] = [each.first for each in merged]

    def _prune(self) -> None:
        changes, start = self._changes, self.start_offset
        count = 0
        while count < len(changes) and changes[count].last < start:
            count += 1
        if count:
            del changes[:count]
            del self._firsts[:count]
        if changes and changes[0].first < start:
            changes[0] = _part_from(changes[0], start)
            self._firsts[0] = start


def to_folded_state(state: LoadedState) -> FoldedState:
    """Return a folded state that starts with a loaded state."""
    folded = FoldedState(state.start_offset)
    folded.lease_bound, folded.done_count = state.lease_bound, state.done_count
    folded.dead_ranges, folded.redrives, folded.producer = state.dead_ranges, state.redrives, state.producer
    folded.isolations = state.isolations
    for change in state.changes:
        folded._put_change(change)
    folded._prune()
    return folded


def to_loaded_state(
    folded: FoldedState,
    *,
    state_epoch: int,
    leader_epoch: int,
    snapshot_epoch: int,
    is_complete: bool = True,
    withheld_ms: int = 0,
) -> LoadedState:
    """Return the folded state as an immutable `LoadedState` with these epochs."""
    return LoadedState(
        state_epoch,
        leader_epoch,
        snapshot_epoch,
        folded.start_offset,
        folded.lease_bound,
        folded.done_count,
        folded.changes,
        folded.dead_ranges,
        folded.redrives,
        folded.producer,
        is_complete,
        withheld_ms,
        folded.isolations,
    )


def fold(state: LoadedState, update: Update) -> LoadedState:
    """Return the state after an update."""
    folded = to_folded_state(state)
    folded.apply(update)
    return to_loaded_state(
        folded,
        state_epoch=state.state_epoch,
        leader_epoch=state.leader_epoch,
        snapshot_epoch=state.snapshot_epoch,
        is_complete=state.is_complete,
        withheld_ms=state.withheld_ms,
    )


def _is_stored(change: StateBatch) -> bool:
    """Whether the state differs from that of offsets in no range, which are AVAILABLE and were never delivered."""
    return change[2:] != _DEFAULT_STATE


def _part_from(change: StateBatch, first: int) -> StateBatch:
    """Return the part of a range from the offset `first` on."""
    if change.reservation is None:
        return change._replace(first=first)
    return change._replace(first=first, reservation=_reservation_at(change, first))


def _reservation_at(change: StateBatch, offset: int) -> DeadLetterReservation | None:
    """Return the reservation of the part of a range that starts at this offset, with the sequence of that offset."""
    reservation = change.reservation
    if reservation is None or reservation.producer_id < 0:
        return reservation
    return reservation._replace(sequence=(reservation.sequence + offset - change.first) & SEQUENCE_MAX)


def _merge_adjacent(changes: list[StateBatch]) -> list[StateBatch]:
    merged = changes[:1]
    for change in changes[1:]:
        last = merged[-1]
        if (
            last.last + 1 == change.first
            and last[2:-1] == change[2:-1]
            and _reservation_at(last, change.first) == change.reservation
        ):
            merged[-1] = StateBatch(last.first, change.last, *last[2:])
        else:
            merged.append(change)
    return merged


def restore_in_flight_batches(
    state: LoadedState,
    *,
    lock_ms: int,
    log_end: int,
    now_ms: float,
    wall_ms: int,
    own: OwnOffsets | None = None,
) -> InFlightBatches:
    """Create the in-flight batches of a stored state. `log_end`: end offset of this broker's log, above all delivered
    offsets. `lock_ms`: duration of leases. `own`: the offsets of the share partition; None if it has all."""
    in_flight = InFlightBatches(state.start_offset)
    for change in state.changes:
        if change.last < state.start_offset:
            continue
        first = max(change.first, state.start_offset)
        parts: Iterable[tuple[int, int]] = [(first, change.last)]
        if own is not None and change.state == AVAILABLE and change.last < own.end:
            parts = own.within(first, change.last)  # others were passed, which a lost update did not store
        for part in parts:
            for batch in in_flight.ranges.split(*part):
                batch.restore(change, lock_ms=lock_ms, now_ms=now_ms, wall_ms=wall_ms)
    if not state.is_complete:
        _withhold(in_flight, min(state.lease_bound, log_end), now_ms + max(state.withheld_ms, 0), own)
    in_flight.restore_counts()
    return in_flight


def with_known_state(state: LoadedState, known: LoadedState) -> LoadedState:
    """Complete a state from which updates were lost with the in-memory state (`known`) of a leader that led before and
    after the loss; returns the stored state unchanged if it is complete or the epochs differ.

    Only first deliveries can be missing: everything else that members were told is stored durably. Of a terminal change
    that is not stored no member was told, so its records become AVAILABLE.
    """
    if state.is_complete or (known.leader_epoch, known.state_epoch) != (
        state.leader_epoch,
        state.state_epoch,
    ):
        return state
    deliveries = tuple(
        each
        if each.state in (ACQUIRED, AVAILABLE)
        else StateBatch(each.first, each.last, AVAILABLE, each.deliveries, each.uncounted_deliveries)
        for each in known.changes
        if each.deliveries
    )
    changes = to_folded_state(state._replace(changes=deliveries + state.changes)).changes
    return state._replace(changes=changes, is_complete=True, withheld_ms=0)


def _withhold(in_flight: InFlightBatches, stop: int, until_ms: float, own: OwnOffsets | None) -> None:
    """Withhold the offsets below `stop` that have no stored delivery."""
    ranges = in_flight.ranges
    if stop <= ranges.start:
        return
    wanted = [(ranges.start, stop - 1)] if own is None else [*own.within(ranges.start, stop - 1)]
    for first, last in wanted:
        for batch in ranges.split(first, last):
            if batch.state == AVAILABLE and batch.deliveries == 0:
                batch.state = WITHHELD
                batch.deliveries, batch.uncounted_deliveries, batch.deadline_ms = 1, 1, until_ms


def stored_batches(in_flight: InFlightBatches, *, now_ms: float, wall_ms: int) -> tuple[StateBatch, ...]:
    """Convert in-flight batches into the ranges of a stored state. Offsets in no range are AVAILABLE and were never
    delivered."""
    found = []
    for change in state_batches(in_flight.ranges):
        if change.state == WITHHELD:
            found += _withheld_as_backoff(in_flight, change, now_ms, wall_ms)
        elif change.state != AVAILABLE or change.deliveries:
            found.append(change)
    return tuple(found)


def _withheld_as_backoff(
    in_flight: InFlightBatches, change: StateBatch, now_ms: float, wall_ms: int
) -> list[StateBatch]:
    """Return a withheld range as AVAILABLE ranges with a backoff until the withholding ends."""
    return [
        StateBatch(
            max(batch.first, change.first),
            min(batch.last, change.last),
            AVAILABLE,
            batch.deliveries,
            batch.uncounted_deliveries,
            due_ms=wall_ms + max(round(batch.deadline_ms - now_ms), 0),
        )
        for batch in in_flight.ranges.overlapping(change.first, change.last)
    ]


def full_update(token: int, state: LoadedState) -> Update:
    """Return an update with the whole state, which replaces the stored one."""
    return Update(
        token,
        durable=True,
        start_offset=state.start_offset,
        lease_bound=state.lease_bound,
        done_count=state.done_count,
        changes=state.changes,
        is_snapshot=True,
        dead_ranges=state.dead_ranges,
        redrives=state.redrives,
        producer=state.producer,
        isolations=state.isolations or None,
    )
