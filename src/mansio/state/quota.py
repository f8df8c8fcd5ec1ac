"""Byte-rate quotas: whose quota a client falls under, and how long one that took too much has to pause.

Every quota in use is a bucket of bytes. It fills at the quota's rate up to what `burst_ms` brings, every request takes
its bytes out, and a request may take more than there is: the client then pauses until the debt is paid (KIP-219: it is
answered at once, with the time to pause). A client that was quiet may thus take up to `burst_ms` worth at once, as much
as Kafka lets through with its windows (`quota.window.num` - 1 of `quota.window.size.seconds`); but where Kafka forgets
a burst as soon as it has left the last window, a bucket never does, so the rate holds however the requests come.

Always true:
* Of a client that keeps its pauses, no stretch of time carries more than rate x time + one burst + one request; one
  that always has something gets all of its rate.
* At most `buckets_max` buckets are kept. A full one says nothing that a new one does not, so it is forgotten when
  others come; if none is full, the one that was idle longest goes, and its debt with it.

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
"""No client is told to pause for longer; what is then still owed counts against its next request."""

DEFAULT_BURST_MS: Final = 10_000
DEFAULT_BUCKETS_MAX: Final = 10_000

NAME_CHARACTERS_MAX: Final = 255
"""Client ids that agree in so many characters share a bucket."""

EVICTION_SCAN_MAX: Final = 2
"""So many of the longest idle buckets are looked at when a new one comes: they can go faster than they come."""


class Part(Enum):
    """What stands for a name that is not one."""

    DEFAULT = "default"
    """Everybody of this kind who has no quota of their own."""
    ABSENT = "absent"
    """The quota says nothing about this kind."""


Name = str | Part


class Entity(NamedTuple):
    """Whom a quota is for; one of the two at least is not ABSENT."""

    user: Name = Part.ABSENT
    client_id: Name = Part.ABSENT


class Scope(NamedTuple):
    """Who shares one bucket: None where it does not matter."""

    user: str | None
    client_id: str | None


def rate_for(rates: Mapping[Entity, float], user: str, client_id: str) -> tuple[Scope, float] | None:
    """The quota a client falls under, in bytes/s, and with whom it shares that; None if there is none.

    The most special one counts: a user's before anybody's, and of each first what also names the client id (KIP-55).
    """
    for who in (user, Part.DEFAULT):
        for client in (client_id, Part.DEFAULT):
            if (rate := rates.get(Entity(who, client))) is not None:
                return Scope(user, client_id), rate
        if (rate := rates.get(Entity(who, Part.ABSENT))) is not None:
            return Scope(user, None), rate
    for client in (client_id, Part.DEFAULT):
        if (rate := rates.get(Entity(Part.ABSENT, client))) is not None:
            return Scope(None, client_id), rate
    return None


class TokenBucket:
    """The bytes somebody may still take; below zero is what they owe. Times are monotonic seconds."""

    __slots__ = ("_at", "_credit", "capacity", "rate")

    def __init__(self, rate: float, burst_ms: int, now: float) -> None:
        self.rate = rate
        self.capacity = rate * burst_ms / 1000
        self._credit = self.capacity
        self._at = now

    def change_rate(self, rate: float, burst_ms: int, now: float) -> None:
        """Another quota from now on; a debt stays, in bytes."""
        self._fill(now)
        self.rate = rate
        self.capacity = rate * burst_ms / 1000
        self._credit = min(self._credit, self.capacity)

    def take(self, size_bytes: int, now: float) -> int:
        """Take so many bytes; how long to pause, in ms (0: not at all)."""
        self._fill(now)
        self._credit -= size_bytes
        if self._credit >= 0:
            return 0
        return min(ceil(-self._credit / self.rate * 1000), THROTTLE_MS_MAX)

    def is_full(self, now: float) -> bool:
        """Whether it is as good as a new one."""
        self._fill(now)
        return self._credit >= self.capacity

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._credit = min(self.capacity, self._credit + self.rate * (now - self._at))
            self._at = now


class RateLimiter:
    """The quotas of one kind (bytes written, or bytes read), and how far everybody has used theirs."""

    __slots__ = ("_buckets", "_buckets_max", "_burst_ms", "_rates")

    def __init__(self, *, burst_ms: int = DEFAULT_BURST_MS, buckets_max: int = DEFAULT_BUCKETS_MAX) -> None:
        self._rates: dict[Entity, float] = {}
        self._burst_ms = burst_ms
        self._buckets_max = buckets_max
        self._buckets: dict[Scope, TokenBucket] = {}  # the one that was idle longest first

    def __len__(self) -> int:
        """How many buckets there are."""
        return len(self._buckets)

    def set_rates(self, rates: Mapping[Entity, float]) -> None:
        """The quotas from now on, in bytes/s; what somebody owes is not forgotten while they have a quota."""
        self._rates = dict(rates)
        if not rates:
            self._buckets.clear()

    def take(self, user: str, client_id: str, size_bytes: int, now: float) -> int:
        """A client takes so many bytes; how long it has to pause, in ms. With 0 bytes: how long it has to anyway."""
        bucket = self._find(user, client_id, now)
        return 0 if bucket is None else bucket.take(size_bytes, now)

    def burst_bytes(self, user: str, client_id: str, now: float) -> int | None:
        """What a client may take at once at the most; None: anything."""
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
        self._buckets[scope] = bucket  # now the last one used
        return bucket

    def _forget_idle(self, now: float) -> None:
        oldest = list(zip(range(EVICTION_SCAN_MAX), self._buckets.items(), strict=False))
        for _, (scope, bucket) in oldest:
            if bucket.is_full(now):
                del self._buckets[scope]
        if len(self._buckets) >= self._buckets_max:
            del self._buckets[next(iter(self._buckets))]
