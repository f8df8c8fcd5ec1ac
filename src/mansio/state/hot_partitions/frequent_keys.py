"""Most frequent keys of a sample, in bounded memory (Misra-Gries), with the bound of the error.

`FrequentKeys` is lazy: it reduces its counters when there are twice as many as it keeps, by the count of the largest
one that has to go, so that at most `counters_max` are left. Each reduction takes its count from more than
`counters_max` keys at once, and so at most 1/(`counters_max` + 1) of all counted records.

`RecentKeys` counts in two sketches, of which `rotate` drops the older one, so that keys of the past leave.

Source: Misra and Gries, "Finding repeated elements" (1982); Anderson et al., "A High-Performance Algorithm for
Identifying Frequent Items in Data Streams" (2017), for the reduction of many counters at once.

Invariants:
* count <= true count of a key <= count + error, also for keys that have no counter; error <= records / (counters_max +
  1), rounded down.
* There are at most twice `counters_max` counters between two calls of `add`.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from heapq import nlargest
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

COUNTERS_MAX: Final = 256
"""Number of keys that are counted: the error is at most 0.4 % of the records."""
KEY_BYTES_MAX: Final = 256
"""Length of the keys that are kept. Of longer ones the begin is, with a hash of the whole key."""
_HASH_BYTES: Final = 16


class KeyCount(NamedTuple):
    """A key, and the least number of sampled records that have it."""

    key: bytes
    records: int


class KeySample(NamedTuple):
    """Frequent keys of a sample of the records of a partition.

    `records`: sampled records, of `batches` batches; `without_key` of them have no key. `keys`: the most frequent keys
    in descending order of their counts; a key has between its `records` and `records + error` of them."""

    records: int
    without_key: int
    error: int
    keys: tuple[KeyCount, ...] = ()
    batches: int = 0

    def share_min(self, key: KeyCount) -> float:
        """Return the part of the records that a key has at least."""
        return key.records / self.records if self.records else 0.0

    def share_max(self, key: KeyCount | None) -> float:
        """Return the part of the records that a key has at most; None: one that is not among `keys`."""
        return ((0 if key is None else key.records) + self.error) / self.records if self.records else 0.0


class FrequentKeys:
    """Counters of the most frequent keys."""

    __slots__ = ("_counters_max", "counts", "error", "records")

    def __init__(self, counters_max: int = COUNTERS_MAX) -> None:
        self._counters_max = counters_max
        self.counts: Counter[bytes] = Counter()
        self.error = 0
        self.records = 0

    def add(self, keys: Sequence[bytes]) -> None:
        """Count keys. Between two reductions the memory is that of so many more counters."""
        self.counts.update(keys)
        self.records += len(keys)
        if len(self.counts) > 2 * self._counters_max:
            cut = nlargest(self._counters_max + 1, self.counts.values())[-1]
            self.error += cut
            self.counts = Counter({key: count - cut for key, count in self.counts.items() if count > cut})


class _Counted:
    """Keys between two calls of `rotate`."""

    __slots__ = ("batches", "keys", "without_key")

    def __init__(self) -> None:
        self.keys = FrequentKeys()
        self.without_key = 0
        self.batches = 0


class RecentKeys:
    """The most frequent keys of the records since the last but one `rotate`."""

    __slots__ = ("_before", "_now")

    def __init__(self) -> None:
        self._before, self._now = _Counted(), _Counted()

    def add(self, keys: Sequence[bytes | None]) -> None:
        """Count the keys of the records of a batch; None is that of a record without one."""
        present = [_kept(key) for key in keys if key is not None]
        self._now.without_key += len(keys) - len(present)
        self._now.batches += 1
        self._now.keys.add(present)

    def rotate(self) -> None:
        """Drop what was counted before the last call."""
        self._before, self._now = self._now, _Counted()

    def sample(self, keys_max: int) -> KeySample:
        """Return the records since the last but one `rotate`, with at most `keys_max` keys."""
        before, now = self._before, self._now
        counts = before.keys.counts + now.keys.counts
        top = nlargest(keys_max, counts.items(), key=itemgetter(1))
        without_key = before.without_key + now.without_key
        return KeySample(
            before.keys.records + now.keys.records + without_key,
            without_key,
            before.keys.error + now.keys.error,
            tuple(KeyCount(key, count) for key, count in top),
            before.batches + now.batches,
        )


def _kept(key: bytes) -> bytes:
    if len(key) <= KEY_BYTES_MAX:
        return key
    return key[: KEY_BYTES_MAX - _HASH_BYTES] + blake2b(key, digest_size=_HASH_BYTES).digest()
