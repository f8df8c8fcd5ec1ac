"""Monitors of the host: free disk space of the data directory, and stalls of the event loop.

A query for free space may block forever on a hung disk. Therefore a daemon thread executes it periodically and no
caller waits: the last result is shown. After a write that failed with disk full, and after the first that succeeds
again, the query is repeated at once (`request_query`), so that a full disk is not shown as one with space.

HTTP runs on the monitored event loop. While the loop is stalled, no health check is answered, and clients notice that
by their timeouts. Therefore recent stalls are reported; a heartbeat that ran late shows them.

Invariants:
* One thread per broker that serves health checks; one log line when the space becomes low and one when it recovers.
* At most `STALLS_KEPT_MAX` stalls are stored; the cost is one timer, nothing per request. The suspension of
  a host counts as a stall, because the clock continues and clients were disconnected.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.services.statistics import LoopHolds
    from mansio.ports import Clock, Timer, Timers


CHECK_INTERVAL_S: Final = 10.0
"""Interval of queries for the free space."""

FIRST_INTERVAL_S: Final = 0.5
"""Interval of queries until the first result, and while the disk is full; at first the directory may not exist yet."""

FULL_FREE_BYTES: Final = 1 << 20
"""The disk counts as full if it has less free space, because log files are extended in steps of up to this size."""

UNRESPONSIVE_AFTER_S: Final = 60.0
"""A file system counts as unresponsive if it has not reported its free space for this time."""

logger = logging.getLogger(__name__)


class DiskSpace(NamedTuple):
    """Free space and size of the file system of the data directory, in bytes."""

    free_bytes: int
    size_bytes: int


def query_disk_space(path: str) -> DiskSpace:
    """Query the operating system for the space of the file system of `path`. Raises `OSError`."""
    usage = shutil.disk_usage(path)
    return DiskSpace(usage.free, usage.total)


class DiskMonitor:
    """Monitors the free space of the file system of `path`. `start` and `stop` may be called from any thread;
    attributes may be read at any time."""

    def __init__(
        self,
        path: str,
        free_warn_bytes: int,
        *,
        query: Callable[[str], DiskSpace] = query_disk_space,
        interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        self.path = path
        self.space: DiskSpace | None = None
        """The last result; None before the first."""
        self._free_warn_bytes = free_warn_bytes
        self._query_host = query
        self._interval_s = interval_s
        self._queried_at = time.monotonic()
        self._error = ""
        self._low = False
        self._stop: threading.Event | None = None
        self._wake = threading.Event()

    def start(self) -> None:
        """Start; a second call has no effect."""
        if self._stop is None:
            self._stop = threading.Event()
            self._wake.clear()
            threading.Thread(
                target=self._run, args=(self._stop,), name="mansio-disk-watch", daemon=True
            ).start()

    def stop(self) -> None:
        """Start no further query. A running query may hang; this does not wait for it."""
        if self._stop is not None:
            self._stop.set()
            self._wake.set()
            self._stop = None

    def request_query(self) -> None:
        """Let the thread query at once, because a write failed with disk full or succeeded again. Never blocks."""
        self._wake.set()

    @property
    def is_low(self) -> bool:
        return self.space is not None and self.space.free_bytes < self._free_warn_bytes

    @property
    def is_full(self) -> bool:
        return self.space is not None and self.space.free_bytes < FULL_FREE_BYTES

    def warnings(self) -> list[tuple[str, str]]:
        """Return (reason, detail) pairs with the reasons `disk_full` or `disk_low`, and `disk_unresponsive`."""
        found = []
        space = self.space
        if space is not None and (self.is_low or self.is_full):
            reason = "disk_full" if self.is_full else "disk_low"
            found.append(
                (reason, f"{space.free_bytes:,} of {space.size_bytes:,} bytes are free for {self.path}")
            )
        silent_s = time.monotonic() - self._queried_at
        if self._error:
            found.append(("disk_unresponsive", f"{self.path}: {self._error}"))
        elif self._stop is not None and silent_s > UNRESPONSIVE_AFTER_S:
            found.append(("disk_unresponsive", f"{self.path} has not answered for {silent_s:.0f} s"))
        return found

    def query(self) -> None:
        """Query the free space in the calling thread; may block."""
        try:
            self.space = self._query_host(self.path)
        except FileNotFoundError:  # the broker has not created it yet
            pass
        except OSError as error:
            self._error = str(error)
            return
        self._error = ""
        self._queried_at = time.monotonic()
        if self.is_low != self._low:
            self._low = self.is_low
            self._log_change()

    def _log_change(self) -> None:
        assert self.space is not None
        known = fields(path=self.path, free_bytes=self.space.free_bytes, size_bytes=self.space.size_bytes)
        if self._low:
            logger.warning("disk_space_low", extra=known)
        else:
            logger.info("disk_space_recovered", extra=known)

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._wake.clear()
            self.query()
            soon = self.space is None or self.is_full
            self._wake.wait(min(FIRST_INTERVAL_S, self._interval_s) if soon else self._interval_s)


HEARTBEAT_INTERVAL_MS: Final = 250.0
STALL_LAG_MS_MIN: Final = 1_000.0
"""A heartbeat that runs so late is a stall of the event loop."""

STALL_RETENTION_MS: Final = 30_000.0
"""Time for which a stall is reported."""

STALLS_REPEATED: Final = 3
"""With so many stalls within `STALL_RETENTION_MS` the event loop counts as stalling although it runs now. After one
stall, a probe that took the broker away would only move its load to others."""

STALLS_KEPT_MAX: Final = 64
"""Maximum number of stalls that are stored."""


class Stall(NamedTuple):
    """A stall of the event loop: a heartbeat ran at `ended_at` (monotonic seconds), `lag_ms` late."""

    ended_at: float
    lag_ms: float


class EventLoopMonitor:
    """Detects stalls of one event loop with a periodic timer, the heartbeat. All methods run on that loop."""

    def __init__(
        self,
        scheduler: Timers,
        clock: Clock,
        holds: Callable[[], LoopHolds | None] = lambda: None,
        *,
        stall_lag_ms_min: float = STALL_LAG_MS_MIN,
        stall_retention_ms: float = STALL_RETENTION_MS,
    ) -> None:
        """Create the monitors. `holds`: returns the holds by requests, with which a stall is explained."""
        self._scheduler = scheduler
        self._clock = clock
        self._stall_bound_ms = stall_lag_ms_min
        self._stall_memory_ms = stall_retention_ms
        self._stalls: deque[Stall] = deque(maxlen=STALLS_KEPT_MAX)
        self._timer: Timer | None = None
        self._due_at = 0.0
        self._holds = holds
        self.lag_ms = 0.0
        self.lag_ms_max = 0.0
        self.stalls_total = 0

    def start(self) -> None:
        """Start; a second call has no effect."""
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def hold_ms_max(self) -> float:
        """The longest time since the start for which one request ran without letting others run."""
        holds = self._holds()
        return 0.0 if holds is None else holds.hold_ms_max

    def recent_stalls(self) -> list[Stall]:
        """Return the stored stalls, oldest first. A heartbeat that is overdue now counts as a stall."""
        now = self._clock.monotonic()
        oldest = now - self._stall_memory_ms / 1000
        found = [stall for stall in self._stalls if stall.ended_at >= oldest]
        overdue_ms = (now - self._due_at) * 1000
        if self._timer is not None and overdue_ms >= self._stall_bound_ms:
            found.append(Stall(now, overdue_ms))
        return found

    @property
    def is_stalling(self) -> bool:
        """Whether a heartbeat is overdue now, or stalls are repeated."""
        overdue_ms = (self._clock.monotonic() - self._due_at) * 1000
        is_overdue = self._timer is not None and overdue_ms >= self._stall_bound_ms
        return is_overdue or len(self.recent_stalls()) >= STALLS_REPEATED

    def _arm(self) -> None:
        self._due_at = self._clock.monotonic() + HEARTBEAT_INTERVAL_MS / 1000
        self._timer = self._scheduler.call_later(HEARTBEAT_INTERVAL_MS, self._on_heartbeat)

    def _on_heartbeat(self) -> None:
        now = self._clock.monotonic()
        self.lag_ms = max(0.0, (now - self._due_at) * 1000)
        self.lag_ms_max = max(self.lag_ms_max, self.lag_ms)
        holds = self._holds()
        longest = None if holds is None else holds.take_recent()
        if self.lag_ms >= self._stall_bound_ms:
            self.stalls_total += 1
            self._stalls.append(Stall(now, self.lag_ms))
            known: dict[str, object] = {"lag_ms": round(self.lag_ms), "stalls": self.stalls_total}
            if longest is not None:
                known |= {**longest._asdict(), "hold_ms": round(longest.hold_ms)}
            logger.warning("event_loop_stalled", extra=fields(**known))
        self._arm()
