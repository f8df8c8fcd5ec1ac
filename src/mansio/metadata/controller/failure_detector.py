"""Failure detector: decides when a broker without a session is declared dead. Pure; times are monotonic seconds.

It records since when each session has existed, and since when each broker has been offline.

A session ends with its lease. If the metadata store stalls, all leases end at about the same time, and all brokers
register again shortly after. If they were declared dead, the in-sync sets would lose their members without need. So:

* If at least half of the registered active brokers have had the same session for the time of a lease, the store was not
  stalled, and every offline broker is dead.
* Otherwise an offline broker is expected back for the time of a lease. This time starts when the broker went offline or
  when this controller was elected, whichever is later.

A broker that was draining has announced its end and is never expected back.

Waiting too long delays elections; declaring a broker dead too early makes a replica catch up. Neither loses records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.metadata.model import BROKER_ACTIVE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.metadata.model import BrokerState, Registration


class FailureDetector:
    """Failure detector of one broker. Every broker updates its own, because it may become controller later."""

    __slots__ = ("_elected_at", "_seen", "_since", "_ttl_s")

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._elected_at = float("-inf")
        self._seen: dict[int, tuple[int, float]] = {}  # epoch and start time of each session
        self._since: dict[int, float] = {}  # offline brokers

    def record_election(self, now: float) -> None:
        """Record that this broker became controller."""
        self._elected_at = now

    def update(
        self, brokers: Mapping[int, BrokerState], registrations: Mapping[int, Registration], now: float
    ) -> None:
        """Update the detector with the current metadata."""
        seen = self._seen
        self._seen = {
            node_id: seen[node_id] if seen.get(node_id, (0, 0))[0] == broker.epoch else (broker.epoch, now)
            for node_id, broker in brokers.items()
        }
        self._since = {
            node_id: self._since.get(node_id, now)
            for node_id, registration in registrations.items()
            if node_id not in brokers and registration.state == BROKER_ACTIVE
        }

    def expected_back(self, now: float) -> frozenset[int]:
        """Return the offline brokers that are not declared dead. Call `update` first."""
        steady = sum(1 for _, since in self._seen.values() if now - since >= self._ttl_s)
        if self._since and 2 * steady >= len(self._seen) + len(self._since):
            return frozenset()
        return frozenset(node_id for node_id in self._since if now < self._declared_dead_at(node_id))

    def next_change_at(self, now: float) -> float | None:
        """Return the next time at which the result of `expected_back` may change without an `update`; None: never."""
        if not self.expected_back(now):
            return None
        steady_at = [since + self._ttl_s for _, since in self._seen.values()]
        declared_at = [self._declared_dead_at(node_id) for node_id in self._since]
        return min((at for at in (*steady_at, *declared_at) if at > now), default=None)

    def _declared_dead_at(self, node_id: int) -> float:
        return max(self._since[node_id], self._elected_at) + self._ttl_s
