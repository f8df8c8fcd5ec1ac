"""A sample of an index of share partitions: 16 of them, by the hash of a record's key, which are served in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from zlib import crc32

from mansio.wire.batch.record_batch import read_header
from mansio.wire.batch.record_reader import read_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.state.share_partition.share_index import ShareIndex

COUNT: Final = 16


def number_of(key: bytes | None) -> int:
    return 0 if key is None else crc32(key) % COUNT


class TurnOrder:
    """One record of each share partition in turn."""

    may_exceed = True
    measures_leases = False

    def __init__(self) -> None:
        self._last_served = 0

    def divide(self, records_max: int, available: Mapping[int, int]) -> Sequence[tuple[int, int]]:
        limits = dict.fromkeys(self._turns(), 0)
        left = records_max
        while left and any(limits[number] < available[number] for number in limits):
            for number in limits:
                if left and limits[number] < available[number]:
                    limits[number] += 1
                    left -= 1
        return [(number, records) for number, records in limits.items() if records]

    def record(self, delivered: Mapping[int, int], available: Mapping[int, int]) -> None:
        del available
        self._last_served = max(
            delivered, key=lambda number: [*self._turns()].index(number), default=self._last_served
        )

    def record_end(self, number: int, records: int, held_ms: float) -> None:
        pass

    def free_locks(self, number: int, leased: Mapping[int, int], locks_max: int) -> int:
        del number
        return locks_max - sum(leased.values())

    def _turns(self) -> Iterator[int]:
        return ((self._last_served + 1 + step) % COUNT for step in range(COUNT))


class HashIndex:
    """`ShareIndex` of a log that begins with offset 0. It reads what was appended when it is asked for its end."""

    numbers: Sequence[int] = range(COUNT)
    names: Mapping[int, str] = {}

    def __init__(self, partition: Partition) -> None:
        self._log = partition.log
        self._numbers = bytearray()
        """By offset, the number of its share partition."""

    @property
    def end(self) -> int:
        for batch in self._log.batches(len(self._numbers)):
            keys = dict(read_keys(batch))
            header = read_header(batch)
            offsets = range(header.base_offset, header.last_offset + 1)
            self._numbers += bytes(number_of(keys.get(offset)) for offset in offsets)
        return len(self._numbers)

    def offsets_of(self, number: int) -> HashOffsets:
        return HashOffsets(self, number)

    def split(self, first: int, last: int) -> Iterable[tuple[int, int, int]]:
        end = self.end
        return [
            (offset, offset, self._numbers[offset] if offset < end else 0)
            for offset in range(first, last + 1)
        ]

    def new_order(self) -> TurnOrder:
        return TurnOrder()

    def offsets(self, number: int, first: int, last: int) -> Iterator[int]:
        stop = min(last + 1, self.end)
        return (offset for offset in range(max(first, 0), stop) if self._numbers[offset] == number)


class HashOffsets:
    """`OwnOffsets` of one number."""

    def __init__(self, index: HashIndex, number: int) -> None:
        self._index = index
        self._number = number

    @property
    def end(self) -> int:
        return self._index.end

    @property
    def has_all(self) -> bool:
        return False

    def within(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        return ((offset, offset) for offset in self._index.offsets(self._number, first, last))

    def first_at_or_above(self, offset: int) -> int | None:
        return next(self._index.offsets(self._number, offset, self.end), None)

    def count(self, first: int, last: int) -> int:
        return sum(1 for _ in self._index.offsets(self._number, first, last))

    def bound_after(self, offset: int, records: int) -> int:
        for own in self._index.offsets(self._number, offset, self.end):
            records -= 1
            if not records:
                return own + 1
        return max(self.end, offset) + records


class HashIndexes:
    """`ShareIndexes` of a broker on which the topics whose names begin with `hashed` have a `HashIndex`."""

    def __init__(self) -> None:
        self._known: dict[Partition, ShareIndex] = {}

    def numbers_of(self, topic_id: bytes) -> Sequence[int]:
        del topic_id
        return range(COUNT)

    def index_of(self, partition: Partition) -> ShareIndex | None:
        if not partition.topic.startswith("hashed"):
            return None
        if partition not in self._known:
            self._known[partition] = HashIndex(partition)
        return self._known[partition]
