"""Test tiers: how much of the suite a run holds, and how many examples a property test gets.

`test` (the default) runs what is not marked `full`; `full` and `nightly` run everything they are pointed at. Examples
and seeds are fixed in `test` and `full`, and random in `nightly` only.
"""

from __future__ import annotations

import os
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

TIERS: Final = ("test", "full", "nightly")
FIXED_SEED: Final = 20_240_229
"""Of the test order and of `random` outside `nightly`."""

NIGHT_VARIABLE: Final = "MANSIO_TEST_AS_AT_NIGHT"
"""Set where planted defects must be found: `repetitions` are then those of `nightly`."""

_current: str = TIERS[0]

_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("test", _COMMON, derandomize=True, database=None, max_examples=15)
settings.register_profile("full", _COMMON, derandomize=True, database=None)
settings.register_profile("nightly", _COMMON, max_examples=5_000)


def choose(tier: str) -> None:
    """Set the tier of this process. Called once, before test modules are imported."""
    global _current
    _current = tier
    settings.load_profile(tier)
    if tier != "nightly":
        fix_constants()


def fix_constants() -> None:
    """Draw the same examples whatever modules are loaded: Hypothesis takes some from the constants in their source, so
    that examples depended on which tests ran before in the same process."""
    none = providers._local_constants
    assert not len(none), "chosen before the first example"
    providers._get_local_constants = lambda: none


def smoke_first(first: Any, *others: Any) -> list[Any]:
    """Parameters of a test, tuples where it has several: `make test` runs the first only, `make full` all."""
    values = [each if isinstance(each, tuple) else (each,) for each in others]
    return [first, *(pytest.param(*each, marks=pytest.mark.full) for each in values)]


def tier() -> str:
    return _current


def repetitions(full: int, nightly: int) -> int:
    """How often a scene is repeated with other seeds, in `full` and where planted defects are searched."""
    return nightly if _current == "nightly" or os.environ.get(NIGHT_VARIABLE) else full


def examples(test: int, full: int, nightly: int | None = None) -> int:
    """How many examples a property test with limits of its own gets in this run; nightly ten times `full`."""
    return {"test": test, "full": full, "nightly": nightly or 10 * full}[_current]
