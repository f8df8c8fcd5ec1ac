"""kill -9 three hundred times while clients of all protocols use one queue."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from support.nightly_counts import leave
from system.crash.test_kill_protocols import kill_and_check

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("MANSIO_NIGHTLY_PROTOCOL_KILLS", "300"))


@pytest.mark.timeout(7200)
def test_no_kill_of_many_loses_doubles_or_reorders_records_of_any_protocol(tmp_path: Path) -> None:
    load = kill_and_check(tmp_path, KILLS, seed=random.randrange(1 << 30))
    leave("kills over all protocols", kills=KILLS, stored=sum(map(len, load.sent.values())))
