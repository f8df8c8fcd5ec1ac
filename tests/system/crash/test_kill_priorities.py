"""kill -9 while members of a share group lease and acknowledge records of all priorities, mixed in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.seeds import chosen_seed
from system.crash.test_kill_delivery import kill_and_judge

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 9


@pytest.mark.full
@pytest.mark.row("D7", "D3")
@pytest.mark.timeout(300)
def test_no_delivery_of_any_priority_is_undone_lost_or_doubled_by_kills(tmp_path: Path) -> None:
    history = kill_and_judge(tmp_path / "data", chosen_seed(), kills=KILLS, priorities=True)
    assert history.accepted > 10 * KILLS
