"""How long a broker may act on its session, by its own clock. Pure: times are handed in.

Owns `Session`, one lease and the epoch it stands for, and `Liveness`, what tells the thread that keeps the lease alive
that the main loop is alive too.

Always true: a session that holds is one the metadata store still has. The deadline counts from when the last request
that was answered well had been *sent*, and is shorter than the lease, so it passes before anybody can be told that the
session ended. It may hold again later: a lease that was renewed late never ended.

Times are seconds of a monotonic clock that goes on while the machine is suspended. One thread calls `renewed`, another
`holds`: a float is replaced as a whole.
"""

from __future__ import annotations

from typing import Final

DEADLINE_FRACTION: Final = 0.7
"""Of the lease's time: what is left covers a clock that runs slow, and the way from a check to what depends on it."""
STALE_FRACTION: Final = 0.3
"""A main loop that gave no sign for this share of the lease's time is taken to hang: its lease is not renewed."""
RENEW_FRACTION: Final = 1 / 6
"""How often a lease is renewed."""


class Session:
    """One lease, from its grant on. `epoch` is 0 until the session's key is written with it."""

    __slots__ = ("_good_until", "ended", "epoch", "lease", "ttl_s")

    def __init__(self, lease: int, ttl_s: float, sent_at: float) -> None:
        """`sent_at`: when the lease was asked for."""
        self.lease = lease
        self.ttl_s = ttl_s
        self.epoch = 0
        self.ended = False
        self._good_until = sent_at + DEADLINE_FRACTION * ttl_s

    def renewed(self, sent_at: float, left_s: float) -> None:
        """A renewal sent at `sent_at` was answered: `left_s` from then on."""
        self._good_until = max(self._good_until, sent_at + DEADLINE_FRACTION * min(left_s, self.ttl_s))

    def end(self) -> None:
        """The store says it is no more, or it was given back. For good."""
        self.ended = True

    def holds(self, now: float) -> bool:
        """Whether this broker may act as this session: confirm, decide, change metadata."""
        return self.epoch != 0 and not self.ended and now < self._good_until

    @property
    def renewed_at(self) -> float:
        """When the last renewal that was answered well had been sent (or the lease asked for), at the latest."""
        return self._good_until - DEADLINE_FRACTION * self.ttl_s

    @property
    def good_until(self) -> float:
        """When `holds` becomes false unless it is renewed."""
        return self._good_until


class Liveness:
    """The main loop's sign of life."""

    __slots__ = ("_last", "_stale_s")

    def __init__(self, ttl_s: float, now: float) -> None:
        self._stale_s = STALE_FRACTION * ttl_s
        self._last = now

    def record(self, now: float) -> None:
        """The main loop is alive."""
        self._last = now

    def is_fresh(self, now: float) -> bool:
        """Whether it was, lately."""
        return now - self._last <= self._stale_s
