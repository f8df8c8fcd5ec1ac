"""When `mansio dev-cluster` restarts a broker that exited: a decision without processes or clocks.

Invariants:
* A broker that was stopped with SIGTERM or Ctrl-C stays down, because it was stopped on purpose.
* A broker whose log failed (`log_failed`) stays down. After a failed fsync the page cache may hold records that are
  not on disk, and a restart would read them as if they were.
* A broker is restarted at most `RESTARTS_MAX` times in any `WINDOW_S`.
"""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass
from typing import Final

from mansio.ports import Backoff

RESTARTS_MAX: Final = 5
WINDOW_S: Final = 60.0
FIRST_DELAY_MS: Final = 500
LONGEST_DELAY_MS: Final = 8_000
FORCED_EXIT_CODE: Final = 130
"""Exit code of `mansio serve` after a second signal."""

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Restart the broker after this delay."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class StayDown:
    """Do not restart the broker, and the reason for people."""

    reason: str


class RestartPolicy:
    """Restarts of one broker. `enabled` False: never restart."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._restarts_s: deque[float] = deque(maxlen=RESTARTS_MAX)
        self._backoff = Backoff(FIRST_DELAY_MS, LONGEST_DELAY_MS, jitter=0.0)

    def on_exit(self, code: int, *, log_failed: bool, now_s: float) -> RestartAfter | StayDown:
        """Decide after an exit. `code`: the exit code, negative for a signal; `now_s`: monotonic seconds."""
        if not self._enabled:
            return StayDown("--no-restart")
        if code in (0, FORCED_EXIT_CODE) or -code in STOP_SIGNALS:
            return StayDown("it was stopped")
        if log_failed:
            return StayDown(
                "a write or flush of a log failed: the disk may lack records that the page cache holds"
            )
        restarts = self._restarts_s
        while restarts and restarts[0] <= now_s - WINDOW_S:
            restarts.popleft()
        if len(restarts) == RESTARTS_MAX:
            return StayDown(f"it was restarted {RESTARTS_MAX} times within {WINDOW_S:g} s")
        delay_s = self._backoff.delay_seconds(len(restarts) + 1)
        restarts.append(now_s + delay_s)
        return RestartAfter(delay_s)
