"""Hundreds of kills of a broker under load: MANSIO_NIGHTLY_KILLS, 500 by default, and 3,000 before a release."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from support.seeds import chosen_seed
from system.crash.test_kill_under_load import KILLS, kill_and_judge

if TYPE_CHECKING:
    from pathlib import Path


NIGHTLY_LIVES = -(-int(os.environ.get("MANSIO_NIGHTLY_KILLS", "500")) // KILLS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("life", range(NIGHTLY_LIVES))
def test_hundreds_of_kills_leave_everything_acknowledged_in_place(tmp_path: Path, life: int) -> None:
    kill_and_judge(tmp_path / f"data-{life}", chosen_seed(), noted=True)
