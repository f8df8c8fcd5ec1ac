"""How long a classic group waits for its members to join.

A rebalance ends when all known members have joined, or the slowest one's rebalance timeout has passed (KIP-62). The
first rebalance of an empty group cannot know whom to wait for: it lasts for the initial delay, and for as long again
while members come, but no longer than that timeout in all (KIP-134).

Pure: methods take the time. Always true: `deadline_ms` is infinity when nothing is waited for.
"""

from __future__ import annotations

import math


class JoinPhase:
    """Of one group. `deadline_ms`: when time is up; then ask whether it is `extended`."""

    __slots__ = ("_initial_delay_ms", "_left_ms", "_member_came", "deadline_ms")

    def __init__(self, initial_delay_ms: float) -> None:
        self.deadline_ms = math.inf
        self._initial_delay_ms = initial_delay_ms
        self._left_ms: float | None = None  # in the initial delay: how much longer it may grow
        self._member_came = False

    def begin(self, now_ms: float, timeout_ms: int) -> None:
        """Wait for known members."""
        self._left_ms = None
        self.deadline_ms = now_ms + timeout_ms

    def begin_from_nobody(self, now_ms: float, timeout_ms: int) -> None:
        """Wait for whoever may come to a group that was empty."""
        self._left_ms = max(timeout_ms - self._initial_delay_ms, 0)
        self._member_came = False
        self.deadline_ms = now_ms + int(self._initial_delay_ms)

    @property
    def awaits_strangers(self) -> bool:
        """Others may come: that all known members have joined ends nothing."""
        return self._left_ms is not None

    def member_came(self) -> None:
        """Where one comes, more may."""
        self._member_came = True

    def extended(self, now_ms: float) -> bool:
        """Time is up: whether it goes on all the same, because members came in the meantime."""
        if not self._left_ms or not self._member_came:
            return False
        delay_ms = min(self._initial_delay_ms, self._left_ms)
        self._left_ms -= delay_ms
        self._member_came = False
        self.deadline_ms = now_ms + delay_ms
        return True

    def end(self) -> None:
        """Nobody is waited for any more."""
        self._left_ms = None
        self.deadline_ms = math.inf
