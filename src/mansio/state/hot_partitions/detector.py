"""Detection of hot partitions from the rates at which partitions take in records.

A partition is hot in a window if its rate is at least `Thresholds.floor`, and far above that of the other partitions of
its topic: `FACTOR_MIN` times their median or, with at most `FEW_PARTITIONS` partitions, `SHARE_OF_FEW` of the topic's
rate. It is flagged while it was hot in `HOT_WINDOWS` of the last `WINDOWS` windows, so that a burst is not.

The median stands for the other partitions because the mean does not: with two partitions none can have three times the
mean, and with many idle ones each that is in use has. A topic with one partition has none with which it could be
compared, and is never flagged.

Invariants:
* A partition is flagged in the third window at the earliest in which it is hot.
* `is_uneven` without the rates of some partitions is true wherever it is true with them: who knows some of the rates
  only needs the others where it is true.
* The state has an entry for each partition that was hot in one of the last `WINDOWS` windows, and no other.
"""

from __future__ import annotations

from collections.abc import Hashable
from statistics import median
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

Key = TypeVar("Key", bound=Hashable)

FACTOR_MIN: Final = 3.0
"""A hot partition has at least this multiple of the median rate of its topic's partitions."""
FEW_PARTITIONS: Final = 3
"""Number of partitions up to which the median says too little, and the share in the topic's rate counts."""
SHARE_OF_FEW: Final = 0.8
"""Share in the rate of a topic with few partitions that a hot one has at least."""
WINDOWS: Final = 5
HOT_WINDOWS: Final = 3
"""A partition is flagged if it was hot in so many of the last `WINDOWS` windows."""

_WINDOWS_MASK: Final = (1 << WINDOWS) - 1


class Thresholds(NamedTuple):
    """Rates below which no partition is hot: `rate_min` in records per second, and `share_min`, a part of what the
    leader takes in."""

    rate_min: float = 100.0
    share_min: float = 0.05

    def floor(self, intake: float) -> float:
        """Return the least rate of a hot partition, in records per second, on a broker that takes in `intake` records
        per second."""
        return max(self.rate_min, self.share_min * intake)


class Skew(NamedTuple):
    """The rate of a partition compared with its topic, in records per second: `median` is that of the rates of all
    `partition_count` partitions, `topic_rate` is their sum."""

    rate: float
    median: float
    topic_rate: float
    partition_count: int

    @property
    def factor(self) -> float | None:
        """The rate as a multiple of the median; None if the median is 0."""
        return self.rate / self.median if self.median else None

    @property
    def share(self) -> float:
        """The part of the topic's rate that the partition has."""
        return self.rate / self.topic_rate if self.topic_rate else 0.0

    @property
    def is_uneven(self) -> bool:
        """Whether the partition has far more than the others of its topic."""
        if self.partition_count < 2 or not self.rate:
            return False
        if self.partition_count <= FEW_PARTITIONS:
            return self.share >= SHARE_OF_FEW
        return self.rate >= FACTOR_MIN * self.median


class TopicRates(NamedTuple):
    """The rates of the partitions of one topic: their median and sum."""

    median: float
    total: float
    partition_count: int

    def skew(self, rate: float) -> Skew:
        """Compare one of them with all."""
        return Skew(rate, self.median, self.total, self.partition_count)


def topic_rates(rates: Sequence[float], partition_count: int) -> TopicRates:
    """Return median and sum of the rates of a topic's partitions; those that are missing in `rates` are 0."""
    idle = max(0, partition_count - len(rates))
    middle = median([*rates, *[0.0] * idle]) if partition_count else 0.0
    return TopicRates(middle, sum(rates), partition_count)


class HotPartitionDetector(Generic[Key]):
    """The partitions of one broker that are hot, by the windows in which they were."""

    __slots__ = ("_windows", "flagged")

    def __init__(self) -> None:
        self._windows: dict[Key, int] = {}
        """A bit for each of the last windows, the latest one is the lowest."""
        self.flagged: frozenset[Key] = frozenset()
        """The partitions that are hot now."""

    @property
    def known(self) -> Collection[Key]:
        """The partitions that were hot in one of the last windows."""
        return self._windows.keys()

    def add_window(self, hot: Collection[Key], *, unknown: Collection[Key] = ()) -> None:
        """Add a window in which the partitions `hot` were hot. Of those that are `unknown`, because some rates could
        not be learned, the window does not count."""
        windows = {}
        for key in {*self._windows, *hot}:
            bits = self._windows.get(key, 0)
            if key not in unknown:
                bits = (bits << 1 | (key in hot)) & _WINDOWS_MASK
            if bits:
                windows[key] = bits
        self._windows = windows
        self.flagged = frozenset(key for key, bits in windows.items() if bits.bit_count() >= HOT_WINDOWS)

    def retain(self, is_kept: Callable[[Key], bool]) -> None:
        """Forget the other partitions: this broker does not lead them any more."""
        self._windows = {key: bits for key, bits in self._windows.items() if is_kept(key)}
        self.flagged = self.flagged.intersection(self._windows)
