"""Produce (API 0): batches from the receive buffer to the log, and an answer as strong as `acks` asks.

Version notes: 3 first with record batches v2; 7 first that may carry zstd (KIP-110); 8 names the record that was
refused (KIP-467); 9 flexible; 10 adds the current leader (KIP-951, not filled with one broker); 13 names topics by id.

acks=0: no answer, and the connection ends if a batch is refused, as in Kafka. acks=1: when the bytes are with the
operating system. acks=all (-1): when they are fdatasync-ed and the high watermark has passed them. A partition's batch
stands or falls alone; the others of the request go on.

Always true: the frame's memory is not used after `produce` returns; every request with acks is answered once.
"""

from __future__ import annotations

from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from mansio.broker.services.statistics import SAMPLE_MASK
from mansio.errors import (
    CorruptMessage,
    InvalidRequiredAcks,
    MansioError,
    RequestTimedOut,
    TransactionsNotOffered,
    UnsupportedCompression,
)
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce as wire
from mansio.wire.batch.compression import Codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.kafka.server.connection import Connection
    from mansio.api.kafka.server.socket_writer import ResponsePart
    from mansio.broker.partition.partition import Partition
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.statistics import Stopwatch
    from mansio.wire.apis.produce import ProduceTemplate
    from mansio.wire.headers import RequestHeader

API_KEY = int(ApiKey.PRODUCE)
ACKS_ALL = -1
ZSTD_VERSION_MIN = 7
CODEC_POSITION = 22  # the byte of a batch's attributes that holds the codec, and its bits
CODEC_MASK = 7
CORRELATION_ID = Struct(">i")

REQUEST_TIMED_OUT = "the batch was appended, but did not become durable in time"

LEARN_EVERY = 8
"""A producer whose requests differ every time is not looked at closely every time."""

TopicResults = list[tuple[str | None, bytes | None, list[wire.PartitionResult]]]
NOTHING: tuple[bytes, ...] = ()


class Wait(NamedTuple):
    """One batch that is in the log and not yet durable; where its result stands in the answer."""

    partition: Partition
    end_offset: int
    topic_position: int
    position: int


def produce(
    service: BrokerServices, connection: Connection, header: RequestHeader, frame: memoryview
) -> Sequence[ResponsePart] | None:
    """Append what the request carries; the answer, or None when it comes later through a slot."""
    version = header.api_version
    request = wire.decode_request(version, frame, header.body)
    acks = request.acks
    refusal = _refusal(request)
    if refusal is None:
        if connection.pattern_misses % LEARN_EVERY == 0:
            connection.pattern = wire.learn_template(header, frame, request)
        connection.pattern_misses += 1
    unanswered: MansioError | None = None
    waits: list[Wait] = []
    results: TopicResults = []
    for name, topic_id, entries in request.topics:
        answers: list[wire.PartitionResult] = []
        for index, records in entries:
            try:
                if refusal is not None:
                    raise refusal
                partition = service.records.writable(name, topic_id, index)
                end_offset, answer = _append(partition, index, records, version, acks)
            except MansioError as error:
                _count_refusal(service, error)
                unanswered = error
                answers.append(_refused(index, error))
                continue
            service.records.counters.appended(len(records))  # type: ignore[arg-type]  # _append refuses None
            if acks == ACKS_ALL and end_offset > partition.replica.high_watermark:
                waits.append(Wait(partition, end_offset, len(results), len(answers)))
            answers.append(answer)
        results.append((name, topic_id, answers))
    quotas = service.quotas.active
    throttle_ms = 0 if quotas is None else quotas.produced(connection, header.client_id, len(frame))
    if acks == 0:
        if unanswered is not None:
            raise unanswered  # nobody reads an answer: the end of the connection makes the client look again
        return NOTHING
    frame_out = wire.encode_response(version, header.correlation_id, results, throttle_ms)
    if not waits:
        return (frame_out,)
    pending = PendingProduce(
        service, connection, version, header.correlation_id, results, frame_out, throttle_ms
    )
    connection.queue(pending)
    pending.wait(waits, request.timeout_ms)
    return None


def produce_by_pattern(
    service: BrokerServices,
    connection: Connection,
    pattern: ProduceTemplate,
    frame: memoryview,
    index: int,
    records: memoryview,
) -> Sequence[ResponsePart] | None:
    """The same for a request of the connection's pattern: one batch, and most of its answer known beforehand."""
    (correlation_id,) = CORRELATION_ID.unpack_from(frame, 4)
    acks = pattern.acks
    try:
        partition = service.records.writable(pattern.topic, pattern.topic_id, index)
        if pattern.version < ZSTD_VERSION_MIN:
            _check_codec(records)
        appended = partition.append(records, urgent=acks == ACKS_ALL)
    except MansioError as error:
        _count_refusal(service, error)
        if acks == 0:
            raise
        return (_rejection_by_pattern(pattern, correlation_id, index, error),)
    service.records.counters.appended(len(records))
    if acks == 0:
        return NOTHING
    base_offset, end_offset, append_time_ms, _ = appended
    answer = wire.encode_template_response(
        pattern, correlation_id, index, base_offset, append_time_ms, partition.log.start_offset
    )
    if acks != ACKS_ALL or end_offset <= partition.replica.high_watermark:
        return (answer,)
    pending = PendingBatch(service, connection, pattern, correlation_id, index, answer)
    connection.queue(pending)
    partition.wait_committed(end_offset, pending.settled)
    return None


def _count_refusal(service: BrokerServices, error: MansioError) -> None:
    service.records.counters.rejected_batches += 1
    service.statistics.refused(API_KEY, error.kafka_code)


def _stopwatch(service: BrokerServices) -> Stopwatch | None:
    """Times the acknowledgement of one batch in some."""
    if service.records.counters.appended_batches & SAMPLE_MASK:
        return None
    return service.statistics.time(service.statistics.acknowledge)


def _rejection_by_pattern(
    pattern: ProduceTemplate, correlation_id: int, index: int, error: MansioError
) -> bytes:
    results = [(pattern.topic, pattern.topic_id, [_refused(index, error)])]
    return wire.encode_response(pattern.version, correlation_id, results)


def _refusal(request: wire.ProduceRequest) -> MansioError | None:
    """Why the whole request is refused, if it is."""
    if not -1 <= request.acks <= 1:
        return InvalidRequiredAcks(f"acks={request.acks}: must be 0, 1 or -1 (all)")
    if request.transactional_id is not None:
        return TransactionsNotOffered()
    return None


def _append(
    partition: Partition, index: int, records: memoryview | None, version: int, acks: int
) -> tuple[int, wire.PartitionResult]:
    """Append one partition's batch: (the end offset to wait for, the result). Raises why it was refused."""
    if not records:
        raise CorruptMessage(f"{partition.name}: the request carries no record batch")
    if version < ZSTD_VERSION_MIN:
        _check_codec(records)
    base_offset, end_offset, append_time_ms, _ = partition.append(records, urgent=acks == ACKS_ALL)
    return end_offset, wire.PartitionResult(
        index, 0, base_offset, append_time_ms, partition.log.start_offset, None, ()
    )


def _check_codec(records: memoryview) -> None:
    """KIP-110: an old request must not carry what its client's peers could not read."""
    if len(records) > CODEC_POSITION and records[CODEC_POSITION] & CODEC_MASK == Codec.ZSTD:
        raise UnsupportedCompression("zstd needs Produce version 7 or later")


def _refused(index: int, error: MansioError) -> wire.PartitionResult:
    return wire.PartitionResult(index, error.kafka_code, -1, -1, -1, error.message, error.record_errors)


class PendingProduce:
    """A request with acks=all whose batches are in the log and not yet durable; also its answer's place.

    The answer for the usual end is there from the start; only a failure has it encoded anew.
    """

    __slots__ = (
        "_answer",
        "_connection",
        "_correlation_id",
        "_failures",
        "_results",
        "_service",
        "_stopwatch",
        "_throttle_ms",
        "_version",
        "_waits",
        "deadline",
        "pieces",
    )

    def __init__(
        self,
        service: BrokerServices,
        connection: Connection,
        version: int,
        correlation_id: int,
        results: TopicResults,
        answer: bytes,
        throttle_ms: int,
    ) -> None:
        self._service = service
        self._connection = connection
        self._version = version
        self._correlation_id = correlation_id
        self._results = results
        self._answer = answer
        self._throttle_ms = throttle_ms
        self._waits: dict[Wait, None] = {}
        self._failures: list[tuple[Wait, MansioError]] = []
        self.deadline = 0.0
        self.pieces: Sequence[ResponsePart] | None = None

    def wait(self, waits: list[Wait], timeout_ms: int) -> None:
        """Answer when all of `waits` are committed, or have failed, or the time is over."""
        service = self._service
        self.deadline = service.records.deadline(timeout_ms)
        self._waits = dict.fromkeys(waits)
        self._stopwatch = _stopwatch(service)
        service.records.pending_produces[self] = None
        for wait in waits:
            if wait.partition.wait_committed(wait.end_offset, partial(self._settled, wait)):
                self._settled(wait, None)

    def _settled(self, wait: Wait, error: MansioError | None) -> None:
        """How a wait ended is kept: when the last one ends, others may have other records at its offsets by then."""
        if self.pieces is not None:
            return  # timed out before
        if error is not None:
            self._failures.append((wait, error))
        del self._waits[wait]
        if not self._waits:
            self._finish()

    def _finish(self) -> None:
        self._service.records.pending_produces.pop(self, None)
        if self._stopwatch is not None:
            self._stopwatch.stop()
        if self._failures:
            self._answer = self._answer_with_failures()
        self.pieces = (self._answer,)
        self._connection.answered(self)

    def _answer_with_failures(self) -> bytes:
        for (_, _, topic_position, position), error in self._failures:
            answers = self._results[topic_position][2]
            self._service.statistics.refused(API_KEY, error.kafka_code)
            answers[position] = _refused(answers[position].index, error)
        return wire.encode_response(self._version, self._correlation_id, self._results, self._throttle_ms)

    def time_out(self) -> None:
        """The client's timeout is over: say so for the partitions that are still waiting."""
        self._failures += [
            (wait, wait.partition.failure or RequestTimedOut(REQUEST_TIMED_OUT)) for wait in self._waits
        ]
        self._finish()


class PendingBatch:
    """The same for a request of one batch, the usual one: nothing to count, and its parts are enough for a refusal."""

    __slots__ = (
        "_answer",
        "_connection",
        "_correlation_id",
        "_index",
        "_pattern",
        "_pending",
        "_statistics",
        "_stopwatch",
        "deadline",
        "pieces",
    )

    def __init__(
        self,
        service: BrokerServices,
        connection: Connection,
        pattern: ProduceTemplate,
        correlation_id: int,
        index: int,
        answer: bytes,
    ) -> None:
        self._connection = connection
        self._pattern = pattern
        self._correlation_id = correlation_id
        self._index = index
        self._answer = answer
        self._statistics = service.statistics
        self._stopwatch = (
            None if service.records.counters.appended_batches & SAMPLE_MASK else _stopwatch(service)
        )
        self._pending = service.records.pending_produces
        self._pending[self] = None
        self.deadline = service.records.deadline(pattern.timeout_ms)
        self.pieces: Sequence[ResponsePart] | None = None

    def settled(self, error: MansioError | None) -> None:
        """The batch is durable, or never will be."""
        if self.pieces is not None:
            return  # timed out before
        del self._pending[self]
        if self._stopwatch is not None:
            self._stopwatch.stop()
        if error is None:
            self.pieces = (self._answer,)
        else:
            self._statistics.refused(API_KEY, error.kafka_code)
            self.pieces = (_rejection_by_pattern(self._pattern, self._correlation_id, self._index, error),)
        self._connection.answered(self)

    def time_out(self) -> None:
        """The client's timeout is over."""
        self.settled(RequestTimedOut(REQUEST_TIMED_OUT))


def time_out(service: BrokerServices, now: float) -> None:
    """Answer every produce request whose deadline is over. `now` is monotonic seconds."""
    for pending in [p for p in service.records.pending_produces if p.deadline <= now]:
        pending.time_out()
