"""How long a record that was not settled rests before it is offered again.

Pure: chance comes in as a number. Always true: the rest is between 0 and the policy's maximum; it never shrinks with
the tries, jitter aside; what a consumer asks for by itself wins over the policy, up to a year.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mansio.state.share_partition.types import Backoff

REQUESTED_DELAY_MS_MAX: Final = 365 * 24 * 60 * 60 * 1000
"""The longest rest a consumer may ask for."""

_DOUBLINGS_MAX: Final = 64
"""Beyond it nothing grows: every policy has reached its maximum by then."""


def delay_ms(policy: Backoff, attempts: int, random_fraction: float, requested_ms: int = -1) -> int:
    """The rest after so many tries (from 1). `random_fraction`: 0 to below 1, evenly; `requested_ms`: -1 for
    nothing asked."""
    if requested_ms >= 0:
        return min(requested_ms, REQUESTED_DELAY_MS_MAX)
    grown = policy.base_ms * max(policy.multiplier, 1.0) ** min(max(attempts - 1, 0), _DOUBLINGS_MAX)
    rest = min(grown, float(policy.max_ms))
    rest += rest * policy.jitter * (2 * random_fraction - 1)
    return max(0, min(round(rest), policy.max_ms))
