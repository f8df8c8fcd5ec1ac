"""The workflows run targets of the Makefile only; each command runs its tests, and fails when they do.

The commands run in a copy of the Makefile, where a program of the test stands for Python and all that it starts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from support.machine import scaled
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / ".github" / "workflows"
SUPPORTED = ["3.11", "3.12", "3.13", "3.14"]
EXPRESSION = re.compile(r"\$\{\{ *matrix\.(\w+) *\}\}")
NOT_IN_NIGHTLY_WORKFLOW = {"flaky", "pythons"}

STUB = r"""#!/bin/sh
echo "$*" >>"$TEST_CALLS"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"-m pytest "* | *"support.outcomes end"* | "-m nightly.suites"* | "-m bench.peers"* | \
        "-m tools.docs_site"*) exit "$TEST_EXIT" ;;
esac
"""
FIND_PYTHON = '#!/bin/sh\n[ "$1" != 3.99 ] && echo "$TEST_PYTHON"\n'
SPARK_VENV = '#!/bin/sh\n"$TEST_PYTHON" -m venv "$2"\n'
MADE_AT_S = 1_700_000_000
MADE = [
    ".dev",
    ".runtime",
    ".build",
    ".spark",
    ".spark-classes",
    ".compiled",
    ".browser",
    ".docs",
    ".engines",
    ".fuzz",
    ".peers",
]


class Command(NamedTuple):
    workflow: str
    words: tuple[str, ...]


def workflow(name: str) -> dict[Any, Any]:
    return dict(yaml.safe_load((FOLDER / f"{name}.yml").read_text()))


def jobs() -> list[tuple[str, dict[str, Any]]]:
    return [
        (path.stem, job) for path in sorted(FOLDER.iterdir()) for job in workflow(path.stem)["jobs"].values()
    ]


def commands() -> list[Command]:
    """Each command with each value of its matrix."""
    found = []
    for name, job in jobs():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            if "run" not in step:
                continue
            keys = EXPRESSION.findall(step["run"])
            assert len(keys) <= 1
            values = matrix[keys[0]] if keys else [""]
            found += [Command(name, tuple(EXPRESSION.sub(value, step["run"]).split())) for value in values]
    return found


class Tree:
    """The Makefile with stand-ins for what it starts; everything is made already."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls = root / "calls"
        for name in re.findall(r"\b(?:tools|tests|src|bench)/[\w./-]+\.(?:sh|py|xml)\b", self.makefile()):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        for name in ("pyproject.toml", "constraints.txt"):
            (root / name).touch()
        shutil.copy(ROOT / "Makefile", root)
        python = self.program(".venv/bin/python", STUB)
        for name in ("ruff", "lint-imports", "mypy"):
            self.program(f".venv/bin/{name}", "#!/bin/sh\n")
        self.program("tools/find_python.sh", FIND_PYTHON)
        self.program("tools/spark_venv.sh", SPARK_VENV)
        (root / ".tools").mkdir()
        for path in (
            *(root / ".venv" / name for name in MADE),
            root / ".tools/.unpacked",
            root / ".tools/.image",
        ):
            path.touch()
        # All of one time: otherwise a tick of the clock between two of them makes `make` build some of them again.
        for path in root.rglob("*"):
            os.utime(path, (MADE_AT_S, MADE_AT_S))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTEST"))},
            "TEST_CALLS": str(self.calls),
            "TEST_PYTHON": str(python),
            "CI": "true",
        }

    @staticmethod
    def makefile() -> str:
        return (ROOT / "Makefile").read_text()

    def program(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, words: tuple[str, ...], *, tests_exit: int) -> int:
        self.calls.unlink(missing_ok=True)
        return subprocess.run(
            words,
            cwd=self.root,
            env={**self.environment, "TEST_EXIT": str(tests_exit)},
            capture_output=True,
            timeout=scaled(60),
        ).returncode


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_workflows_run_make_only() -> None:
    words = [command.words for command in commands()]
    assert {each[0] for each in words} == {"make"}
    assert {("make", "quick"), ("make", "test"), ("make", "full")} <= set(words)
    assert not [path for path in FOLDER.iterdir() if "secrets." in path.read_text()]


@pytest.mark.parametrize("command", commands(), ids=lambda command: "-".join(command.words))
def test_a_command_of_a_workflow_runs_checks_and_fails_when_they_do(tree: Tree, command: Command) -> None:
    assert tree.run(command.words, tests_exit=0) == 0
    assert re.search(r"-m (pytest|nightly\.suites|bench\.peers|tools\.docs_site)", tree.calls.read_text())
    assert tree.run(command.words, tests_exit=1) != 0


def test_a_missing_python_is_a_failure_in_ci(tree: Tree) -> None:
    assert tree.run(("make", "nightly-pythons", "PYTHONS=3.99"), tests_exit=0) != 0


def test_the_matrix_has_every_supported_python_and_only_the_next_one_may_fail() -> None:
    (job,) = workflow("pythons")["jobs"].values()
    pythons = job["strategy"]["matrix"]["python"]
    assert pythons[:-1] == SUPPORTED
    assert job["continue-on-error"] == f"${{{{ matrix.python == '{pythons[-1]}' }}}}"
    assert not [job for name, job in jobs() if name != "pythons" and "continue-on-error" in job]
    in_makefile = re.search(r"^PYTHONS := (.*)$", Tree.makefile(), re.MULTILINE)
    assert in_makefile is not None
    assert in_makefile[1].split() == SUPPORTED


def test_the_nightly_workflow_has_every_part_of_the_night() -> None:
    parts = re.search(r"^NIGHT_PARTS := (.*)$", Tree.makefile(), re.MULTILINE)
    assert parts is not None
    matrix = workflow("nightly")["jobs"]["part"]["strategy"]["matrix"]["part"]
    assert set(matrix) == set(parts[1].split()) - NOT_IN_NIGHTLY_WORKFLOW


def test_a_workflow_may_only_read_and_has_a_time_limit() -> None:
    for path in FOLDER.iterdir():
        assert workflow(path.stem)["permissions"] == {"contents": "read"}, path
    assert all(job["timeout-minutes"] <= 360 for _, job in jobs())
