"""Fuzzing of every target of `unit.fuzz.targets`, for `MANSIO_NIGHTLY_FUZZ_SECONDS`.

Uses Atheris where it can be installed (CPython with a wheel), otherwise plain mutations for the same time. What fails
is kept under `tests/unit/fuzz/regressions/TARGET/` and fed again by `make quick`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from random import Random
from typing import TYPE_CHECKING

import pytest

from support.nightly_counts import leave
from support.paths import ROOT
from unit.fuzz.targets import TARGETS
from unit.fuzz.test_targets import REGRESSIONS, feed, mutations

if TYPE_CHECKING:
    from pathlib import Path

NIGHTLY_S = int(os.environ.get("MANSIO_NIGHTLY_FUZZ_SECONDS", "45"))
"""For each target: ten of them in less than ten minutes."""

UNAUTHENTICATED = ("gate", "sasl", "tokens")
"""Targets that read what a client sends before it has authenticated."""

UNAUTHENTICATED_INPUTS = int(os.environ.get("MANSIO_NIGHTLY_FUZZ_INPUTS", "1000000"))
CHUNK = 2000


@pytest.mark.timeout(NIGHTLY_S + 120)
@pytest.mark.parametrize("name", TARGETS)
def test_inputs_found_by_coverage_do_no_harm(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"{name}: no Atheris for Python {version}, plain mutations instead")
        plain_mutations(name)
        return
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    failures = REGRESSIONS / name
    failures.mkdir(parents=True, exist_ok=True)
    # A shell between: a process counts the memory of the one that started it as its own peak, and the peak is limited.
    between = ["sh", "-c", '"$@"; exit $?', "sh"]
    done = subprocess.run(
        [
            *between,
            sys.executable,
            "-m",
            "nightly.fuzz.coverage_guided",
            name,
            corpus,
            failures,
            str(NIGHTLY_S),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=NIGHTLY_S + 100,
        check=False,
    )
    if not any(failures.iterdir()):
        failures.rmdir()
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    executed = re.search(r"number_of_executed_units: *(\d+)", output)
    assert executed is not None, output[-2000:]
    print(f"{name}: {executed[1]} inputs, {len(list(corpus.iterdir()))} kept for what they reached")
    leave("fuzz inputs by coverage", inputs={name: int(executed[1])})


def plain_mutations(name: str) -> None:
    target = TARGETS[name]
    random = Random()
    end = time.monotonic() + NIGHTLY_S
    count = 0
    while time.monotonic() < end:
        for data in mutations(target, random, 2000, NIGHTLY_S):
            feed(name, data)
            count += 1
    print(f"{name}: {count} mutated inputs")
    leave("fuzz inputs", inputs={name: count})


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", UNAUTHENTICATED)
def test_a_million_inputs_before_a_log_in_do_no_harm(name: str) -> None:
    target = TARGETS[name]
    random = Random()
    count = 0
    while count < UNAUTHENTICATED_INPUTS:
        for data in mutations(target, random, min(CHUNK, UNAUTHENTICATED_INPUTS - count), 600):
            feed(name, data)
            count += 1
    leave("fuzz inputs before a log-in", inputs={name: count})
