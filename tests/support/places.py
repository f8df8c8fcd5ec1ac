"""Where things are: the root of the project, its commands, the unpacked Debian tools; and free ports.

Ports come from below the range from which the system takes ports for outgoing connections, so no client's own
socket can sit on one; and every xdist worker has a stretch of its own, so no two tests are given the same.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".tools" / "bin"

FIRST_PORT = 20_000
PORTS_PER_WORKER = 1_500
WORKERS_MAX = 8


def _stretch() -> Iterator[int]:
    """The ports of this worker, round and round: those of another one may be of a broker that is about to come back."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS_MAX
    for number in itertools.count(os.getpid()):
        yield FIRST_PORT + worker * PORTS_PER_WORKER + number % PORTS_PER_WORKER


_next_port = _stretch()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on now, and which this test process gave to nobody else for long."""
    for _ in range(PORTS_PER_WORKER):
        port = next(_next_port)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise RuntimeError("no free port")


def mansio_command() -> list[str]:
    """The `mansio` command of the interpreter that runs the tests, as an argument list to append to."""
    return [sys.executable, "-m", "mansio.cli.main"]


def required_tool(name: str) -> str:
    """Path of a program that is no Python package (kcat, ...): from `.tools/`, else from PATH.

    Missing, it is a failure where `CI` is set and a skip that says what to do elsewhere.
    """
    for path in (str(TOOLS / name), name):
        found = shutil.which(path)
        if found:
            return found
    reason = f"{name} is missing: `make setup` unpacks it into .tools/"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
