"""Every block of docs/tutorial/quickstart.md does what the page states."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.quick_start import check_quick_start

if TYPE_CHECKING:
    from support.process import ServedBroker


@pytest.mark.full
@pytest.mark.row("A6")
def test_every_block_of_the_quick_start_works_as_pasted(served_broker: ServedBroker) -> None:
    check_quick_start(served_broker, Path(sys.executable))
