"""Mutation test of the simulator: each planted defect of the cluster rules makes a simulated history fail."""

from __future__ import annotations

import pytest

from nightly.planted.simulated_defects import DEFECTS, SEARCHED_MAX, SimulatedDefect, search
from support.nightly_counts import leave

NEAR = 8
"""The history that is known to be broken is tried first; a change of the code may move it by some seeds."""
NAMES = [one.defect.name for one in DEFECTS]


@pytest.mark.parametrize("planted", DEFECTS, ids=NAMES)
@pytest.mark.timeout(900)
def test_a_planted_defect_breaks_its_recorded_history(planted: SimulatedDefect) -> None:
    found = search(planted.defect, planted.seed, planted.seed + NEAR)
    assert found is not None, (
        f"{planted.defect.name} is not found near seed {planted.seed}; search for another"
    )


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("planted", DEFECTS, ids=NAMES)
def test_a_planted_defect_is_found_afresh(planted: SimulatedDefect) -> None:
    first = planted.seed // 100_000 * 100_000 + 100_000  # histories of the same kind
    found = search(planted.defect, first, first + SEARCHED_MAX)
    assert found is not None
    leave(
        "planted defects found in simulated histories",
        after_seeds={planted.defect.name: found.seed - first + 1},
    )
