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

from mansio.state.retry import ASKED_MAX_MS
from mansio.state.share_fold import of_state
from mansio.state.share_ranges import NEVER_MS, Span
from mansio.state.share_types import ACQUIRED, AVAILABLE, WITHHELD, Change, Update
from mansio.state.share_window import Window, changes_of

if TYPE_CHECKING:
    from mansio.state.share_types import LoadedState


def restored(state: LoadedState, *, lock_ms: int, log_end: int, now_ms: float, wall_ms: int) -> Window:
    """The window of a stored state. `log_end`: of this broker's log, which is not below what anybody was given."""
    window = Window(state.start_offset)
    ranges = window.ranges
    for change in state.changes:
        if change.last < state.start_offset:
            continue
        for span in ranges.split(max(change.first, state.start_offset), change.last):
            _fill(span, change, lock_ms, now_ms, wall_ms)
    if not state.certain:
        _withhold(window, min(state.horizon, log_end), now_ms + max(state.withheld_ms, 0))
    for span in ranges:
        window.count(span)
        if span.deadline_ms != NEVER_MS:
            window.watch(span.deadline_ms, span.first, span.last)
    ranges.merge_around(ranges.start, ranges.end - 1)
    window.done -= ranges.advance_start()
    return window


def remembered(state: LoadedState, known: LoadedState) -> LoadedState:
    """A state after a loss, with what the leader knows who has led since before it (`known`, its `snapshot`): the first
    deliveries that are missing. All else that anybody was told is stored durably, so what there is of it holds. What
    was about to be stored for ever was not, and nobody was told: it is free."""
    if state.certain or (known.leader_epoch, known.state_epoch) != (state.leader_epoch, state.state_epoch):
        return state
    told = tuple(
        each
        if each.state in (ACQUIRED, AVAILABLE)
        else Change(each.first, each.last, AVAILABLE, each.deliveries, each.forgiven)
        for each in known.changes
        if each.deliveries
    )
    changes = of_state(state._replace(changes=told + state.changes)).changes
    return state._replace(changes=changes, certain=True, withheld_ms=0)


def _fill(span: Span, change: Change, lock_ms: int, now_ms: float, wall_ms: int) -> None:
    span.state, span.deliveries, span.forgiven = change.state, change.deliveries, change.forgiven
    span.ticket = change.ticket
    if change.state == ACQUIRED:
        span.holder, span.deadline_ms = change.holder, now_ms + lock_ms
    elif change.state == AVAILABLE and change.due_ms > wall_ms:
        rest_ms = min(change.due_ms - wall_ms, ASKED_MAX_MS)
        span.due_ms, span.deadline_ms = wall_ms + rest_ms, now_ms + rest_ms


def _withhold(window: Window, stop: int, until_ms: float) -> None:
    ranges = window.ranges
    if stop <= ranges.start:
        return
    for span in ranges.split(ranges.start, stop - 1):
        if span.state == AVAILABLE and span.deliveries == 0:
            span.state = WITHHELD
            span.deliveries, span.forgiven, span.deadline_ms = 1, 1, until_ms


def stored(window: Window, *, now_ms: float, wall_ms: int) -> tuple[Change, ...]:
    """All that a state has to say of the window; what it leaves out is AVAILABLE and was never delivered."""
    told = []
    for change in changes_of(window.ranges):
        if change.state == WITHHELD:
            told += _parked(window, change, now_ms, wall_ms)
        elif change.state != AVAILABLE or change.deliveries:
            told.append(change)
    return tuple(told)


def _parked(window: Window, change: Change, now_ms: float, wall_ms: int) -> list[Change]:
    return [
        Change(
            max(span.first, change.first),
            min(span.last, change.last),
            AVAILABLE,
            span.deliveries,
            span.forgiven,
            due_ms=wall_ms + max(round(span.deadline_ms - now_ms), 0),
        )
        for span in window.ranges.within(change.first, change.last)
    ]


def whole(token: int, state: LoadedState) -> Update:
    """A state as the update that puts it in the place of whatever is stored."""
    return Update(
        token,
        durable=True,
        start_offset=state.start_offset,
        horizon=state.horizon,
        done_count=state.done_count,
        changes=state.changes,
        snapshot=True,
        dead=state.dead,
        redrives=state.redrives,
        producer=state.producer,
    )
