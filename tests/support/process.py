"""Process of `mansio serve`, for tests that kill and restart brokers.

Owns: the process and the file its output goes to. It is forked from one that has imported everything (`forked_serve`),
unless a test gives the command to run: `mansio_command()` for a new interpreter. Always true: a broker that was started
is ready when `start` returns; it is stopped or killed by its own pid, and is gone when `stop` or `kill` returns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from support.forked_serve import IS_POSSIBLE, fork_parent
from support.machine import scaled
from support.paths import free_port, mansio_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from support.forked_serve import ForkedProcess

READY_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0


TESTS_OWN = ("MANSIO_TEST_", "MANSIO_NIGHTLY_")
"""What tells the tests something; the broker would refuse it as a setting it does not know."""


def inherited() -> dict[str, str]:
    """The environment a broker gets from the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith(TESTS_OWN)}


class ServedBroker:
    """One broker process over one data directory; it may be started again after `stop` or `kill`."""

    def __init__(
        self,
        data: Path | str,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        http: bool = True,
        command: Sequence[str] | None = None,
    ) -> None:
        """`command`: what runs instead of `mansio`; it gets the same arguments. Of `environment`, the interpreter's own
        variables need a `command`, too."""
        self.command = list(command or mansio_command())
        self.is_forked = command is None and IS_POSSIBLE
        self.point = ""
        """Where the process of the next start kills itself, see `killing_serve`; such a process is forked."""
        self.data = Path(data)
        self.kafka_port = free_port()
        self.http_port = free_port() if http else 0
        self.arguments = list(arguments)
        self.environment = dict(environment or {})
        self.output = self.data.with_name(self.data.name + ".log")
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` of the Kafka listener."""
        return f"127.0.0.1:{self.kafka_port}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> ServedBroker:
        """Start it; return when its `ready` line is out; raise with its output when it dies first."""
        assert not self.running, "already running"
        self.data.parent.mkdir(parents=True, exist_ok=True)
        begin = self.output.stat().st_size if self.output.exists() else 0
        command = [*self.command, "serve", "--data", str(self.data), "--kafka", self.bootstrap_servers]
        command += ["--http", f"127.0.0.1:{self.http_port}" if self.http_port else ""]
        self._process = self._launch([*command, *self.arguments])
        end = time.monotonic() + scaled(READY_DEADLINE_S)
        while b" ready kafka=" not in self._output_since(begin):
            if self._process.poll() is not None:
                raise AssertionError(f"mansio serve ended with {self._process.returncode}:\n{self.text()}")
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"mansio serve was not ready in {READY_DEADLINE_S:g} s:\n{self.text()}")
            time.sleep(0.005)
        return self

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[bytes] | ForkedProcess:
        environment = {**inherited(), "PYTHONUNBUFFERED": "1", **self.environment}
        if self.is_forked or self.point:
            self.output.touch()
            arguments, files = command[len(self.command) :], (os.devnull, self.output, self.output)
            return fork_parent(os.getpid()).start(arguments, environment, files, self.point)
        with self.output.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _output_since(self, begin: int) -> bytes:
        with self.output.open("rb") as output:
            output.seek(begin)
            return output.read()

    def text(self) -> str:
        """Everything it has written to stdout and stderr, over all its runs."""
        return self.output.read_text(errors="replace")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone. Harmless when it is."""
        if self._process is not None:
            self._process.kill()
        self._wait(STOP_DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM, wait, return its exit code. One that does not stop is killed, and that is an error."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"mansio serve ignored SIGTERM for {STOP_DEADLINE_S:g} s") from None

    def _wait(self, deadline_s: float) -> int:
        return 0 if self._process is None else self._process.wait(deadline_s)


@contextmanager
def served(
    data: Path | str,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    http: bool = True,
    command: Sequence[str] | None = None,
) -> Iterator[ServedBroker]:
    """A running broker for a `with` block; killed at its end if it still runs."""
    broker = ServedBroker(data, arguments=arguments, environment=environment, http=http, command=command)
    try:
        yield broker.start()
    finally:
        broker.kill()
