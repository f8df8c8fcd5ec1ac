"""Check of the content of clients' compressed batches on append, and their recompression for topics whose
compression.type is not `producer` (Kafka `LogValidator`), and their inspection for the features of topics.

A batch that is stored as sent is decompressed and its records are counted; one that is recompressed is decompressed
once for both. A small batch is processed on the event loop, a larger one on a thread. Later batches of the same
partition wait in a queue, also those that need none of this, so that batches are appended and producer sequences
checked in the order of arrival. Each partition has at most one batch at a time on the thread. A batch some of whose
records are repeats goes to the thread a second time, to be rebuilt without them (`RebuildRequired`), and keeps its
place in the queue. The size as sent, the CRC and the decompressed size of a batch are checked before it is
recompressed; `Partition.append` checks the recompressed batch.

The queue is bounded by the decompressed size of its batches, estimated without decompressing them
(`estimate_decompressed_bytes`); for gzip the estimate is a number that the client sent. Decompression stops at the
estimated size. A batch that is larger is then counted with the maximum decompressed size and submitted again, or
rejected if that exceeds the bound.

A batch whose log may not open its file waits in the queue, too (`ActiveFiles.wait`): the next flush is started, after
which the waiting partitions try again, longest waiting first. So does a batch for which another broker has to be asked
(`LookUpRequired`), in bounded time.

Only batches of clients on a leader are recompressed; followers, coordinators and compaction append batches unchanged.

Invariants:
* The batches of a partition are appended in the order of arrival.
* Each append has exactly one result, also if its client has disconnected; a failure affects one batch only.
* A batch that is rejected because too many wait is never appended.
* Between two batches of one partition, one batch of every other waiting partition is processed.
* A batch waits for at most `LOOK_UPS_MAX` look-ups, whose time counts from its arrival.
* The waiting batches count for at most `QUEUED_BYTES_MAX`, those of one client for at most `CLIENT_BYTES_MAX`, and one
  batch at a time is decompressed. A single batch may exceed the bounds if no other one waits.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.partition.append_validation import (
    DECODED_RECORDS_MAX,
    InspectedRecords,
    awaits_flush,
    check_client_batch,
    check_record_count,
    inspect_records,
    needs_thread,
    new_too_large_error,
)
from mansio.broker.partition.partition_hook import LookUpRequired, RebuildRequired
from mansio.errors import DecompressedTooLarge, InvalidRecord, MansioError, RequestTimedOut
from mansio.logs import fields
from mansio.tracebacks import without_traceback
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX, Codec, estimate_decompressed_bytes
from mansio.wire.batch.recompress import recompress
from mansio.wire.batch.record_batch import (
    ATTRIBUTES_END_POSITION,
    CODEC_MASK,
    HEADER_BYTES,
    check_batch,
    read_header,
)
from mansio.wire.batch.record_reader import check_content, decompress_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from mansio.broker.partition.append_validation import AppendRules, RebuiltBatch
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.ports import Background, Buffer
    from mansio.wire.batch.recompress import Compression

    OnAppended = Callable[["AppendResult | MansioError"], None]

logger = logging.getLogger(__name__)

INLINE_BYTES_MAX: Final = 16 << 10
"""Size up to which a batch is recompressed on the event loop, as sent and decompressed; it takes less than 1 ms."""

INLINE_LEVEL_MAX: Final = 9
"""Compression level up to which batches are recompressed on the event loop; higher ones take tens of milliseconds."""

CLIENT_BYTES_MAX: Final = DECOMPRESSED_BYTES_MAX + (32 << 20)
"""Maximum number of bytes for which the waiting batches of one client count: a batch of the maximum
size, and others."""

QUEUED_BYTES_MAX: Final = 2 * CLIENT_BYTES_MAX
"""Maximum number of bytes for which all waiting batches count. Only one of them is decompressed at a time."""

CONGESTED_BYTES_MIN: Final = 32 << 20
"""Number of queued bytes above which every client counts as congested (`BatchProcessor.is_congested`)."""

CLIENT_CONGESTED_BYTES_MIN: Final = 16 << 20
"""Number of queued bytes of one client above which this client counts as congested."""

REBUILDS_MAX: Final = 5
"""Number of times a batch is rebuilt without its repeats, because others were found each time: after a change of the
leader, or if ids that had expired were removed meanwhile."""

LOOK_UPS_MAX: Final = 5
"""Number of times another broker is asked for a batch: what the answers say may be out of date when the batch is tried
again, for example after a rebuild."""

OVERHEAD_BYTES: Final = 1 << 10
"""Number of bytes counted for the objects of a waiting batch, in addition to its size."""


class _QueuedAppend:
    """A batch that waits to be processed or appended."""

    __slots__ = (
        "began_s",
        "check",
        "client",
        "inspect",
        "inspected",
        "is_checked",
        "is_intact",
        "job_bytes_max",
        "look_up_count",
        "on_appended",
        "output_bytes_max",
        "queued_bytes",
        "rebuild_count",
        "records",
        "result",
        "target",
        "transactional",
        "urgent",
    )

    def __init__(
        self,
        records: Buffer,
        target: Compression | None,
        output_bytes_max: int,
        *,
        checks_content: bool,
        is_intact: bool,
        inspect: Callable[[Buffer, int], InspectedRecords] | None,
        urgent: bool,
        client: Hashable,
        on_appended: OnAppended,
        transactional: bool,
        check: Callable[[], None] | None,
    ) -> None:
        self.records = records
        self.target = target
        """The codec with which the batch is stored; None to store it as sent."""
        self.output_bytes_max = output_bytes_max
        """Maximum decompressed size with which the batch is accepted."""
        self.job_bytes_max = 0
        """Estimated decompressed size, at which decompression stops; 0 for a batch that is not decompressed."""
        self.is_checked = target is not None or (checks_content and _is_compressed(records))
        """Whether the thread checks the content, so that `Partition.append` need not."""
        self.is_intact = is_intact
        """Whether `check_batch` has accepted the batch as sent."""
        self.inspect = inspect
        """Inspects the batch as it will be stored; None if the topic has no feature that needs it."""
        self.inspected: InspectedRecords | None = None
        if self.is_checked or (inspect is not None and _is_compressed(records)):
            content = memoryview(records)[HEADER_BYTES:]
            self.job_bytes_max = estimate_decompressed_bytes(_read_codec(records), content, output_bytes_max)
        self.began_s = 0.0
        """Monotonic time of the arrival of a batch that is inspected."""
        self.look_up_count = 0
        """Number of times another broker was asked."""
        self.rebuild_count = 0
        """Number of times the batch was submitted to be rebuilt without its repeats."""
        self.queued_bytes = 0
        """Number of bytes for which the batch counts towards the bounds of the queue."""
        self.urgent = urgent
        self.client = client
        self.on_appended = on_appended
        self.transactional = transactional
        self.check = check
        self.result: Buffer | MansioError | None = None if self.is_checked or inspect is not None else records
        """The batch to append, or the error with which processing failed; None while neither is known."""


class BatchProcessor:
    """Checks, recompresses and inspects the batches of clients, for all partitions of a broker. All methods run on the
    broker's event loop."""

    def __init__(self, background: Background) -> None:
        self.background = background
        """The thread, also for other work that decompresses much."""
        self.queues: dict[Partition, deque[_QueuedAppend]] = {}
        """Waiting batches of clients; later ones of the partition must be appended after them. Between method calls the
        thread has the first batch of each queue, and no other, unless that batch waits for a file."""
        self._client_bytes: dict[Hashable, int] = {}
        self.queued_bytes = 0
        """Number of bytes of all waiting batches: for each the larger of its size as sent and decompressed."""
        self.recompressed_batch_count = 0
        """Number of batches stored with another codec than they were sent with."""

    def is_congested(self, client: Hashable) -> bool:
        """Return whether a client should be throttled, because many batches wait, of all clients or of this one."""
        return (
            self.queued_bytes > CONGESTED_BYTES_MIN
            or self._client_bytes.get(client, 0) > CLIENT_CONGESTED_BYTES_MIN
        )

    def append(
        self,
        partition: Partition,
        records: Buffer,
        *,
        urgent: bool,
        on_appended: OnAppended,
        client: Hashable = None,
        transactional: bool = False,
        check: Callable[[], None] | None = None,
        was_tried: bool = False,
    ) -> None:
        """Append one batch with the topic's codec. `on_appended` is called once, possibly before this method returns,
        with the result or the error. `check` is called before the append, and may raise a `MansioError` instead of it.
        `was_tried`: `Partition.append` has just raised `DecompressedTooLarge` for this batch, which needs the thread,
        `LookUpRequired`, or an error that `awaits_flush`.

        The errors are those of `Partition.append`; `MessageTooLarge` if the batch is too large when decompressed;
        `RequestTimedOut` if too many batches wait, of all clients or of this `client`; and `MansioError` itself after
        an unexpected exception."""
        try:
            partition.ensure_leader()
            rules = partition.rules
            if len(records) > rules.message_bytes_max:
                check_client_batch(partition.name, rules, check_batch(records), transactional=transactional)
            if rules.inspects_records and len(records) >= HEADER_BYTES:
                header = read_header(records)
                if header.record_count > DECODED_RECORDS_MAX:  # unless it is damaged
                    check_record_count(partition.name, check_batch(records))
            target = rules.compression
            if target is not None and not _has_other_codec(records, target.codec):
                target = None
            outcome: AppendResult | MansioError | RebuildRequired | LookUpRequired | None = None
            if not (was_tried or partition in self.queues or needs_thread(records, rules)):
                batch = records if target is None else _recompress_inline(records, target)
                if batch is not None:
                    outcome = self._append(
                        partition,
                        batch,
                        urgent,
                        transactional,
                        check,
                        recompressed=target is not None,
                        is_intact=target is not None,
                        is_checked=target is not None,
                    )
                    was_tried = target is None
            assert not isinstance(outcome, RebuildRequired), "no thread has inspected the batch"
            is_queued = (
                outcome is None
                or isinstance(outcome, DecompressedTooLarge | LookUpRequired)
                or (isinstance(outcome, MansioError) and awaits_flush(outcome))
            )
            if is_queued:
                entry = _QueuedAppend(
                    records,
                    target,
                    rules.decompressed_bytes_max,
                    checks_content=rules.checks_content,
                    is_intact=was_tried,
                    inspect=partial(_inspect, partition.name, rules, now_ms=partition.clock.wall_ms())
                    if rules.inspects_records
                    else None,
                    urgent=urgent,
                    client=client,
                    on_appended=on_appended,
                    transactional=transactional,
                    check=check,
                )
                if rules.inspects_records:
                    entry.began_s = partition.clock.monotonic()
                self._reserve_bytes(partition, entry, OVERHEAD_BYTES + max(len(records), entry.job_bytes_max))
        except MansioError as error:
            on_appended(error)
            return
        if not is_queued:
            assert outcome is not None
            assert not isinstance(outcome, LookUpRequired)
            on_appended(outcome)
            return
        entry.records = bytes(records)
        if entry.result is not None:
            entry.result = entry.records
        queue = self.queues.get(partition)
        if queue is not None:
            queue.append(entry)
        elif entry.result is not None:  # it waits for its file
            self.queues[partition] = deque((entry,))
            if not self._await_file(partition):
                self._append_ready(partition)
        elif self._submit(partition, entry):
            self.queues[partition] = deque((entry,))
        else:
            self._complete(partition, entry)

    def _reserve_bytes(self, partition: Partition, entry: _QueuedAppend, size: int) -> None:
        """Count the batch for `size` bytes. Raises `RequestTimedOut` if that exceeds a bound."""
        queued = self.queued_bytes - entry.queued_bytes
        own = self._client_bytes.get(entry.client, 0) - entry.queued_bytes
        if (queued and queued + size > QUEUED_BYTES_MAX) or (own and own + size > CLIENT_BYTES_MAX):
            raise RequestTimedOut(
                f"{partition.name}: {queued} bytes of batches wait to be processed, {own} of this client; the batch was"
                " not written, and will not be"
            )
        self.queued_bytes = queued + size
        self._client_bytes[entry.client] = own + size
        entry.queued_bytes = size

    def _release_bytes(self, entry: _QueuedAppend) -> None:
        self.queued_bytes -= entry.queued_bytes
        own = self._client_bytes.pop(entry.client) - entry.queued_bytes
        if own:
            self._client_bytes[entry.client] = own

    def _submit(self, partition: Partition, entry: _QueuedAppend) -> bool:
        """Pass the batch to the thread. Returns False, after setting an error as result, if the thread is closed."""
        work = partial(
            _process,
            entry.records,
            entry.target,
            output_bytes_max=entry.job_bytes_max,
            checks_content=entry.is_checked,
            is_intact=entry.is_intact,
            inspect=entry.inspect,
        )
        return self._start(partition, entry, work, partial(self._on_processed, partition, entry))

    def _start(
        self, partition: Partition, entry: _QueuedAppend, work: Callable[[], Any], done: Callable[..., None]
    ) -> bool:
        """Submit `work` for the batch. Returns False, after setting an error as result, if the thread is closed."""
        try:
            self.background.submit(work, done)
        except RuntimeError:
            entry.result = RequestTimedOut(
                f"{partition.name}: the broker shuts down; the batch was not written"
            )
            return False
        return True

    def _on_processed(
        self,
        partition: Partition,
        entry: _QueuedAppend,
        processed: tuple[Buffer, InspectedRecords | None] | None,
        error: BaseException | None,
    ) -> None:
        if processed is not None:
            entry.result, entry.inspected = processed
        elif isinstance(error, DecompressedTooLarge):
            if entry.job_bytes_max >= entry.output_bytes_max:
                entry.result = new_too_large_error(partition.name, len(entry.records), entry.output_bytes_max)
            elif self._resubmit(partition, entry):
                return
        elif isinstance(error, MansioError):
            entry.result = without_traceback(error)
        else:
            _log_failure(partition, error)
            entry.result = InvalidRecord(f"{partition.name}: the batch cannot be processed")
        self._append_ready(partition)

    def _submit_rebuild(self, partition: Partition, entry: _QueuedAppend, required: RebuildRequired) -> bool:
        """Pass the batch to the thread, which encodes it without its repeats. Returns False, after setting an error as
        result, if that was done too often or the thread is closed."""
        entry.rebuild_count += 1
        if entry.rebuild_count > REBUILDS_MAX:
            entry.result = RequestTimedOut(
                f"{partition.name}: the ids of the batch changed {REBUILDS_MAX} times; it was not written"
            )
            return False
        return self._start(partition, entry, required.rebuild, partial(self._on_rebuilt, partition, entry))

    def _on_rebuilt(
        self,
        partition: Partition,
        entry: _QueuedAppend,
        rebuilt: RebuiltBatch | None,
        error: BaseException | None,
    ) -> None:
        if rebuilt is not None and entry.inspected is not None:
            entry.inspected = entry.inspected._replace(rebuilt=rebuilt)
        elif isinstance(error, MansioError):
            entry.result = without_traceback(error)
        else:
            _log_failure(partition, error)
            entry.result = InvalidRecord(f"{partition.name}: the batch cannot be encoded without its repeats")
        self._append_ready(partition)

    def _begin_look_up(self, partition: Partition, entry: _QueuedAppend, required: LookUpRequired) -> bool:
        """Let the queue of a partition wait until another broker was asked for its first batch. Returns False, after
        setting an error as result, if that was done too often."""
        entry.began_s = (
            entry.began_s or partition.clock.monotonic()
        )  # if the topic was not inspected on arrival
        entry.look_up_count += 1
        if entry.look_up_count > LOOK_UPS_MAX:
            entry.result = RequestTimedOut(
                f"{partition.name}: {LOOK_UPS_MAX} look-ups for the batch are out of date; it was not written"
            )
            return False
        partition.scheduler.spawn(self._look_up(partition, entry, required), name="look-up for a batch")
        return True

    async def _look_up(self, partition: Partition, entry: _QueuedAppend, required: LookUpRequired) -> None:
        refusal: MansioError | None = RequestTimedOut(f"{partition.name}: the batch was not written")
        try:
            await required.look_up(entry.began_s)
            refusal = None
        except MansioError as error:
            refusal = without_traceback(error)
        finally:  # whatever ends it, the batches behind go on
            if refusal is not None:
                entry.result = refusal
            self._append_ready(partition)

    def _resubmit(self, partition: Partition, entry: _QueuedAppend) -> bool:
        """Submit a batch again that is larger than estimated. Returns False, after setting an error as result, if that
        exceeds a bound or the thread is closed."""
        try:
            self._reserve_bytes(partition, entry, OVERHEAD_BYTES + entry.output_bytes_max)
        except RequestTimedOut as refused:
            entry.result = without_traceback(refused)
            return False
        entry.job_bytes_max = entry.output_bytes_max
        return self._submit(partition, entry)

    def _append_ready(self, partition: Partition) -> None:
        """Append the queued batches before the next one that needs the thread, and submit that one."""
        queue = self.queues[partition]
        while queue:
            entry = queue[0]
            if entry.result is None and self._submit(partition, entry):
                return
            if not self._complete(partition, entry):
                return
            queue.popleft()
        del self.queues[partition]

    def _await_file(self, partition: Partition) -> bool:
        """Let the queue of a partition wait for the file of its log. Returns False if nothing is to be flushed."""
        return partition.wait_for_file(partition, partial(self._append_ready, partition))

    def _complete(self, partition: Partition, entry: _QueuedAppend) -> bool:
        """Append a batch, unless its processing failed, and call its `on_appended`. Returns False if the batch was
        passed to the thread again instead, or waits for a file or a look-up."""
        result = entry.result
        assert result is not None
        outcome: AppendResult | MansioError
        if isinstance(result, MansioError):
            outcome = result
        else:
            appended = self._append(
                partition,
                result,
                entry.urgent,
                entry.transactional,
                entry.check,
                recompressed=entry.target is not None,
                # otherwise not processed, nor tried before
                is_intact=entry.is_intact or entry.is_checked or entry.inspect is not None,
                is_checked=True,  # what was not processed is small, or not to be checked
                inspected=entry.inspected,
            )
            if isinstance(appended, RebuildRequired):
                if self._submit_rebuild(partition, entry, appended):
                    return False
                assert isinstance(entry.result, MansioError)
                appended = entry.result
            elif isinstance(appended, LookUpRequired):
                if self._begin_look_up(partition, entry, appended):
                    return False
                assert isinstance(entry.result, MansioError)
                appended = entry.result
            elif isinstance(appended, MansioError) and awaits_flush(appended) and self._await_file(partition):
                return False
            outcome = appended
        self._release_bytes(entry)
        try:
            entry.on_appended(outcome)
        except Exception as raised:  # noqa: BLE001  # the batches behind it are of other clients
            _log_failure(partition, raised)
        return True

    def _append(
        self,
        partition: Partition,
        batch: Buffer,
        urgent: bool,
        transactional: bool,
        check: Callable[[], None] | None,
        *,
        recompressed: bool,
        is_intact: bool,
        is_checked: bool,
        inspected: InspectedRecords | None = None,
    ) -> AppendResult | MansioError | RebuildRequired | LookUpRequired:
        try:
            if check is not None:
                check()
            result = partition.append(
                batch,
                urgent=urgent,
                transactional=transactional,
                is_intact=is_intact,
                is_checked=is_checked,
                inspected=inspected,
            )
        except (MansioError, RebuildRequired, LookUpRequired) as error:
            return without_traceback(error)
        except Exception as error:  # noqa: BLE001  # a defect fails its own batch only
            _log_failure(partition, error)
            return MansioError(f"{partition.name}: the append failed unexpectedly; the batch may be written")
        self.recompressed_batch_count += recompressed and not result.duplicate
        return result


def _log_failure(partition: Partition, error: BaseException | None) -> None:
    known = fields(topic=partition.topic, partition=partition.index)
    logger.error("recompression_failed", extra=known, exc_info=error)


def _read_codec(records: Buffer) -> int:
    return records[ATTRIBUTES_END_POSITION - 1] & CODEC_MASK


def _is_compressed(records: Buffer) -> bool:
    return len(records) >= HEADER_BYTES and _read_codec(records) != Codec.NONE


def _process(
    records: Buffer,
    target: Compression | None,
    *,
    output_bytes_max: int,
    checks_content: bool,
    is_intact: bool,
    inspect: Callable[[Buffer, int], InspectedRecords] | None,
) -> tuple[Buffer, InspectedRecords | None]:
    """Check, recompress and inspect a batch, on the thread. Return the batch as it will be stored and the result of its
    inspection. `is_intact`: `check_batch` has accepted the batch. Raises the errors of `check_batch`, `check_content`,
    `recompress` and `inspect_records`."""
    if target is not None:
        records = recompress(records, target, output_bytes_max=output_bytes_max)
    else:
        header = read_header(records) if is_intact else check_batch(records)
        if checks_content:
            check_content(records, header, output_bytes_max)
    if inspect is None:
        return records, None
    is_bounded = target is not None or checks_content
    return records, inspect(records, 0 if is_bounded else output_bytes_max)


def _inspect(
    name: str, rules: AppendRules, records: Buffer, output_bytes_max: int, *, now_ms: int
) -> InspectedRecords:
    """Inspect a batch that has passed `check_batch`. `output_bytes_max`: 0 if its decompressed size needs no check.
    Raises `DecompressedTooLarge` above it; other errors are in the result."""
    try:
        if output_bytes_max:
            decompress_batch(records, output_bytes_max)
        return inspect_records(name, rules, records, now_ms)._replace(by_thread=True)
    except DecompressedTooLarge:
        raise
    except MansioError as error:
        return InspectedRecords(rules, error=without_traceback(error), by_thread=True)


def _has_other_codec(records: Buffer, codec: Codec) -> bool:
    """Return whether a batch has another codec. False for too few bytes, which `Partition.append` rejects."""
    return len(records) >= HEADER_BYTES and _read_codec(records) != codec


def _recompress_inline(records: Buffer, target: Compression) -> bytes | None:
    """Return the batch with the codec `target`; None if recompression would take too long on the event loop."""
    if len(records) > INLINE_BYTES_MAX or (target.level or 0) > INLINE_LEVEL_MAX:
        return None
    try:
        return recompress(records, target, output_bytes_max=INLINE_BYTES_MAX)
    except InvalidRecord:
        return None  # too large or invalid; recompression on the thread raises the error
