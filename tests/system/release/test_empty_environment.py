"""`pip install` of the wheel and of the source distribution into an empty environment, with all dependencies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from support.environments import Environment
from support.machine import scaled
from support.process import served
from support.quick_start import check_quick_start
from support.smoke import check_version

if TYPE_CHECKING:
    from pathlib import Path

    from support.environments import Distributions

SITE_PACKAGES_BYTES_MAX = 110_000_000
INSTALL_S_MAX = 60.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]


def installed_bytes(environment: Environment) -> int:
    """Size of all installed packages."""
    return sum(path.stat().st_size for path in environment.packages.rglob("*") if path.is_file())


def install(environment: Environment, distribution: Path) -> None:
    """Install with all dependencies; print what it cost."""
    start = time.monotonic()
    environment.pip("install", "--quiet", distribution, seconds=INSTALL_S_MAX)
    took, size = time.monotonic() - start, installed_bytes(environment)
    print(f"{distribution.name}: {took:.1f} s (limit {scaled(INSTALL_S_MAX):.0f} s), {size / 1e6:.0f} MB")
    assert size <= SITE_PACKAGES_BYTES_MAX
    environment.pip("check")


def test_wheel_installs_runs_the_quick_start_and_the_demo_and_uninstalls(
    tmp_path: Path, distributions: Distributions
) -> None:
    environment = Environment(tmp_path)
    empty = files(environment)
    install(environment, distributions.wheel)
    command = [str(environment.bin / "python"), "-m", "mansio"]
    with served(
        environment.place / "mansio-data", command=command, environment=environment.variables
    ) as broker:
        python = environment.bin / "python"
        check_quick_start(broker, python, variables=environment.variables, place=environment.place)
        assert broker.stop() == 0
    shown = environment.run("mansio", "demo", "broker", "--count", "20000", seconds=120)
    assert "20,000" in shown
    environment.pip("uninstall", "--quiet", "--yes", "mansio-mq")
    left = {name for name in files(environment) - empty if "mansio" in name}
    assert left == set()
    assert list(environment.home.iterdir()) == []
    assert {path.name for path in environment.place.iterdir()} == {"mansio-data", "mansio-data.log"}


def test_source_distribution_installs(tmp_path: Path, distributions: Distributions) -> None:
    environment = Environment(tmp_path)
    install(environment, distributions.source)
    check_version(environment)
    assert "Usage: mansio" in environment.run("python", "-m", "mansio", "--help")


def files(environment: Environment) -> set[str]:
    """Names of all files of the environment, relative to it."""
    return {str(path.relative_to(environment.directory)) for path in environment.directory.rglob("*")}
