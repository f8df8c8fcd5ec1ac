"""An archive job killed at a hundred random steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from system.spark.test_archive_kills import NEVER, archiver, check

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(900)
def test_archive_killed_at_a_hundred_random_steps_has_every_record_once(tmp_path: Path) -> None:
    offsets = 1_500
    with archiver(tmp_path, offsets) as run:
        for _ in range(100):
            run(random.randint(1, 40))
        assert run(NEVER) == "ended 0"
    check(tmp_path, offsets)
