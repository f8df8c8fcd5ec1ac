"""Recompression of clients' batches on append, for topics whose compression.type is not `producer` (Kafka
`LogValidator`).

A small batch is recompressed on the event loop, a larger one on a thread. What arrives for the partition meanwhile
waits behind it, recompressed or not, so that batches are appended in the order in which they arrived, and sequences are
checked in that order. Partitions take turns: each has at most one batch at the thread. Every batch passes all checks of
`Partition.append` in its final form; before, the checks of its size as sent, its CRC and its decompressed size.

The queue is bounded by what its batches take when decompressed, which is the work they cause, as far as that is known
without decompressing them (`estimate_decompressed_bytes`); for gzip the client states it. A job stops at this length.
If the batch is longer, it is counted with the most that a batch may take and starts again, or is refused if there is no
room.

Only clients' batches on a leader are recompressed: followers, coordinators and compaction append what they are given.

Invariants:
* A batch of a partition is appended before every batch of it that arrived later.
* Each append is answered exactly once, whatever happens to its client: a failure ends its own batch only.
* A batch that is refused because too many wait is never appended.
* Between two batches of one partition every other partition that waits gets its turn.
* The batches that wait take at most `QUEUED_BYTES_MAX`, those of one client `CLIENT_BYTES_MAX`, and one batch at a time
  is decompressed. A single batch may take more if nothing else waits.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.broker.partition.append_validation import DECODED_BYTES_MAX, reject_batch
from mansio.errors import InvalidRecord, MansioError, RequestTimedOut
from mansio.logs import fields
from mansio.wire.batch.compression import estimate_decompressed_bytes
from mansio.wire.batch.recompress import recompress
from mansio.wire.batch.record_batch import ATTRIBUTES_END_POSITION, CODEC_MASK, HEADER_BYTES, check_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

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

QUEUED_BYTES_MAX: Final = 128 << 20
CLIENT_BYTES_MAX: Final = QUEUED_BYTES_MAX // 2
CONGESTED_BYTES: Final = QUEUED_BYTES_MAX // 4
CLIENT_CONGESTED_BYTES: Final = CLIENT_BYTES_MAX // 4

ENTRY_BYTES: Final = 1 << 10
"""What a batch that waits takes at least: its objects."""


class _QueuedAppend:
    """A batch that waits for its turn."""

    __slots__ = (
        "client",
        "job_bytes_max",
        "on_appended",
        "output_bytes_max",
        "queued_bytes",
        "records",
        "result",
        "target",
        "urgent",
    )

    def __init__(
        self,
        records: Buffer,
        target: Compression | None,
        output_bytes_max: int,
        *,
        urgent: bool,
        client: Hashable,
        on_appended: OnAppended,
    ) -> None:
        self.records = records
        self.target = target
        """The codec to store it with; None: as it is."""
        self.output_bytes_max = output_bytes_max
        """Limit of its decompressed records."""
        self.job_bytes_max = 0
        """What its decompressed records are expected to take at most."""
        if target is not None:
            content = memoryview(records)[HEADER_BYTES:]
            self.job_bytes_max = estimate_decompressed_bytes(_codec(records), content, output_bytes_max)
        self.queued_bytes = 0
        """Bytes by which it counts towards the bounds of the queue."""
        self.urgent = urgent
        self.client = client
        self.on_appended = on_appended
        self.result: Buffer | MansioError | None = None
        """The batch to append, or why it cannot be recompressed; None: not known yet."""


class Recompressor:
    """One per broker. All methods run on its event loop."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._queues: dict[Partition, deque[_QueuedAppend]] = {}
        """Between calls the first batch of each queue is at the thread, and no other."""
        self._client_bytes: dict[Hashable, int] = {}
        self.queued_bytes = 0
        """Bytes of the batches that wait, as sent or decompressed, whichever is more."""
        self.recompressed_batches = 0
        """Batches stored with another codec than they were sent with."""

    def is_congested(self, client: Hashable) -> bool:
        """The client should send less: many batches wait, or many of its own."""
        return (
            self.queued_bytes > CONGESTED_BYTES or self._client_bytes.get(client, 0) > CLIENT_CONGESTED_BYTES
        )

    def append(
        self,
        partition: Partition,
        records: Buffer,
        *,
        urgent: bool,
        on_appended: OnAppended,
        client: Hashable = None,
    ) -> None:
        """Append one batch with the topic's codec. `on_appended` is called once, maybe immediately, with the result or
        the error: those of `Partition.append`, `InvalidRecord` if the records take too many bytes when decompressed,
        `RequestTimedOut` if too many batches wait, altogether or of this `client`, and a `MansioError` without a more
        specific type after an unexpected exception."""
        try:
            partition.ensure_leader()
            rules = partition.rules
            if len(records) > rules.message_bytes_max:
                reject_batch(partition.name, rules, check_batch(records))
            target = rules.compression
            if target is not None and not _has_other_codec(records, target.codec):
                target = None
            batch = None
            if partition not in self._queues:
                batch = records if target is None else _recompressed_inline(records, target)
            if batch is None:
                entry = _QueuedAppend(
                    records,
                    target,
                    max(DECODED_BYTES_MAX, rules.message_bytes_max),
                    urgent=urgent,
                    client=client,
                    on_appended=on_appended,
                )
                self._reserve(partition, entry, ENTRY_BYTES + max(len(records), entry.job_bytes_max))
        except MansioError as error:
            on_appended(error)
            return
        if batch is not None:
            on_appended(self._append(partition, batch, urgent, recompressed=target is not None))
            return
        entry.records = bytes(records)
        if target is None:
            entry.result = entry.records
        queue = self._queues.get(partition)
        if queue is not None:
            queue.append(entry)
        elif self._submit(partition, entry):
            self._queues[partition] = deque((entry,))
            partition.is_recompressing = True
        else:
            self._answer(partition, entry)

    def _reserve(self, partition: Partition, entry: _QueuedAppend, size: int) -> None:
        """Let the batch take `size` of the bounds. Raises `RequestTimedOut` if there is no room."""
        queued = self.queued_bytes - entry.queued_bytes
        own = self._client_bytes.get(entry.client, 0) - entry.queued_bytes
        if (queued and queued + size > QUEUED_BYTES_MAX) or (own and own + size > CLIENT_BYTES_MAX):
            raise RequestTimedOut(
                f"{partition.name}: {queued} bytes wait to be recompressed, {own} of this client; the batch was not"
                " written, and will not be"
            )
        self.queued_bytes = queued + size
        self._client_bytes[entry.client] = own + size
        entry.queued_bytes = size

    def _release(self, entry: _QueuedAppend) -> None:
        self.queued_bytes -= entry.queued_bytes
        own = self._client_bytes.pop(entry.client) - entry.queued_bytes
        if own:
            self._client_bytes[entry.client] = own

    def _submit(self, partition: Partition, entry: _QueuedAppend) -> bool:
        """Pass the batch to the thread. False: it is closed, and the batch has its result."""
        assert entry.target is not None
        work = partial(recompress, entry.records, entry.target, output_bytes_max=entry.job_bytes_max)
        try:
            self._background.submit(work, partial(self._recompressed, partition, entry))
        except RuntimeError:
            entry.result = RequestTimedOut(
                f"{partition.name}: the broker shuts down; the batch was not written"
            )
            return False
        return True

    def _recompressed(
        self, partition: Partition, entry: _QueuedAppend, batch: bytes | None, error: BaseException | None
    ) -> None:
        if batch is not None:
            entry.result = batch
        elif isinstance(error, InvalidRecord) and entry.job_bytes_max < entry.output_bytes_max:
            if self._repeat(partition, entry):
                return
        elif isinstance(error, MansioError):
            entry.result = error
        else:
            _log_failure(partition, error)
            entry.result = InvalidRecord(f"{partition.name}: the batch cannot be recompressed")
        self._drain(partition)

    def _repeat(self, partition: Partition, entry: _QueuedAppend) -> bool:
        """Submit a batch again that is longer than expected. False: it has its result."""
        try:
            self._reserve(partition, entry, ENTRY_BYTES + entry.output_bytes_max)
        except RequestTimedOut as refused:
            entry.result = refused
            return False
        entry.job_bytes_max = entry.output_bytes_max
        return self._submit(partition, entry)

    def _drain(self, partition: Partition) -> None:
        """Append the batches up to the next one that has to be recompressed, and submit that one."""
        queue = self._queues[partition]
        while queue:
            entry = queue[0]
            if entry.result is None and self._submit(partition, entry):
                return
            queue.popleft()
            self._answer(partition, entry)
        del self._queues[partition]
        partition.is_recompressing = False

    def _answer(self, partition: Partition, entry: _QueuedAppend) -> None:
        """Append the batch and report it, or the error."""
        self._release(entry)
        result = entry.result
        assert result is not None
        if not isinstance(result, MansioError):
            outcome = self._append(partition, result, entry.urgent, recompressed=entry.target is not None)
        else:
            outcome = result
        try:
            entry.on_appended(outcome)
        except Exception as raised:  # noqa: BLE001  # the batches behind it are of other clients
            _log_failure(partition, raised)

    def _append(
        self, partition: Partition, batch: Buffer, urgent: bool, *, recompressed: bool
    ) -> AppendResult | MansioError:
        try:
            result = partition.append(batch, urgent=urgent)
        except MansioError as error:
            return error
        except Exception as error:  # noqa: BLE001  # a defect fails its own batch only
            _log_failure(partition, error)
            return MansioError(f"{partition.name}: the append failed unexpectedly; the batch may be written")
        self.recompressed_batches += recompressed and not result.duplicate
        return result


def _log_failure(partition: Partition, error: BaseException | None) -> None:
    known = fields(topic=partition.topic, partition=partition.index)
    logger.error("recompression_failed", extra=known, exc_info=error)


def _codec(records: Buffer) -> int:
    return records[ATTRIBUTES_END_POSITION - 1] & CODEC_MASK


def _has_other_codec(records: Buffer, codec: Codec) -> bool:
    """Whether the batch has another codec. False for bytes that are too short to be a batch, which `Partition.append`
    rejects."""
    return len(records) >= HEADER_BYTES and _codec(records) != codec


def _recompressed_inline(records: Buffer, target: Compression) -> bytes | None:
    """The batch with the codec `target`; None if this would take too long on the event loop."""
    if len(records) > INLINE_BYTES_MAX or (target.level or 0) > INLINE_LEVEL_MAX:
        return None
    try:
        return recompress(records, target, output_bytes_max=INLINE_BYTES_MAX)
    except InvalidRecord:
        return None  # longer, or invalid in another way: the thread finds out
