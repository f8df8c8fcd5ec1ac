"""Commands of a suite: each has a time limit, a log file and a process group that ends with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Final

from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


_running: Final[set[subprocess.Popen[bytes]]] = set()


class TimeLimitExceeded(Exception):
    """The command was killed; `output` is what it had written."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    limit_s: float,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
) -> tuple[int, str]:
    """Exit code and output, standard error included; all of it is appended to `log`.

    `limit_s` is in seconds and is scaled by the speed of the machine. Raises TimeLimitExceeded when it is over, with
    the command and the processes it started killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ {' '.join(map(str, command))}\n".encode())
        output.flush()
        begin = output.tell()
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=directory,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        allowed_s = scaled(limit_s)
        in_time = True
        try:
            process.communicate(stdin.encode(), timeout=allowed_s)
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            _end(process)
            _running.discard(process)
    with log.open("rb") as written:
        written.seek(begin)
        text = written.read().decode(errors="replace")
    if not in_time:
        raise TimeLimitExceeded(f"{command[0]}: no end within {allowed_s:.0f} s, see {log}", text)
    return process.returncode, text


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process and of those it started, which have its pid as their group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_all() -> None:
    """Kill what runs in any thread, so that a suite that is interrupted ends at once."""
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def checked(
    command: Sequence[str | Path],
    *,
    log: Path,
    limit_s: float,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """The output of a command whose exit code has to be 0; RuntimeError with its end otherwise."""
    code, output = run(command, log=log, limit_s=limit_s, directory=directory, environment=environment)
    if code:
        raise RuntimeError(f"{command[0]} ended with {code}, see {log}:\n{output[-2000:]}")
    return output


def copied(source: Path, target: Path) -> None:
    """A copy that can be changed of a tree whose files and directories may be read-only."""
    shutil.rmtree(target, ignore_errors=True)
    for folder, _, files in os.walk(source):
        into = target / os.path.relpath(folder, source)
        into.mkdir(parents=True, exist_ok=True)
        for name in files:
            shutil.copyfile(os.path.join(folder, name), into / name)
