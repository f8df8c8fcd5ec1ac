"""When a broker without a session is given up. Pure: times are handed in, in seconds of a monotonic clock.

Owns the memory a controller needs for that: since when each session has been there, and each broker away.

A session ends with its lease, and a lease can end because the *store* stood still. Then all end at about the same time,
and every broker is back a moment later; who takes that for the death of all empties the in-sync sets for nothing. So:

* while at least half of the brokers that should be there have had one and the same session for the time of a lease,
  the store has not stood still, and whoever is away is dead;
* otherwise a broker is awaited for the time of a lease, from when it was first missed or from this controller's own
  election, whichever is later.

A broker that was draining has said that it goes: it is never awaited.

Awaiting costs availability, never data; giving up early costs a copy that must catch up, never data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.metadata.model import ACTIVE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.metadata.model import BrokerState, Registration


class FailureDetector:
    """One per broker, told of every change of the view, so that it knows the past when it becomes controller."""

    __slots__ = ("_elected_at", "_seen", "_since", "_ttl_s")

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._elected_at = float("-inf")
        self._seen: dict[int, tuple[int, float]] = {}  # of each session: its epoch, and since when
        self._since: dict[int, float] = {}  # of each broker that is away

    def elected(self, now: float) -> None:
        """This broker became controller."""
        self._elected_at = now

    def update(
        self, brokers: Mapping[int, BrokerState], registrations: Mapping[int, Registration], now: float
    ) -> None:
        """The view as it is now."""
        seen = self._seen
        self._seen = {
            node_id: seen[node_id] if seen.get(node_id, (0, 0))[0] == broker.epoch else (broker.epoch, now)
            for node_id, broker in brokers.items()
        }
        self._since = {
            node_id: self._since.get(node_id, now)
            for node_id, registration in registrations.items()
            if node_id not in brokers and registration.state == ACTIVE
        }

    def expected_back(self, now: float) -> frozenset[int]:
        """Who is away and not given up. Call `update` first."""
        steady = sum(1 for _, since in self._seen.values() if now - since >= self._ttl_s)
        if self._since and 2 * steady >= len(self._seen) + len(self._since):
            return frozenset()
        return frozenset(node_id for node_id in self._since if now < self._declared_dead_at(node_id))

    def next_at(self, now: float) -> float | None:
        """When time alone can change `expected_back`; None: never."""
        if not self.expected_back(now):
            return None
        steady_at = [since + self._ttl_s for _, since in self._seen.values()]
        given_up_at = [self._declared_dead_at(node_id) for node_id in self._since]
        return min((at for at in (*steady_at, *given_up_at) if at > now), default=None)

    def _declared_dead_at(self, node_id: int) -> float:
        return max(self._since[node_id], self._elected_at) + self._ttl_s
