"""Commands of foreign test suites end within their time limits, with all that they started."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from nightly.suites.commands import TimeLimitExceeded, copied, end_all, run
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = "import time; time.sleep(600)"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", {ENDLESS!r}])
print(child.pid, flush=True)
child.wait() if sys.argv[1] == "waits" else None
"""


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_command_over_its_time_limit_is_killed_with_its_children_and_its_output_is_kept(
    tmp_path: Path,
) -> None:
    with pytest.raises(TimeLimitExceeded, match=r"no end within") as raised:
        run([sys.executable, "-S", "-c", PARENT, "waits"], log=tmp_path / "log", limit_s=0.5)
    child = int(raised.value.output)
    wait_until(lambda: _is_gone(child), 10, "the child is gone")


def test_children_that_outlive_their_command_are_killed(tmp_path: Path) -> None:
    code, output = run([sys.executable, "-S", "-c", PARENT, "ends"], log=tmp_path / "log", limit_s=30)
    assert code == 0
    wait_until(lambda: _is_gone(int(output)), 10, "the child is gone")


def test_commands_of_other_threads_end_when_a_suite_is_interrupted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run, [sys.executable, "-S", "-c", PARENT, "waits"], log=log, limit_s=300)
        wait_until(
            lambda: log.exists() and "".join(log.read_text().split()[-1:]).isdigit(),
            30,
            "the child has started",
        )
        end_all()
        code, _ = done.result(scaled(30))
    assert code == -signal.SIGKILL


def test_a_copy_of_read_only_files_can_be_changed_and_replaced(tmp_path: Path) -> None:
    source, target = tmp_path / "cache", tmp_path / "copy"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "file").write_text("original")
    (source / "inner" / "file").chmod(0o444)
    (source / "inner").chmod(0o555)
    for _ in range(2):
        copied(source, target)
        assert (target / "inner" / "file").read_text() == "original"
        (target / "inner" / "file").write_text("changed")
        (target / "inner" / "another").write_text("new")
    (source / "inner").chmod(0o755)
