"""Rates at which addresses may create connections (KIP-612, quota `connection_creation_rate`).

Each address has a token bucket of connections (`state.quota`), which fills at the rate of its quota, or of the default
quota, up to what it gives in `burst_ms`. Kafka counts each IPv6 address for itself; here the first 64 bits are one
address, as in the admission of handshakes, because a host may use all addresses that have them. So the quota of an
IPv6 address is one of its network of 64 bits; of several quotas for the same network the lowest applies.

Invariant: an address creates at most rate x time + one burst + one connections in any time range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.handshake_admission import address_key
from mansio.state.quota import (
    DEFAULT_BUCKETS_MAX,
    DEFAULT_BURST_MS,
    EntityName,
    QuotaEntity,
    RateLimiter,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class ConnectionRates:
    """The quotas of addresses and their buckets."""

    __slots__ = ("_limiter",)

    def __init__(self, *, burst_ms: int = DEFAULT_BURST_MS, buckets_max: int = DEFAULT_BUCKETS_MAX) -> None:
        self._limiter = RateLimiter(burst_ms=burst_ms, buckets_max=buckets_max)

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._limiter)

    def set_rates(self, rates: Mapping[EntityName, float]) -> None:
        """Replace the quotas, in connections per second, by address or DEFAULT."""
        by_key: dict[QuotaEntity, float] = {}
        for name, rate in rates.items():
            entity = _entity(address_key(name) if isinstance(name, str) else name)
            by_key[entity] = min(rate, by_key.get(entity, rate))
        self._limiter.set_rates(by_key)

    def take(self, host: str, now: float) -> int:
        """Count a new connection from the address `host`. Returns 0, or the time in ms after which the address may
        connect again; the connection is not counted then. `now`: seconds of a monotonic clock."""
        key = address_key(host)
        throttle_ms = self._limiter.take("", key, 0, now)
        if not throttle_ms:
            self._limiter.take("", key, 1, now)
        return throttle_ms


def _entity(name: EntityName) -> QuotaEntity:
    """Return the entity under which a limiter has the quota of an address: the place of the client id, since the rates
    of addresses have a limiter of their own."""
    return QuotaEntity(client_id=name)
