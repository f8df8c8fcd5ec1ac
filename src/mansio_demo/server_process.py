"""A process of `mansio` that serves the demos, and what their clients need to connect to it.

Invariants:
* `launch` returns after the ready line; after the `with` block the process has ended.
* Until the end of the `with` block, clients in this process, Spark too, find user and password of a secure server in
  the environment. Then the variables are as before. The server does not get them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from mansio.errors import Unavailable
from mansio.net.security_settings import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

READY_S_MAX = 30.0
STOP_S_MAX = 10.0
USER = "admin"


class ServerProcess(AbstractContextManager["ServerProcess"]):
    """One process on one directory."""

    def __init__(
        self, directory: str, settings: Mapping[str, str] | None = None, *, is_secure: bool = False
    ) -> None:
        """Prepare a server. `settings`: settings of the broker by name, in addition to the defaults. `is_secure`:
        whether it has TLS and users."""
        self.directory = directory
        self.is_secure = is_secure
        self._settings = {f"MANSIO_{name.upper()}": text for name, text in (settings or {}).items()}
        self._before: dict[str, str | None] = {}
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed in __exit__

    @property
    def security_directory(self) -> Path:
        """Directory with the files of a secure server."""
        return Path(self.directory, "security")

    def launch(self, arguments: Sequence[str]) -> dict[str, str]:
        """Start `mansio` with `arguments`, wait until it is ready, and return the fields of its ready line. Raises
        `Unavailable` with its output."""
        command = [sys.executable, "-m", "mansio", *arguments, *(["--secure"] if self.is_secure else [])]
        known = {name: text for name, text in os.environ.items() if name not in VARIABLES.values()}
        process = subprocess.Popen(  # noqa: S603  # our own command line
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**known, **self._settings},
        )
        self._process = process
        ready_timer = threading.Timer(READY_S_MAX, process.kill)
        ready_timer.start()
        line = process.stdout.readline() if process.stdout is not None else ""
        ready_timer.cancel()
        if " ready " not in line:
            self.end(signal.SIGTERM)
            raise Unavailable(f"mansio {arguments[0]} did not start: {self._log_tail()}")
        if self.is_secure:
            self._set_environment()
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    @property
    def is_running(self) -> bool:
        """Whether the process was started and not ended."""
        return self._process is not None

    def end(self, number: int) -> int:
        """Send a signal and wait until the process has ended; returns its exit code. No effect if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            code = process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait(STOP_S_MAX)
        if process.stdout is not None:
            process.stdout.close()
        return code

    def _set_environment(self) -> None:
        password = (self.security_directory / "admin.password").read_text(encoding="utf-8").rstrip("\n")
        ours: dict[str, str | None] = {
            "MANSIO_TLS": str(self.security_directory / "ca.pem"),
            "MANSIO_USER": USER,
            "MANSIO_PASSWORD": password,
        }
        others = dict.fromkeys(set(VARIABLES.values()) - set(ours))
        if not self._before:
            self._before = {name: os.environ.get(name) for name in VARIABLES.values()}
        _change_environment({**others, **ours})

    def _log_tail(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end(signal.SIGTERM)
        _change_environment(self._before)
        self._errors.close()


def _change_environment(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process; None removes one."""
    for name, text in variables.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
