"""kill -9 three hundred times while producers repeat ids."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

from system.crash.test_kill_deduplication import kill_repeatedly

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("MANSIO_NIGHTLY_DEDUPLICATION_KILLS", "300"))


def test_no_id_is_stored_twice_when_the_broker_is_killed_many_times(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, KILLS, seed=random.randrange(1 << 30))
