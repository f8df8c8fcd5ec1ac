"""Crash states of many logs that are flushed together, many more of them."""

from __future__ import annotations

import pytest

from system.crash.test_crash_many_logs import run

STATES_NIGHTLY = 60_000


@pytest.mark.timeout(600)
def test_durable_records_of_many_logs_survive_a_crash_at_length() -> None:
    run(STATES_NIGHTLY)
