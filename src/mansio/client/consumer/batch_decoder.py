"""Decoding of fetched batches into messages.

Decompresses and decodes the batches that the isolation filter selects, and drops records before the requested offset
and from the stop offset on. A consumer spends most of its time here.

Invariants:
* `next_offset` of the last batch of a fetch is the partition's next fetch offset, even if records were dropped or
  offsets are missing (compaction and transactions leave gaps).
* A batch that cannot be read ends nothing: the batches behind it follow, and its offsets are reported.
* Memory is that of one decompressed batch and of the records in one `MessageBatch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.client.types import Message
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX, Codec, estimate_decompressed_bytes
from mansio.wire.batch.isolation_filter import visible_batches
from mansio.wire.batch.record_batch import CODEC_MASK, HEADER_BYTES
from mansio.wire.batch.unreadable import UnreadableOffsets, read_or_skip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.client.consumer.fetcher import CompletedFetch, PartitionState
    from mansio.wire.batch.record_batch import BatchHeader

BATCH_BYTES_MAX = DECOMPRESSED_BYTES_MAX
"""Default limit of the decompressed size of a batch."""

SHORT_GZIP_BYTES = 16 << 10
"""Size up to which a gzip batch has the decompressed size that it states. A stream that states too little takes at most
50 ms."""


class MessageBatch(NamedTuple):
    """Decoded messages of one batch, or of a part of a large one, and the offset after them; without messages perhaps
    the offsets that cannot be read."""

    state: PartitionState
    messages: list[Message]
    next_offset: int
    unreadable: UnreadableOffsets | None = None
    is_large: bool = False
    """Whether it only announces a large batch, which the next iteration decodes."""


def decode_fetch(
    completed_fetch: CompletedFetch,
    read_committed: bool,
    batch_bytes_max: int = BATCH_BYTES_MAX,
    inline_bytes_max: int | None = None,
) -> Iterator[MessageBatch]:
    """Decode the batches of a fetch, one per iteration, a large one in several. A batch that is larger than
    `batch_bytes_max` when decompressed is unreadable. `inline_bytes_max`: each part of a batch that is larger than this
    when decompressed is announced (None: none is). Raises `CorruptMessage` for a wrong CRC or order of offsets."""
    state, first_offset, batches, aborted = completed_fetch
    stop = state.stop_offset
    for position, header, is_visible in visible_batches(
        batches, state.partition, first_offset, aborted, read_committed
    ):
        next_offset = header.last_offset + 1
        if not is_visible:
            yield MessageBatch(state, [], next_offset)
            continue
        remaining = header.record_count
        batch = batches[position : position + header.size]
        parts = read_or_skip(batch, header, Message, *state.partition, output_bytes_max=batch_bytes_max)
        is_large = inline_bytes_max is not None and _is_larger(header, batch, inline_bytes_max)
        while True:
            if is_large:
                yield MessageBatch(state, [], first_offset, is_large=True)
            part = next(parts, None)
            if part is None:
                break
            if isinstance(part, UnreadableOffsets):
                yield MessageBatch(state, [], next_offset, part.within(first_offset, stop))
                continue
            messages = part
            remaining -= len(messages)
            end = messages[-1].offset + 1 if remaining else next_offset
            if header.base_offset < first_offset:
                messages = [message for message in messages if message.offset >= first_offset]
            if stop is not None and end >= stop:
                yield MessageBatch(state, [each for each in messages if each.offset < stop], next_offset)
                break
            yield MessageBatch(state, messages, end)


def _is_larger(header: BatchHeader, batch: memoryview, bytes_max: int) -> bool:
    """Whether the records of a batch may take more than `bytes_max` when decompressed."""
    content = batch[HEADER_BYTES:]
    codec = header.attributes & CODEC_MASK  # which may be an unknown one
    if codec == Codec.GZIP and len(content) > SHORT_GZIP_BYTES:
        return True
    return estimate_decompressed_bytes(codec, content, bytes_max + 1) > bytes_max
