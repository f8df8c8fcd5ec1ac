"""How much room there is where the data is.

Asking a file system may take for ever when its disk hangs, so a daemon thread asks, now and then, and nobody waits for
it: what is shown is its last answer. A write that finds no room has it asked at once (`check_soon`), and so has the one
that finds room again: a full disk is not shown as one with space.

Always true: one thread per broker that shows health; one log line when the space becomes low and one when it is back.

Notices when the broker's event loop stood still.

HTTP runs on the loop it watches: while the loop is stalled no probe is answered at all, and the prober's
own timeout speaks. What is left to tell is the recent past: a heartbeat the loop should have run at a known
moment ran late.

Always true: the watch keeps at most `STALLS_KEPT` stalls; it costs one timer, nothing per request.
A machine that was suspended looks like a stall too (the clock goes on), and that is right: clients were cut off.
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
"""Until there was an answer: the directory may not have been made yet."""

FULL_BYTES: Final = 1 << 20
"""With less free the disk counts as full: the files of logs grow in steps up to this size."""

SILENCE_S_MAX: Final = 60.0
"""A disk that does not say for so long how much is free is reported as hanging."""

logger = logging.getLogger(__name__)


class Space(NamedTuple):
    """Bytes of the file system that holds the data."""

    free_bytes: int
    size_bytes: int


def host_space(path: str) -> Space:
    """Ask the system. Raises `OSError`."""
    usage = shutil.disk_usage(path)
    return Space(usage.free, usage.total)


class DiskMonitor:
    """Watches the file system of `path`. `start` and `stop` from anywhere; attributes may be read at any time."""

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
        """The last answer; None before the first."""
        self._free_warn_bytes = free_warn_bytes
        self._ask = ask
        self._interval_s = interval_s
        self._asked_at = time.monotonic()
        self._error = ""
        self._low = False
        self._stop: threading.Event | None = None
        self._wake = threading.Event()

    def start(self) -> None:
        """Begin to watch; a second call changes nothing."""
        if self._stop is None:
            self._stop = threading.Event()
            self._wake.clear()
            threading.Thread(
                target=self._run, args=(self._stop,), name="mansio-disk-watch", daemon=True
            ).start()

    def stop(self) -> None:
        """No new look is begun. One that hangs is not waited for."""
        if self._stop is not None:
            self._stop.set()
            self._wake.set()
            self._stop = None

    def check_soon(self) -> None:
        """Something happened to the disk: ask at once, in the thread. Never blocks."""
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
        silent_s = time.monotonic() - self._asked_at
        if self._error:
            found.append(("disk_unresponsive", f"{self.path}: {self._error}"))
        elif self._stop is not None and silent_s > SILENCE_S_MAX:
            found.append(("disk_unresponsive", f"{self.path} has not answered for {silent_s:.0f} s"))
        return found

    def look(self) -> None:
        """Ask once, here and now; may block."""
        try:
            self.space = self._ask(self.path)
        except FileNotFoundError:  # the broker has not made it yet
            pass
        except OSError as error:
            self._error = str(error)
            return
        self._error = ""
        self._asked_at = time.monotonic()
        if self.low != self._low:
            self._low = self.low
            self._say()

    def _say(self) -> None:
        assert self.space is not None
        known = fields(path=self.path, free_bytes=self.space.free_bytes, size_bytes=self.space.size_bytes)
        if self._low:
            logger.warning("disk_space_low", extra=known)
        else:
            logger.info("disk_space_recovered", extra=known)

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._wake.clear()
            self.look()
            soon = self.space is None or self.full
            self._wake.wait(min(FIRST_INTERVAL_S, self._interval_s) if soon else self._interval_s)


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
