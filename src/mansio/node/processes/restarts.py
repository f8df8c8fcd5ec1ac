"""Decision whether to restart a broker process that exited. Accesses no process and no clock.

Invariants:
* In a dev-cluster a broker that was stopped with SIGTERM or Ctrl-C is not restarted, because the user has stopped it.
* A broker with a failed log (`log_failed`) is not restarted. After a failed fsync the page cache may hold records that
  are not on the disk, and a restarted broker would read them as if they were.
* In a dev-cluster a broker is restarted at most `RESTARTS_MAX` times in any `RESTART_WINDOW_S`.
"""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass
from typing import Final

from mansio.ports import Backoff

RESTARTS_MAX: Final = 5
RESTART_WINDOW_S: Final = 60.0
RESTART_DELAY_MS_MIN: Final = 500
RESTART_DELAY_MS_MAX: Final = 8_000
FORCED_EXIT_CODE: Final = 130
"""Exit code of `mansio serve` after a second signal."""

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Restart the broker after this delay."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class StayDown:
    """Do not restart the broker, for this reason, which is printed."""

    reason: str


class RestartPolicy:
    """Decides on the restarts of one broker. With `enabled` false it is never restarted. `restarts_max`: None if their
    number is not limited. `restarts_stopped`: whether a broker that was stopped is restarted, too."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        restarts_max: int | None = RESTARTS_MAX,
        restarts_stopped: bool = False,
    ) -> None:
        self._enabled = enabled
        self._restarts_max = restarts_max
        self._restarts_stopped = restarts_stopped
        self._restarts_s: deque[float] = deque()
        self._backoff = Backoff(RESTART_DELAY_MS_MIN, RESTART_DELAY_MS_MAX, jitter=0.0)

    def on_exit(self, code: int, *, log_failed: bool, now_s: float) -> RestartAfter | StayDown:
        """Decide what to do after the broker exited. `code`: exit code, negative for a signal. `log_failed`: whether
        the broker has logged `log_failed`. `now_s`: monotonic time in seconds.
        """
        if not self._enabled:
            return StayDown("--no-restart")
        is_stopped = code in (0, FORCED_EXIT_CODE) or -code in STOP_SIGNALS
        if is_stopped and not self._restarts_stopped:
            return StayDown("it was stopped")
        if log_failed:
            return StayDown(
                "a write or flush of a log failed: the disk may lack records that the page cache holds"
            )
        restarts = self._restarts_s
        while restarts and restarts[0] <= now_s - RESTART_WINDOW_S:
            restarts.popleft()
        if len(restarts) == self._restarts_max:
            return StayDown(f"it was restarted {len(restarts)} times within {RESTART_WINDOW_S:g} s")
        delay_s = self._backoff.delay_seconds(len(restarts) + 1)
        restarts.append(now_s + delay_s)
        return RestartAfter(delay_s)
