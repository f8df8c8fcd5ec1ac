"""Byte-rate quotas: which quota applies to a client, and the throttle time of a client that exceeds it.

Every quota in use is a token bucket of bytes. It fills at the quota's rate up to `burst_ms` worth; every request takes
its bytes out, and may take more than there is: the client is then throttled until the debt is paid (KIP-219: it is
answered at once, with the throttle time). An idle client may thus send `burst_ms` worth at once, as much as Kafka
allows with its windows (`quota.window.num` - 1 of `quota.window.size.seconds`); but while Kafka forgets a burst that
has left the last window, a bucket does not, so the rate holds whatever the timing of requests.

Invariants:
* For a client that respects its throttle times, no time range carries more than rate x time + one burst + one request;
  one that always has data gets its full rate. A client that ignores throttle_time_ms is charged for the remainder.
* At most `buckets_max` buckets are kept. A full one is equivalent to a new one, so it is evicted first; if none is
  full, the least recently used is evicted together with its debt.

Sources: KIP-13, KIP-55 (which quota applies), KIP-219, KIP-546.
"""

from __future__ import annotations

from enum import Enum
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"

THROTTLE_MS_MAX: Final = 60 * 60 * 1000
"""Upper bound of a throttle time; a remaining debt counts against the next request."""

DEFAULT_BURST_MS: Final = 10_000
DEFAULT_BUCKETS_MAX: Final = 10_000

NAME_CHARACTERS_MAX: Final = 255
"""Client ids that are equal in their first characters, up to this length, share a bucket."""

EVICTION_SCAN_MAX: Final = 2
"""Number of least recently used buckets checked per new one: they can be evicted faster than they are created."""


class Part(Enum):
    """Placeholders for an entity's name."""

    DEFAULT = "default"
    """All clients of this kind without a quota of their own."""
    ABSENT = "absent"
    """The quota does not depend on this kind."""


Name = str | Part


class Entity(NamedTuple):
    """The entity of a quota; at least one of the two is not ABSENT."""

    user: Name = Part.ABSENT
    client_id: Name = Part.ABSENT


class Scope(NamedTuple):
    """The clients that share one bucket: None where the name is irrelevant."""

    user: str | None
    client_id: str | None


def rate_for(rates: Mapping[Entity, float], user: str, client_id: str) -> tuple[Scope, float] | None:
    """The quota of a client in bytes/s and the scope that shares it; None if there is none.

    The most specific quota applies: a user's before the default, and of each first the one that also names the client
    id (KIP-55).
    """
    for user_part in (user, Part.DEFAULT):
        for client in (client_id, Part.DEFAULT):
            if (rate := rates.get(Entity(user_part, client))) is not None:
                return Scope(user, client_id), rate
        if (rate := rates.get(Entity(user_part, Part.ABSENT))) is not None:
            return Scope(user, None), rate
    for client in (client_id, Part.DEFAULT):
        if (rate := rates.get(Entity(Part.ABSENT, client))) is not None:
            return Scope(None, client_id), rate
    return None


class TokenBucket:
    """Bytes that may still be taken; a negative value is a debt. Times are monotonic seconds."""

    __slots__ = ("_at", "_credit", "capacity", "rate")

    def __init__(self, rate: float, burst_ms: int, now: float) -> None:
        self.rate = rate
        self.capacity = rate * burst_ms / 1000
        self._credit = self.capacity
        self._at = now

    def change_rate(self, rate: float, burst_ms: int, now: float) -> None:
        """Change the rate; a debt stays, in bytes."""
        self._fill(now)
        self.rate = rate
        self.capacity = rate * burst_ms / 1000
        self._credit = min(self._credit, self.capacity)

    def take(self, size_bytes: int, now: float) -> int:
        """Take bytes; returns the throttle time in ms (0: none)."""
        self._fill(now)
        self._credit -= size_bytes
        if self._credit >= 0:
            return 0
        return min(ceil(-self._credit / self.rate * 1000), THROTTLE_MS_MAX)

    def is_full(self, now: float) -> bool:
        """Whether the bucket is equivalent to a new one."""
        self._fill(now)
        return self._credit >= self.capacity

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._credit = min(self.capacity, self._credit + self.rate * (now - self._at))
            self._at = now


class RateLimiter:
    """The quotas of one kind (bytes written, or bytes read) and their buckets."""

    __slots__ = ("_buckets", "_buckets_max", "_burst_ms", "_rates")

    def __init__(self, *, burst_ms: int = DEFAULT_BURST_MS, buckets_max: int = DEFAULT_BUCKETS_MAX) -> None:
        self._rates: dict[Entity, float] = {}
        self._burst_ms = burst_ms
        self._buckets_max = buckets_max
        self._buckets: dict[Scope, TokenBucket] = {}  # least recently used first

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self._buckets)

    def set_rates(self, rates: Mapping[Entity, float]) -> None:
        """Set the quotas, in bytes/s; a client's debt is kept while it has a quota."""
        self._rates = dict(rates)
        if not rates:
            self._buckets.clear()

    def take(self, user: str, client_id: str, size_bytes: int, now: float) -> int:
        """Take bytes for a client; returns its throttle time in ms. With 0 bytes: its current throttle time."""
        bucket = self._find(user, client_id, now)
        return 0 if bucket is None else bucket.take(size_bytes, now)

    def burst_bytes(self, user: str, client_id: str, now: float) -> int | None:
        """Upper bound of what a client may take at once; None: no bound."""
        bucket = self._find(user, client_id, now)
        return None if bucket is None else max(int(bucket.capacity), 1)

    def _find(self, user: str, client_id: str, now: float) -> TokenBucket | None:
        found = rate_for(self._rates, user, client_id[:NAME_CHARACTERS_MAX])
        if found is None:
            return None
        scope, rate = found
        bucket = self._buckets.pop(scope, None)
        if bucket is None:
            self._forget_idle(now)
            bucket = TokenBucket(rate, self._burst_ms, now)
        elif bucket.rate != rate:
            bucket.change_rate(rate, self._burst_ms, now)
        self._buckets[scope] = bucket  # now the most recently used
        return bucket

    def _forget_idle(self, now: float) -> None:
        oldest = list(zip(range(EVICTION_SCAN_MAX), self._buckets.items(), strict=False))
        for _, (scope, bucket) in oldest:
            if bucket.is_full(now):
                del self._buckets[scope]
        if len(self._buckets) >= self._buckets_max:
            del self._buckets[next(iter(self._buckets))]
