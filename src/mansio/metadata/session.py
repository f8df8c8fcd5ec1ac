"""Validity of a broker's session by its own clock. Pure: times are passed in.

`Session` is one lease with its broker epoch. `Liveness` reports to the thread that renews the lease whether the main
loop is alive.

Invariant: a valid session exists in the metadata store. Its deadline counts from the time at which the last successful
request was *sent*, and is shorter than the lease, so it passes before any other broker can learn that the session has
ended. An invalid session may become valid again: a lease that was renewed late never ended.

Times are seconds of a monotonic clock that continues while the machine is suspended. One thread calls `renewed`,
another `is_valid`: a float is replaced atomically.
"""

from __future__ import annotations

from typing import Final

DEADLINE_FRACTION: Final = 0.7
"""Part of the lease time: the remainder covers a slow clock and the time between a check and its consequences."""
STALE_FRACTION: Final = 0.3
"""Part of the lease time: a main loop without a sign of life for longer counts as hung; its lease is not renewed."""
RENEW_FRACTION: Final = 1 / 6
"""Interval of renewals, as part of the lease time."""


class Session:
    """One lease. `epoch` is 0 until the key of the session is written."""

    __slots__ = ("_good_until", "ended", "epoch", "lease", "ttl_s")

    def __init__(self, lease: int, ttl_s: float, sent_at: float) -> None:
        """`sent_at`: time at which the lease was requested."""
        self.lease = lease
        self.ttl_s = ttl_s
        self.epoch = 0
        self.ended = False
        self._good_until = sent_at + DEADLINE_FRACTION * ttl_s

    def renewed(self, sent_at: float, left_s: float) -> None:
        """Apply a successful renewal that was sent at `sent_at`, with `left_s` of lease time from then on."""
        self._good_until = max(self._good_until, sent_at + DEADLINE_FRACTION * min(left_s, self.ttl_s))

    def end(self) -> None:
        """End the session permanently: the store reports its end, or it was revoked."""
        self.ended = True

    def is_valid(self, now: float) -> bool:
        """Whether this broker may act with this session: acknowledge, decide, change metadata."""
        return self.epoch != 0 and not self.ended and now < self._good_until

    @property
    def renewed_at(self) -> float:
        """Time at which the last successful renewal (or the request of the lease) was sent."""
        return self._good_until - DEADLINE_FRACTION * self.ttl_s

    @property
    def good_until(self) -> float:
        """Time at which `is_valid` becomes false without a renewal."""
        return self._good_until


class Liveness:
    """Sign of life of the main loop."""

    __slots__ = ("_last", "_stale_s")

    def __init__(self, ttl_s: float, now: float) -> None:
        self._stale_s = STALE_FRACTION * ttl_s
        self._last = now

    def record(self, now: float) -> None:
        """Record that the main loop is alive."""
        self._last = now

    def is_fresh(self, now: float) -> bool:
        """Whether the main loop was alive recently."""
        return now - self._last <= self._stale_s
