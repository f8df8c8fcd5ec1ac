"""Decoding of fetched batches into messages.

Decompresses and decodes the batches that the isolation filter selects, and drops records before the requested offset
and from the stop offset on. A consumer spends most of its time here.

Invariant: `next_offset` of the last batch of a fetch is the partition's next fetch offset, even if records were dropped
or offsets are missing (compaction and transactions leave gaps).
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
"""Default limit of the decompressed size of a batch."""

RECORD_MEMORY_BYTES_MIN = 64
"""Memory that each record of a compressed batch is assumed to need at least: a Python object needs more memory than the
bytes of a small record. A batch with more records than fit in `batch_bytes_max` at this size is refused."""


class MessageBatch(NamedTuple):
    """Decoded messages of one batch, and the offset after the batch."""

    state: PartitionState
    messages: list[Message]
    next_offset: int


def decode_fetch(
    completed_fetch: CompletedFetch, read_committed: bool, batch_bytes_max: int = BATCH_BYTES_MAX
) -> Iterator[MessageBatch]:
    """Decode the batches of a fetch, one per iteration. Raises `CorruptMessage`, or `InvalidRecord` for a batch that is
    larger than `batch_bytes_max` when decompressed."""
    state, first_offset, batches, aborted = completed_fetch
    topic, partition = state.partition
    stop = state.stop_offset
    for position, header, is_visible in visible_batches(
        batches, state.partition, first_offset, aborted, read_committed
    ):
        next_offset = header.last_offset + 1
        if not is_visible:
            yield MessageBatch(state, [], next_offset)
            continue
        if header.codec and header.record_count * RECORD_MEMORY_BYTES_MIN > batch_bytes_max:
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
