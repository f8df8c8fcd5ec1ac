"""Processes of `mansio` that are forked from `fork_parent`: a broker starts with a tenth of the processor time of a new
interpreter, which spends most of it on imports, and so does a command.

Always true: there is one parent in each test process, from the first process on; it ends with the test process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from support.machine import scaled
from support.paths import ROOT, mansio_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PARENT: Final = str(Path(__file__).with_name("fork_parent.py"))
POLL_S_MAX: Final = 0.01
IS_POSSIBLE: Final = sys.platform == "linux"
"""macOS does not promise that a process may fork after it has used some of its frameworks."""


class ForkParent:
    """The process that forks, and the requests to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        atexit.register(self.close)

    def close(self) -> None:
        """End it. Brokers that still run go on without a parent that reaps them."""
        with self._process:  # closes the pipes, and waits
            pass

    def ask(self, **request: Any) -> Any:
        with self._lock:
            requests, answers = self._process.stdin, self._process.stdout
            assert requests is not None
            assert answers is not None
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()
            answer = answers.readline()
        assert answer, f"the process that forks others ended with {self._process.wait()}"
        return json.loads(answer)

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: tuple[Path | str, Path | str, Path | str],
        point: str = "",
    ) -> ForkedProcess:
        """`mansio` with these arguments. `files`: its input, output and errors; it appends to the last two. `point`:
        see `killing_serve`."""
        known = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "directory": str(Path.cwd()),
            "files": [os.path.abspath(file) for file in files],
            "point": point,
        }
        return ForkedProcess(self, self.ask(start=known))


@functools.cache
def fork_parent(test_process: int) -> ForkParent:
    """The one of the test process with this id: a process that a test has forked itself gets another one."""
    return ForkParent(os.environ)


class ForkedProcess:
    """As much of `subprocess.Popen` as `ServedBroker` needs."""

    def __init__(self, parent: ForkParent, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code once it is gone, the negative number of a signal that killed it; None while it runs."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._parent.ask(poll=self.pid)
            return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:  # otherwise its id may be another's
                os.kill(self.pid, number)

    def wait(self, deadline_s: float) -> int:
        end = time.monotonic() + deadline_s
        pause_s = 0.001
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("mansio", deadline_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)
        return code


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], *, stdin: bytes = b"", deadline_s: float = 60
) -> subprocess.CompletedProcess[bytes]:
    """Run `mansio` with these arguments and return what it has written and its exit code. For tests of what a command
    does; those of its process (signals, pipes, a terminal) start `mansio_command()` themselves."""
    if not IS_POSSIBLE:
        command = [*mansio_command(), *arguments]
        return subprocess.run(
            command,
            env=environment,
            input=stdin,
            capture_output=True,
            timeout=scaled(deadline_s),
            check=False,
        )
    with tempfile.TemporaryDirectory() as directory:
        given, out, errors = (Path(directory, name) for name in ("in", "out", "errors"))
        given.write_bytes(stdin)
        process = fork_parent(os.getpid()).start(arguments, environment, (given, out, errors))
        try:
            code = process.wait(scaled(deadline_s))
        finally:
            process.kill()
            process.wait(scaled(deadline_s))
        return subprocess.CompletedProcess(arguments, code, out.read_bytes(), errors.read_bytes())
