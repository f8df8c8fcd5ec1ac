"""Data directories damaged at random, examined by `mansio data check`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from component import test_data_check
from component.test_data_check import ruin_and_examine
from support.nightly_counts import leave

if TYPE_CHECKING:
    from pathlib import Path

healthy = test_data_check.healthy


def test_very_many_ruined_directories(healthy: Path, tmp_path: Path) -> None:
    for seed in range(1_000, 1_600):
        data = shutil.copytree(healthy, tmp_path / str(seed))
        ruin_and_examine(data, seed)
        shutil.rmtree(data)
        leave("ruined directories examined", directories=1)
