"""A failed test is repeated in CI only, alone and once; a run is green only if every test has passed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support import outcomes
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CONFTEST = """
from support import outcomes

def pytest_addoption(parser):
    outcomes.add_option(parser)

def pytest_configure(config):
    outcomes.configure(config)
"""

FIRST_TIME = """
import os
from pathlib import Path

def first_time(name):
    # Repetitions are processes without a worker; the file makes it right without workers, too.
    mark = Path(__file__).with_name(f"{name}.seen")
    seen = mark.exists()
    mark.touch()
    return not seen
"""

PASSING = """
def test_passes():
    pass
"""
FAILING = """
def test_always_fails():
    assert False
"""
FLAKY = """
from first_time import first_time

def test_fails_once():
    assert not first_time("flaky")
"""
SET_UP = """
import pytest
from first_time import first_time

@pytest.fixture
def place():
    assert not first_time("setup")

def test_set_up_fails_once(place):
    pass
"""
CRASH = """
import os
from first_time import first_time

def test_process_ends_once():
    if first_time("crash"):
        os._exit(3)
"""
COLLECTION = """
from first_time import first_time

assert not first_time("collection")

def test_of_a_module_that_could_not_be_imported():
    pass
"""
SKIPPED_LATER = """
import pytest
from first_time import first_time

def test_is_skipped_the_second_time():
    if not first_time("skipped"):
        pytest.skip("not here")
    assert False
"""


class Project:
    """Some tests in a directory, run as a recipe of the Makefile runs them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.list = directory / "flaky" / "runs"
        (directory / "pytest.ini").write_text(f"[pytest]\npythonpath = . {ROOT / 'tests'}\n")
        (directory / "conftest.py").write_text(CONFTEST)
        (directory / "first_time.py").write_text(FIRST_TIME)

    def add(self, **modules: str) -> None:
        for name, text in modules.items():
            (self.directory / f"test_{name}.py").write_text(text)

    def run(self, *arguments: str, ci: bool = True, checks: int = 0) -> tuple[int, list[str]]:
        """The exit code and the lines of the end of a run; the pytest part before it is as in the Makefile."""
        left = self.directory / "left"
        left.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--outcomes", str(left)]
        command += ["--continue-on-collection-errors", *arguments]
        exit_code = self._process(command, ci=ci).returncode
        end = [sys.executable, "-m", "support.outcomes", "end", f"--checks={checks}", f"{left}:{exit_code}"]
        ended = self._process(end, ci=ci)
        assert ended.stderr == ""
        return ended.returncode, ended.stdout.splitlines()

    def listed(self, *arguments: str) -> tuple[int, str]:
        ended = self._process([sys.executable, "-m", "support.outcomes", "flaky", *arguments], ci=False)
        return ended.returncode, ended.stdout

    def _process(self, command: list[str], *, ci: bool) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CI"))
        }
        environment |= {"PYTHONPATH": str(ROOT / "tests"), outcomes.LIST_VARIABLE: str(self.list)}
        environment |= {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "xdist.plugin",
        }  # starts sooner
        environment |= {"CI": "true"} if ci else {}
        return subprocess.run(
            command, cwd=self.directory, env=environment, capture_output=True, text=True, timeout=300
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_test_that_passes_alone_is_named_in_the_last_lines_of_a_green_run(project: Project) -> None:
    project.add(flaky=FLAKY, passing=PASSING)
    exit_code, lines = project.run()
    assert exit_code == 0
    assert lines[-2:] == [
        "FLAKY test_flaky.py::test_fails_once: failed, and passed alone",
        "2 passed, 0 failed",
    ]
    exit_code, shown = project.listed()
    assert exit_code == 0
    assert shown.startswith("test_flaky.py::test_fails_once: in 1 of 1 runs")
    assert project.listed("--check")[0] == 1, "what was named fails the nightly run"
    project.listed("--repaired", "test_flaky.py::test_fails_once")
    assert project.listed("--check")[0] == 0


@pytest.mark.full
def test_a_test_that_fails_twice_is_a_failure_beside_a_flaky_one(project: Project) -> None:
    project.add(flaky=FLAKY, failing=FAILING, passing=PASSING)
    exit_code, lines = project.run()
    assert exit_code == 1
    assert lines[-3:] == [
        "FAILED test_failing.py::test_always_fails",
        "FLAKY test_flaky.py::test_fails_once: failed, and passed alone",
        "2 passed, 1 failed",
    ]


def test_nothing_is_repeated_outside_ci(project: Project) -> None:
    project.add(flaky=FLAKY, passing=PASSING)
    exit_code, lines = project.run(ci=False)
    assert exit_code == 1
    assert lines == ["", "FAILED test_flaky.py::test_fails_once", "1 passed, 1 failed"]
    assert not project.list.exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "arguments", "node_id"),
    [
        pytest.param(SET_UP, (), "test_it.py::test_set_up_fails_once", id="set-up"),
        pytest.param(COLLECTION, (), "test_it.py", id="collection"),
        pytest.param(CRASH, ("-n1",), "test_it.py::test_process_ends_once", id="worker"),
    ],
)
def test_failures_of_set_up_collection_and_workers_are_repeated(
    project: Project, text: str, arguments: tuple[str, ...], node_id: str
) -> None:
    project.add(it=text, passing=PASSING)
    exit_code, lines = project.run(*arguments)
    assert exit_code == 0, lines
    assert f"FLAKY {node_id}: failed, and passed alone" in lines
    assert lines[-1] == "2 passed, 0 failed"


@pytest.mark.full
def test_a_run_whose_checks_failed_is_red(project: Project) -> None:
    project.add(passing=PASSING)
    exit_code, lines = project.run(checks=1)
    assert exit_code == 1
    assert lines[-1] == "1 passed, 0 failed, checks failed"


@pytest.mark.full
def test_a_test_that_is_skipped_at_its_repetition_stays_failed(project: Project) -> None:
    project.add(it=SKIPPED_LATER)
    exit_code, lines = project.run()
    assert exit_code == 1
    assert lines[-1] == "0 passed, 1 failed"


@pytest.mark.full
@pytest.mark.parametrize("ci", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_run_that_did_not_run_all_tests_is_red(project: Project, ci: bool) -> None:
    project.add(a=FLAKY, b=PASSING, crash=CRASH)
    for arguments in (("-x", "test_a.py", "test_b.py"), ("-n0", "test_crash.py"), ("--no-such-option",)):
        exit_code, lines = project.run(*arguments, ci=ci)
        assert exit_code == 1, arguments
        assert "A pytest process did not run all of its tests; see above" in lines


@pytest.mark.full
def test_more_failures_than_the_limit_are_not_repeated(project: Project) -> None:
    project.add(
        it="import pytest\n@pytest.mark.parametrize('n', range(11))\ndef test_it(n):\n    assert False\n"
    )
    exit_code, lines = project.run()
    assert exit_code == 1
    assert not any(line.startswith("Repeated") for line in lines)
    assert lines[-1] == "0 passed, 11 failed"


def test_the_list_keeps_the_last_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    outcomes.add_run(path, ["test_old"])
    for _ in range(outcomes.RUNS_KEPT - 1):
        outcomes.add_run(path, ["test_often"])
    assert {node_id: len(times) for node_id, times in outcomes.named(path).items()} == {
        "test_old": 1,
        "test_often": outcomes.RUNS_KEPT - 1,
    }
    outcomes.add_run(path, [])
    assert set(outcomes.named(path)) == {"test_often"}
    assert len(path.read_text().splitlines()) == outcomes.RUNS_KEPT


@pytest.mark.parametrize(
    ("exit_code", "failed", "is_complete"),
    [
        (0, [], True),
        (0, ["test_a"], False),
        (1, ["test_a"], True),
        (1, [], False),
        (2, [], False),
        (3, [], False),
        (4, [], False),
        (5, [], True),
        (-9, [], False),
        (139, [], False),
    ],
)
def test_only_the_exit_codes_of_a_whole_run_count(
    tmp_path: Path, exit_code: int, failed: list[str], is_complete: bool
) -> None:
    path = tmp_path / "left"
    path.write_text(json.dumps({"counts": {}, "failed": failed, "is_complete": True}))
    assert outcomes.read(path, exit_code).is_complete is is_complete
