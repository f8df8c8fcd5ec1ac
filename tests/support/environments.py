"""Built distributions, and virtual environments outside the repository that they are installed into.

Distributions are built once per test run: processes of one run share them through a directory beside their temporary
ones. An environment's commands run with an empty home directory and without any path of the repository.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from support.machine import scaled
from support.paths import ROOT
from support.process import inherited

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COMMAND_S = 60.0


@dataclass(frozen=True, slots=True)
class Distributions:
    """The wheel and the source distribution of this source tree."""

    wheel: Path
    source: Path


def build_distributions(shared: Path) -> Distributions:
    """Both distributions in a directory that all processes of a test run share; the first one builds them."""
    pytest.importorskip("build", reason="build is missing: `make setup` installs it")
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "done").exists():
            run([ROOT / "tools" / "dist.sh", shared], environment={"PYTHON": sys.executable})
            (shared / "done").touch()
    (wheel,) = shared.glob("*.whl")
    (source,) = shared.glob("*.tar.gz")
    return Distributions(wheel, source)


def run(
    command: Sequence[str | Path],
    *,
    place: Path | None = None,
    environment: dict[str, str] | None = None,
    seconds: float = COMMAND_S,
) -> str:
    """Standard output of a command that must succeed; with all of its output in the error otherwise."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=place,
        env={**inherited(), **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(seconds),
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


class Environment:
    """A virtual environment with a home and a working directory of its own."""

    def __init__(self, place: Path, python: str = sys.executable) -> None:
        """Created empty, without pip: that of the test run installs into it."""
        self.directory = place / "environment"
        self.home = place / "home"
        self.place = place / "work"
        self.home.mkdir(parents=True)
        self.place.mkdir()
        run([python, "-m", "venv", "--without-pip", self.directory])

    @property
    def bin(self) -> Path:
        return self.directory / "bin"

    @property
    def packages(self) -> Path:
        """Its directory site-packages."""
        (found,) = self.directory.glob("lib/python*/site-packages")
        return found

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its commands."""
        return {
            "HOME": str(self.home),
            "PATH": os.pathsep.join([str(self.bin), os.environ["PATH"]]),
            "PYTHONPATH": "",
            "VIRTUAL_ENV": str(self.directory),
        }

    def use_packages_of_this_interpreter(self) -> None:
        """Make the packages of the test run importable, after its own ones. Its `.pth` files have no effect here."""
        (self.packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *arguments: str | Path, seconds: float = COMMAND_S) -> str:
        """Run pip for this environment with the index that the machine is configured for."""
        pip: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--python",
            self.bin / "python",
        ]
        return run([*pip, *arguments], place=self.place, seconds=seconds)

    def run(self, *command: str, seconds: float = COMMAND_S) -> str:
        """Run one of its commands in its working directory."""
        program = self.bin / command[0]
        return run([program, *command[1:]], place=self.place, environment=self.variables, seconds=seconds)
