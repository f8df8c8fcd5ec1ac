"""The gRPC examples in Go and Node.js: built as their first lines say, and run against `mansio serve --grpc`.

Nightly: needs Go, or Node.js with npm. `protoc` is the one of grpcio-tools.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.machine import scaled
from support.paths import ROOT, free_port
from support.process import served

if TYPE_CHECKING:
    from pathlib import Path

BUILD_DEADLINE_S = 600
RUN_DEADLINE_S = 60
COUNT = 5
PROTO = "src/mansio/api/grpc/mansio.proto"
MADE = ("node_modules", "mansiopb")

pytestmark = pytest.mark.timeout(1200)


def example(language: str, place: Path) -> Path:
    """A copy of the example, beside which the definition of the service is where it is in the repository."""
    (place / PROTO).parent.mkdir(parents=True)
    shutil.copyfile(ROOT / PROTO, place / PROTO)
    folder = f"examples/grpc/{language}"
    return shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns(*MADE))


def go_example(place: Path) -> list[str]:
    source, programs = example("go", place), place / "bin"
    programs.mkdir()
    protoc = programs / "protoc"
    protoc.write_text(f'#!/bin/sh\nexec {sys.executable} -m grpc_tools.protoc "$@"\n')
    protoc.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "GOBIN": str(programs), "GOTOOLCHAIN": "local"}
    for command in (
        ["go", "generate"],
        ["go", "build", "-mod=readonly", "-o", str(programs / "example"), "."],
    ):
        subprocess.run(command, cwd=source, env=environment, check=True, timeout=scaled(BUILD_DEADLINE_S))
    return [str(programs / "example")]


def node_example(place: Path) -> list[str]:
    source = example("node", place)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=source, check=True, timeout=scaled(BUILD_DEADLINE_S))
    return ["node", str(source / "main.js")]


@pytest.fixture(scope="module", params=["go", "node"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts the example; the address of the broker follows."""
    needed = {"go": ["go"], "node": ["node", "npm"]}[request.param]
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} missing")
    made = {"go": go_example, "node": node_example}[request.param]
    return made(tmp_path_factory.mktemp(request.param))


@pytest.mark.row("A2")
def test_the_example_publishes_receives_and_acknowledges(program: list[str], tmp_path: Path) -> None:
    """In a second run, too, in which no record of the first one is received."""
    address = f"127.0.0.1:{free_port()}"
    with served(tmp_path / "data", arguments=["--grpc", address], http=False) as broker:
        for offset in (0, COUNT):
            done = subprocess.run(
                [*program, address],
                capture_output=True,
                text=True,
                timeout=scaled(RUN_DEADLINE_S),
                check=False,
            )
            assert (done.returncode, done.stdout.splitlines()) == (
                0,
                [
                    f"published {COUNT} records at offset {offset}",
                    *(f"received {number} apples" for number in range(COUNT)),
                    f"acknowledged {COUNT} records",
                ],
            ), done.stderr
        assert "Traceback" not in broker.text()


def test_a_broker_that_cannot_be_reached_ends_the_example_with_an_error(program: list[str]) -> None:
    done = subprocess.run(
        [*program, f"127.0.0.1:{free_port()}"],
        capture_output=True,
        text=True,
        timeout=scaled(RUN_DEADLINE_S),
        check=False,
    )
    assert done.returncode == 1
    assert "published" not in done.stdout
    assert done.stderr
