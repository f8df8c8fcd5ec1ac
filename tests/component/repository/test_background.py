"""Scripts that install Spark in the background of the demo: one installation per machine, callers wait for it, and a
failure is reported."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest

from support.machine import scaled
from support.paths import ROOT
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with nothing but the two scripts and a place for what they write."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / "tools").mkdir()
    for name in ("background.sh", "wait_spark.sh"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    return tmp_path


def begin(checkout: Path, command: str) -> str:
    done = subprocess.run(
        ["tools/background.sh", "spark", "sh", "-c", command],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=scaled(20),
        check=True,
    )
    return done.stderr


def wait(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["tools/wait_spark.sh"], cwd=checkout, capture_output=True, text=True, timeout=scaled(30), check=False
    )


def test_two_who_ask_get_one_installation_and_both_can_wait_for_it(checkout: Path) -> None:
    command = "echo begun >>count; while [ ! -e go ]; do sleep 0.05; done; touch .venv/.spark"
    for _ in range(2):
        begin(checkout, command)
    wait_until(lambda: (checkout / "count").exists())
    begin(checkout, command)
    (checkout / "go").touch()
    done = wait(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (checkout / ".venv/.spark").exists()
    assert (checkout / "count").read_text() == "begun\n"
    assert wait(checkout).returncode == 0, "it is over, and that is known"


def test_what_went_wrong_is_shown_and_the_next_try_begins_again(checkout: Path) -> None:
    begin(checkout, "echo no such package; exit 3")
    done = wait(checkout)
    assert done.returncode == 1
    assert "no such package" in done.stderr
    assert "make setup" in done.stderr
    begin(checkout, "true")
    assert wait(checkout).returncode == 0


def test_one_that_was_killed_is_not_waited_for_and_is_begun_again(checkout: Path) -> None:
    begin(checkout, "echo $PPID >parent; while [ ! -e go ]; do sleep 0.05; done")
    parent = checkout / "parent"
    wait_until(lambda: parent.exists() and parent.read_text().strip())
    killed = psutil.Process(int(parent.read_text()))
    killed.kill()
    psutil.wait_procs([killed], timeout=scaled(10))
    try:
        assert "cut short" in begin(checkout, "true")
        assert wait(checkout).returncode == 0
    finally:
        (checkout / "go").touch()  # what it had begun lives on
