"""Produce use case: append batches to partitions and complete when they are committed.

acks=0 and acks=1 complete when the batch is in the operating system's page cache, acks=all when it is flushed on every
in-sync replica. Each partition's batch succeeds or fails on its own.

Hot path: `append` does not create an object per batch beyond the result of the log; `PendingAppend` is one object per
batch that waits. `begin` serves requests with several partitions, and topics whose batches are recompressed on append:
these may be appended later, and complete then, whatever the acks.

Invariants:
* The caller's buffers are only read until `append` or `begin` returns.
* A pending produce completes exactly once: all batches committed or failed, or its timeout is over. `cancel` ends the
  waiting, never the append.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.broker.services.statistics import SAMPLE_MASK
from mansio.errors import (
    CorruptMessage,
    InvalidTopic,
    MansioError,
    RequestTimedOut,
    UnsupportedCompression,
)
from mansio.wire.batch.compression import Codec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.statistics import Statistics, Stopwatch
    from mansio.ports import Buffer, Clock, Promise, Scheduler

    TopicBatches = tuple[str | None, bytes | None, Sequence[tuple[int, Buffer | None]]]
    """(topic name or None, topic id or None, [(partition, batch)])."""

    TopicResults = tuple[str | None, bytes | None, list["BatchResult"]]

ACKS_ALL: Final = -1
ACKS_NONE: Final = 0

TIMEOUT_CHECK_INTERVAL_MS: Final = 1000
"""Interval at which the owner of the service has to call `expire`."""

CODEC_POSITION: Final = 22  # the byte of a batch's attributes that contains the codec
CODEC_MASK: Final = 7

TIMED_OUT: Final = "the batch was appended, but was not committed in time"
NOT_APPENDED_IN_TIME: Final = "the batch was not appended in time, and may be appended later"

NOT_APPENDED: Final = -1
"""As the end offset of a batch that is not appended yet."""


class ProduceCounters:
    """Incremented per batch, never per record."""

    __slots__ = ("appended_batches", "appended_bytes", "rejected_batches")

    def __init__(self) -> None:
        self.appended_batches = 0
        self.appended_bytes = 0
        self.rejected_batches = 0


class RecompressionRequired(Exception):
    """A batch for this partition has to be appended through the `Recompressor`; nothing was done."""

    def __init__(self, partition: Partition) -> None:
        super().__init__(partition.name)
        self.partition = partition


class BatchResult(NamedTuple):
    """Result of one partition's batch. With `error` the offsets are -1. `append_time_ms` is -1 unless the topic uses
    log-append time."""

    partition: int
    error: MansioError | None = None
    base_offset: int = -1
    append_time_ms: int = -1
    log_start_offset: int = -1


class ProduceService:
    """Appends batches and tracks the requests that wait for a commit. All methods run on the broker's event loop."""

    __slots__ = ("_now", "_partitions", "_scheduler", "_statistics", "_wait_ms_max", "counters", "pending")

    def __init__(
        self,
        partitions: PartitionSet,
        *,
        clock: Clock,
        scheduler: Scheduler,
        statistics: Statistics,
        wait_ms_max: int,
    ) -> None:
        """`wait_ms_max` bounds the timeout of a request, in ms."""
        self._partitions = partitions
        self._scheduler = scheduler
        self._statistics = statistics
        self._wait_ms_max = wait_ms_max
        self._now = clock.monotonic()
        self.counters = ProduceCounters()
        self.pending: dict[PendingAppend | PendingProduce, None] = {}
        """Requests that wait for a commit, oldest first."""

    def append(
        self,
        topic: str | None,
        topic_id: bytes | None,
        index: int,
        records: Buffer | None,
        *,
        acks: int,
        allow_zstd: bool = True,
    ) -> tuple[Partition, AppendResult]:
        """Append one batch to a partition, which is named by the topic's name or id.

        With acks=all the caller waits for the commit (`PendingAppend`). Raises the `MansioError` for which the batch is
        rejected, and `RecompressionRequired`, after which the caller calls `begin`.
        """
        counters = self.counters
        try:
            partition = self._partitions.find(topic, topic_id, index)
            if partition.internal:
                raise InvalidTopic(f"{partition.topic} is an internal topic; clients may not write to it")
            if not records:
                raise CorruptMessage(f"{partition.name}: the request contains no record batch")
            if not allow_zstd and _is_zstd(records):
                raise UnsupportedCompression("zstd needs Produce version 7 or later")
            if partition.rules.compression is not None or partition.is_recompressing:
                raise RecompressionRequired(partition)
            appended = partition.append(records, urgent=acks == ACKS_ALL)
        except MansioError:
            counters.rejected_batches += 1
            raise
        counters.appended_batches += 1
        counters.appended_bytes += len(records)
        return partition, appended

    def begin(
        self,
        topics: Sequence[TopicBatches],
        *,
        acks: int,
        allow_zstd: bool = True,
        client: Hashable = None,
    ) -> PendingProduce:
        """Append all batches. The result is complete unless a batch is being recompressed, or acks=all and it is not
        committed yet; then call `PendingProduce.wait`. `allow_zstd` False: the client's protocol version excludes zstd
        (KIP-110). `client`: whose share of the recompression queue the batches take; None for the broker's own."""
        pending = PendingProduce(self)
        for name, topic_id, entries in topics:
            results: list[BatchResult] = []
            pending.results.append((name, topic_id, results))
            for index, records in entries:
                try:
                    partition, appended = self.append(
                        name, topic_id, index, records, acks=acks, allow_zstd=allow_zstd
                    )
                except MansioError as error:
                    results.append(BatchResult(index, error))
                    continue
                except RecompressionRequired as required:
                    results.append(BatchResult(index))
                    self._append_recompressed(pending, required.partition, records or b"", acks, client)
                    continue
                base_offset, end_offset, append_time_ms, _ = appended
                if acks == ACKS_ALL and end_offset > partition.replica.high_watermark:
                    pending.add(partition, end_offset, len(pending.results) - 1, len(results))
                results.append(
                    BatchResult(index, None, base_offset, append_time_ms, partition.log.start_offset)
                )
        return pending

    def _append_recompressed(
        self, pending: PendingProduce, partition: Partition, records: Buffer, acks: int, client: Hashable
    ) -> None:
        """Append a batch, now or later; its result is the last one of `pending`."""
        pending.is_recompressed = True
        waiting = pending.add(
            partition, NOT_APPENDED, len(pending.results) - 1, len(pending.results[-1][2]) - 1
        )
        size = len(records)

        def on_appended(outcome: AppendResult | MansioError) -> None:
            if isinstance(outcome, MansioError):
                self.counters.rejected_batches += 1
            else:
                self.counters.appended_batches += 1
                self.counters.appended_bytes += size
            pending.appended(waiting, outcome, is_committed_awaited=acks == ACKS_ALL)

        urgent = acks == ACKS_ALL
        self._partitions.recompressor.append(
            partition, records, urgent=urgent, on_appended=on_appended, client=client
        )

    async def produce(
        self, topics: Sequence[TopicBatches], *, acks: int, timeout_ms: int
    ) -> list[TopicResults]:
        """Append all batches and return their results when all are complete, or after `timeout_ms`."""
        pending = self.begin(topics, acks=acks)
        if not pending.is_complete:
            promise: Promise[None] = self._scheduler.promise()

            def on_done(_: PendingProduce) -> None:
                if not promise.done():
                    promise.set_result(None)

            pending.wait(timeout_ms, on_done)
            try:
                await promise
            finally:
                pending.cancel()
        return pending.results

    def deadline(self, timeout_ms: int) -> float:
        """Monotonic seconds at which a request that arrives now times out after `timeout_ms` (bounded). Late by at most
        `TIMEOUT_CHECK_INTERVAL_MS`, never early."""
        return self._now + (TIMEOUT_CHECK_INTERVAL_MS + min(timeout_ms, self._wait_ms_max)) / 1000

    def stopwatch(self) -> Stopwatch | None:
        """Measures the time to the acknowledgement for one batch in `SAMPLE_EVERY`; None for the others."""
        if self.counters.appended_batches & SAMPLE_MASK:
            return None
        return self._statistics.time(self._statistics.acknowledge)

    def expire(self, now: float) -> None:
        """Time out every request whose deadline has passed. `now` is monotonic seconds; to be called every
        `TIMEOUT_CHECK_INTERVAL_MS`."""
        self._now = now
        for pending in [one for one in self.pending if one.deadline <= now]:
            pending.time_out()


class PendingAppend:
    """One batch that is appended with acks=all and not committed yet.

    `context` and `response` belong to the caller, which needs no object of its own per batch: `on_done(pending, error)`
    may call `respond`.
    """

    __slots__ = ("_on_done", "_pending", "_stopwatch", "context", "deadline", "response")

    def __init__(
        self,
        service: ProduceService,
        timeout_ms: int,
        on_done: Callable[[PendingAppend, MansioError | None], None],
        context: Any,
    ) -> None:
        self._on_done = on_done
        self._pending = service.pending
        self._pending[self] = None
        self._stopwatch = None if service.counters.appended_batches & SAMPLE_MASK else service.stopwatch()
        self.context = context
        self.deadline = service.deadline(timeout_ms)
        self.response: Any = None

    def complete(self, error: MansioError | None) -> None:
        """The batch is committed, or failed."""
        if self._pending.pop(self, False) is False:
            return  # timed out before
        if self._stopwatch is not None:
            self._stopwatch.stop()
        self._on_done(self, error)

    def respond(self, response: Any) -> None:
        self.response = response

    def time_out(self) -> None:
        self.complete(RequestTimedOut(TIMED_OUT))


class _Wait(NamedTuple):
    """One batch that is not committed yet, or not appended yet, and the position of its result."""

    partition: Partition
    end_offset: int
    topic_position: int
    position: int


class PendingProduce:
    """A produce request with several batches. `response` belongs to the caller, as in `PendingAppend`.

    A batch's outcome is stored when its own wait ends: when the last wait ends, other records may be at its offsets.
    """

    __slots__ = (
        "_ended",
        "_on_done",
        "_service",
        "_stopwatch",
        "_waits",
        "deadline",
        "is_recompressed",
        "response",
        "results",
    )

    def __init__(self, service: ProduceService) -> None:
        self._service = service
        self._ended = False
        self.is_recompressed = False
        """A batch was passed to the `Recompressor`."""
        self._waits: dict[_Wait, None] = {}
        self._on_done: Callable[[PendingProduce], None] | None = None
        self._stopwatch: Stopwatch | None = None
        self.results: list[TopicResults] = []
        """Results so far, in the order of the request; final once complete."""
        self.deadline = 0.0
        self.response: Any = None

    @property
    def is_complete(self) -> bool:
        """Every batch is committed or failed."""
        return not self._waits

    def add(self, partition: Partition, end_offset: int, topic_position: int, position: int) -> _Wait:
        """Register a batch that is not committed yet, and the position of its result in `results`. `end_offset` is
        `NOT_APPENDED` if it is not appended yet."""
        wait = _Wait(partition, end_offset, topic_position, position)
        self._waits[wait] = None
        return wait

    def appended(
        self, wait: _Wait, outcome: AppendResult | MansioError, *, is_committed_awaited: bool
    ) -> None:
        """A batch that was registered as not appended is appended, or rejected."""
        if self._ended:
            return
        if isinstance(outcome, MansioError):
            self._fail(wait, outcome)
        else:
            partition, _, topic_position, position = wait
            base_offset, end_offset, append_time_ms, _ = outcome
            results = self.results[topic_position][2]
            results[position] = BatchResult(
                results[position].partition, None, base_offset, append_time_ms, partition.log.start_offset
            )
            if is_committed_awaited and end_offset > partition.replica.high_watermark:
                following = self.add(partition, end_offset, topic_position, position)
                if self._on_done is not None:
                    self._wait_committed(following)
        del self._waits[wait]
        if not self._waits and self._on_done is not None:
            self._finish()

    def wait(self, timeout_ms: int, on_done: Callable[[PendingProduce], None]) -> None:
        """Call `on_done` once when every batch is committed or failed, or after `timeout_ms`; maybe immediately."""
        service = self._service
        self._on_done = on_done
        self.deadline = service.deadline(timeout_ms)
        self._stopwatch = service.stopwatch()
        service.pending[self] = None
        for wait in tuple(self._waits):
            if wait.end_offset != NOT_APPENDED:
                self._wait_committed(wait)
        if not self._waits and not self._ended:  # the last one was appended before this call
            self._finish()

    def time_out(self) -> None:
        """Fail the batches that are still waiting."""
        for wait in self._waits:
            reason = NOT_APPENDED_IN_TIME if wait.end_offset == NOT_APPENDED else TIMED_OUT
            self._fail(wait, wait.partition.failure or RequestTimedOut(reason))
        self._finish()

    def respond(self, response: Any) -> None:
        self.response = response

    def cancel(self) -> None:
        """Stop waiting; the batches stay appended, or are appended later."""
        self._ended = True
        self._on_done = None
        self._service.pending.pop(self, None)

    def _wait_committed(self, wait: _Wait) -> None:
        if wait.partition.wait_committed(wait.end_offset, partial(self._committed, wait)):
            self._committed(wait, None)

    def _committed(self, wait: _Wait, error: MansioError | None) -> None:
        if self._on_done is None:
            return  # timed out or cancelled before
        if error is not None:
            self._fail(wait, error)
        del self._waits[wait]
        if not self._waits:
            self._finish()

    def _fail(self, wait: _Wait, error: MansioError) -> None:
        results = self.results[wait.topic_position][2]
        results[wait.position] = BatchResult(results[wait.position].partition, error)

    def _finish(self) -> None:
        self._ended = True
        self._service.pending.pop(self, None)
        if self._stopwatch is not None:
            self._stopwatch.stop()
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(self)


def _is_zstd(records: Buffer) -> bool:
    return len(records) > CODEC_POSITION and records[CODEC_POSITION] & CODEC_MASK == Codec.ZSTD
