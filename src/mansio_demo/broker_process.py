"""A `mansio serve` process that can be killed and restarted on the same ports.

Invariants:
* `start` returns after the `ready` line; after the `with` block the process has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mansio.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

READY_S_MAX = 30.0
STOP_S_MAX = 10.0


class BrokerProcess(AbstractContextManager["BrokerProcess"]):
    """One broker on one directory. The first start chooses free ports; later starts use the same ones."""

    def __init__(self, directory: str, settings: Mapping[str, str] | None = None) -> None:
        """Prepare a broker. `settings`: settings of the broker by name, in addition to the defaults."""
        self.directory = directory
        self._environment = {f"MANSIO_{name.upper()}": text for name, text in (settings or {}).items()}
        self.kafka = "127.0.0.1:0"
        self.http = "127.0.0.1:0"
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed in __exit__

    def start(self) -> float:
        """Start the broker and wait until it is ready. Returns the duration in seconds. Raises `Unavailable` with its
        output.
        """
        started = time.monotonic()
        command = [sys.executable, "-m", "mansio", "serve", "--data", self.directory]
        command += ["--kafka", self.kafka, "--http", self.http]
        process = subprocess.Popen(  # noqa: S603  # our own command line
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **self._environment},
        )
        self._process = process
        ready_timer = threading.Timer(READY_S_MAX, process.kill)
        ready_timer.start()
        line = process.stdout.readline() if process.stdout is not None else ""
        ready_timer.cancel()
        if " ready " not in line:
            self.kill()
            raise Unavailable(f"mansio serve did not start: {self._log_tail()}")
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        self.kafka, self.http = fields["kafka"], fields["http"]
        return time.monotonic() - started

    def kill(self) -> None:
        """SIGKILL: nothing is flushed. No effect if it does not run."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        code = process.wait(STOP_S_MAX)
        if process.stdout is not None:
            process.stdout.close()
        return code

    def _log_tail(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.kill()
        self._errors.close()
