"""Server process of a peer: started on loopback, monitored, stopped by process id.

Invariant: everything started here is stopped here, including child processes; no process is stopped by name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import psutil

from bench.peers.peer import PeerUnavailableError, ServerLocation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 20.0
SYNC_CALLS = "fsync,fdatasync,msync,sync_file_range,sync,syncfs"
OUTPUT_SHOWN_CHARACTERS = 500


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """The processes of one server at 127.0.0.1:`place.port`."""

    def __init__(self, place: ServerLocation) -> None:
        self.place = place
        self.processes: list[subprocess.Popen[bytes]] = []
        self.output = place.directory.with_suffix(".log")

    def start(
        self,
        command: Sequence[str | Path | int],
        *,
        environment: Mapping[str, str] | None = None,
        user: int | None = None,
        is_traced: bool = True,
    ) -> None:
        """Start one of its processes, optionally as another user (root only)."""
        arguments = [str(argument) for argument in command]
        if self.place.trace is not None and is_traced:
            arguments = [*_tracing(self.place.trace), *arguments]
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.place.directory,
                env={**os.environ, **(environment or {})},
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        self.processes.append(process)

    def wait_for_port(self, port: int | None = None) -> None:
        """Wait until it accepts connections. Stops it and raises `PeerUnavailableError` on exit or timeout."""
        end = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < end and all(process.poll() is None for process in self.processes):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port or self.place.port), 1).close()
                return
            time.sleep(0.05)
        self.stop()
        said = self.output.read_text(errors="replace").strip()[-OUTPUT_SHOWN_CHARACTERS:]
        raise PeerUnavailableError(f"the server did not start: {said}")

    def tree(self) -> list[psutil.Process]:
        """Its processes and their children."""
        found: dict[int, psutil.Process] = {}
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                top = psutil.Process(process.pid)
                found |= {one.pid: one for one in (top, *top.children(recursive=True))}
        return list(found.values())

    def cpu_s(self) -> float:
        """Their processor time, including ended children."""
        used = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                used += sum(process.cpu_times()[:4])
        return used

    def stop(self) -> None:
        tree = self.tree()
        for process in reversed(self.processes):
            # strace does not forward signals; its child gets the signal directly.
            for one in _traced(process) if self.place.trace is not None else [process]:
                with contextlib.suppress(ProcessLookupError, psutil.Error):
                    one.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(tree, timeout=STOP_DEADLINE_S)
        for left in alive:
            with contextlib.suppress(psutil.Error):
                left.kill()
        for process in self.processes:
            process.wait()
        shutil.rmtree(self.place.directory, ignore_errors=True)


def run_quietly(command: Sequence[str | Path], *, user: int | None = None, **options: Any) -> None:
    """Run a set-up command. Raises `PeerUnavailableError` with its last output if it fails."""
    done = subprocess.run(
        [str(argument) for argument in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_DEADLINE_S,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        **options,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-OUTPUT_SHOWN_CHARACTERS:]
        raise PeerUnavailableError(f"{os.path.basename(str(command[0]))} failed: {said}")


def _tracing(trace: Path) -> list[str]:
    strace = shutil.which("strace")
    if strace is None:
        raise PeerUnavailableError("no strace")
    only = ["-e", f"trace={SYNC_CALLS}", "-e", "signal=none"]
    return [strace, "-f", "--seccomp-bpf", "-qq", "-ttt", *only, "-o", str(trace), "--"]


def _traced(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process.pid).children()
    return []
