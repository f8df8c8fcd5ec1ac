"""Monitors of the host: free disk space of the data directory, and stalls of the event loop.

The request for free space may block forever on a hung disk, so a daemon thread makes it periodically and no caller
waits: the last result is shown. After a write that failed with disk full, and after the first that succeeds again, it
is repeated at once (`check_soon`), so that a full disk is not shown as one with space.

HTTP runs on the event loop that is monitored: while it is stalled no health check is answered, and the client's own
timeout reports it. What remains to report is the recent past: a heartbeat that ran late.

Invariants:
* One thread per broker that serves health checks; one log line when the space becomes low and one when it recovers.
* At most `STALLS_KEPT` stalls are stored; the cost is one timer, nothing per request. A suspended host counts as a
  stall (the clock continues): clients were disconnected.
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

    from mansio.ports import Clock, Scheduler, Timer


CHECK_INTERVAL_S: Final = 10.0
FIRST_INTERVAL_S: Final = 0.5
"""Interval until the first result: the directory may not exist yet."""

FULL_BYTES: Final = 1 << 20
"""With less free space the disk counts as full: log files are extended in steps up to this size."""

SILENCE_S_MAX: Final = 60.0
"""A file system that does not report its free space for this time is reported as unresponsive."""

logger = logging.getLogger(__name__)


class Space(NamedTuple):
    """Bytes of the file system of the data directory."""

    free_bytes: int
    size_bytes: int


def host_space(path: str) -> Space:
    """Query the operating system. Raises `OSError`."""
    usage = shutil.disk_usage(path)
    return Space(usage.free, usage.total)


class DiskMonitor:
    """Monitors the file system of `path`. `start` and `stop` may be called from any thread; attributes may be read
    at any time."""

    def __init__(
        self,
        path: str,
        free_warn_bytes: int,
        *,
        ask: Callable[[str], Space] = host_space,
        interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        self.path = path
        self.space: Space | None = None
        """The last result; None before the first."""
        self._free_warn_bytes = free_warn_bytes
        self._query_host = ask
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
        """Start no further query. One that hangs is not waited for."""
        if self._stop is not None:
            self._stop.set()
            self._wake.set()
            self._stop = None

    def check_soon(self) -> None:
        """Query at once, in the thread, because a disk error occurred or ended. Never blocks."""
        self._wake.set()

    @property
    def low(self) -> bool:
        return self.space is not None and self.space.free_bytes < self._free_warn_bytes

    @property
    def full(self) -> bool:
        return self.space is not None and self.space.free_bytes < FULL_BYTES

    def warnings(self) -> list[tuple[str, str]]:
        """(reason, detail): `disk_full` or `disk_low`, `disk_unresponsive`."""
        found = []
        space = self.space
        if space is not None and (self.low or self.full):
            reason = "disk_full" if self.full else "disk_low"
            found.append(
                (reason, f"{space.free_bytes:,} of {space.size_bytes:,} bytes are free for {self.path}")
            )
        silent_s = time.monotonic() - self._queried_at
        if self._error:
            found.append(("disk_unresponsive", f"{self.path}: {self._error}"))
        elif self._stop is not None and silent_s > SILENCE_S_MAX:
            found.append(("disk_unresponsive", f"{self.path} has not answered for {silent_s:.0f} s"))
        return found

    def query(self) -> None:
        """Query once, in the calling thread; may block."""
        try:
            self.space = self._query_host(self.path)
        except FileNotFoundError:  # the broker has not created it yet
            pass
        except OSError as error:
            self._error = str(error)
            return
        self._error = ""
        self._queried_at = time.monotonic()
        if self.low != self._low:
            self._low = self.low
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
            soon = self.space is None or self.full
            self._wake.wait(min(FIRST_INTERVAL_S, self._interval_s) if soon else self._interval_s)


HEARTBEAT_MS = 250.0
STALL_BOUND_MS = 1_000.0
STALL_MEMORY_MS = 30_000.0
STALLS_KEPT = 64


class Stall(NamedTuple):
    """The event loop continued at `ended_at` (monotonic seconds), `lag_ms` late."""

    ended_at: float
    lag_ms: float


class EventLoopMonitor:
    """Heartbeat of one event loop. `start` and `stop` are called on that loop; attributes may be read on it at any
    time."""

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
        """Start; a second call has no effect."""
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def recent_stalls(self) -> list[Stall]:
        """The stored stalls, oldest first, including a heartbeat that is overdue now."""
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
