"""Which batches of a fetch answer a reader may see: the judgement every reader makes before it opens one.

A broker hands out its log as it is: batches from before the offset that was asked for, transaction markers, batches of
transactions that were aborted (KIP-98). Here each batch's CRC-32C is checked and its place in the log, and it is said
whether its records are for the reader.

Always true: offsets only grow; what is not for the reader is named as well, because a reader's position passes over it;
a batch cut off at the end of an answer is left for the next one.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from mansio.errors import CorruptMessage
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.wire.batch.record_batch import BatchHeader

_CRC_START: Final = 21
_MARKER_BYTES_MAX: Final = 1 << 20
"""A batch of transaction markers takes less than a hundred bytes; as little as this is opened of one."""


def visible_batches(
    batches: memoryview,
    partition: tuple[str, int],
    first_offset: int,
    aborted: Sequence[tuple[int, int]] = (),
    read_committed: bool = True,
) -> Iterator[tuple[int, BatchHeader, bool]]:
    """(position, header, whether its records are for the reader) of each whole batch not below `first_offset`.

    `partition` is (topic, number), for messages. `aborted` are (producer id, first offset) of the aborted transactions,
    as the answer says them; without `read_committed` their records are for the reader too. Markers never are.
    Raises `CorruptMessage`, and what `records.iterate_batches` raises.
    """
    beginnings = [(first, producer) for producer, first in aborted] if read_committed else []
    heapq.heapify(beginnings)
    aborting: set[int] = set()
    next_offset = 0
    for position, header in iterate_batches(batches):
        if header.base_offset < next_offset or header.last_offset_delta < 0:
            raise CorruptMessage(
                f"{partition[0]}-{partition[1]}: offset {header.base_offset} comes after {next_offset - 1}"
            )
        next_offset = header.last_offset + 1
        if next_offset <= first_offset:
            continue
        if crc32c(batches[position + _CRC_START : position + header.size]) != header.crc:
            raise CorruptMessage(
                f"{partition[0]}-{partition[1]} at offset {header.base_offset}: the CRC-32C does not match"
            )
        while beginnings and beginnings[0][0] <= header.last_offset:
            aborting.add(heapq.heappop(beginnings)[1])
        if header.is_control:
            if header.producer_id in aborting and _is_abort(batches[position : position + header.size]):
                aborting.discard(header.producer_id)
            yield position, header, False
        else:
            yield position, header, not (header.is_transactional and header.producer_id in aborting)


def _is_abort(batch: memoryview) -> bool:
    """The key of a control record is version and type, 16 bits each (KIP-98)."""
    records = read_records(batch, max_output_bytes=_MARKER_BYTES_MAX)
    return any(record.key is not None and record.key[2:4] == b"\x00\x00" for record in records)
