"""Every target of `unit.fuzz.targets`: inputs that failed once, mutated inputs, and in the night as many as time
allows.

The nightly run uses Atheris where it can be installed (CPython with a wheel), and says so where it cannot: then the
same time goes into plain mutations. What fails is kept under `regressions/TARGET/` and fed again by `make test`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from support.night import leave
from support.places import ROOT
from unit.fuzz.mutations import mutated
from unit.fuzz.targets import TARGETS

if TYPE_CHECKING:
    from unit.fuzz.targets import Target

REGRESSIONS = Path(__file__).parent / "regressions"
INPUTS = 1500
NIGHTLY_S = int(os.environ.get("MANSIO_NIGHTLY_FUZZ_SECONDS", "45"))
"""For each target: ten of them in less than ten minutes."""

INPUT_S_MAX = 1.0


def feed(name: str, data: bytes) -> None:
    """Feed one input; keep it if it fails."""
    begin = time.thread_time()
    try:
        TARGETS[name].feed(data)
        seconds = time.thread_time() - begin
        assert seconds < INPUT_S_MAX, f"{seconds:.2f} s"
    except Exception as error:
        kept = REGRESSIONS / name / f"mutation-{hashlib.sha256(data).hexdigest()[:16]}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(data)
        raise AssertionError(f"{name}: {data!r}, kept as {kept}") from error


def mutations(target: Target, random: Random, count: int, seconds: float) -> list[bytes]:
    """`count` inputs at most, made in `seconds` at most."""
    corpus = target.corpus(random)
    end = time.monotonic() + seconds
    found = []
    while len(found) < count and time.monotonic() < end:
        found.append(mutated(random, random.choice(corpus)))
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_failed_once_and_mutated_ones_do_no_harm(name: str) -> None:
    target = TARGETS[name]
    for kept in sorted((REGRESSIONS / name).glob("*")):
        target.feed(kept.read_bytes())
    random = Random(7)
    for data in target.corpus(random):
        feed(name, data)
    for data in mutations(target, random, INPUTS, 60):
        feed(name, data)


@pytest.mark.nightly
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
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    executed = re.search(r"number_of_executed_units: *(\d+)", said)
    assert executed is not None, said[-2000:]
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
