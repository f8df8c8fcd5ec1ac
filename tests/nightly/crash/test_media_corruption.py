"""Damaged logs, many more of them."""

from __future__ import annotations

from collections import Counter

import pytest

from support.nightly_counts import leave
from support.seeds import chosen_seed
from system.crash.test_media_corruption import run_cases

NIGHTLY_CASES = 50_000


@pytest.mark.timeout(1200)
def test_fifty_thousand_damaged_logs_answer_right_or_as_corrupt() -> None:
    seen = run_cases(chosen_seed(), NIGHTLY_CASES)
    ended: Counter[str] = Counter()
    for (_, _, outcome), count in seen.items():
        ended[outcome] += count
    leave("damaged logs", ended=ended)
