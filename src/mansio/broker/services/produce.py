"""Produce service: appends batches to partitions, and tracks the requests that wait for their commit.

A request with acks=0 or acks=1 is complete when its batches are in the operating system's page cache, with acks=all
when they are flushed on every in-sync replica. The batch of each partition succeeds or fails on its own.

Hot path: `ProduceService.append` creates no object per batch except the result of the log; a batch that waits needs one
object, a `PendingAppend`. `ProduceService.begin_produce` is for requests with several partitions, and for topics whose
batches are recompressed, and large batches. Such batches may be appended later; the request is complete only then, even
with acks=0 or acks=1.

Before the first batch of a producer's transaction in a partition is appended, the `verifier` asks the transaction
coordinator whether the partition belongs to the transaction (KIP-890). Other batches do not wait for it.

Invariants:
* No transaction is open in a partition that its coordinator does not know: its marker would never come.
* The caller's buffers are not read after `append` or `begin_produce` has returned.
* A pending request completes exactly once: when all batches are committed or failed, or when its timeout expires.
  `cancel` ends the waiting, never the append.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.broker.partition.append_validation import awaits_flush, needs_thread
from mansio.broker.partition.partition_hook import LookUpRequired
from mansio.broker.services.statistics import SAMPLE_MASK
from mansio.config.topic_names import EVENT_TOPICS
from mansio.errors import (
    ConcurrentTransactions,
    CorruptMessage,
    DecompressedTooLarge,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTopic,
    InvalidTxnState,
    MansioError,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    ProducerFenced,
    RequestTimedOut,
    UnsupportedCompression,
)
from mansio.ports import complete
from mansio.state.authorization.acls import Operation
from mansio.tracebacks import without_traceback
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import HEADER_BYTES, read_header
from mansio.wire.field_values import ACKS_ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.partition.producer_hook import ProducerHook, Verification
    from mansio.broker.services.authorization import Grants
    from mansio.broker.services.statistics import Statistics, Stopwatch
    from mansio.broker.services.transactions.verifier import TransactionVerifier
    from mansio.ports import Buffer, Clock, Promise, Scheduler
    from mansio.state.trace.trace_buffer import Publisher
    from mansio.wire.batch.record_batch import BatchHeader

    TopicBatches = tuple[str | None, bytes | None, Sequence[tuple[int, Buffer | None]]]
    """(topic name or None, topic id or None, [(partition, batch)])."""

    TopicResults = tuple[str | None, bytes | None, list["BatchResult"]]


TIMEOUT_CHECK_INTERVAL_MS: Final = 1000
"""Interval at which the listener must call `ProduceService.time_out_requests`."""

ATTRIBUTES_BYTE_POSITION: Final = 22  # position in a batch of the byte that contains the codec
CODEC_MASK: Final = 7

TIMED_OUT_MESSAGE: Final = "the batch was appended, but was not committed in time"
NOT_APPENDED_IN_TIME_MESSAGE: Final = "the batch was not appended in time, and may be appended later"

NOT_APPENDED_OFFSET: Final = -1
"""End offset of a batch that is not appended yet."""


class ProduceCounters:
    """Counters of appended and rejected batches; incremented per batch, never per record."""

    __slots__ = ("appended_batches", "appended_bytes", "rejected_batches")

    def __init__(self) -> None:
        self.appended_batches = 0
        self.appended_bytes = 0
        self.rejected_batches = 0


class ProcessingRequired(Exception):
    """The caller must append the batch through `ProduceService.begin_produce`, because it has to be recompressed, its
    content is so large that a thread processes it, or it waits until the file of its log can be opened or another
    broker was asked. Nothing was appended. `was_tried`: the partition has refused the batch after the check of its CRC,
    because of its size when decompressed or because it has to wait."""

    def __init__(self, partition: Partition, *, was_tried: bool = False) -> None:
        super().__init__(partition.name)
        self.partition = partition
        self.was_tried = was_tried


class _Unverified(NamedTuple):
    """The first batch of a producer's transaction in a partition, which waits for the transaction coordinator."""

    partition: Partition
    producers: ProducerHook
    producer_id: int
    producer_epoch: int
    records: bytes
    leader_epoch: int
    wait: _PendingBatch
    verification: Verification


class BatchResult(NamedTuple):
    """Result of the batch of one partition. If it has an `error`, its offsets are -1. `append_time_ms` is -1 unless the
    topic uses log-append time."""

    partition: int
    error: MansioError | None = None
    base_offset: int = -1
    append_time_ms: int = -1
    log_start_offset: int = -1


class ProduceService:
    """Appends batches and tracks the requests that wait for a commit. All methods run on the broker's event loop."""

    __slots__ = (
        "_last_check_s",
        "_partitions",
        "_scheduler",
        "_statistics",
        "_wait_ms_max",
        "counters",
        "pending",
        "verifier",
    )

    def __init__(
        self,
        partitions: PartitionSet,
        *,
        clock: Clock,
        scheduler: Scheduler,
        statistics: Statistics,
        verifier: TransactionVerifier,
        wait_ms_max: int,
    ) -> None:
        """Create the service. `verifier`: asks the transaction coordinators. `wait_ms_max`: upper bound of the timeout
        of a request."""
        self._partitions = partitions
        self._scheduler = scheduler
        self._statistics = statistics
        self.verifier = verifier
        self._wait_ms_max = wait_ms_max
        self._last_check_s = clock.monotonic()
        """Monotonic time of the last check for requests that have timed out."""
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
        transactional: bool = False,
        was_tried: bool = False,
        is_broker: bool = False,
        publisher: Publisher | None = None,
    ) -> tuple[Partition, AppendResult]:
        """Append one batch to partition `index` of the topic with this name or, if `topic` is None, id. Whether its
        producer may write to the topic was asked before.

        `transactional`: the batch may belong to a transaction, which the caller has verified. With acks=all the caller
        must wait for the commit (`PendingAppend`). Raises the `MansioError` for which the batch is rejected, and
        `ProcessingRequired` if the caller must use `begin_produce` instead; always if this `was_tried` before.
        `is_broker`: another broker appends to the topic of the audit or of the trace. `publisher`: the client, for the
        trace; None for an unknown one.
        """
        counters = self.counters
        try:
            partition = self._partitions.find(topic, topic_id, index)
            if partition.internal and not (is_broker and partition.topic in EVENT_TOPICS):
                raise InvalidTopic(f"{partition.topic} is an internal topic; clients may not write to it")
            if not records:
                raise CorruptMessage(f"{partition.name}: the request contains no record batch")
            if not allow_zstd and _is_zstd(records):
                raise UnsupportedCompression("zstd needs Produce version 7 or later")
            rules = partition.rules
            if (
                was_tried
                or rules.compression is not None
                or partition in self._partitions.batch_processor.queues
                or needs_thread(records, rules)
            ):
                raise ProcessingRequired(partition, was_tried=was_tried)
            appended = partition.append(records, urgent=acks == ACKS_ALL, transactional=transactional)
        except (
            DecompressedTooLarge,
            LookUpRequired,
        ):  # too large for a check on the event loop, or it has to wait
            raise ProcessingRequired(partition, was_tried=True) from None
        except MansioError as error:
            if awaits_flush(error):
                raise ProcessingRequired(partition, was_tried=True) from None
            counters.rejected_batches += 1
            raise
        counters.appended_batches += 1
        counters.appended_bytes += len(records)
        if (trace := partition.trace) is not None and not appended.duplicate:
            if (
                trace.publisher is publisher
                and trace.run_end == appended.base_offset
                and partition.last_append_ms <= trace.run_until_ms
            ):
                trace.run_end = appended.end_offset
            else:
                trace.begin_run(
                    publisher, appended.base_offset, appended.end_offset, partition.last_append_ms
                )
        return partition, appended

    def begin_produce(
        self,
        topics: Sequence[TopicBatches],
        *,
        grants: Grants | None,
        acks: int,
        allow_zstd: bool = True,
        client: Hashable = None,
        was_tried: bool = False,
        is_broker: bool = False,
        publisher: Publisher | None = None,
    ) -> PendingProduce:
        """Append the batches of a request. If the result is not complete, the caller must call `PendingProduce.wait`: a
        batch is being processed, or acks=all and a batch is not committed yet.

        `grants`: of the client, which needs WRITE for each topic; None if it may write to all of them.
        `allow_zstd` False: reject zstd, because the protocol version of the request excludes it (KIP-110). `client`:
        the client whose share of the processor's queue is used; None for batches of the broker itself. `was_tried`:
        `append` has just raised `ProcessingRequired` with `was_tried` for the only batch of the request. `is_broker`,
        `publisher`: see `append`."""
        pending = PendingProduce(self, publisher)
        writable = None
        if grants is not None:
            if grants.revision != grants.rules.revision:
                grants.renew()
            writable = grants.writable
        for name, topic_id, entries in topics:
            results: list[BatchResult] = []
            pending.results.append((name, topic_id, results))
            if (
                writable is not None
                and (topic_id if name is None else name) not in writable
                and (refused := self._refusal(grants, name, topic_id)) is not None
            ):
                results += [BatchResult(index, refused) for index, _ in entries]
                self.counters.rejected_batches += len(entries)
                continue
            for index, records in entries:
                try:
                    partition, appended = self.append(
                        name,
                        topic_id,
                        index,
                        records,
                        acks=acks,
                        allow_zstd=allow_zstd,
                        was_tried=was_tried,
                        is_broker=is_broker,
                        publisher=publisher,
                    )
                except MansioError as error:
                    results.append(BatchResult(index, without_traceback(error)))
                    continue
                except ProcessingRequired as required:
                    results.append(BatchResult(index))
                    waiting = pending.add_pending_batch(
                        required.partition, NOT_APPENDED_OFFSET, len(pending.results) - 1, len(results) - 1
                    )
                    self._append_processed(
                        pending, waiting, records or b"", acks, client, was_tried=required.was_tried
                    )
                    continue
                base_offset, end_offset, append_time_ms, _ = appended
                if acks == ACKS_ALL and end_offset > partition.replica.high_watermark:
                    pending.add_pending_batch(partition, end_offset, len(pending.results) - 1, len(results))
                results.append(
                    BatchResult(index, None, base_offset, append_time_ms, partition.log.start_offset)
                )
        return pending

    def _refusal(
        self, grants: Grants | None, topic: str | None, topic_id: bytes | None
    ) -> MansioError | None:
        if grants is None:
            return None
        return grants.topic_error(Operation.WRITE, topic, topic_id, self._partitions.name_of, "PRODUCE")

    def _append_processed(
        self,
        pending: PendingProduce,
        waiting: _PendingBatch,
        records: Buffer,
        acks: int,
        client: Hashable,
        *,
        was_tried: bool,
        transactional: bool = False,
        adds: bool = False,
    ) -> None:
        """Append a batch after its processing, now or later. A transactional one is refused if its transaction ends
        meanwhile: it would open one that never ends. `was_tried`: see `ProcessingRequired`; `adds`: see
        `begin_transactional`."""
        pending.is_processed = True
        size, partition = len(records), waiting.partition
        header = _transactional_header(records) if transactional else None
        producers, leader_epoch = partition.producers, partition.leader_epoch
        verification = (
            None
            if header is None or producers is None
            else producers.begin_verification(header, bumps_epoch=adds)
        )

        def check() -> None:
            if verification is not None:
                _check_verified(partition, verification, leader_epoch)

        def on_appended(outcome: AppendResult | MansioError) -> None:
            if header is not None and producers is not None and verification is not None:
                producers.end_verification(header.producer_id, verification)
            if isinstance(outcome, MansioError):
                self.counters.rejected_batches += 1
            else:
                self.counters.appended_batches += 1
                self.counters.appended_bytes += size
                if (trace := partition.trace) is not None and not outcome.duplicate:
                    base_offset, end_offset, _, _ = outcome
                    trace.begin_run(pending.publisher, base_offset, end_offset, partition.clock.wall_ms())
            pending.record_outcome(waiting, outcome, awaits_commit=acks == ACKS_ALL)

        urgent = acks == ACKS_ALL
        self._partitions.batch_processor.append(
            partition,
            records,
            urgent=urgent,
            on_appended=on_appended,
            client=client,
            transactional=transactional,
            check=check if verification is not None else None,
            was_tried=was_tried,
        )

    # Transactions

    def begin_transactional(
        self,
        topics: Sequence[TopicBatches],
        transactional_id: str,
        *,
        grants: Grants | None,
        acks: int,
        adds: bool,
        allow_zstd: bool = True,
        client: Hashable = None,
        was_tried: bool = False,
        publisher: Publisher | None = None,
    ) -> PendingProduce:
        """Like `begin_produce`, for a request with a transactional id. A batch that begins a transaction in its
        partition is appended after the transaction was verified. `adds`: transaction version 2 (Produce 12+), in which
        the partition is added to the transaction if it does not belong to it.

        Raises `TransactionalIdAuthorizationFailed` if the client may not use the transactional id."""
        writable = None
        if grants is not None:
            if grants.revision != grants.rules.revision:
                grants.renew()
            if transactional_id not in grants.transactional_ids:
                grants.check_transactional_id(transactional_id)
            writable = grants.writable
        pending = PendingProduce(self, publisher)
        unverified: list[_Unverified] = []
        producer_ids = set[int]()
        for name, topic_id, entries in topics:
            results: list[BatchResult] = []
            pending.results.append((name, topic_id, results))
            if (
                writable is not None
                and (topic_id if name is None else name) not in writable
                and (refused := self._refusal(grants, name, topic_id)) is not None
            ):
                results += [BatchResult(index, refused) for index, _ in entries]
                self.counters.rejected_batches += len(entries)
                continue
            for index, records in entries:
                results.append(BatchResult(index))
                position = len(pending.results) - 1, len(results) - 1
                header = _transactional_header(records)
                if header is not None:
                    producer_ids.add(header.producer_id)
                    found = self._find_unverified(
                        pending, name, topic_id, index, records or b"", position, adds=adds
                    )
                    if found is not None:
                        unverified.append(found)
                        continue
                self._append_transactional(
                    pending,
                    (name, topic_id, index),
                    records,
                    position,
                    acks,
                    allow_zstd,
                    client,
                    adds=adds,
                    was_tried=was_tried,
                )
        if len(producer_ids) > 1:
            error = InvalidProducerIdMapping("a request has transactional batches of more than one producer")
            errors = [error] * len(unverified)
            self._end_verification(pending, unverified, errors, acks, allow_zstd, client, adds=adds)
        elif unverified:
            pending.is_verified = True
            work = self._verify(pending, transactional_id, unverified, acks, adds, allow_zstd, client)
            self._scheduler.spawn(work, name="transaction verification")
        return pending

    def is_transaction_open(
        self, topic: str | None, topic_id: bytes | None, index: int, records: Buffer
    ) -> bool:
        """Whether a batch is transactional and its producer has an open transaction in the partition, so that `append`
        may take it without verification. False if there is no such partition."""
        header = _transactional_header(records)
        if header is None:
            return False
        try:
            producers = self._partitions.find(topic, topic_id, index).producers
        except MansioError:
            return False
        return producers is not None and producers.is_open(header)

    def _find_unverified(
        self,
        pending: PendingProduce,
        topic: str | None,
        topic_id: bytes | None,
        index: int,
        records: Buffer,
        position: tuple[int, int],
        *,
        adds: bool,
    ) -> _Unverified | None:
        """Return the batch if its transaction must be verified; None also if the append will be rejected."""
        try:
            partition = self._partitions.find(topic, topic_id, index)
        except MansioError:
            return None
        header, producers = read_header(records), partition.producers
        if producers is None or not partition.is_leader or partition.internal or producers.is_open(header):
            return None
        return _Unverified(
            partition,
            producers,
            header.producer_id,
            header.producer_epoch,
            bytes(records),
            partition.leader_epoch,
            pending.add_pending_batch(partition, NOT_APPENDED_OFFSET, *position),
            producers.begin_verification(header, bumps_epoch=adds),
        )

    async def _verify(
        self,
        pending: PendingProduce,
        transactional_id: str,
        unverified: Sequence[_Unverified],
        acks: int,
        adds: bool,
        allow_zstd: bool,
        client: Hashable,
    ) -> None:
        """Ask the coordinator about the transaction of these batches, and append those that belong to it."""
        first = unverified[0]
        partitions = [(one.partition.topic, one.partition.index) for one in unverified]
        errors: list[MansioError | None] = [RequestTimedOut(NOT_APPENDED_IN_TIME_MESSAGE)] * len(unverified)
        try:
            found = await self.verifier.verify(
                transactional_id, first.producer_id, first.producer_epoch, partitions, adds=adds
            )
            errors = [_as_produce_error(error, adds=adds) for error in found]
        except MansioError as error:
            errors = [_as_produce_error(error, adds=adds)] * len(unverified)
        finally:
            self._end_verification(pending, unverified, errors, acks, allow_zstd, client, adds=adds)

    def _end_verification(
        self,
        pending: PendingProduce,
        unverified: Sequence[_Unverified],
        errors: Sequence[MansioError | None],
        acks: int,
        allow_zstd: bool,
        client: Hashable,
        *,
        adds: bool,
    ) -> None:
        for one, found in zip(unverified, errors, strict=True):
            error = found
            one.producers.end_verification(one.producer_id, one.verification)
            partition = one.partition
            try:
                if error is None:
                    _check_verified(partition, one.verification, one.leader_epoch)
            except MansioError as outdated:
                error = without_traceback(outdated)
            if error is not None:
                self.counters.rejected_batches += 1
                pending.record_outcome(one.wait, error, awaits_commit=False)
                continue
            try:
                _, appended = self.append(
                    partition.topic,
                    None,
                    partition.index,
                    one.records,
                    acks=acks,
                    allow_zstd=allow_zstd,
                    transactional=True,
                    publisher=pending.publisher,
                )
            except MansioError as rejection:
                pending.record_outcome(one.wait, rejection, awaits_commit=False)
            except ProcessingRequired as required:
                self._append_processed(
                    pending,
                    one.wait,
                    one.records,
                    acks,
                    client,
                    was_tried=required.was_tried,
                    transactional=True,
                    adds=adds,
                )
            else:
                pending.record_outcome(one.wait, appended, awaits_commit=acks == ACKS_ALL)

    def _append_transactional(
        self,
        pending: PendingProduce,
        wanted: tuple[str | None, bytes | None, int],
        records: Buffer | None,
        position: tuple[int, int],
        acks: int,
        allow_zstd: bool,
        client: Hashable,
        *,
        adds: bool,
        was_tried: bool,
    ) -> None:
        """Append a batch whose transaction is open already, or which is not transactional."""
        results = pending.results[position[0]][2]
        try:
            partition, appended = self.append(
                *wanted,
                records,
                acks=acks,
                allow_zstd=allow_zstd,
                transactional=True,
                was_tried=was_tried,
                publisher=pending.publisher,
            )
        except MansioError as error:
            results[position[1]] = BatchResult(wanted[2], without_traceback(error))
            return
        except ProcessingRequired as required:
            waiting = pending.add_pending_batch(required.partition, NOT_APPENDED_OFFSET, *position)
            self._append_processed(
                pending,
                waiting,
                records or b"",
                acks,
                client,
                was_tried=required.was_tried,
                transactional=True,
                adds=adds,
            )
            return
        base_offset, end_offset, append_time_ms, _ = appended
        if acks == ACKS_ALL and end_offset > partition.replica.high_watermark:
            pending.add_pending_batch(partition, end_offset, *position)
        results[position[1]] = BatchResult(
            wanted[2], None, base_offset, append_time_ms, partition.log.start_offset
        )

    async def produce(
        self, topics: Sequence[TopicBatches], *, grants: Grants | None, acks: int, timeout_ms: int
    ) -> list[TopicResults]:
        """Append all batches; return their results when all are committed or failed, or after `timeout_ms`."""
        pending = self.begin_produce(topics, grants=grants, acks=acks)
        if not pending.is_complete:
            promise: Promise[None] = self._scheduler.promise()

            def on_done(_: PendingProduce) -> None:
                complete(promise, None)

            pending.wait(timeout_ms, on_done)
            try:
                await promise
            finally:
                pending.cancel()
        return pending.results

    def deadline_after(self, timeout_ms: int) -> float:
        """Return the deadline, in monotonic seconds, of a request that arrives now; `timeout_ms` is bounded by the
        service. The deadline is late by at most `TIMEOUT_CHECK_INTERVAL_MS`, never early."""
        return self._last_check_s + (TIMEOUT_CHECK_INTERVAL_MS + min(timeout_ms, self._wait_ms_max)) / 1000

    def start_stopwatch(self) -> Stopwatch | None:
        """Start to measure the time until the acknowledgement, for one batch in `SAMPLE_EVERY`; return None for the
        others."""
        if self.counters.appended_batches & SAMPLE_MASK:
            return None
        return self._statistics.start_stopwatch(self._statistics.acknowledge_latency)

    def time_out_requests(self, now: float) -> None:
        """Time out all requests whose deadline has passed. `now`: monotonic seconds. The listener must call this every
        `TIMEOUT_CHECK_INTERVAL_MS`."""
        self._last_check_s = now
        for pending in [one for one in self.pending if one.deadline <= now]:
            pending.time_out()


class PendingAppend:
    """One batch that is appended with acks=all and not committed yet.

    `context` and `response` are for the caller, so that it needs no object of its own per batch. The callback
    `on_done(pending, error)` may set the response with `respond`.
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
        self._stopwatch = (
            None if service.counters.appended_batches & SAMPLE_MASK else service.start_stopwatch()
        )
        self.context = context
        self.deadline = service.deadline_after(timeout_ms)
        self.response: Any = None

    def complete(self, error: MansioError | None) -> None:
        """Report that the batch is committed or, with `error`, that it failed. Has no effect after a timeout."""
        if self._pending.pop(self, False) is False:
            return  # timed out before
        if self._stopwatch is not None:
            self._stopwatch.stop()
        self._on_done(self, error)

    def respond(self, response: Any) -> None:
        self.response = response

    def time_out(self) -> None:
        self.complete(RequestTimedOut(TIMED_OUT_MESSAGE))


class _PendingBatch(NamedTuple):
    """One batch that is not committed yet, or not even appended, and the position of its result."""

    partition: Partition
    end_offset: int
    topic_position: int
    position: int


class PendingProduce:
    """A produce request with several batches. `response` is for the caller, as in `PendingAppend`.

    The outcome of each batch is stored when its own wait ends. When the last wait ends, it could not be determined any
    more: other records may be at the offsets of the batch.
    """

    __slots__ = (
        "_has_ended",
        "_on_done",
        "_service",
        "_stopwatch",
        "_waits",
        "deadline",
        "is_processed",
        "is_verified",
        "publisher",
        "response",
        "results",
    )

    def __init__(self, service: ProduceService, publisher: Publisher | None) -> None:
        self._service = service
        self.publisher = publisher
        self._has_ended = False
        self.is_processed = False
        """Whether any batch was passed to the `BatchProcessor`."""
        self.is_verified = False
        """Whether a batch waits for a transaction coordinator; the next request of the client must not overtake it."""
        self._waits: dict[_PendingBatch, None] = {}
        self._on_done: Callable[[PendingProduce], None] | None = None
        self._stopwatch: Stopwatch | None = None
        self.results: list[TopicResults] = []
        """Results in the order of the request; final once `is_complete`."""
        self.deadline = 0.0
        self.response: Any = None

    @property
    def is_complete(self) -> bool:
        """Whether every batch is committed or failed."""
        return not self._waits

    def add_pending_batch(
        self, partition: Partition, end_offset: int, topic_position: int, position: int
    ) -> _PendingBatch:
        """Register a batch that is not committed yet, with the position of its result in `results`. `end_offset`:
        `NOT_APPENDED_OFFSET` if the batch is not appended yet."""
        wait = _PendingBatch(partition, end_offset, topic_position, position)
        self._waits[wait] = None
        return wait

    def record_outcome(
        self, wait: _PendingBatch, outcome: AppendResult | MansioError, *, awaits_commit: bool
    ) -> None:
        """Record the outcome of a batch that was registered with `NOT_APPENDED_OFFSET`: it was appended, or it was
        rejected. `awaits_commit`: the request also waits for the commit of the batch."""
        if self._has_ended:
            return
        if isinstance(outcome, MansioError):
            self._fail_batch(wait, outcome)
        else:
            partition, _, topic_position, position = wait
            base_offset, end_offset, append_time_ms, _ = outcome
            results = self.results[topic_position][2]
            results[position] = BatchResult(
                results[position].partition, None, base_offset, append_time_ms, partition.log.start_offset
            )
            if awaits_commit and end_offset > partition.replica.high_watermark:
                following = self.add_pending_batch(partition, end_offset, topic_position, position)
                if self._on_done is not None:
                    self._wait_until_committed(following)
        del self._waits[wait]
        if not self._waits and self._on_done is not None:
            self._finish()

    def wait(self, timeout_ms: int, on_done: Callable[[PendingProduce], None]) -> None:
        """Call `on_done` once when every batch is committed or failed, or after `timeout_ms`; possibly before this
        returns."""
        service = self._service
        self._on_done = on_done
        self.deadline = service.deadline_after(timeout_ms)
        self._stopwatch = service.start_stopwatch()
        service.pending[self] = None
        for wait in tuple(self._waits):
            if wait.end_offset != NOT_APPENDED_OFFSET:
                self._wait_until_committed(wait)
        if not self._waits and not self._has_ended:  # the last one was appended before this call
            self._finish()

    def time_out(self) -> None:
        """End the request; the batches that are not committed get an error."""
        for wait in self._waits:
            reason = (
                NOT_APPENDED_IN_TIME_MESSAGE if wait.end_offset == NOT_APPENDED_OFFSET else TIMED_OUT_MESSAGE
            )
            self._fail_batch(wait, wait.partition.failure or RequestTimedOut(reason))
        self._finish()

    def respond(self, response: Any) -> None:
        self.response = response

    def cancel(self) -> None:
        """Stop waiting without a call of `on_done`; the batches stay appended, or are appended later."""
        self._has_ended = True
        self._on_done = None
        self._service.pending.pop(self, None)

    def _wait_until_committed(self, wait: _PendingBatch) -> None:
        if wait.partition.when_committed(wait.end_offset, partial(self._on_committed, wait)):
            self._on_committed(wait, None)

    def _on_committed(self, wait: _PendingBatch, error: MansioError | None) -> None:
        if self._on_done is None:
            return  # timed out or cancelled before
        if error is not None:
            self._fail_batch(wait, error)
        del self._waits[wait]
        if not self._waits:
            self._finish()

    def _fail_batch(self, wait: _PendingBatch, error: MansioError) -> None:
        results = self.results[wait.topic_position][2]
        results[wait.position] = BatchResult(results[wait.position].partition, without_traceback(error))

    def _finish(self) -> None:
        self._has_ended = True
        self._service.pending.pop(self, None)
        if self._stopwatch is not None:
            self._stopwatch.stop()
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(self)


def _check_verified(partition: Partition, verification: Verification, leader_epoch: int) -> None:
    """Raise an error if the result of a verification is outdated: the leader has changed since it began
    (`NotLeaderOrFollower`), or the transaction has ended (`InvalidTxnState`)."""
    if partition.leader_epoch != leader_epoch:
        raise NotLeaderOrFollower(f"{partition.name}: the leader has changed meanwhile")
    if not verification.is_valid:
        raise InvalidTxnState(f"{partition.name}: the transaction has ended meanwhile")


def _transactional_header(records: Buffer | None) -> BatchHeader | None:
    """Return the header of a transactional batch, None for other ones. Nothing is checked."""
    if not records or len(records) < HEADER_BYTES:
        return None
    header = read_header(records)
    return header if header.is_transactional and not header.is_control else None


def _as_produce_error(error: MansioError | None, *, adds: bool) -> MansioError | None:
    """Return the error of a batch for a failed verification, as Kafka does. Clients handle a fenced producer by the
    error that a partition gives, and retry NOT_ENOUGH_REPLICAS; only those that use `adds` retry
    CONCURRENT_TRANSACTIONS, and none retries the other errors of a coordinator."""
    if isinstance(error, ProducerFenced):
        return InvalidProducerEpoch(error.message)
    if error is None or not error.retriable or (adds and isinstance(error, ConcurrentTransactions)):
        return without_traceback(error)
    return NotEnoughReplicas(f"the transaction cannot be verified now: {error.message}")


def _is_zstd(records: Buffer) -> bool:
    return (
        len(records) > ATTRIBUTES_BYTE_POSITION
        and records[ATTRIBUTES_BYTE_POSITION] & CODEC_MASK == Codec.ZSTD
    )
