"""Paths of the project root, its commands and the unpacked Debian tools; and free ports.

Ports come from below the range from which the system takes ports for outgoing connections, so no client's own
socket can sit on one; and every process uses a range of its own, so no two tests get the same port,
even in test runs side by side on one machine.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".tools" / "bin"

FIRST_PORT = 20_000
PORTS_PER_PROCESS = 500
PORT_RANGES = 24


def _port_range() -> Iterator[int]:
    """The ports of this process, round and round: those of another one may be of a broker that is about to come back.

    The first of them says whose they are: it is bound, and that ends with the process."""
    for number in range(PORT_RANGES):
        first = FIRST_PORT + number * PORTS_PER_PROCESS
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
        except OSError:
            claim.close()
            continue
        with claim:
            yield from itertools.cycle(range(first + 1, first + PORTS_PER_PROCESS))
    raise RuntimeError(f"all {PORT_RANGES} stretches of ports are taken: too many test runs at once")


_next_port = _port_range()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port without a listener, which this test process has not returned recently."""
    for _ in range(PORTS_PER_PROCESS):
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


def required_package(name: str) -> None:
    """Skip the test when the package `name` is not installed; where `CI` is set, fail it."""
    if importlib.util.find_spec(name) is None:
        _missing(f"{name} is missing: `make setup` installs it")


def required_tool(name: str) -> str:
    """Path of a program that is no Python package (kcat, ...): from `.tools/`, else from PATH.

    Missing, it is a failure where `CI` is set and a skip that says what to do elsewhere.
    """
    for path in (str(TOOLS / name), name):
        found = shutil.which(path)
        if found:
            return found
    return _missing(f"{name} is missing: `make setup` unpacks it into .tools/")


def _missing(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
