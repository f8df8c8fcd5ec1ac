"""Which flushes run on the event loop instead of on the flush thread, while the disk is quick.

The hand-over to a thread and back is a large part of a small flush on a quick disk. Such a flush runs at the end of an
iteration of the event loop, for all that arrived in it; the loop stands still meanwhile.

Invariants:
* Only small flushes run on the loop: at most `LOGS_MAX` logs, `BYTES_MAX` bytes, one file each, no epochs.
* After a slow flush all flushes run on the thread for a while, and for twice as long each time it happens again soon:
  a slow disk, or other processes that keep this one from the processor, cost one slow iteration now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Clock
    from mansio.storage.flush.flush_state import FlushJob

LOGS_MAX: Final = 3
BYTES_MAX: Final = 256 << 10

SLOW_S: Final = 0.010
"""A flush of this duration is slow."""
SLOW_AVERAGE_S: Final = 0.001
"""So is the disk when the moving average of flushes exceeds this."""
AVERAGE_WEIGHT: Final = 1 / 8

PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 60.0
QUICK_FLUSHES: Final = 1_000
"""After so many quick flushes in a row the next pause is a short one again."""


class LoopFlushPolicy:
    """All methods belong to the event loop."""

    __slots__ = ("_average_s", "_clock", "_pause_s", "_paused_until_s", "_quick")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._average_s = 0.0
        self._pause_s = PAUSE_S
        self._paused_until_s = 0.0
        self._quick = 0

    def is_paused(self) -> bool:
        """Whether all flushes run on the thread for now."""
        return self._paused_until_s > 0.0 and self._clock.monotonic() < self._paused_until_s

    def may_flush(self, jobs: Sequence[FlushJob]) -> bool:
        """Whether these jobs may run on the loop, as one flush."""
        if len(jobs) > LOGS_MAX or self.is_paused():
            return False
        flushed_bytes = 0
        for job in jobs:
            if job.closing or job.directory_dirty or job.epochs is not None:
                return False
            flushed_bytes += job.size_bytes
        return flushed_bytes <= BYTES_MAX

    def flushed(self, duration_s: float) -> None:
        """A flush on the loop took this long."""
        self._average_s += (duration_s - self._average_s) * AVERAGE_WEIGHT
        if duration_s < SLOW_S and self._average_s < SLOW_AVERAGE_S:
            self._quick += 1
            if self._quick >= QUICK_FLUSHES:
                self._pause_s = PAUSE_S
            return
        self._paused_until_s = self._clock.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        self._average_s, self._quick = 0.0, 0
