"""Isolation filter: selects the batches of a Fetch response that a consumer may read (KIP-98).

A broker sends parts of its log unchanged, with batches before the requested offset, control batches, and batches of
aborted transactions. Every reader passes its fetched batches through `visible_batches`, which checks the CRC-32C and
the order of offsets of each batch.

Invariants:
* The offsets of the returned batches increase.
* Batches that the consumer may not read are returned as well, because its position moves past them.
* An incomplete batch at the end of a response is ignored; the next fetch returns it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from mansio.errors import CorruptMessage
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.wire.batch.record_batch import BatchHeader

_CRC_START: Final = 21
_CONTROL_BATCH_BYTES_MAX: Final = 1 << 20
"""Limit on the decompressed size of a control batch, which normally takes less than a hundred bytes."""


def visible_batches(
    batches: memoryview,
    partition: tuple[str, int],
    first_offset: int,
    aborted: Sequence[tuple[int, int]] = (),
    read_committed: bool = True,
) -> Iterator[tuple[int, BatchHeader, bool]]:
    """(position, header, whether the consumer may read it) of each complete batch with offsets from `first_offset` on.

    `partition` is (topic, index), for error messages. `aborted` are (producer id, first offset) of aborted
    transactions, as in the response; without `read_committed` the consumer may read their records. It may never read
    control batches.
    Raises `CorruptMessage`, and the errors of `iterate_batches`.
    """
    pending_aborts = [(first, producer) for producer, first in aborted] if read_committed else []
    heapq.heapify(pending_aborts)
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
        while pending_aborts and pending_aborts[0][0] <= header.last_offset:
            aborting.add(heapq.heappop(pending_aborts)[1])
        if header.is_control:
            if header.producer_id in aborting and _is_abort(batches[position : position + header.size]):
                aborting.discard(header.producer_id)
            yield position, header, False
        else:
            yield position, header, not (header.is_transactional and header.producer_id in aborting)


def aborted_batches(
    batches: memoryview, aborted: Iterable[tuple[int, int, int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield the offset range (first, last) of each complete batch of an aborted transaction.

    `aborted`: (producer id, first offset, offset of the marker, last stable offset) of aborted transactions. Raises the
    errors of `iterate_batches`.
    """
    ranges: dict[int, list[tuple[int, int]]] = {}
    for producer_id, first, last, _ in aborted:
        ranges.setdefault(producer_id, []).append((first, last))
    for _, header in iterate_batches(batches):
        if header.is_transactional and not header.is_control and header.producer_id in ranges:
            offset = header.base_offset
            if any(first <= offset < last for first, last in ranges[header.producer_id]):
                yield offset, header.last_offset


def _is_abort(batch: memoryview) -> bool:
    """Whether a control batch is an abort marker. The key is version and type, 16 bits each (KIP-98)."""
    records = read_records(batch, output_bytes_max=_CONTROL_BATCH_BYTES_MAX)
    return any(record.key is not None and record.key[2:4] == b"\x00\x00" for record in records)
