"""The tables of the mutation tests fit the source: `make nightly` applies them, every run checks that it can."""

from __future__ import annotations

import pytest

from nightly.planted.defects import DEFECTS, MORE
from nightly.planted.planted import Defect, lines_of
from nightly.planted.simulated_defects import DEFECTS as SIMULATED
from nightly.planted.simulated_defects import RARE
from support.paths import ROOT


@pytest.mark.parametrize("defect", [*DEFECTS, *MORE], ids=lambda defect: defect.name)
def test_every_planted_defect_has_its_line_and_its_tests(defect: Defect) -> None:
    lines_of(defect)
    for test in defect.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), file
        name = name.partition("[")[0].rpartition("::")[2]
        assert not name or name in (ROOT / file).read_text(), test


@pytest.mark.parametrize(
    "defect", [one.defect for one in (*SIMULATED, *RARE)], ids=lambda defect: defect.name
)
def test_every_simulated_defect_has_its_line(defect: Defect) -> None:
    lines_of(defect)
