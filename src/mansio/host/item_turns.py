"""Turns of the event loop: work with many items runs for about `TURN_S` at a time, and other work in between.

The duration of a turn is measured, so that a turn ends in time however long an item takes; the clock is asked only
every few items. All work of a broker that could hold the loop for longer uses this module. The time from the begin to
the end of a turn is a *slice* of that work; the longest one of each `Work` is a metric.

Invariants:
* A turn has at least one item, and at most `items_max`. Only the items between two looks at the clock exceed its time.
* The clock only decides when other work runs. It does not change what the work does.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from mansio.ports import SliceTimes

TURN_S: Final = 0.001
"""Time after which other work runs."""

ITEMS_PER_TURN: Final = 500
"""Number of items after which other work runs in any case."""

ITEMS_PER_LOOK: Final = 8
"""Number of items after which the clock is asked."""


class Work(StrEnum):
    """Work in the background whose slices are measured. Those of requests are measured as `LoopHolds` does, because a
    request waits for other things, too."""

    DELAYED_DELIVERY = "delayed_delivery"
    """Delivery of delayed records, and firing of schedules."""
    VIEW_REPLAY = "view_replay"
    """Application of a log to the views of features, such as pending records."""
    GROUP_LOAD = "group_load"
    """Loading of groups, transactions and share groups from internal topics."""
    KEY_SCAN = "key_scan"
    """Reading of the keys of a log for a share group with fairness."""
    CHECKPOINT = "checkpoint"
    """Snapshot of the state of groups for a checkpoint."""
    RETENTION = "retention"
    """Checks of all partitions for what can be deleted."""
    COMPACTION_CHOICE = "compaction_choice"
    """Choice of the log that is compacted next."""
    ROLE_CHANGES = "role_changes"
    """Application of the roles of many partitions, at the start of a broker and when a topic is created."""
    ISR_CHECK = "isr_check"
    """Periodic checks of the in-sync sets of all partitions that this broker leads."""
    TRACE = "trace"
    """Encoding of the trace of records, and search in it."""
    HOT_PARTITIONS = "hot_partitions"
    """Measurement of the rates of all partitions that this broker leads, and reading of keys of hot ones."""
    CONTROLLER_PLAN = "controller_plan"
    """Decisions of the controller about all partitions."""


class Loop(Protocol):
    """The part of the port `Scheduler` that turns need."""

    @property
    def slices(self) -> SliceTimes: ...

    async def sleep(self, delay_ms: float) -> None: ...


class ItemTurns:
    """The turns of one piece of work. Items must be independent of each other, as other work runs between them.

    A coroutine calls `next` for each item. Work that goes on in a callback calls `begin`, `is_over` after each item,
    and `end`."""

    __slots__ = ("_began", "_items_max", "_items_per_look", "_left", "_look_at", "_loop", "_work")

    def __init__(
        self,
        loop: Loop,
        work: Work | None = None,
        *,
        items_max: int = ITEMS_PER_TURN,
        items_per_look: int = ITEMS_PER_LOOK,
    ) -> None:
        """Begin the first turn. `work`: of work that waits for nothing else; `items_per_look`: 1 if a single item can
        take a large part of `TURN_S`."""
        self._loop = loop
        self._work = work
        self._items_max = items_max
        self._items_per_look = items_per_look
        self.begin()

    def begin(self) -> None:
        """Begin a turn."""
        self._left = self._items_max
        self._look_at = max(0, self._left - self._items_per_look)
        self._began = self._loop.slices.now()

    def is_over(self, items: int = 1) -> bool:
        """Count items that were processed, or are processed next; return whether other work has to run before."""
        self._left -= items
        if self._left > self._look_at:
            return False
        self._look_at = max(0, self._left - self._items_per_look)
        return self._left <= 0 or self._loop.slices.now() - self._began >= TURN_S

    def end(self) -> float:
        """End the turn; return how long it was, in seconds."""
        took_s = self._loop.slices.now() - self._began
        if self._work is not None:
            self._loop.slices.note(self._work, took_s)
        return took_s

    async def next(self, items: int = 1) -> None:
        """Begin the next item, or the next `items`; let other work run first if the turn is over."""
        if self.is_over(items):
            await self.pause()

    async def pause(self) -> None:
        """End the turn, let other work run, and begin the next one."""
        self.end()
        await self._loop.sleep(0)
        self.begin()
