"""Recompression of clients' batches on append, for topics whose compression.type is not `producer` (Kafka
`LogValidator`).

A small batch is recompressed on the event loop, a larger one on a thread. What arrives for the partition meanwhile
waits behind it, recompressed or not, so that batches are appended in the order in which they arrived, and sequences are
checked in that order. Every batch passes all checks of `Partition.append` in its final form; before, the checks of its
size as sent, its CRC and its decompressed size.

Only clients' batches on a leader are recompressed: followers, coordinators and compaction append what they are given.

Invariants:
* A batch of a partition is appended before every batch of it that arrived later.
* Each append is answered exactly once, whatever happens to its client: a failure ends its own batch only.
* The batches that wait take at most `QUEUED_BYTES_MAX`, and one batch at a time is decompressed.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.broker.partition.append_validation import DECODED_BYTES_MAX, reject_batch
from mansio.errors import InvalidRecord, MansioError, RequestTimedOut
from mansio.logs import fields
from mansio.wire.batch.recompress import recompress
from mansio.wire.batch.record_batch import ATTRIBUTES_END, CODEC_MASK, HEADER_BYTES, check_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.ports import Background, Buffer
    from mansio.wire.batch.compression import Codec
    from mansio.wire.batch.recompress import Compression

    OnAppended = Callable[["AppendResult | MansioError"], None]

logger = logging.getLogger(__name__)

INLINE_BYTES_MAX: Final = 16 << 10
"""Batches up to this size, as sent and decompressed, are recompressed on the event loop: in less than a millisecond."""

INLINE_LEVEL_MAX: Final = 9
"""Higher levels take tens of milliseconds even for a small batch."""

QUEUED_BYTES_MAX: Final = 64 << 20
CONGESTED_BYTES: Final = QUEUED_BYTES_MAX // 4


class _QueuedAppend:
    """A batch that waits for its turn. `target` None: it is appended as it is."""

    __slots__ = ("on_appended", "records", "target", "urgent")

    def __init__(
        self, records: bytes, target: Compression | None, urgent: bool, on_appended: OnAppended
    ) -> None:
        self.records = records
        self.target = target
        self.urgent = urgent
        self.on_appended = on_appended


class Recompressor:
    """One per broker. All methods run on its event loop."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._queues: dict[Partition, deque[_QueuedAppend]] = {}
        self.queued_bytes = 0
        """Bytes of the batches that wait, as sent."""
        self.recompressed_batches = 0
        """Batches stored with another codec than they were sent with."""

    @property
    def is_congested(self) -> bool:
        """Clients should send less: many batches wait."""
        return self.queued_bytes > CONGESTED_BYTES

    def append(self, partition: Partition, records: Buffer, *, urgent: bool, on_appended: OnAppended) -> None:
        """Append one batch with the topic's codec. `on_appended` is called once, maybe immediately, with the result or
        the error: those of `Partition.append`, `InvalidRecord` if the records take too many bytes when decompressed,
        and `RequestTimedOut` if too many batches wait."""
        try:
            partition.ensure_leader()
            rules = partition.rules
            if len(records) > rules.message_bytes_max:
                reject_batch(partition.name, rules, check_batch(records))
            target = rules.compression
            if target is not None and not _has_other_codec(records, target.codec):
                target = None
            queue = self._queues.get(partition)
            if queue is None:
                batch = records if target is None else _recompressed_inline(records, target)
                if batch is not None:
                    on_appended(self._append(partition, batch, urgent, recompressed=target is not None))
                    return
            if self.queued_bytes + len(records) > QUEUED_BYTES_MAX:
                raise RequestTimedOut(
                    f"{partition.name}: {self.queued_bytes} bytes wait to be recompressed; nothing was written"
                )
        except MansioError as error:
            on_appended(error)
            return
        self._enqueue(partition, _QueuedAppend(bytes(records), target, urgent, on_appended))

    def _enqueue(self, partition: Partition, entry: _QueuedAppend) -> None:
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = deque()
            partition.is_recompressing = True
        queue.append(entry)
        self.queued_bytes += len(entry.records)
        if entry.target is not None:
            work = partial(
                recompress,
                entry.records,
                entry.target,
                max_output_bytes=max(DECODED_BYTES_MAX, partition.rules.message_bytes_max),
            )
            self._background.submit(work, partial(self._recompressed, partition))

    def _recompressed(self, partition: Partition, batch: bytes | None, error: BaseException | None) -> None:
        """The thread recompresses in the order of arrival, so this is the first batch of the partition's queue."""
        queue = self._queues[partition]
        entry = self._next(queue)
        outcome: AppendResult | MansioError
        try:
            if batch is not None:
                outcome = self._append(partition, batch, entry.urgent, recompressed=True)
            elif isinstance(error, MansioError):
                outcome = error
            else:
                known = fields(topic=partition.topic, partition=partition.index)
                logger.error("recompression_failed", extra=known, exc_info=error)
                outcome = InvalidRecord(f"{partition.name}: the batch cannot be recompressed")
            entry.on_appended(outcome)
        finally:
            self._append_unchanged(partition, queue)

    def _append_unchanged(self, partition: Partition, queue: deque[_QueuedAppend]) -> None:
        """Append the batches up to the next one that is being recompressed."""
        while queue and queue[0].target is None:
            entry = self._next(queue)
            entry.on_appended(self._append(partition, entry.records, entry.urgent, recompressed=False))
        if not queue:
            del self._queues[partition]
            partition.is_recompressing = False

    def _next(self, queue: deque[_QueuedAppend]) -> _QueuedAppend:
        entry = queue.popleft()
        self.queued_bytes -= len(entry.records)
        return entry

    def _append(
        self, partition: Partition, batch: Buffer, urgent: bool, *, recompressed: bool
    ) -> AppendResult | MansioError:
        try:
            result = partition.append(batch, urgent=urgent)
        except MansioError as error:
            return error
        self.recompressed_batches += recompressed and not result.duplicate
        return result


def _has_other_codec(records: Buffer, codec: Codec) -> bool:
    """False for what is too short to be a batch; `Partition.append` rejects it."""
    return len(records) >= HEADER_BYTES and records[ATTRIBUTES_END - 1] & CODEC_MASK != codec


def _recompressed_inline(records: Buffer, target: Compression) -> bytes | None:
    """The batch with the codec `target`; None if this would take too long on the event loop."""
    if len(records) > INLINE_BYTES_MAX or (target.level or 0) > INLINE_LEVEL_MAX:
        return None
    try:
        return recompress(records, target, max_output_bytes=INLINE_BYTES_MAX)
    except InvalidRecord:
        return None  # longer, or invalid in another way: the thread finds out
