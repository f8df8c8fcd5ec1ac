"""Flipped bits of the SQLite metadata store, many more of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from support.nightly_counts import leave
from unit.metadata import test_sqlite_damage
from unit.metadata.test_sqlite_damage import Files, State, flips

if TYPE_CHECKING:
    from pathlib import Path

closed = test_sqlite_damage.closed


@pytest.mark.timeout(900)
def test_twenty_thousand_flipped_bits_of_a_closed_store(tmp_path: Path, closed: tuple[Files, State]) -> None:
    seen = flips(tmp_path, *closed, "", 20_000, random.randrange(1 << 32))
    leave("flipped bits of metadata", seen=seen)
