"""Decoding of fetched batches into messages.

Decompresses and decodes the batches that `wire/batch/isolation_filter.py` selects, and drops records before the
requested offset and from the stop offset on. This is the hot loop of a consumer.

Invariant: `next_offset` of the last batch of a fetch is the fetch offset that followed it, whatever was dropped in
between (compaction and transactions leave gaps).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.client.types import Message
from mansio.errors import InvalidRecord
from mansio.wire.batch.isolation_filter import visible_batches
from mansio.wire.batch.record_reader import read_record_tuples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.client.consumer.fetcher import CompletedFetch, PartitionState

BATCH_BYTES_MAX = 64 << 20
"""Default limit on the decompressed size of a batch."""

RECORD_BYTES = 64
"""Minimal memory assumed per record of a compressed batch: as an object a record takes much more than its bytes."""


class MessageBatch(NamedTuple):
    """Messages of one batch, and the position after it."""

    state: PartitionState
    messages: list[Message]
    next_offset: int


def decode_fetch(
    chunk: CompletedFetch, read_committed: bool, batch_bytes_max: int = BATCH_BYTES_MAX
) -> Iterator[MessageBatch]:
    """Decode the batches of a fetch lazily, one per iteration. Raises `CorruptMessage`, `InvalidRecord`."""
    state, first_offset, batches, aborted = chunk
    topic, partition = state.partition
    stop = state.stop_offset
    for position, header, is_visible in visible_batches(
        batches, state.partition, first_offset, aborted, read_committed
    ):
        next_offset = header.last_offset + 1
        if not is_visible:
            yield MessageBatch(state, [], next_offset)
            continue
        if header.codec and header.record_count * RECORD_BYTES > batch_bytes_max:
            raise InvalidRecord(
                f"{topic}-{partition} at offset {header.base_offset}: {header.record_count} records in one batch are"
                f" more than batch_bytes_max ({batch_bytes_max}) allows"
            )
        size = header.size
        messages = read_record_tuples(
            batches[position : position + size],
            Message,
            topic,
            partition,
            output_bytes_max=max(size, batch_bytes_max),
        )
        if header.base_offset < first_offset:
            messages = [message for message in messages if message.offset >= first_offset]
        if stop is not None and next_offset > stop:
            messages = [message for message in messages if message.offset < stop]
        yield MessageBatch(state, messages, next_offset)
