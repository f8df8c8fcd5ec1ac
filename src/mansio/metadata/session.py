"""Validity of a broker's session by its own clock. Pure: the caller passes the time.

`Session` is a lease with its broker epoch. `Liveness` shows the thread that renews the lease whether the event loop
responds.

Invariant: the lease of a valid session exists in the metadata store, and so does its key, unless the session was ended
early (`metadata.hand_over`): then a key with the same lease lets the next leaders wait. The deadline counts from the
time at which the last successful renewal was *sent*, and is earlier than the end of the lease, so it passes before
another broker can learn that the lease has ended. An invalid session becomes valid again if its lease is renewed before
it expires.

Times are seconds of a monotonic clock that continues while the machine is suspended. One thread calls `record_renewal`
and another one `is_valid`; no lock is needed, because a float is replaced atomically.
"""

from __future__ import annotations

from typing import Final

DEADLINE_FRACTION: Final = 0.7
"""Fraction of the lease time for which a session is valid. The rest covers a slow clock, and the time between a check
and the action that depends on it."""
STALE_FRACTION: Final = 0.3
"""Fraction of the lease time: if the event loop has not called `Liveness.record` for longer, it counts as blocked, and
the lease is not renewed."""
RENEW_FRACTION: Final = 1 / 6
"""Interval of renewals, as a fraction of the lease time."""


class Session:
    """Session of a broker with its lease. `epoch` is the broker epoch, 0 until the session's key has been written.

    `ttl_s` is the lease time in seconds. `has_ended`: the session has ended permanently.
    """

    __slots__ = ("_valid_until", "epoch", "has_ended", "lease", "ttl_s")

    def __init__(self, lease: int, ttl_s: float, sent_at: float) -> None:
        """`sent_at`: time at which the lease was requested."""
        self.lease = lease
        self.ttl_s = ttl_s
        self.epoch = 0
        self.has_ended = False
        self._valid_until = sent_at + DEADLINE_FRACTION * ttl_s

    def record_renewal(self, sent_at: float, left_s: float) -> None:
        """Record a successful renewal that was sent at `sent_at` and leaves `left_s` seconds of lease time."""
        self._valid_until = max(self._valid_until, sent_at + DEADLINE_FRACTION * min(left_s, self.ttl_s))

    def end(self) -> None:
        """Mark the session as ended permanently, because the store reported its end or it was revoked."""
        self.has_ended = True

    def is_valid(self, now: float) -> bool:
        """Whether the broker may act with this session: acknowledge requests and change metadata."""
        return self.epoch != 0 and not self.has_ended and now < self._valid_until

    @property
    def renewed_at(self) -> float:
        """Time at which the last successful renewal (or the request of the lease) was sent."""
        return self._valid_until - DEADLINE_FRACTION * self.ttl_s

    @property
    def valid_until(self) -> float:
        """Time at which `is_valid` becomes false without a renewal."""
        return self._valid_until


class Liveness:
    """Time at which the event loop last responded."""

    __slots__ = ("_last", "_stale_s")

    def __init__(self, ttl_s: float, now: float) -> None:
        self._stale_s = STALE_FRACTION * ttl_s
        self._last = now

    def record(self, now: float) -> None:
        """Record that the event loop responded at `now`."""
        self._last = now

    def is_fresh(self, now: float) -> bool:
        """Whether the event loop responded within the last `STALE_FRACTION` of the lease time."""
        return now - self._last <= self._stale_s
