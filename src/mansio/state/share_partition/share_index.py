"""Division of the offsets of a topic partition among several share partitions of one group.

A topic partition has one share partition for each group, which has all offsets, unless a feature of the topic has an
index: this index says which share partition has which offset, and in which order records of them are acquired. The
share partitions are numbered. A new feature of this kind implements `ShareIndex` and `AcquisitionOrder`; what leases,
acknowledges, describes, redrives or deletes records knows neither the feature nor how many share partitions there are.

Invariants:
* Each offset below `ShareIndex.end` belongs to one number, which stays the same.
* The number `BASE` exists with every index and without one. Its state is loaded first; the state of another number that
  does not exist yet begins at its start offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from mansio.state.share_partition.types import BASE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mansio.state.share_partition.types import AcknowledgementBatch

ACKNOWLEDGED_OFFSETS_MAX: Final = 20_000
"""Maximum number of offsets in the acknowledgements of a partition; greater than the number of records that can be
leased."""


class OwnOffsets(Protocol):
    """The offsets of one share partition."""

    @property
    def end(self) -> int:
        """Offset below which it is known which offsets these are."""

    @property
    def has_all(self) -> bool:
        """Whether these are all offsets."""

    def within(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of own offsets within the offsets `first` to `last`, ascending; adjacent ones are not
        merged."""

    def first_at_or_above(self, offset: int) -> int | None:
        """Return the first own offset that is not below `offset`; None if there is none."""

    def count(self, first: int, last: int) -> int:
        """Return how many of the offsets `first` to `last` are own ones."""

    def bound_after(self, offset: int, records: int) -> int:
        """Return the offset after the next `records` own offsets from `offset` on. Beyond `end` each offset counts as
        an own one."""


class AcquisitionOrder(Protocol):
    """In which order, and how many, records of each share partition of a topic partition are acquired. One object for
    each group, in memory: the deliveries of all members count together."""

    may_exceed: bool
    """Whether a member that takes whole batches may get more records than its part."""

    measures_leases: bool
    """Whether `record_end` has to be called."""

    def divide(self, records_max: int, available: Mapping[int, int]) -> Sequence[tuple[int, int]]:
        """Return (number, records) in the order of acquisition, at most `records_max` records in all.

        `available`: by number, the records that can be acquired now; it may be less than there are, but not 0."""

    def record(self, delivered: Mapping[int, int], available: Mapping[int, int]) -> None:
        """Record deliveries by number. `available`: as in `divide`, before these deliveries."""

    def record_end(self, number: int, records: int, held_ms: float) -> None:
        """Record that leases of so many records ended, which lasted `held_ms` together."""

    def free_locks(self, number: int, leased: Mapping[int, int], locks_max: int) -> int:
        """Return how many more records of a share partition may be leased, if `leased` are now, by number, and at most
        `locks_max` in all."""


class ShareIndex(Protocol):
    """Which share partition of a topic partition has which offset."""

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of all share partitions, in the order in which they are described and redriven."""

    @property
    def names(self) -> Mapping[int, str]:
        """The names of the share partitions that descriptions (as `priorities`) and metrics list one by one; none if
        they are not to be listed."""

    @property
    def end(self) -> int:
        """Offset below which it is known which share partition has an offset."""

    def offsets_of(self, number: int) -> OwnOffsets:
        """Return the offsets of one share partition; the result follows changes of the index."""

    def split(self, first: int, last: int) -> Iterable[tuple[int, int, int]]:
        """Return the offsets `first` to `last` as ranges (first, last, number), ascending. Offsets that the index does
        not cover have the number `BASE`."""

    def new_order(self) -> AcquisitionOrder:
        """Return the order of acquisition for a group."""


def split_acknowledgements(
    batches: Sequence[AcknowledgementBatch], index: ShareIndex
) -> dict[int, list[AcknowledgementBatch]]:
    """Return the parts of acknowledgements for each share partition, by number.

    Malformed ones are returned whole, as those of `BASE`, and rejected there."""
    found: dict[int, list[AcknowledgementBatch]] = {}
    before, left = -1, ACKNOWLEDGED_OFFSETS_MAX
    for batch in batches:
        first, last, types = batch.first, batch.last, batch.types
        count = last - first + 1
        if first <= before or not 0 < count <= left or len(types) not in (1, count):
            return {BASE: list(batches)}
        before = last
        left -= count
        for low, high, number in index.split(first, last):
            own = types if len(types) == 1 else types[low - first : high - first + 1]
            found.setdefault(number, []).append(batch._replace(first=low, last=high, types=own))
    return found
