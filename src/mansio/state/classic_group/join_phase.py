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

    __slots__ = ("_has_new_member", "_initial_delay_ms", "_remaining_ms", "deadline_ms")

    def __init__(self, initial_delay_ms: float) -> None:
        self.deadline_ms = math.inf
        self._initial_delay_ms = initial_delay_ms
        self._remaining_ms: float | None = None  # in the initial delay: how much longer it may grow
        self._has_new_member = False

    def begin(self, now_ms: float, timeout_ms: int) -> None:
        """Wait for known members."""
        self._remaining_ms = None
        self.deadline_ms = now_ms + timeout_ms

    def begin_from_empty(self, now_ms: float, timeout_ms: int) -> None:
        """Wait for whoever may come to a group that was empty."""
        self._remaining_ms = max(timeout_ms - self._initial_delay_ms, 0)
        self._has_new_member = False
        self.deadline_ms = now_ms + int(self._initial_delay_ms)

    @property
    def awaits_new_members(self) -> bool:
        """Others may come: that all known members have joined ends nothing."""
        return self._remaining_ms is not None

    def member_joined(self) -> None:
        """Where one comes, more may."""
        self._has_new_member = True

    def extended(self, now_ms: float) -> bool:
        """Time is up: whether it goes on all the same, because members came in the meantime."""
        if not self._remaining_ms or not self._has_new_member:
            return False
        delay_ms = min(self._initial_delay_ms, self._remaining_ms)
        self._remaining_ms -= delay_ms
        self._has_new_member = False
        self.deadline_ms = now_ms + delay_ms
        return True

    def end(self) -> None:
        """Nobody is waited for any more."""
        self._remaining_ms = None
        self.deadline_ms = math.inf
