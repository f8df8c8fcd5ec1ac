"""Every target of `unit.fuzz.targets`: inputs that failed once, and mutated inputs.

What fails is kept under `regressions/TARGET/` and fed again. `tests/nightly/fuzz` feeds many more.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from unit.fuzz.cost import assert_cheap
from unit.fuzz.mutations import mutated
from unit.fuzz.targets import TARGETS

if TYPE_CHECKING:
    from unit.fuzz.targets import Target

REGRESSIONS = Path(__file__).parent / "regressions"
INPUTS = 1500


def feed(name: str, data: bytes) -> None:
    """Feed one input; keep it if it fails."""
    try:
        assert_cheap(TARGETS[name].feed, data)
    except Exception as error:
        kept = REGRESSIONS / name / f"mutation-{hashlib.sha256(data).hexdigest()[:16]}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(data)
        raise AssertionError(f"{name}: {data!r}, kept as {kept}") from error


def mutations(target: Target, random: Random, count: int, seconds: float) -> list[bytes]:
    """`count` inputs at most, made in `seconds` at most."""
    corpus = target.corpus(random)
    end = time.monotonic() + seconds
    found: list[bytes] = []
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
