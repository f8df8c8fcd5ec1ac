"""Outcomes of a test run: what pytest leaves, one repetition of failed tests in CI, and the list of flaky tests.

A pytest run with `--outcomes FILE` leaves its counts and the tests that failed in FILE (`OutcomeRecorder`). A recipe of
the Makefile ends with

    python -m support.outcomes end --checks=EXIT_CODE FILE:EXIT_CODE...

which prints the sum of all its pytest runs as the last line and returns the exit code of the whole run. With `CI` set,
each failed test runs once more, alone: in a process of its own, after all others. A run whose tests then pass is green
and names them as flaky; without `CI` nothing is repeated. `python -m support.outcomes flaky` prints the flaky tests of
the last `RUNS_KEPT` runs in CI, and with `--repaired TEST...` removes tests from them.

Invariants:
* A run is green only if each of its pytest processes ended by itself with the exit code of a complete run.
* A repetition never replaces the rest of a run: one that was interrupted, or broke off before all tests, is red.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

REPEATED_MAX: Final = 10
"""Failed tests that a run repeats; with more of them it is red, and nothing is repeated."""
REPETITION_S_MAX: Final = 1800.0
"""Time limit of one repetition; tests have their own time limits below it."""
RUNS_KEPT: Final = 20

LIST_VARIABLE: Final = "MANSIO_TEST_FLAKY_LIST"
"""Environment variable with the path of the list; for CI, whose clones are removed."""
DEFAULT_LIST: Final = ROOT / ".flaky" / "runs"

COMPLETE: Final = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
SHOWN: Final = ("passed", "failed", "skipped", "xfailed", "xpassed")


@dataclass
class Outcomes:
    """Outcomes of one pytest process, or of several. `failed` holds node ids, each once: of tests (also those whose
    set-up or tear-down failed, or whose worker died) and of modules that could not be collected."""

    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    is_complete: bool = True


class OutcomeRecorder:
    """Pytest plugin that writes the `Outcomes` of a run to a file when it ends. With pytest-xdist: of the process
    that starts the workers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes = Outcomes()
        self._passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._add_failure(report.nodeid)
        elif report.skipped:
            self._outcomes.counts["xfailed" if hasattr(report, "wasxfail") else "skipped"] += 1
        elif report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add_failure(report.nodeid)

    def _add_failure(self, node_id: str) -> None:
        if node_id not in self._outcomes.failed:
            self._outcomes.failed.append(node_id)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Called for an interrupted run, too; `shouldfail` is set by `-x` and `--maxfail`."""
        counts, failed = self._outcomes.counts, self._outcomes.failed
        counts["failed"] = len(failed)
        counts["passed"] = len(self._passed.difference(failed))
        is_complete = not (session.shouldfail or session.shouldstop)
        left = {"counts": dict(counts), "failed": failed, "is_complete": is_complete}
        self._path.write_text(json.dumps(left))


def add_option(parser: pytest.Parser) -> None:
    """Add `--outcomes` to pytest's options; for `conftest.py`."""
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="leave counts and failed tests in FILE")


def configure(config: pytest.Config) -> None:
    """Record the outcomes of this process if `--outcomes` is given; for `conftest.py`."""
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OutcomeRecorder(path.absolute()))


def read(path: Path, exit_code: int) -> Outcomes:
    """The outcomes of a pytest process that ended with `exit_code`. Not complete if it left no file, or ended in
    another way than by running all of its tests."""
    if not path.exists():
        return Outcomes(is_complete=False)
    left = json.loads(path.read_text())
    outcomes = Outcomes(Counter(left["counts"]), left["failed"], left["is_complete"])
    has_failures = exit_code == pytest.ExitCode.TESTS_FAILED and outcomes.failed
    outcomes.is_complete &= bool(has_failures or (exit_code in COMPLETE and not outcomes.failed))
    return outcomes


def passes_alone(node_id: str, arguments: Sequence[str]) -> bool:
    """Run one test, or one module that could not be collected, in a process of its own, and return whether it passed.
    A test that is skipped this time has not passed."""
    with tempfile.TemporaryDirectory() as directory:
        left = Path(directory) / "outcomes"
        command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "--outcomes", str(left)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            ended = subprocess.run(
                [*command, *arguments, node_id],
                stdin=subprocess.DEVNULL,
                env=environment,  # that of the first run: the path is this module's
                timeout=REPETITION_S_MAX,
            )
        except subprocess.TimeoutExpired:
            return False
        outcomes = read(left, ended.returncode)
    if not outcomes.is_complete or outcomes.failed:
        return False
    return outcomes.counts["passed"] > 0 or "::" not in node_id


def end_run(
    parts: Sequence[Outcomes],
    arguments: Sequence[str],
    *,
    have_checks_failed: bool,
    repeat: bool,
    flaky_list: Path,
) -> int:
    """Repeat what failed if `repeat`, print the flaky tests and the sum of all parts, and return the exit code.
    `arguments`: those of pytest for a repetition."""
    counts = sum((part.counts for part in parts), Counter[str]())
    failed = list(dict.fromkeys(node_id for part in parts for node_id in part.failed))
    is_complete = all(part.is_complete for part in parts)
    flaky: list[str] = []
    if repeat and len(failed) > REPEATED_MAX:
        print(f"\n{len(failed)} tests failed: more than {REPEATED_MAX}, so none is repeated")
    elif repeat and is_complete:
        for node_id in failed:
            print(f"\nRepeated alone: {node_id}", flush=True)
            if passes_alone(node_id, arguments):
                flaky.append(node_id)
        add_run(flaky_list, flaky)
    counts["failed"] = len(failed) - len(flaky)
    counts["passed"] += len(flaky)
    print()
    for node_id in failed:
        print(f"FLAKY {node_id}: failed, and passed alone" if node_id in flaky else f"FAILED {node_id}")
    if not is_complete:
        print("A pytest process did not run all of its tests; see above")
    shown = [f"{counts[name]} {name}" for name in SHOWN if counts[name] or name in ("passed", "failed")]
    print(", ".join([*shown, "checks failed"] if have_checks_failed else shown))
    return 0 if is_complete and not counts["failed"] and not have_checks_failed else 1


def flaky_list() -> Path:
    """Path of the list: one JSON object a line for each of the last `RUNS_KEPT` runs in CI, the newest one last."""
    return Path(os.environ.get(LIST_VARIABLE) or DEFAULT_LIST)


def _runs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _write_runs(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text("".join(json.dumps(run) + "\n" for run in runs[-RUNS_KEPT:]))
    part.replace(path)


def add_run(path: Path, flaky: Sequence[str]) -> None:
    """Add a run with the tests that it named. A list that cannot be written does not fail the run."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        _write_runs(path, [*_runs(path), {"when": when, "flaky": list(flaky)}])
    except (OSError, ValueError) as error:
        print(f"The list of flaky tests was not written: {error}")


def named(path: Path) -> dict[str, list[str]]:
    """The times of the runs that named each flaky test."""
    found: dict[str, list[str]] = {}
    for run in _runs(path):
        for node_id in run["flaky"]:
            found.setdefault(node_id, []).append(str(run["when"]))
    return found


def remove(path: Path, repaired: Sequence[str]) -> None:
    """Remove tests that were repaired from all runs."""
    runs = _runs(path)
    for run in runs:
        run["flaky"] = [each for each in run["flaky"] if each not in repaired]
    _write_runs(path, runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Outcomes of a test run.")
    commands = parser.add_subparsers(dest="command", required=True)
    end = commands.add_parser("end", help="print the sum, repeat failed tests in CI")
    end.add_argument("--checks", type=int, default=0, metavar="EXIT_CODE", help="of lint, types and layers")
    end.add_argument("--pytest", default="", help="arguments of a repetition, in one string")
    end.add_argument("parts", nargs="+", metavar="FILE:EXIT_CODE")
    flaky = commands.add_parser("flaky", help=f"the flaky tests of the last {RUNS_KEPT} runs in CI")
    flaky.add_argument("--repaired", nargs="+", default=[], metavar="TEST", help="remove them from the list")
    flaky.add_argument("--check", action="store_true", help="exit code 1 if there is one")
    return parser.parse_args()


def main() -> int:
    given = _arguments()
    path = flaky_list()
    if given.command == "end":
        split = [part.rpartition(":") for part in given.parts]
        parts = [read(Path(file), int(code)) for file, _, code in split]
        return end_run(
            parts,
            shlex.split(given.pytest),
            have_checks_failed=given.checks != 0,
            repeat=bool(os.environ.get("CI")),
            flaky_list=path,
        )
    if given.repaired:
        remove(path, given.repaired)
    found = named(path)
    for node_id, times in sorted(found.items(), key=lambda each: -len(each[1])):
        print(f"{node_id}: in {len(times)} of {len(_runs(path))} runs, last {times[-1]}")
    if not found:
        print(f"No flaky test in {len(_runs(path))} runs ({path})")
    return 1 if given.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
