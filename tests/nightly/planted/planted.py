"""Planting one-line defects: the mechanism. The defects and the tests that must find them are in `defects.py`.

Always true: the files of the project are never touched (a copy of `src` is changed); a defect whose line is not there
exactly once is an error, so that the table cannot rot.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

from support.paths import ROOT
from support.tiers import NIGHT_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = ROOT / "src" / "mansio"
RUN_S_MAX = 600
NEAREST_RATIO_MIN = 0.4
"""Lines less alike than this (`difflib.SequenceMatcher.ratio`) are no suggestion for a quotation that is gone."""
_FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)
_NOT_ITS_FAULT = re.compile(
    r"^E +(?:\w+\.)*(ImportError|SyntaxError|NameError|ModuleNotFoundError|IndentationError)\b"
)


class Defect(NamedTuple):
    """`line` of `file` (below `src/mansio`) becomes `planted`; one of `tests` has to fail.

    Both lines are written without their indentation and without the comment after the code.
    """

    name: str
    file: str
    line: str
    planted: str
    tests: tuple[str, ...]


def lines_of(defect: Defect) -> tuple[list[str], int]:
    """The lines of the defect's file, and which of them it is about."""
    path = SOURCE / defect.file
    lines = path.read_text().split("\n") if path.exists() else []
    code = [_code_of(line) for line in lines]
    found = [at for at, line in enumerate(code) if line == defect.line]
    assert len(found) == 1, (
        f"{defect.name}: {defect.file} has this line {len(found)} times: {defect.line}\n"
        + (_places(found) if found else _suggestion(code, defect.line))
    )
    assert defect.planted != defect.line
    return lines, found[0]


def _code_of(line: str) -> str:
    """A line without its indentation and without the comment after the code."""
    return line.strip().partition("  # ")[0]


def _places(found: list[int]) -> str:
    return f"in lines {', '.join(str(at + 1) for at in found)}"


def _suggestion(code: list[str], quoted: str) -> str:
    """Where a quotation that is no longer in its file may be now: in another file, or the line most like it."""
    for path in sorted(SOURCE.rglob("*.py")):
        for at, line in enumerate(path.read_text().split("\n")):
            if _code_of(line) == quoted:
                return f"it is line {at + 1} of {path.relative_to(SOURCE)}"
    nearest = difflib.get_close_matches(quoted, code, n=1, cutoff=NEAREST_RATIO_MIN)
    return f"nearest is line {code.index(nearest[0]) + 1}: {nearest[0]}" if nearest else "no line is like it"


def plant(defect: Defect, directory: Path) -> Path:
    """A copy of `src` with the defect in it."""
    lines, at = lines_of(defect)
    copy = directory / "src"
    shutil.copytree(ROOT / "src", copy, dirs_exist_ok=True)
    before = lines[at]
    lines[at] = before[: len(before) - len(before.lstrip())] + defect.planted
    (copy / "mansio" / defect.file).write_text("\n".join(lines))
    return copy


def run_tests(
    source: Path, tests: tuple[str, ...], *, deadline_s: float = RUN_S_MAX
) -> subprocess.CompletedProcess[str]:
    """Run tests of the project against another copy of its source, until the first failure."""
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_timeout",
        "--timeout",
        "60",
        "--tier",
        "full",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    paths = [str(source), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["CI"] = "1"  # a test that is skipped finds nothing
    environment[NIGHT_VARIABLE] = "1"
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no other order, no workers, and a quicker start
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )


def caught(defect: Defect, directory: Path) -> str:
    """Which test found the defect. Raises `AssertionError` when none did, or something else went wrong."""
    result = run_tests(plant(defect, directory), defect.tests)
    report = f"{defect.name} ({defect.file}: {defect.planted.strip()})\n{result.stdout[-3000:]}{result.stderr[-1000:]}"
    assert result.returncode != 0, f"nobody noticed: {report}"
    assert result.returncode == 1, f"the tests could not run: {report}"
    failed = _FAILED.search(result.stdout)
    assert failed is not None, f"no test failed: {report}"
    wrong = [line for line in result.stdout.splitlines() if _NOT_ITS_FAULT.match(line)]
    assert not wrong, f"it failed for another reason: {report}"
    return failed[1]
