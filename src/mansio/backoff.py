"""Growth of the delays between attempts: without randomness, clock and waiting, so that state machines use it too.

`mansio.ports.Backoff` adds the jitter.
"""

from __future__ import annotations

from typing import Final

EXPONENT_MAX: Final = 64
"""Largest exponent of the factor, which keeps the power finite."""


def grown_delay(failures: int, first: float, longest: float, factor: float = 2.0) -> float:
    """Return the delay after the `failures`-th consecutive failure (from 1): `first`, multiplied by `factor` for each
    further failure, at most `longest`. The unit of the delays is the caller's."""
    return min(longest, first * factor ** min(max(failures - 1, 0), EXPONENT_MAX))
