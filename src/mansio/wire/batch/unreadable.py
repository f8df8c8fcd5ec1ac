"""Reading of batches that may be unreadable: their records, or the reason why there are none.

A broker checks the content of batches on append, but a log may contain batches that an earlier version or another
setting has accepted: bytes that cannot be decompressed, wrong counts or lengths, more decompressed bytes than a reader
allows. Every reader that returns records goes on behind such a batch, and reports its offsets and the reason.

Invariant: the content of a batch whose CRC is valid raises nothing in `read_or_skip`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mansio.errors import UNREADABLE_OR_DAMAGED
from mansio.wire.batch.record_reader import read_record_slices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.ports import Buffer
    from mansio.wire.batch.record_batch import BatchHeader

    Row = TypeVar("Row", bound=tuple[Any, ...])


class UnreadableOffsets(NamedTuple):
    """Offsets of a partition, both inclusive, whose records cannot be read, and the reason."""

    first: int
    last: int
    reason: str

    def within(self, start: int, stop: int | None) -> UnreadableOffsets | None:
        """Return the part with offsets in [start, stop); None if there is none."""
        first = max(self.first, start)
        last = self.last if stop is None else min(self.last, stop - 1)
        return UnreadableOffsets(first, last, self.reason) if first <= last else None


def read_or_skip(
    batch: Buffer, header: BatchHeader, kind: type[Row], topic: str, partition: int, *, output_bytes_max: int
) -> Iterator[list[Row] | UnreadableOffsets]:
    """Yield the records of one complete batch, as `read_record_slices` returns them, and behind them the offsets from
    the first unreadable record to the end of the batch, if there are any.

    `output_bytes_max`: decompressed size up to which the batch is read, or its stored size if that is larger."""
    first, last = header.base_offset, header.last_offset
    slices = read_record_slices(
        batch, kind, topic, partition, output_bytes_max=max(output_bytes_max, header.size)
    )
    try:
        for rows in slices:
            if rows:
                first = rows[-1][2] + 1
            yield rows
            del rows
    except UNREADABLE_OR_DAMAGED as error:
        # Bytes behind the last record are reported with its offset.
        unreadable = UnreadableOffsets(min(first, last), last, error.message)
    else:
        return
    yield unreadable
