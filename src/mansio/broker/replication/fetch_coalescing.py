"""Fetch coalescing: delays a follower's fetch response by up to 1 ms to put more batches into it.

A follower's round (fetch, append, flush, fetch again) takes about as much time for one batch as for ten. When a
follower's fetch confirms batches, the producers of these batches usually send as many new ones at once. If the follower
gets its response before they arrive, they wait for a whole further round. The response is therefore delayed until as
many produce requests are pending as before the confirmation, by at most `WAIT_MS_MAX`.

Some producers do not send at once. After a delay without more batches (a fruitless wait) the next responses are sent
without delay: one, then three, then seven, and so on. A producer that sends at arbitrary times is therefore rarely
delayed, and one that sends single batches never.

Invariant: only the time of a response depends on this module, by at most `WAIT_MS_MAX`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sized

WAIT_MS_MAX: Final = 1.0
"""Maximum delay of a response."""

FULL_RESPONSE_BYTES: Final = 1 << 20
"""A response of at least this size is never delayed; responses to followers that are far behind are that large."""

FRUITLESS_WAITS_MAX: Final = 5
"""After n fruitless waits (at most this many), 2 ** n - 1 responses are sent without a wait."""


class FetchCoalescer:
    """Decides for one leader which responses are delayed. `pending`: the produce requests that wait for a commit."""

    __slots__ = ("_fruitless_waits", "_pending", "_skips", "_target")

    def __init__(self, pending: Sized) -> None:
        self._pending = pending
        self._target = 0
        self._fruitless_waits = 0
        self._skips = 0

    def record_follower_fetch(self, pending_before: int) -> None:
        """Record a follower's fetch. `pending_before`: number of produce requests that were pending before it. If the
        fetch confirmed some of them, or none was pending, `is_full` compares with this number from now on."""
        if pending_before > len(self._pending) or not pending_before:
            self._target = pending_before

    @property
    def is_full(self) -> bool:
        """Whether at least as many produce requests are pending as before the last fetch that confirmed some, or found
        none pending."""
        return len(self._pending) >= self._target

    def should_wait(self, found_bytes: int) -> bool:
        """Return whether a response with `found_bytes` of records should be delayed. Call it once per response."""
        if self.is_full or found_bytes >= FULL_RESPONSE_BYTES:
            return False
        if self._skips:
            self._skips -= 1
            return False
        return True

    def record_wait(self) -> None:
        """Record that a delay has ended. The delay was fruitless if `is_full` is False."""
        if self.is_full:
            self._fruitless_waits = max(self._fruitless_waits - 1, 0)
        else:
            self._fruitless_waits = min(self._fruitless_waits + 1, FRUITLESS_WAITS_MAX)
            self._skips = (1 << self._fruitless_waits) - 1
