"""How much a leader's followers take at a time: whether one that finds something is better answered a moment later.

A round of a follower (fetch, append, sync, fetch again) costs all brokers the same for one batch as for ten. When a
follower's word confirms batches, the producers that waited for them most often send as many again at once. Answered
before those are here, the follower syncs half of what is under way, and the rest has to wait for all of that round:
there are twice as many rounds, each half empty. So its answer waits until as many requests wait to be confirmed as
before, `WAIT_MS` at most.

Whether producers are like that is found out: a wait that was in vain has the next answers leave without one, more of
them with each time. A producer that sends when it likes meets a wait seldom, one that sends one by one never.

Always true: nothing but the moment of an answer depends on what is here, and that by `WAIT_MS` at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sized

WAIT_MS: Final = 1.0

ENOUGH_BYTES: Final = 1 << 20
"""So much is a round worth having, whatever else is to come; and who asks for old records always finds as much."""

FRUITLESS_WAITS_MAX: Final = 5
"""After so many waits in vain, 2 ** so many answers leave without one, less one."""


class FetchCoalescer:
    """What a leader knows of the producers that wait for its followers. `pending`: their requests that are not answered
    yet."""

    __slots__ = ("_pending", "_vain", "_wanted", "_without")

    def __init__(self, pending: Sized) -> None:
        self._pending = pending
        self._wanted = 0
        self._vain = 0
        self._without = 0

    def heard(self, pending_before: int) -> None:
        """A follower told what it has; before that, so many requests were pending."""
        if pending_before > len(self._pending) or not pending_before:
            self._wanted = pending_before

    @property
    def full(self) -> bool:
        """Are as many pending as there were before the last were confirmed?"""
        return len(self._pending) >= self._wanted

    def should_wait(self, found_bytes: int) -> bool:
        """A follower could be answered with so much. Asked once for each answer."""
        if self.full or found_bytes >= ENOUGH_BYTES:
            return False
        if self._without:
            self._without -= 1
            return False
        return True

    def waited(self) -> None:
        """A wait is over. It was in vain unless the round is full now."""
        if self.full:
            self._vain = max(self._vain - 1, 0)
        else:
            self._vain = min(self._vain + 1, FRUITLESS_WAITS_MAX)
            self._without = (1 << self._vain) - 1
