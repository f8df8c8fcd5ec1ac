"""Child process that writes to a log file, and ends with its parent.

It has its own session (setsid), so that Ctrl-C in a terminal reaches only the parent, which decides in which order
processes stop. On Linux the child receives SIGTERM when the parent ends for any reason; on other systems it keeps
running after a SIGKILL of the parent.

Invariant: when `stop` returns, the process has ended. `trim_log` keeps the log file near `LOG_BYTES_MAX`.
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

# PR_SET_PDEATHSIG is 1, SIGTERM is 15. The comparison of parent ids detects a parent that ended before the call.
_ENDS_WITH_PARENT: Final = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]): sys.exit("the process that started this one has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """A child process. It may be started again after it has ended."""

    def __init__(
        self, command: Sequence[str], log_path: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """`command` is the full path of a program and its arguments; `environment` is added to the parent's."""
        self.command = list(command)
        self.log_path = log_path
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """The process id of the last start; 0 if the process was never started."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process; its output is appended to the log file. Raises `OSError` if it cannot be started."""
        assert not self.is_running, "already running"
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.trim_log()
            self._log_start = os.fstat(descriptor).st_size
            self._process = await asyncio.create_subprocess_exec(
                *_wrapped_command(self.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    async def wait(self) -> int:
        """Wait until the process has ended; returns its exit code, negative for the signal that ended it."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send the signal `number` to the process; no effect if it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def stop(self, wait_s: float = STOP_S_MAX) -> int | None:
        """Send SIGTERM, and SIGKILL after `wait_s` seconds; wait until the process has ended.

        Returns its exit code, None if it was never started.
        """
        if self._process is None:
            return None
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(wait_s):
                return await self._process.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return await self._process.wait()

    # -- log --------

    def output(self) -> str:
        """Return the output of the process since its last start, at most the last 64 KiB."""
        try:
            with open(self.log_path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(min(self._log_start, end), end - TAIL_BYTES_MAX))
                return file.read(TAIL_BYTES_MAX).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def tail(self, lines: int = 15) -> list[str]:
        """Return the last lines of the output of the process since its last start."""
        return self.output().splitlines()[-lines:]

    def has_printed(self, *texts: bytes) -> bool:
        """Whether the output of the process since its last start contains one of `texts`. Blocks."""
        try:
            with open(self.log_path, "rb") as file:
                file.seek(min(self._log_start, file.seek(0, os.SEEK_END)))
                return any(text in line for line in file for text in texts)
        except FileNotFoundError:
            return False

    def trim_log(self) -> None:
        """If the log file exceeds `LOG_BYTES_MAX`, move its last `LOG_BYTES_KEPT` to `<log>.1` and empty it.

        Output that is written meanwhile may be lost.
        """
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


def _wrapped_command(command: Sequence[str]) -> list[str]:
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _ENDS_WITH_PARENT, str(os.getpid()), *command]


def exit_reason(code: int) -> str:
    """Text for an exit code, for example "exit code 1" or "killed by SIGKILL"."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"
