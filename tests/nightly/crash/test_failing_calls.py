"""Failures of each pair of disk calls."""

from __future__ import annotations

import errno

import pytest

from mansio.errors import MansioError
from support.nightly_counts import leave
from system.crash.test_failing_calls import PAIR_DISTANCE_MAX, WORKLOADS, run


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WORKLOADS)
def test_any_two_failing_calls_lose_nothing_durable(name: str) -> None:
    pairs = 0
    for seed in (0, 1):
        calls = run(WORKLOADS[name], {}, seed)
        for first in range(1, calls + 1):
            for second in range(first + 1, min(calls, first + PAIR_DISTANCE_MAX) + 1):
                for codes in ((errno.ENOSPC, errno.EIO), (errno.ENOSPC, errno.ENOSPC)):
                    pairs += 1
                    try:
                        run(WORKLOADS[name], dict(zip((first, second), codes, strict=True)), seed)
                    except (AssertionError, MansioError, OSError) as error:
                        raise AssertionError(
                            f"seed {seed}, calls {first} and {second}, {codes}: {error}"
                        ) from error
    leave("failing calls", pairs=pairs)
