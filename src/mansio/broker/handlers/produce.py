"""Produce (API 0): batches from the receive buffer to the log, and an answer as strong as `acks` asks.

Version notes: 3 first with record batches v2; 7 first that may carry zstd (KIP-110); 8 names the record that was
refused (KIP-467); 9 flexible; 10 adds the current leader (KIP-951, not filled with one broker); 13 names topics by id.

acks=0: no answer. acks=1: when the bytes are with the operating system. acks=all (-1): when they are fdatasync-ed
and the high watermark has passed them. A partition's batch stands or falls alone; the others of the request go on.

Always true: the frame's memory is not used after `produce` returns; every request with acks is answered once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mansio.errors import (
    CorruptMessage,
    InvalidRequiredAcks,
    MansioError,
    RequestTimedOut,
    UnsupportedCompression,
)
from mansio.wire import produce as wire
from mansio.wire.records import Codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.connection import Connection, Slot
    from mansio.broker.egress import Piece
    from mansio.broker.partition import Partition
    from mansio.broker.service import Service
    from mansio.wire.headers import RequestHeader

ACKS_ALL = -1
ZSTD_VERSION_MIN = 7

TopicResults = list[tuple[str | None, bytes | None, list[wire.PartitionResult]]]


def produce(
    service: Service, connection: Connection, header: RequestHeader, frame: memoryview
) -> Sequence[Piece] | None:
    """Append what the request carries; the answer, or None when it comes later through a slot."""
    version = header.api_version
    request = wire.decode_request(version, frame, header.body)
    acks = request.acks
    error: MansioError | None = None
    if not -1 <= acks <= 1:
        error = InvalidRequiredAcks(f"acks={acks}: must be 0, 1 or -1 (all)")
    elif request.transactional_id is not None:
        error = service.records.no_transactions()
    waits: list[tuple[Partition, int, int, int]] = []
    results: TopicResults = []
    for topic_index, (name, topic_id, entries) in enumerate(request.topics):
        answers = []
        for index, records in entries:
            if error is None:
                answer = _append(
                    service, name, topic_id, index, records, version, acks, waits, topic_index, len(answers)
                )
            else:
                answer = _refused(index, error)
            answers.append(answer)
        results.append((name, topic_id, answers))
    if acks == 0:
        return ()
    if waits:
        pending = PendingProduce(connection, version, header.correlation_id, results)
        if pending.wait(service, waits, request.timeout_ms):
            return None
    return [wire.encode_response(version, header.correlation_id, results)]


def _append(
    service: Service,
    name: str | None,
    topic_id: bytes | None,
    index: int,
    records: memoryview | None,
    version: int,
    acks: int,
    waits: list[tuple[Partition, int, int, int]],
    topic_position: int,
    position: int,
) -> wire.PartitionResult:
    try:
        partition = service.records.writable(name, topic_id, index)
        if records is None or len(records) == 0:
            raise CorruptMessage(f"{partition.name}: the request carries no record batch")
        if version < ZSTD_VERSION_MIN and len(records) > 22 and records[22] & 7 == Codec.ZSTD:
            raise UnsupportedCompression("zstd needs Produce version 7 or later")
        appended = partition.append(records, urgent=acks == ACKS_ALL)
    except MansioError as error:
        service.records.counters.refused_batches += 1
        return _refused(index, error)
    service.records.counters.appended(len(records))
    if acks == ACKS_ALL and appended.end_offset > partition.high_watermark:
        waits.append((partition, appended.end_offset, topic_position, position))
    return wire.PartitionResult(
        index, 0, appended.base_offset, appended.append_time_ms, partition.log.start_offset, None, ()
    )


def _refused(index: int, error: MansioError) -> wire.PartitionResult:
    record_errors: tuple[tuple[int, str | None], ...] = getattr(error, "record_errors", ())
    return wire.PartitionResult(index, error.kafka_code, -1, -1, -1, error.message, record_errors)


class PendingProduce:
    """A request with acks=all whose batches are in the log and not yet durable."""

    __slots__ = (
        "_correlation_id",
        "_left",
        "_results",
        "_service",
        "_slot",
        "_version",
        "_waits",
        "deadline",
    )

    def __init__(
        self, connection: Connection, version: int, correlation_id: int, results: TopicResults
    ) -> None:
        self._version = version
        self._correlation_id = correlation_id
        self._results = results
        self._left = 0
        self._slot: Slot = connection.defer(blocking=False)
        self._waits: list[tuple[Partition, partial[None]]] = []
        self.deadline = 0.0

    def wait(self, service: Service, waits: list[tuple[Partition, int, int, int]], timeout_ms: int) -> bool:
        """Wait for all of them. False if none had to be waited for after all."""
        self._service = service
        self.deadline = service.clock.monotonic() + timeout_ms / 1000
        for partition, end_offset, topic_position, position in waits:
            settle = partial(self._settled, topic_position, position)
            self._left += 1
            if partition.wait_committed(end_offset, settle):
                self._left -= 1
            else:
                self._waits.append((partition, settle))
        service.records.pending_produces[self] = None
        if not self._left:
            self._answer()
        return True

    def _settled(self, topic_position: int, position: int, error: MansioError | None) -> None:
        if error is not None:
            answers = self._results[topic_position][2]
            answers[position] = _refused(answers[position].index, error)
        self._left -= 1
        if not self._left:
            self._answer()

    def _answer(self) -> None:
        self._service.records.pending_produces.pop(self, None)
        if not self._slot.abandoned:
            self._slot.answer([wire.encode_response(self._version, self._correlation_id, self._results)])

    def time_out(self) -> None:
        """The client's timeout is over: say so for the partitions that are still waiting."""
        late = RequestTimedOut("the batch was appended, but did not become durable in time")
        for partition, settle in self._waits:
            partition.forget_commit_wait(settle)
        waits, self._waits = self._waits, []
        for _, settle in waits:
            if self._left:
                settle(late)


def time_out(service: Service, now: float) -> None:
    """Answer every produce request whose deadline is over. `now` is monotonic seconds."""
    for pending in [p for p in service.records.pending_produces if p.deadline <= now]:
        pending.time_out()
