"""Fetch (API 1): slices of segment files, at once or when there is something to read.

Version notes: 4 first with record batches v2 and isolation level; 7 sessions (KIP-227: none are kept, session id 0
tells the client to send full requests); 9 fences by leader epoch (KIP-320); 12 flexible and diverging epochs (KIP-595);
13 names topics by id (KIP-516).

A request that finds less than `min_bytes` is parked with its partitions and tried again when one of them moves on, or
answered with what there is when `max_wait_ms` is over.

Always true: no record at or above the partition's readable end leaves; a request is answered once; the first batch of
a response is sent even when it is larger than the limits (KIP-74), so that a reader always makes progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import MansioError
from mansio.wire import fetch as wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.connection import Connection, Slot
    from mansio.broker.egress import Piece
    from mansio.broker.partition import Partition
    from mansio.broker.service import Service
    from mansio.log.log import LogSlice
    from mansio.ports import Timer
    from mansio.wire.headers import RequestHeader

TopicAnswers = list[tuple[str | None, bytes | None, list[wire.FetchedPartition]]]


class Gathered(NamedTuple):
    """One try at answering: the answers, how many bytes they carry, whether one of them is an error."""

    topics: TopicAnswers
    total_bytes: int
    has_error: bool


def fetch(
    service: Service, connection: Connection, header: RequestHeader, frame: memoryview
) -> Sequence[Piece] | None:
    """Answer now if there is enough to read or something to say; otherwise park."""
    request = wire.decode_request(header.api_version, frame, header.body)
    gathered = gather(service, request)
    if (
        gathered.total_bytes >= request.min_bytes
        or gathered.has_error
        or request.max_wait_ms <= 0
        or not request.topics
    ):
        return _encode(service, header, gathered)
    parked = ParkedFetch(service, connection, header, request)
    parked.park()
    return None


def gather(service: Service, request: wire.FetchRequest) -> Gathered:
    """Read every partition of the request, within its byte limits."""
    room = min(request.max_bytes, service.settings.fetch_bytes_max)
    total = 0
    has_error = False
    topics: TopicAnswers = []
    for name, topic_id, wanted in request.topics:
        answers = []
        for want in wanted:
            try:
                partition = service.records.readable(name, topic_id, want.index)
                partition.check_leader_epoch(want.current_leader_epoch)
                part = None
                if room > 0:
                    part = partition.read(
                        want.fetch_offset, min(room, want.max_bytes), request.isolation_level
                    )
            except MansioError as error:
                has_error = True
                answers.append(_refused(want.index, error))
                continue
            if part is not None and total and part.length > room:
                part = None  # the first batch is over what is left: next time
            answers.append(_fetched(partition, part, request.isolation_level))
            if part is not None:
                total += part.length
                room -= part.length
        topics.append((name, topic_id, answers))
    return Gathered(topics, total, has_error)


def _fetched(partition: Partition, part: LogSlice | None, isolation_level: int) -> wire.FetchedPartition:
    return wire.FetchedPartition(
        index=partition.index,
        error_code=0,
        high_watermark=partition.replica.high_watermark,
        last_stable_offset=partition.readable_end(isolation_level),
        log_start_offset=partition.log.start_offset,
        aborted=None,
        preferred_read_replica=-1,
        records_bytes=0 if part is None else part.length,
        records=part,
    )


def _refused(index: int, error: MansioError) -> wire.FetchedPartition:
    return wire.FetchedPartition(
        index=index,
        error_code=error.kafka_code,
        high_watermark=-1,
        last_stable_offset=-1,
        log_start_offset=-1,
        aborted=None,
        preferred_read_replica=-1,
        records_bytes=0,
        records=None,
    )


def _encode(service: Service, header: RequestHeader, gathered: Gathered) -> Sequence[Piece]:
    service.records.counters.fetched(gathered.total_bytes)
    return wire.encode_response(header.api_version, header.correlation_id, gathered.topics)


class ParkedFetch:
    """A fetch that waits for more to read, for its time to be over, or for the broker to stop."""

    __slots__ = ("_header", "_partitions", "_request", "_service", "_slot", "_timer", "_woken")

    def __init__(
        self, service: Service, connection: Connection, header: RequestHeader, request: wire.FetchRequest
    ) -> None:
        self._service = service
        self._header = header._replace(body=0)
        self._request = request
        self._slot: Slot = connection.defer()
        self._slot.on_lost = self._leave
        self._partitions: list[Partition] = []
        self._timer: Timer | None = None
        self._woken = False

    def park(self) -> None:
        """Begin to wait."""
        service = self._service
        for name, topic_id, wanted in self._request.topics:
            for want in wanted:
                partition = service.records.readable(name, topic_id, want.index)
                partition.park(self.wake)
                self._partitions.append(partition)
        wait_ms = min(self._request.max_wait_ms, service.settings.fetch_wait_ms_max)
        self._timer = service.scheduler.call_later(wait_ms, self.answer_now)
        service.records.parked_fetches[self] = None

    def wake(self) -> None:
        """A partition moved on. All that moves in this turn of the loop is looked at once, at its end."""
        if not self._woken:
            self._woken = True
            self._service.scheduler.call_soon(self._try)

    def _try(self) -> None:
        self._woken = False
        if self._timer is None:
            return
        gathered = gather(self._service, self._request)
        if gathered.total_bytes >= self._request.min_bytes or gathered.has_error:
            self._answer(gathered)

    def answer_now(self) -> None:
        """The wait is over: answer with what there is."""
        if self._timer is not None:
            self._answer(gather(self._service, self._request))

    def _answer(self, gathered: Gathered) -> None:
        self._leave()
        if not self._slot.abandoned:
            self._slot.answer(_encode(self._service, self._header, gathered))

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for partition in self._partitions:
            partition.unpark(self.wake)
        self._partitions.clear()
        self._service.records.parked_fetches.pop(self, None)


def answer_parked(service: Service) -> None:
    """Answer every parked fetch with what there is: the broker stops."""
    for parked in tuple(service.records.parked_fetches):
        parked.answer_now()
