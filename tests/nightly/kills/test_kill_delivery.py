"""Hundreds of kills of a broker with share groups: MANSIO_NIGHTLY_DELIVERY_KILLS, 1,000 by default."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from support.killing_serve import ISOLATION_POINT, POINTS
from support.nightly_counts import leave
from support.seeds import chosen_seed
from system.crash.test_kill_delivery import KILLS, kill_and_judge

if TYPE_CHECKING:
    from pathlib import Path


NIGHTLY_LIVES = -(-int(os.environ.get("MANSIO_NIGHTLY_DELIVERY_KILLS", "1000")) // KILLS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("life", range(NIGHTLY_LIVES))
def test_no_delivery_of_many_is_undone_lost_or_doubled_by_hundreds_of_kills(
    tmp_path: Path, life: int
) -> None:
    history = kill_and_judge(tmp_path / f"data-{life}", chosen_seed(), priorities=bool(life % 2))
    leave("kills under delivery", kills=KILLS + 1, **history.numbers())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("life", range(NIGHTLY_LIVES // 2))
def test_no_delivery_of_a_fair_group_is_undone_lost_or_doubled_by_hundreds_of_kills(
    tmp_path: Path, life: int
) -> None:
    points = (*POINTS, *[ISOLATION_POINT] * ((KILLS - len(POINTS)) // 2))
    history = kill_and_judge(tmp_path / f"data-{life}", chosen_seed(), points=points, fair=True)
    leave("kills under delivery with fairness", kills=KILLS + 1, **history.numbers())
