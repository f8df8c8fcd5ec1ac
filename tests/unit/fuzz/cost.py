"""Processor time of one input: an input that costs much is an attack, however small it is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

INPUT_S_MAX: Final = 0.5
ATTEMPTS: Final = 5


def assert_cheap(feed: Callable[[T], object], data: T) -> None:
    """Feed an input, and assert that it takes at most `INPUT_S_MAX` of processor time.

    An input that took longer is fed again, and the shortest time counts: the first one of a kind compiles its decoder,
    any may pay for a garbage collection, and on a machine with other load processor time contains the time of a
    processor that is shared."""
    least_s = float("inf")
    for _ in range(ATTEMPTS):
        begin = time.thread_time()
        feed(data)
        least_s = min(least_s, time.thread_time() - begin)
        if least_s < INPUT_S_MAX:
            return
    raise AssertionError(f"{least_s:.2f} s in the fastest of {ATTEMPTS} attempts")
