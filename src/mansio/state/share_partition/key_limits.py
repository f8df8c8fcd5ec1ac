"""Limits by key of one group in one topic partition: how many records of a group key may be leased at once, and how
many deliveries of it may start per second.

A record counts from its acquisition until its acknowledgement, release or expiry is stored; so does a record that may
have been leased before a loss of state. The rate is a token bucket for each key: a delivery takes a token, a bucket
gets `rate` tokens per second and has at most `burst`. Every bucket is empty when the limits are created, as they are
after a fail-over, and after a change of rate or burst; so at most rate x time + burst deliveries of a key start in any
interval, over fail-overs.

One object is shared by the share partitions of a topic partition (`share_index`), so that the limits hold for all of
them together. Each has a `KeyIndex` of its own, which is told when a key has a free place again.

A bucket is one number, the time at which it is full (GCRA, ITU-T I.371). A full bucket is dropped. At most
`BUCKETS_MAX` buckets are kept; if all are used, keys without one wait.

Invariants:
* The number of leases of a key is the number of offsets that the attached indexes count for it.
* `places` allows a delivery as soon as `due_ms` has come, and not before, unless all buckets are used.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

BUCKETS_MAX: Final = 100_000
"""Maximum number of keys whose buckets are not full."""

UNLIMITED: Final = 1 << 62
"""Number of places of a key without a limit."""

_DROPPED_MAX: Final = 64
"""Maximum number of full buckets that are dropped at a time."""


class LimitedIndex(Protocol):
    """The records of one share partition to which limits apply."""

    @property
    def is_scanned(self) -> bool:
        """Whether the keys of all records are known that may have been leased when the state was loaded."""

    def counted_keys(self) -> Iterable[int]:
        """Yield the key of each record that is counted as leased."""

    def on_place(self, key: int) -> None:
        """Offer a record of a key that has a free place again."""


class KeyLimits:
    """Leases and token buckets of the group keys of one topic partition. Keys are hashes."""

    __slots__ = (
        "_burst",
        "_empty_ms",
        "_full_at",
        "_full_ms",
        "_indexes",
        "_interval_ms",
        "_leased",
        "_leases_max",
        "change_count",
    )

    def __init__(self, now_ms: float) -> None:
        """Without limits; see `configure`."""
        self._leases_max = 0
        self._interval_ms = 0.0
        """Time in which a bucket gets a token; 0 without a limit of the rate."""
        self._burst = 1
        self._empty_ms = now_ms
        """Time at which all buckets were empty."""
        self._leased: dict[int, int] = {}
        """Number of leased records of each key that has any."""
        self._full_ms: dict[int, float] = {}
        """Time at which the bucket of a key is full; no entry if it is the earliest possible one."""
        self._full_at: list[tuple[float, int]] = []
        """Heap with one entry for each bucket: a time at which it may be full."""
        self._indexes: dict[int, LimitedIndex] = {}
        self.change_count = 0
        """Number of changes that may have reduced the places of a key."""

    def configure(self, leases_max: int, rate: float, burst: int, now_ms: float) -> None:
        """Set the limits: leased records of a key at once, deliveries of a key per second, and the size of a bucket. 0:
        no limit. A change of the rate empties all buckets."""
        interval_ms = 1000 / rate if rate else 0.0
        if (interval_ms, burst) != (self._interval_ms, self._burst):
            self._interval_ms, self._burst, self._empty_ms = interval_ms, burst, now_ms
            self._full_ms.clear()
            self._full_at.clear()
        self._leases_max = leases_max
        self.change_count += 1

    # Share partitions

    def attach(self, number: int, index: LimitedIndex) -> None:
        """Count the leases of an index, in place of the former one of the share partition with this number."""
        self.detach(number)
        self._indexes[number] = index

    def detach(self, number: int) -> None:
        """Count the leases of a share partition no longer, and tell the other indexes which keys have free places
        again."""
        index = self._indexes.pop(number, None)
        keys = () if index is None else tuple(index.counted_keys())
        for key in keys:
            self._remove(key)
        self.change_count += 1
        for key in dict.fromkeys(keys):
            self._tell_of_place(key)

    @property
    def are_leases_known(self) -> bool:
        """Whether all leases of all attached share partitions are counted."""
        return all(index.is_scanned for index in self._indexes.values())

    # Leases

    def add_lease(self, key: int) -> None:
        """Count a record as leased."""
        self._leased[key] = self._leased.get(key, 0) + 1
        self.change_count += 1

    def end_lease(self, key: int) -> None:
        """Count a record as leased no longer, and tell all indexes if the key has a free place again."""
        left = self._remove(key)
        if left == self._leases_max - 1:
            self._tell_of_place(key)

    def _tell_of_place(self, key: int) -> None:
        for index in self._indexes.values():
            index.on_place(key)

    def _remove(self, key: int) -> int:
        left = self._leased[key] - 1
        if left:
            self._leased[key] = left
        else:
            del self._leased[key]
        return left

    def has_place(self, key: int) -> bool:
        """Whether the key has fewer leases than it may have."""
        return not self._leases_max or self._leased.get(key, 0) < self._leases_max

    def places(self, key: int, now_ms: float) -> int:
        """Return how many records of the key may be leased now."""
        places = self._leases_max - self._leased.get(key, 0) if self._leases_max else UNLIMITED
        if not self._interval_ms or places <= 0:
            return places
        if len(self._full_ms) >= BUCKETS_MAX and key not in self._full_ms:
            self.drop_full(now_ms)
            if len(self._full_ms) >= BUCKETS_MAX:
                return 0
        due_ms = self.due_ms(key)
        if due_ms > now_ms:
            return 0
        return min(places, self._burst, 1 + math.floor((now_ms - due_ms) / self._interval_ms))

    def full_keys(self) -> list[int]:
        """Return the keys that have as many leases as they may have."""
        most = self._leases_max
        return [key for key, count in self._leased.items() if count >= most] if most else []

    # Rate

    def due_ms(self, key: int) -> float:
        """Return the time from which on the rate allows the next delivery of a key; it may be in the past."""
        if not self._interval_ms:
            return -math.inf
        full_ms = self._full_ms.get(key)
        if full_ms is None:
            if len(self._full_ms) >= BUCKETS_MAX:
                return self._full_at[0][0]  # waits for a bucket
            full_ms = self._empty_ms + self._burst * self._interval_ms
        return full_ms - (self._burst - 1) * self._interval_ms

    def take_token(self, key: int, now_ms: float) -> None:
        """Take a token for a delivery that starts now. `places` has allowed it."""
        if not self._interval_ms:
            return
        self.change_count += 1
        full_ms = self._full_ms.get(key)
        if full_ms is None:
            self.drop_full(now_ms)
            full_ms = self._empty_ms + self._burst * self._interval_ms
            heappush(self._full_at, (full_ms, key))
        self._full_ms[key] = max(full_ms, now_ms) + self._interval_ms

    def drop_full(self, now_ms: float) -> None:
        """Drop some of the buckets that are full."""
        full_at, full_ms = self._full_at, self._full_ms
        for _ in range(_DROPPED_MAX):
            if not full_at or full_at[0][0] > now_ms:
                return
            key = heappop(full_at)[1]
            if full_ms[key] <= now_ms:
                del full_ms[key]
            else:
                heappush(full_at, (full_ms[key], key))
