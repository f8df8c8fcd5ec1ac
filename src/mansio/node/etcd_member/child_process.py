"""Child process that writes to a log file, is stopped by its process id, and ends with its parent.

It has its own session, so that Ctrl-C in a terminal reaches only the parent, which decides the order of stops. On Linux
it receives SIGTERM when the parent dies, for any reason; on other systems it keeps running after a SIGKILL of the
parent.

Invariant: after `stop` it has ended; its log stays below `LOG_BYTES_MAX` as long as `trim_log` is called.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOG_BYTES_MAX: Final = 16 << 20
LOG_BYTES_KEPT: Final = 1 << 20
TAIL_BYTES_MAX: Final = 64 << 10
STOP_S_MAX: Final = 10.0

# PR_SET_PDEATHSIG is 1. A parent that was already gone when it was set is detected by the parent's id.
_ENDS_WITH_PARENT: Final = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]): sys.exit("the process that started this one has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """One process, started at most once at a time; may be restarted after it ended."""

    def __init__(
        self, command: Sequence[str], log_path: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """`command` is a full path and its arguments; `environment` is added to the parent's."""
        self.command = list(command)
        self.log_path = log_path
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """The process id; 0 if it was never started."""
        return 0 if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it. Its output is appended to the log file. Raises `OSError` if it cannot be started."""
        assert not self.running, "already running"
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.trim_log()
            self._log_start = os.fstat(descriptor).st_size
            self._process = await asyncio.create_subprocess_exec(
                *_launched(self.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit code, negative for the signal that ended it."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Send it a signal; no effect if it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def stop(self, wait_s: float = STOP_S_MAX) -> int | None:
        """SIGTERM, and after `wait_s` SIGKILL; returns when it has ended, with its exit code (None: never started)."""
        if self._process is None:
            return None
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(wait_s):
                return await self._process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self._process.wait()

    # -- log --------

    def output(self) -> str:
        """Its output since it was started, at most the last 64 KiB."""
        try:
            with open(self.log_path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(min(self._log_start, end), end - TAIL_BYTES_MAX))
                return file.read(TAIL_BYTES_MAX).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def tail(self, lines: int = 15) -> list[str]:
        """The last lines of its output."""
        return self.output().splitlines()[-lines:]

    def has_printed(self, *texts: bytes) -> bool:
        """Whether its output since it was started contains one of `texts`. Reads the log file; blocks."""
        try:
            with open(self.log_path, "rb") as file:
                file.seek(min(self._log_start, file.seek(0, os.SEEK_END)))
                return any(text in line for line in file for text in texts)
        except FileNotFoundError:
            return False

    def trim_log(self) -> None:
        """Keep only the end of a log that has grown too long, in `<log>.1`. Output written meanwhile may be lost."""
        try:
            size = os.stat(self.log_path).st_size
        except FileNotFoundError:
            return
        if size <= LOG_BYTES_MAX:
            return
        with open(self.log_path, "rb") as file:
            file.seek(size - LOG_BYTES_KEPT)
            kept = file.read(LOG_BYTES_KEPT)
        with open(f"{self.log_path}.1", "wb") as file:
            file.write(kept)
        os.truncate(self.log_path, 0)
        self._log_start = 0


def _launched(command: Sequence[str]) -> list[str]:
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _ENDS_WITH_PARENT, str(os.getpid()), *command]


def exit_reason(code: int) -> str:
    """An exit code as text."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"
