"""How much room there is where the data is.

Asking a file system may take for ever when its disk hangs, so a daemon thread asks, now and then, and nobody waits for
it: what is shown is its last answer. A write that finds no room has it asked at once (`check_soon`), and so has the one
that finds room again: a full disk is not shown as one with space.

Always true: one thread per broker that shows health; one log line when the space becomes low and one when it is back.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable

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
