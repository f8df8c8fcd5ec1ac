"""kill -9 while members of a fair share group lease and acknowledge records, one key has backlogs, and fairness is
turned off and on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.killing_serve import ISOLATION_POINT
from support.seeds import chosen_seed
from system.crash.test_kill_delivery import KILLS, kill_and_judge

if TYPE_CHECKING:
    from pathlib import Path

FEW = 3
POINTS = (ISOLATION_POINT,) * KILLS


@pytest.mark.full
@pytest.mark.row("D9", "D3")
@pytest.mark.timeout(300)
def test_no_delivery_of_a_fair_group_is_undone_lost_or_doubled_by_kills(tmp_path: Path) -> None:
    history = kill_and_judge(tmp_path / "data", chosen_seed(), kills=FEW, points=POINTS, fair=True)
    assert history.accepted > 10 * FEW
