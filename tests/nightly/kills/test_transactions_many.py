"""kill -9 three hundred times while a producer commits and aborts transactions."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from support.nightly_counts import leave
from support.transactional_writer import kill_repeatedly

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("MANSIO_NIGHTLY_TRANSACTION_KILLS", "300"))


@pytest.mark.row("P4", "L5")
@pytest.mark.timeout(7200)
def test_no_kill_of_many_leaves_a_transaction_in_part_or_twice(tmp_path: Path) -> None:
    writer = kill_repeatedly(tmp_path, KILLS, seed=random.randrange(1 << 30))
    leave(
        "kills during transactions",
        kills=KILLS,
        committed=len(writer.committed),
        aborted=len(writer.aborted),
        unknown=len(writer.unknown),
    )
