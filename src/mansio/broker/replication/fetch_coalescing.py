"""Fetch coalescing: delays a follower's fetch response by up to 1 ms to put more batches into it.

A follower's round (fetch, append, flush, fetch again) costs all brokers the same for one batch as for ten. When a
follower's fetch confirms batches, the producers that waited for them usually send as many again at once. If the
follower is answered before those arrive, it flushes half of what is in flight, and the other half waits for that whole
round: twice as many rounds, each half full. So the response waits until as many produce requests are pending as before
the confirmation, at most `WAIT_MS`.

Whether producers behave like this is measured: after a wait that brought nothing, the next responses are sent without
one, more of them each time. A producer that sends at arbitrary times is rarely delayed, one that sends single batches
never.

Invariant: only the time of a response depends on this class, by at most `WAIT_MS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sized

WAIT_MS: Final = 1.0

ENOUGH_BYTES: Final = 1 << 20
"""A response of this size is never delayed; fetches of old records always find as much."""

FRUITLESS_WAITS_MAX: Final = 5
"""After n fruitless waits (at most this many), 2 ** n - 1 responses are sent without a wait."""


class FetchCoalescer:
    """State of one leader. `pending` contains the produce requests that wait for a commit."""

    __slots__ = ("_fruitless_waits", "_pending", "_skips", "_target")

    def __init__(self, pending: Sized) -> None:
        self._pending = pending
        self._target = 0
        self._fruitless_waits = 0
        self._skips = 0

    def follower_reported(self, pending_before: int) -> None:
        """A follower's fetch confirmed its position; `pending_before` requests were pending before that."""
        if pending_before > len(self._pending) or not pending_before:
            self._target = pending_before

    @property
    def full(self) -> bool:
        """As many requests are pending as before the last confirmation."""
        return len(self._pending) >= self._target

    def should_wait(self, found_bytes: int) -> bool:
        """Whether a response with `found_bytes` is to be delayed. To be called once per response."""
        if self.full or found_bytes >= ENOUGH_BYTES:
            return False
        if self._skips:
            self._skips -= 1
            return False
        return True

    def waited(self) -> None:
        """A wait has ended; it was fruitless unless the round is full now."""
        if self.full:
            self._fruitless_waits = max(self._fruitless_waits - 1, 0)
        else:
            self._fruitless_waits = min(self._fruitless_waits + 1, FRUITLESS_WAITS_MAX)
            self._skips = (1 << self._fruitless_waits) - 1
