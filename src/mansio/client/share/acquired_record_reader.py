"""From the bytes of a share fetch to leased messages.

A broker hands out whole batches, of which only some records may be leased, and hands out the same batch again for the
next ones. Owns what was opened and not leased yet, so that a large batch is opened once and not once for each fetch.

Always true: a message is made for one delivery and given away once; what is kept is one batch a partition, and
`KEPT_BYTES_MAX` of batches in all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.client.consumer.batch_decoder import RECORD_BYTES
from mansio.client.share.leased import GAP, RELEASE, Leased
from mansio.errors import InvalidRecord
from mansio.wire.batch.isolation_filter import visible_batches
from mansio.wire.batch.record_reader import read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.topic_partition import TopicPartition

    Acquired = Sequence[tuple[int, int, int]]

KEPT_BYTES_MAX: Final = 8 << 20


class _UnreadBatch(NamedTuple):
    """The records of one batch that nobody was given yet, in order. The CRC tells batches apart."""

    base_offset: int
    crc: int
    size: int
    rows: list[Leased]


class AcquiredRecordReader:
    """Of one receiver."""

    def __init__(self, batch_bytes_max: int) -> None:
        self._batch_bytes_max = batch_bytes_max
        self._unread_batches: dict[TopicPartition, _UnreadBatch] = {}
        self._kept_bytes = 0

    def read(
        self, partition: TopicPartition, records: memoryview, acquired: Acquired
    ) -> tuple[list[Leased], list[tuple[int, int, int]]]:
        """The records that were acquired (first offset, last, delivery count), and the ranges of those that are not
        there, each with what to say of it: `GAP` where the log has none (compaction leaves such), `RELEASE` where the
        bytes did not come.

        Raises `CorruptMessage`, `InvalidRecord`, `UnsupportedCompression`: they cannot be read.
        """
        firsts = [first for first, _, _ in acquired]
        last_acquired = acquired[-1][1]
        found: list[Leased] = []
        end = -1
        for position, header, is_visible in visible_batches(
            records, partition, firsts[0], read_committed=False
        ):
            end = header.last_offset
            if not is_visible or header.base_offset > last_acquired:
                continue
            rows = self._rows(partition, header, records[position : position + header.size], firsts[0])
            if rows:
                begin = max(bisect_right(firsts, rows[0].offset) - 1, 0)
                _pick(rows, acquired[begin : bisect_right(firsts, header.last_offset)], found)
            self._keep(partition, header, rows, last_acquired)
        if len(found) == sum(last - first + 1 for first, last, _ in acquired):
            return found, []
        return found, _holes([message.offset for message in found], acquired, end)

    def _rows(
        self, partition: TopicPartition, header: BatchHeader, batch: memoryview, first: int
    ) -> list[Leased]:
        """The records of a batch from `first` on, in order; there may be earlier ones."""
        rest = self._unread_batches.get(partition)
        is_kept = rest is not None and (rest.base_offset, rest.crc) == (header.base_offset, header.crc)
        if rest is not None and is_kept and rest.rows[0].offset <= first:
            return rest.rows[bisect_left(rest.rows, first, key=_offset) :]
        if header.codec and header.record_count * RECORD_BYTES > self._batch_bytes_max:
            raise InvalidRecord(
                f"{partition.topic}-{partition.partition} at offset {header.base_offset}: {header.record_count} records"
                f" in one batch are more than batch_bytes_max ({self._batch_bytes_max}) allows"
            )
        limit = max(header.size, self._batch_bytes_max)
        return read_rows(batch, Leased, *partition, max_output_bytes=limit)

    def _keep(
        self, partition: TopicPartition, header: BatchHeader, rows: list[Leased], last_acquired: int
    ) -> None:
        old = self._unread_batches.pop(partition, None)
        if old is not None:
            self._kept_bytes -= old.size
        rest = rows[bisect_right(rows, last_acquired, key=_offset) :]
        if not rest or header.size > KEPT_BYTES_MAX:
            return
        if self._kept_bytes + header.size > KEPT_BYTES_MAX:
            self._unread_batches.clear()
            self._kept_bytes = 0
        self._unread_batches[partition] = _UnreadBatch(header.base_offset, header.crc, header.size, rest)
        self._kept_bytes += header.size


_offset = itemgetter(2)


def _pick(rows: list[Leased], acquired: Acquired, found: list[Leased]) -> None:
    """Add the rows that were acquired, each with the count of its range."""
    at = 0
    for first, last, count in acquired:
        at = bisect_left(rows, first, at, key=_offset)
        end = bisect_right(rows, last, at, key=_offset)
        picked = rows[at:end]
        if count != 1:
            for message in picked:
                message.delivery_count = count
        found += picked
        at = end


def _holes(offsets: Sequence[int], acquired: Acquired, end: int) -> list[tuple[int, int, int]]:
    """The ranges of what was acquired in which there is no record. `end`: the last offset that was read."""
    holes: list[tuple[int, int, int]] = []
    at = 0
    for first, last, _ in acquired:
        expected = first
        while at < len(offsets) and offsets[at] <= last:
            if offsets[at] > expected:
                holes.append((expected, offsets[at] - 1, GAP))
            expected = offsets[at] + 1
            at += 1
        if expected <= min(last, end):
            holes.append((expected, min(last, end), GAP))
        if (unread := max(expected, end + 1)) <= last:
            holes.append((unread, last, RELEASE))
    return holes
