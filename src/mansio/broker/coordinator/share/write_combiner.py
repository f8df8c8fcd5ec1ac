"""Whose turn it is to write: the order in which the updates of one share partition are stored, and which go as one.

Many members of a group who fetch or acknowledge at the same time cost one record, not one each. What has to be durable
waits while something durable is under way, and all that waits is stored as one when that is known: the disk, or the
replicas, would have kept it waiting all the same. And once several updates of a kind came in one turn of the loop, the
next turns are waited for to their ends, until one of them brings but one again.

It may be so, and what need not be durable may pass what has to, because updates that are not stored yet speak of
different offsets: they come to the same in any order.

Always true: a whole state is written alone, after all that came before it and before all that comes after it; one
durable update is under way at most; those of a kind are stored in the order in which they came; what is stored as one
has `COMBINED_RANGES_MAX` ranges at most, or is a single update; nothing waits for longer than the turn of the
loop, or for what is under way.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Promise, Scheduler
    from mansio.state.share_partition.types import DeadRange, Update

COMBINED_RANGES_MAX: Final = 2_000


class CombinedWrite:
    """Updates that are stored as one. Whoever came first writes them; `followers` are told by `complete`."""

    __slots__ = ("durable", "followers", "promise", "ranges", "updates", "waits", "whole")

    def __init__(self, updates: Sequence[Update]) -> None:
        self.updates = list(updates)
        self.whole = any(each.snapshot for each in updates)
        self.durable = any(each.durable for each in updates)
        self.ranges = sum(len(each.changes) for each in updates)
        self.promise: Promise[None] | None = None
        """Kept when it has come; None if that was at once."""
        self.waits = False
        self.followers: list[Promise[bool]] = []

    def complete(self, *, stored: bool) -> None:
        """It was written, or was not; nobody else writes it."""
        followers, self.followers = self.followers, []
        for promise in followers:
            if not promise.done():  # who waited was broken off
                promise.set_result(stored)

    def start(self) -> None:
        """Whoever waits for it goes on."""
        self.waits = False
        if self.promise is not None and not self.promise.done():
            self.promise.set_result(None)


class WriteCombiner:
    """Of one share partition; see the module. Pairs are of what need not be durable, and what has to."""

    __slots__ = (
        "_alone",
        "_came",
        "_durable",
        "_ends",
        "_gathering",
        "_many",
        "_queue",
        "_scheduler",
        "_under_way",
        "_wholes",
    )

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: deque[CombinedWrite] = deque()
        self._wholes = 0  # in the queue
        self._under_way = 0
        self._alone = False  # a whole state is under way
        self._durable = False  # something durable is under way
        self._ends = False  # `_turn_ends` is due
        self._came = [0, 0]  # in this turn of the loop
        self._many = [False, False]  # several came in one turn
        self._gathering: list[CombinedWrite | None] = [None, None]

    def __bool__(self) -> bool:
        """Is anything under way, or waiting?"""
        return bool(self._under_way or self._queue or any(self._gathering))

    def join(self, updates: Sequence[Update]) -> Promise[bool] | None:
        """Have these stored with what waits already; kept when that is over: was it stored? None if nothing waits that
        they can go with."""
        durable, ranges = False, 0
        for each in updates:
            if each.snapshot:
                return None
            durable |= each.durable
            ranges += len(each.changes)
        found = self._gathering[durable]
        if found is None and durable and self._queue:
            found = self._queue[-1]
        if (
            found is None
            or found.whole
            or found.durable != durable
            or found.ranges + ranges > COMBINED_RANGES_MAX
        ):
            return None
        self._came[durable] += 1
        found.updates += updates
        found.ranges += ranges
        promise: Promise[bool] = self._scheduler.promise()
        found.followers.append(promise)
        return promise

    def enqueue(self, updates: Sequence[Update]) -> CombinedWrite:
        """A turn of their own: to be written when it has come, and given back with `finish` in any case."""
        turn = CombinedWrite(updates)
        durable = turn.durable
        if turn.whole:
            self._stop_gathering()
        else:
            self._came[durable] += 1
            if not self._ends:
                self._ends = True
                self._scheduler.call_soon(self._turn_ends)
        if self._gathering[durable] is not None:  # it has no room
            self._stop_gathering()
        if turn.whole or not self._many[durable]:
            self._start_or_queue(turn)
        else:
            turn.promise = self._scheduler.promise()
            turn.waits = True
            self._gathering[durable] = turn
        return turn

    def finish(self, turn: CombinedWrite, *, stored: bool) -> None:
        """It was written, or was not; perhaps it did not even come."""
        if turn.waits:
            turn.waits = False
            if turn in self._queue:
                self._queue.remove(turn)
                self._wholes -= turn.whole
            else:
                self._gathering[turn.durable] = None
            turn.complete(stored=False)
            return
        self._under_way -= 1
        if turn.whole:
            self._alone = False
        elif turn.durable:
            self._durable = False
        turn.complete(stored=stored)
        self._next()

    def end(self) -> None:
        """Whoever waits has its turn: there is nothing to be written any more."""
        self._stop_gathering()
        queue, self._queue, self._wholes = self._queue, deque(), 0
        for turn in queue:
            self._under_way += 1
            turn.start()

    def _turn_ends(self) -> None:
        self._ends = False
        self._stop_gathering()
        for durable in (False, True):
            self._many[durable] = self._came[durable] > 1
            self._came[durable] = 0

    def _stop_gathering(self) -> None:
        for durable in (False, True):
            turn, self._gathering[durable] = self._gathering[durable], None
            if turn is not None:
                self._start_or_queue(turn)

    def _start_or_queue(self, turn: CombinedWrite) -> None:
        """At once, or as soon as may be."""
        if self._wholes or (self._queue and turn.durable) or not self._may_go(turn):
            turn.promise = turn.promise or self._scheduler.promise()
            turn.waits = True
            self._queue.append(turn)
            self._wholes += turn.whole
        else:
            self._go(turn)

    def _next(self) -> None:
        """All that may go now; what need not be durable passes what has to, but no whole state."""
        while self._queue and self._may_go(self._queue[0]):
            turn = self._queue.popleft()
            self._wholes -= turn.whole
            self._go(turn)
        if not self._queue or self._queue[0].whole or self._alone:
            return
        for turn in list(self._queue):
            if turn.whole:
                return
            if not turn.durable:
                self._queue.remove(turn)
                self._go(turn)

    def _may_go(self, turn: CombinedWrite) -> bool:
        if self._alone or (turn.whole and self._under_way):
            return False
        return turn.whole or not turn.durable or not self._durable

    def _go(self, turn: CombinedWrite) -> None:
        self._under_way += 1
        if turn.whole:
            self._alone = True
        elif turn.durable:
            self._durable = True
        turn.start()


def combine_updates(updates: Sequence[Update]) -> Update:
    """Several updates, none of which is the whole state and none of which is stored yet: they speak of different
    offsets."""
    if len(updates) == 1:
        return updates[0]
    furthest = max(updates, key=lambda each: (each.start_offset, each.token))
    last = updates[-1]
    changes = sorted((change for each in updates for change in each.changes), key=lambda change: change.first)

    def newest(name: str) -> Any:
        return next((value for each in reversed(updates) if (value := getattr(each, name)) is not None), None)

    return last._replace(
        durable=any(each.durable for each in updates),
        start_offset=furthest.start_offset,
        done_count=furthest.done_count,
        lease_bound=max(each.lease_bound for each in updates),
        changes=tuple(changes),
        dead=newest("dead"),
        dead_added=_dead_added(updates),
        redrives=newest("redrives"),
        producer=newest("producer"),
    )


def _dead_added(updates: Sequence[Update]) -> tuple[DeadRange, ...]:
    """Since one of them last said all that is dead."""
    added: tuple[DeadRange, ...] = ()
    for each in updates:
        added = each.dead_added if each.dead is not None else added + each.dead_added
    return added
