"""Crash states of compactions, many more of them."""

from __future__ import annotations

from support.nightly_counts import leave
from system.crash.test_crash_compaction import STATES, crash_states


def test_compacted_records_survive_a_crash_after_any_change_of_the_disk_many_more() -> None:
    states, _ = crash_states(20 * STATES, 1_000_000)
    assert states >= 20 * STATES
    leave("crash states", of_compactions=states)
