"""kill -9 three hundred times while a share group with order by key takes records with leases of chosen durations."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from support.nightly_counts import leave
from system.crash.test_kill_key_order import kill_repeatedly

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("MANSIO_NIGHTLY_KEY_ORDER_KILLS", "300"))


@pytest.mark.timeout(3600)
def test_no_kill_of_many_breaks_the_order_of_a_key_or_the_duration_of_a_lease(tmp_path: Path) -> None:
    numbers = kill_repeatedly(tmp_path, KILLS, seed=random.randrange(1 << 30))
    leave(
        "kills with order by key", kills=KILLS, **{name.replace(" ", "_"): n for name, n in numbers.items()}
    )
