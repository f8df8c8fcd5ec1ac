"""Temporary directories of killed processes are removed by the next process; those of running processes are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from mansio.spark.session.temp_dirs import make_directory, remove_abandoned_directories, remove_directory

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

OWNER = """
import sys
from mansio.spark.session.temp_dirs import make_directory
print(make_directory("mansio-test-"), flush=True)
sys.stdin.read()
"""


def test_directory_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as owner:
        assert owner.stdout is not None
        theirs = owner.stdout.readline().strip()
        foreign = tmp_path / "mansio-test-without-owner"
        foreign.mkdir()
        assert remove_abandoned_directories("mansio-test-") == []
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    mine = make_directory("mansio-test-")
    assert sorted(os.listdir(tmp_path)) == sorted([foreign.name, os.path.basename(mine)])
    assert not os.path.exists(theirs)
    assert remove_abandoned_directories("mansio-test-") == []
    remove_directory(mine)
    assert os.listdir(tmp_path) == [foreign.name]
