"""A share partition's state from what is stored, and back.

Always true: * A lease that is found runs a whole duration from now; no deadline is ever stored.
* After a loss, what has no delivery on record but lies below the lease horizon may be in somebody's hands: it is
  WITHHELD for as long as such a lease could last, and counts as delivered once, which is forgiven. Above the horizon
  nothing was ever leased.
* What is stored of a withheld range is a rest until its end, so that no restart ends it early.
* Whoever led through a loss knows every lease that it can have cost: then nothing is withheld.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.share_partition.batch_map import NEVER_MS, InFlightBatch
from mansio.state.share_partition.in_flight import InFlightBatches, changes_of
from mansio.state.share_partition.retry_backoff import REQUESTED_DELAY_MS_MAX
from mansio.state.share_partition.snapshot_delta import from_state
from mansio.state.share_partition.types import ACQUIRED, AVAILABLE, WITHHELD, StateBatch, Update

if TYPE_CHECKING:
    from mansio.state.share_partition.types import LoadedState


def restored(
    state: LoadedState, *, lock_ms: int, log_end: int, now_ms: float, wall_ms: int
) -> InFlightBatches:
    """The window of a stored state. `log_end`: of this broker's log, which is not below what anybody was given."""
    in_flight = InFlightBatches(state.start_offset)
    ranges = in_flight.ranges
    for change in state.changes:
        if change.last < state.start_offset:
            continue
        for batch in ranges.split(max(change.first, state.start_offset), change.last):
            _fill(batch, change, lock_ms, now_ms, wall_ms)
    if not state.is_complete:
        _withhold(in_flight, min(state.lease_bound, log_end), now_ms + max(state.withheld_ms, 0))
    for batch in ranges:
        in_flight.count(batch)
        if batch.deadline_ms != NEVER_MS:
            in_flight.watch(batch.deadline_ms, batch.first, batch.last)
    ranges.merge_around(ranges.start, ranges.end - 1)
    in_flight.done -= ranges.advance_start()
    return in_flight


def with_known_state(state: LoadedState, known: LoadedState) -> LoadedState:
    """A state after a loss, with what the leader knows who has led since before it (`known`, its `snapshot`): the first
    deliveries that are missing. All else that anybody was told is stored durably, so what there is of it holds. What
    was about to be stored for ever was not, and nobody was told: it is free."""
    if state.is_complete or (known.leader_epoch, known.state_epoch) != (
        state.leader_epoch,
        state.state_epoch,
    ):
        return state
    told = tuple(
        each
        if each.state in (ACQUIRED, AVAILABLE)
        else StateBatch(each.first, each.last, AVAILABLE, each.deliveries, each.uncounted_deliveries)
        for each in known.changes
        if each.deliveries
    )
    changes = from_state(state._replace(changes=told + state.changes)).changes
    return state._replace(changes=changes, is_complete=True, withheld_ms=0)


def _fill(batch: InFlightBatch, change: StateBatch, lock_ms: int, now_ms: float, wall_ms: int) -> None:
    batch.state, batch.deliveries, batch.uncounted_deliveries = (
        change.state,
        change.deliveries,
        change.uncounted_deliveries,
    )
    batch.reservation = change.reservation
    if change.state == ACQUIRED:
        batch.holder, batch.deadline_ms = change.holder, now_ms + lock_ms
    elif change.state == AVAILABLE and change.due_ms > wall_ms:
        backoff_ms = min(change.due_ms - wall_ms, REQUESTED_DELAY_MS_MAX)
        batch.due_ms, batch.deadline_ms = wall_ms + backoff_ms, now_ms + backoff_ms


def _withhold(in_flight: InFlightBatches, stop: int, until_ms: float) -> None:
    ranges = in_flight.ranges
    if stop <= ranges.start:
        return
    for batch in ranges.split(ranges.start, stop - 1):
        if batch.state == AVAILABLE and batch.deliveries == 0:
            batch.state = WITHHELD
            batch.deliveries, batch.uncounted_deliveries, batch.deadline_ms = 1, 1, until_ms


def stored(in_flight: InFlightBatches, *, now_ms: float, wall_ms: int) -> tuple[StateBatch, ...]:
    """All that a state has to say of the window; what it leaves out is AVAILABLE and was never delivered."""
    told = []
    for change in changes_of(in_flight.ranges):
        if change.state == WITHHELD:
            told += _parked(in_flight, change, now_ms, wall_ms)
        elif change.state != AVAILABLE or change.deliveries:
            told.append(change)
    return tuple(told)


def _parked(in_flight: InFlightBatches, change: StateBatch, now_ms: float, wall_ms: int) -> list[StateBatch]:
    return [
        StateBatch(
            max(batch.first, change.first),
            min(batch.last, change.last),
            AVAILABLE,
            batch.deliveries,
            batch.uncounted_deliveries,
            due_ms=wall_ms + max(round(batch.deadline_ms - now_ms), 0),
        )
        for batch in in_flight.ranges.within(change.first, change.last)
    ]


def whole(token: int, state: LoadedState) -> Update:
    """A state as the update that puts it in the place of whatever is stored."""
    return Update(
        token,
        durable=True,
        start_offset=state.start_offset,
        lease_bound=state.lease_bound,
        done_count=state.done_count,
        changes=state.changes,
        snapshot=True,
        dead=state.dead,
        redrives=state.redrives,
        producer=state.producer,
    )
