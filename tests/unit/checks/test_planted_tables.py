"""The tables of the mutation tests fit the source: `make nightly` applies them, every run checks that it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nightly.planted.defects import DEFECTS, MORE
from nightly.planted.planted import Defect, lines_of
from nightly.planted.simulated_defects import DEFECTS as SIMULATED
from nightly.planted.simulated_defects import RARE
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable


def mistakes(defects: Iterable[Defect]) -> list[str]:
    """Why these defects cannot be planted, or which of their tests are not there."""
    found = []
    for defect in defects:
        try:
            lines_of(defect)
        except AssertionError as error:
            found.append(str(error))
        for test in defect.tests:
            file, _, name = test.partition("::")
            name = name.partition("[")[0].rpartition("::")[2]
            if not (ROOT / file).exists() or (name and name not in (ROOT / file).read_text()):
                found.append(f"{defect.name}: there is no test {test}")
    return found


def test_every_planted_defect_has_its_line_and_its_tests() -> None:
    assert mistakes([*DEFECTS, *MORE]) == []


def test_every_simulated_defect_has_its_line() -> None:
    assert mistakes(one.defect for one in (*SIMULATED, *RARE)) == []


COMMIT = SIMULATED[0].defect


def test_quotation_that_is_gone_names_the_nearest_line() -> None:
    lines, at = lines_of(COMMIT)
    gone = COMMIT._replace(line="if end_offset <= self.replicas.high_water_mark:")
    with pytest.raises(AssertionError) as raised:
        lines_of(gone)
    assert str(raised.value).splitlines() == [
        f"{gone.name}: {gone.file} has this line 0 times: {gone.line}",
        f"nearest is line {at + 1}: {lines[at].strip()}",
    ]


def test_quotation_that_moved_to_another_file_names_it() -> None:
    _, at = lines_of(COMMIT)
    with pytest.raises(AssertionError, match=f"it is line {at + 1} of {COMMIT.file}$"):
        lines_of(COMMIT._replace(file="broker/partition/gone.py"))


def test_quotation_that_is_like_no_line_names_none() -> None:
    with pytest.raises(AssertionError, match="no line is like it"):
        lines_of(COMMIT._replace(line="§" * 60))


def test_quotation_that_fits_several_lines_names_them_all() -> None:
    text = (ROOT / "src" / "mansio" / COMMIT.file).read_text().split("\n")
    places = [str(at + 1) for at, line in enumerate(text) if line.strip() == "return"]
    assert len(places) > 1
    with pytest.raises(AssertionError, match=f"in lines {', '.join(places)}$"):
        lines_of(COMMIT._replace(line="return"))
