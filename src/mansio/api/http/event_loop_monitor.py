"""Notices when the broker's event loop stood still.

HTTP runs on the loop it watches: while the loop is stalled no probe is answered at all, and the prober's
own timeout speaks. What is left to tell is the recent past: a heartbeat the loop should have run at a known
moment ran late.

Always true: the watch keeps at most `STALLS_KEPT` stalls; it costs one timer, nothing per request.
A machine that was suspended looks like a stall too (the clock goes on), and that is right: clients were cut off.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mansio.logs import fields

if TYPE_CHECKING:
    from mansio.ports import Clock, Scheduler, Timer

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 250.0
STALL_BOUND_MS = 1_000.0
STALL_MEMORY_MS = 30_000.0
STALLS_KEPT = 64


class Stall(NamedTuple):
    """The loop came back at `ended_at` (seconds, monotonic), `lag_ms` later than it should have."""

    ended_at: float
    lag_ms: float


class EventLoopMonitor:
    """A heartbeat on one loop. `start` and `stop` on that loop; everything else may be read from it at
    any time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        *,
        stall_bound_ms: float = STALL_BOUND_MS,
        stall_memory_ms: float = STALL_MEMORY_MS,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._stall_bound_ms = stall_bound_ms
        self._stall_memory_ms = stall_memory_ms
        self._stalls: deque[Stall] = deque(maxlen=STALLS_KEPT)
        self._timer: Timer | None = None
        self._due_at = 0.0
        self.lag_ms = 0.0
        self.lag_ms_max = 0.0
        self.stalls_total = 0

    def start(self) -> None:
        """Begin to beat; a second call changes nothing."""
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def recent_stalls(self) -> list[Stall]:
        """The stalls remembered, oldest first, a beat that is overdue right now included."""
        now = self._clock.monotonic()
        oldest = now - self._stall_memory_ms / 1000
        found = [stall for stall in self._stalls if stall.ended_at >= oldest]
        overdue_ms = (now - self._due_at) * 1000
        if self._timer is not None and overdue_ms >= self._stall_bound_ms:
            found.append(Stall(now, overdue_ms))
        return found

    def _arm(self) -> None:
        self._due_at = self._clock.monotonic() + HEARTBEAT_MS / 1000
        self._timer = self._scheduler.call_later(HEARTBEAT_MS, self._beat)

    def _beat(self) -> None:
        now = self._clock.monotonic()
        self.lag_ms = max(0.0, (now - self._due_at) * 1000)
        self.lag_ms_max = max(self.lag_ms_max, self.lag_ms)
        if self.lag_ms >= self._stall_bound_ms:
            self.stalls_total += 1
            self._stalls.append(Stall(now, self.lag_ms))
            logger.warning(
                "event_loop_stalled", extra=fields(lag_ms=round(self.lag_ms), stalls=self.stalls_total)
            )
        self._arm()
