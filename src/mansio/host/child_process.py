"""Child process that ends with its parent, and writes to a log file or to its parent.

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
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence

LOG_BYTES_MAX: Final = 16 << 20
LOG_BYTES_KEPT: Final = 1 << 20
TAIL_BYTES_MAX: Final = 64 << 10
READ_BYTES_MAX: Final = 64 << 10
STOP_S_MAX: Final = 10.0

# PR_SET_PDEATHSIG is 1, SIGTERM is 15. The comparison of parent ids detects a parent that ended before the call.
_ENDS_WITH_PARENT: Final = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]): sys.exit("the process that started this one has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


class LogFile:
    """Log file to which a child process writes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._start = 0

    def open_writer(self) -> int:
        """Return a descriptor for the process that is about to start, which the caller closes. Raises `OSError`."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.trim()
        self._start = os.fstat(descriptor).st_size
        return descriptor

    def text(self) -> str:
        """Return the output of the process since its last start, at most the last 64 KiB."""
        try:
            with open(self.path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(min(self._start, end), end - TAIL_BYTES_MAX))
                return file.read(TAIL_BYTES_MAX).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def find(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Return the first match in a line of the process since its last start. Blocks."""
        try:
            with open(self.path, "rb") as file:
                file.seek(min(self._start, file.seek(0, os.SEEK_END)))
                return next(filter(None, map(pattern.search, file)), None)
        except FileNotFoundError:
            return None

    def trim(self) -> None:
        """If the file exceeds `LOG_BYTES_MAX`, move its last `LOG_BYTES_KEPT` to `<log>.1` and empty it.

        Output that is written meanwhile may be lost.
        """
        try:
            size = os.stat(self.path).st_size
        except FileNotFoundError:
            return
        if size <= LOG_BYTES_MAX:
            return
        with open(self.path, "rb") as file:
            file.seek(size - LOG_BYTES_KEPT)
            kept = file.read(LOG_BYTES_KEPT)
        with open(f"{self.path}.1", "wb") as file:
            file.write(kept)
        os.truncate(self.path, 0)
        self._start = 0


class RelayedOutput:
    """Output of a child process that its parent gets line by line, on the event loop.

    Of the lines since the last start, `text` has the last 64 KiB. A line longer than `READ_BYTES_MAX` comes in parts.
    """

    def __init__(self, on_line: Callable[[bytes], object], watched: Sequence[re.Pattern[bytes]] = ()) -> None:
        """`on_line` is called with each line, its end included. `watched`: the patterns that `find` knows of."""
        self._on_line = on_line
        self._watched = tuple(watched)
        self._found: dict[re.Pattern[bytes], re.Match[bytes]] = {}
        self._reader = -1
        self._begun = b""
        """The line of which the end has not arrived."""
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0

    def open_writer(self) -> int:
        """Return a descriptor for the process that is about to start, which the caller closes. Raises `OSError`."""
        self._close()
        self._found.clear()
        self._kept.clear()
        self._kept_bytes = 0
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)
        return writer

    def text(self) -> str:
        self._read_all()
        return (b"".join(self._kept) + self._begun).decode(errors="replace")

    def find(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Return the first match in a line since the last start, however long ago. The pattern is watched."""
        self._read_all()
        return self._found.get(pattern)

    def _read_all(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        """Read once; return whether there may be more."""
        if self._reader < 0:
            return False
        try:
            data = os.read(self._reader, READ_BYTES_MAX)
        except BlockingIOError:
            return False
        if not data:
            self._close()
            return False
        lines = (self._begun + data).splitlines(keepends=True)
        self._begun = lines.pop() if not lines[-1].endswith(b"\n") else b""
        if len(self._begun) > READ_BYTES_MAX:
            lines.append(self._begun)
            self._begun = b""
        for line in lines:
            self._add(line)
        return True

    def _add(self, line: bytes) -> None:
        for pattern in self._watched:
            if pattern not in self._found and (match := pattern.search(line)) is not None:
                self._found[pattern] = match
        self._kept.append(line)
        self._kept_bytes += len(line)
        while self._kept_bytes > TAIL_BYTES_MAX and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popleft())
        self._on_line(line)

    def _close(self) -> None:
        if self._reader < 0:
            return
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        self._reader = -1
        if self._begun:
            line, self._begun = self._begun, b""
            self._add(line)


class ChildProcess:
    """A child process. It may be started again after it has ended."""

    def __init__(
        self,
        command: Sequence[str],
        output: LogFile | RelayedOutput | str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command` is the full path of a program and its arguments; `output` gets what it writes, a text is the path
        of a log file; `environment` is added to the parent's."""
        self.command = list(command)
        self._output = LogFile(output) if isinstance(output, str) else output
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process id of the last start; 0 if the process was never started."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, stdin: int = asyncio.subprocess.DEVNULL) -> None:
        """Start the process. `stdin`: a descriptor that becomes its standard input. Raises `OSError` if it cannot be
        started."""
        assert not self.is_running, "already running"
        descriptor = self._output.open_writer()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *_wrapped_command(self.command),
                stdin=stdin,
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

    # -- output --------

    def output(self) -> str:
        """Return the output of the process since its last start, at most the last 64 KiB."""
        return self._output.text()

    def tail(self, lines: int = 15) -> list[str]:
        """Return the last lines of the output of the process since its last start."""
        return self.output().splitlines()[-lines:]

    async def find(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Return the first match in a line that the process has written since its last start."""
        if isinstance(self._output, LogFile):
            return await asyncio.to_thread(self._output.find, pattern)
        return self._output.find(pattern)

    def trim_log(self) -> None:
        """Keep the log file near `LOG_BYTES_MAX`."""
        if isinstance(self._output, LogFile):
            self._output.trim()


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
