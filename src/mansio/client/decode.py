"""From raw batches to messages.

Owns the hot loop of consuming. Checks each batch's CRC-32C, leaves out control batches, aborted transactions (for
read-committed readers), records before the offset that was asked for and from the stop offset on.

Always true: the `next_offset` of the last batch of a chunk is the fetch offset that followed it, whatever was left
out in between (compaction and transactions leave holes).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from mansio.errors import CorruptMessage, InvalidRecord
from mansio.wire.record_rows import read_rows
from mansio.wire.records import iterate_batches, read_records

from .types import Message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .partition_state import Chunk, PartitionState

BATCH_BYTES_MAX = 64 << 20
"""A batch that is larger than this when opened is refused, unless the consumer says otherwise."""

RECORD_BYTES = 64
"""What a record of a compressed batch is taken to be at least: as an object it is much more than its bytes."""

CRC_START = 21


class MessageBatch(NamedTuple):
    """The messages of one batch that are wanted, and the offset to go on with after it."""

    state: PartitionState
    messages: list[Message]
    next_offset: int


def decode_chunk(
    chunk: Chunk, read_committed: bool, batch_bytes_max: int = BATCH_BYTES_MAX
) -> Iterator[MessageBatch]:
    """Open the batches of a chunk, one when it is asked for. `CorruptMessage`, `InvalidRecord`."""
    state, first_offset, batches, aborted = chunk
    topic, partition = state.partition
    stop = state.stop_offset
    beginnings = [(first, producer) for producer, first in aborted] if read_committed else []
    heapq.heapify(beginnings)
    aborting: set[int] = set()
    next_offset = 0
    for position, header in iterate_batches(batches):
        if header.base_offset < next_offset or header.last_offset_delta < 0:
            raise CorruptMessage(
                f"{topic}-{partition}: offset {header.base_offset} comes after {next_offset - 1}"
            )
        next_offset = header.last_offset + 1
        if next_offset <= first_offset:
            continue
        batch = batches[position : position + header.size]
        if crc32c(batch[CRC_START:]) != header.crc:
            raise CorruptMessage(
                f"{topic}-{partition} at offset {header.base_offset}: the CRC-32C does not match"
            )
        while beginnings and beginnings[0][0] <= header.last_offset:
            aborting.add(heapq.heappop(beginnings)[1])
        if header.is_control:
            if header.producer_id in aborting and _is_abort(batch):
                aborting.discard(header.producer_id)
            yield MessageBatch(state, [], next_offset)
            continue
        if header.is_transactional and header.producer_id in aborting:
            yield MessageBatch(state, [], next_offset)
            continue
        if header.codec and header.record_count * RECORD_BYTES > batch_bytes_max:
            raise InvalidRecord(
                f"{topic}-{partition} at offset {header.base_offset}: {header.record_count} records in one batch are"
                f" more than batch_bytes_max ({batch_bytes_max}) allows"
            )
        messages = read_rows(
            batch, Message, topic, partition, max_output_bytes=max(batch_bytes_max, header.size)
        )
        if header.base_offset < first_offset:
            messages = [message for message in messages if message.offset >= first_offset]
        if stop is not None and next_offset > stop:
            messages = [message for message in messages if message.offset < stop]
        yield MessageBatch(state, messages, next_offset)


def _is_abort(batch: memoryview) -> bool:
    """The key of a control record is version and type, 16 bits each (KIP-98)."""
    records = read_records(batch, max_output_bytes=BATCH_BYTES_MAX)
    return any(record.key is not None and record.key[2:4] == b"\x00\x00" for record in records)
