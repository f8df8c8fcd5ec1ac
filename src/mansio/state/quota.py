"""Rate quotas: which quota applies to a client, and the throttle time of a client that exceeds it.

The rates of one type are in bytes per second, or in partitions per second; this page speaks of bytes. Each quota in use
has a token bucket. It fills at the quota's rate up to the bytes of `burst_ms`. Every request takes its bytes out of the
bucket, even if it contains fewer: the client is then throttled until the bucket is no longer negative (KIP-219: the
client receives the response at once, with the throttle time). An idle client may thus send the bytes of `burst_ms` at
once, as much as Kafka allows with its windows (`quota.window.num` - 1 of `quota.window.size.seconds`). Kafka forgets a
burst after the last window; a bucket does not, so the rate is never exceeded, whatever the timing of requests.

Invariants:
* For a client that respects its throttle times, the bytes in any time range are at most rate x time + one burst + one
  request; a client that always has data gets its full rate. A client that ignores throttle_time_ms is charged for the
  remainder.
* At most `buckets_max` buckets are kept. A full bucket is equivalent to a new one, so full buckets are evicted first;
  if none is full, the least recently used bucket is evicted together with its debt.

Sources: KIP-13, KIP-55 (which quota applies), KIP-219, KIP-546, KIP-599 (partitions).
"""

from __future__ import annotations

from enum import Enum
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
CONTROLLER_MUTATION_RATE: Final = "controller_mutation_rate"
"""Partitions that a client creates and deletes, per second."""
CONNECTION_CREATION_RATE: Final = "connection_creation_rate"

THROTTLE_MS_MAX: Final = 60 * 60 * 1000
"""Upper bound of a throttle time; the remaining debt of the bucket counts against the next request."""

DEFAULT_BURST_MS: Final = 10_000
"""Default size of a bucket, as the time in which the quota's rate fills it."""
DEFAULT_BUCKETS_MAX: Final = 10_000

NAME_CHARACTERS_MAX: Final = 255
"""Length to which client ids are truncated: clients with the same first characters share a bucket."""

EVICTION_SCAN_MAX: Final = 2
"""Number of least recently used buckets that are checked for each new one. With two, buckets can be evicted faster than
they are created."""


class NonLiteralName(Enum):
    """Values of a `QuotaEntity` field that are not the name of a user or client."""

    DEFAULT = "default"
    """All users, or all client ids, without a quota of their own."""
    ABSENT = "absent"
    """The quota does not depend on the user, or on the client id."""


EntityName = str | NonLiteralName


class QuotaEntity(NamedTuple):
    """Entity of a quota: a user, a client id, a client id of a user, or an address. At least one field is not
    ABSENT."""

    user: EntityName = NonLiteralName.ABSENT
    client_id: EntityName = NonLiteralName.ABSENT
    ip: EntityName = NonLiteralName.ABSENT


class QuotaScope(NamedTuple):
    """Clients that share one bucket: those of this user, with this client id, or both. None: the field is
    irrelevant."""

    user: str | None
    client_id: str | None


def find_quota(
    rates: Mapping[QuotaEntity, float], user: str, client_id: str
) -> tuple[QuotaScope, float] | None:
    """Return the quota of a client per second, and the scope of clients that share it; None if no quota applies.

    The first of these quotas that is set applies (KIP-55): of the user with this client id, of the user with the
    default client id, of the user; the same three of the default user; of the client id; of the default client id.
    """
    for user_part in (user, NonLiteralName.DEFAULT):
        for client in (client_id, NonLiteralName.DEFAULT):
            if (rate := rates.get(QuotaEntity(user_part, client))) is not None:
                return QuotaScope(user, client_id), rate
        if (rate := rates.get(QuotaEntity(user_part, NonLiteralName.ABSENT))) is not None:
            return QuotaScope(user, None), rate
    for client in (client_id, NonLiteralName.DEFAULT):
        if (rate := rates.get(QuotaEntity(NonLiteralName.ABSENT, client))) is not None:
            return QuotaScope(None, client_id), rate
    return None


class TokenBucket:
    """Token bucket; a negative content is a debt. Times are seconds of a monotonic clock."""

    __slots__ = ("_credit", "_refilled_at", "capacity", "rate")

    def __init__(self, rate: float, burst_ms: int, now: float) -> None:
        self.rate = rate
        self.capacity = rate * burst_ms / 1000
        self._credit = self.capacity
        self._refilled_at = now

    def change_rate(self, rate: float, burst_ms: int, now: float) -> None:
        """Change the rate per second; a debt stays unchanged."""
        self._refill(now)
        self.rate = rate
        self.capacity = rate * burst_ms / 1000
        self._credit = min(self._credit, self.capacity)

    def take(self, amount: int, now: float) -> int:
        """Take an amount out of the bucket; returns the throttle time in ms, 0 for none."""
        self._refill(now)
        self._credit -= amount
        if self._credit >= 0:
            return 0
        return min(ceil(-self._credit / self.rate * 1000), THROTTLE_MS_MAX)

    def is_full(self, now: float) -> bool:
        """Whether the bucket is full, that is, equivalent to a new one."""
        self._refill(now)
        return self._credit >= self.capacity

    def _refill(self, now: float) -> None:
        if now > self._refilled_at:
            self._credit = min(self.capacity, self._credit + self.rate * (now - self._refilled_at))
            self._refilled_at = now


class RateLimiter:
    """The quotas of one type (bytes written, bytes read, or partitions created and deleted) and their buckets."""

    __slots__ = ("_buckets", "_buckets_max", "_burst_ms", "_rates")

    def __init__(self, *, burst_ms: int = DEFAULT_BURST_MS, buckets_max: int = DEFAULT_BUCKETS_MAX) -> None:
        self._rates: dict[QuotaEntity, float] = {}
        self._burst_ms = burst_ms
        self._buckets_max = buckets_max
        self._buckets: dict[QuotaScope, TokenBucket] = {}  # least recently used first

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._buckets)

    def set_rates(self, rates: Mapping[QuotaEntity, float]) -> None:
        """Replace the quotas, in units per second. Clients that still have a quota keep their debt."""
        self._rates = dict(rates)
        if not rates:
            self._buckets.clear()

    def take(self, user: str, client_id: str, amount: int, now: float) -> int:
        """Take an amount for a client; returns its throttle time in ms. With 0, returns the current throttle time."""
        bucket = self._find_bucket(user, client_id, now)
        return 0 if bucket is None else bucket.take(amount, now)

    def quota_of(self, user: str, client_id: str) -> tuple[QuotaScope, float] | None:
        """Return the quota of a client per second, and the scope of clients that share it; None if it has none."""
        return find_quota(self._rates, user, client_id[:NAME_CHARACTERS_MAX])

    def burst_bytes(self, user: str, client_id: str, now: float) -> int | None:
        """Return the maximum number of bytes that a client may send at once without being throttled; None if it has no
        quota."""
        bucket = self._find_bucket(user, client_id, now)
        return None if bucket is None else max(int(bucket.capacity), 1)

    def _find_bucket(self, user: str, client_id: str, now: float) -> TokenBucket | None:
        found = self.quota_of(user, client_id)
        if found is None:
            return None
        scope, rate = found
        bucket = self._buckets.pop(scope, None)
        if bucket is None:
            self._evict_idle_buckets(now)
            bucket = TokenBucket(rate, self._burst_ms, now)
        elif bucket.rate != rate:
            bucket.change_rate(rate, self._burst_ms, now)
        self._buckets[scope] = bucket  # now the most recently used
        return bucket

    def _evict_idle_buckets(self, now: float) -> None:
        oldest = list(zip(range(EVICTION_SCAN_MAX), self._buckets.items(), strict=False))
        for _, (scope, bucket) in oldest:
            if bucket.is_full(now):
                del self._buckets[scope]
        if len(self._buckets) >= self._buckets_max:
            del self._buckets[next(iter(self._buckets))]
