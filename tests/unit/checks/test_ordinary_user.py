"""CI that is started as root runs its command as an ordinary user, and gives the clone back.

Programs of the test stand for those that need root: `id`, `setpriv` and `chown`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere root stays root")

ID = """#!/bin/sh
case "$*" in
    "-u") echo "$TEST_UID" ;;
    *) echo 65534 ;;
esac
"""
CHOWN = """#!/bin/sh
echo "chown $*" >>"$TEST_CALLS"
"""
SETPRIV = """#!/bin/sh
[ "$TEST_REFUSED" != any ] || exit 1
while :; do
    case "$1" in
        --*) shift ;;
        *) break ;;
    esac
done
case "$*" in
    *"$TEST_REFUSED"*) exit 1 ;;
esac
exec "$@"
"""


class Clone:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "above" / "clone"
        self.calls = directory / "calls"
        self.calls.touch()
        (self.path / "tools").mkdir(parents=True)
        for name in ("as_ordinary_user.sh", "find_python.sh"):
            shutil.copy(ROOT / "tools" / name, self.path / "tools")
        self.programs = directory / "programs"
        self.programs.mkdir()
        for name, text in (("id", ID), ("chown", CHOWN), ("setpriv", SETPRIV)):
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)

    def run(
        self, command: str, *, uid: int = 0, refused: str = "nothing"
    ) -> subprocess.CompletedProcess[str]:
        """`refused`: what the ordinary user cannot do; `any`: root may not become that user."""
        environment = {
            **os.environ,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "TEST_UID": str(uid),
            "TEST_CALLS": str(self.calls),
            "TEST_REFUSED": refused,
        }
        return subprocess.run(
            [self.path / "tools" / "as_ordinary_user.sh", "sh", "-c", command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def owners(self) -> list[str]:
        return [line.split()[2] for line in self.calls.read_text().splitlines()]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_root_hands_the_clone_over_and_takes_it_back_and_passes_the_exit_code_on(clone: Clone) -> None:
    ended = clone.run('pwd; echo "$HOME"; test -d "$HOME" && exit 7')
    assert ended.returncode == 7
    notice, place, home = ended.stdout.splitlines()
    assert notice == "Running as an ordinary user (65534)"
    assert place == str(clone.path)
    assert home != os.environ.get("HOME")
    assert not os.path.exists(home), "it is removed"
    status = clone.path.stat()
    assert clone.owners() == ["65534:65534", f"{status.st_uid}:{status.st_gid}"]


def test_an_ordinary_user_runs_the_command_directly(clone: Clone) -> None:
    ended = clone.run('echo "$HOME"; exit 3', uid=1000)
    assert (ended.returncode, ended.stdout) == (3, f"{os.environ.get('HOME', '')}\n")
    assert clone.owners() == []


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ("any", "setpriv cannot change the user here"),
        ("test -x", "a directory above {clone} is closed to other users"),
        ("test -w", "there is no temporary directory that other users may write"),
        ("find_python", "the only suitable Python is closed to other users"),
    ],
)
def test_root_that_cannot_hand_over_states_why_and_runs_the_command(
    clone: Clone, refused: str, reason: str
) -> None:
    ended = clone.run("exit 5", refused=refused)
    assert ended.returncode == 5
    reason = reason.format(clone=clone.path)
    assert ended.stderr == f"Running as root, not as an ordinary user: {reason}\n"
    status = clone.path.stat()
    assert clone.owners() in ([], ["65534:65534", f"{status.st_uid}:{status.st_gid}"])
