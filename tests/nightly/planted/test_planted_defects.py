"""Mutation test: each defect of one line, planted in a copy of the source, makes the listed tests fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nightly.planted.defects import DEFECTS, MORE
from nightly.planted.planted import Defect, caught
from support.nightly_counts import leave

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("defect", DEFECTS, ids=[defect.name.replace(" ", "-") for defect in DEFECTS])
def test_a_planted_defect_is_found(defect: Defect, tmp_path: Path) -> None:
    print(caught(defect, tmp_path))
    leave("planted defects caught", by_day=1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("defect", MORE, ids=[defect.name.replace(" ", "-") for defect in MORE])
def test_more_planted_defects_are_found_by_their_whole_room(defect: Defect, tmp_path: Path) -> None:
    print(caught(defect, tmp_path))
    leave("planted defects caught", by_night=1)
