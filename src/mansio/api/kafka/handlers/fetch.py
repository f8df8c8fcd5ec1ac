"""Fetch (API 1): slices of segment files, at once or when there is something to read.

Version notes: 4 first with record batches v2 and isolation level; 7 sessions (KIP-227: none are kept, session id 0
tells the client to send full requests); 9 fences by leader epoch (KIP-320); 12 flexible and diverging epochs (KIP-595);
13 names topics by id (KIP-516); 15 says which session of which broker a follower asks from (KIP-903).

A request that finds less than `min_bytes` is parked with its partitions and tried again when one of them moves on, or
answered with what there is when `max_wait_ms` is over. A follower's request (in a cluster) gets all of the log, up to
its end, and says what the follower has durable; parked, it is woken by appends and not by commits.

Always true: no record at or above the partition's readable end leaves for a client; a request is answered once; the
first batch of a response is sent even when it is larger than the limits (KIP-74), so that a reader always makes
progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.broker.replication.fetch_coalescing import WAIT_MS
from mansio.broker.services.statistics import SAMPLE_MASK
from mansio.errors import CorruptLog, CorruptMessage, MansioError, OffsetOutOfRange, StaleBrokerEpoch
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch as wire
from mansio.wire.apis import replica_fetch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.kafka.server.connection import Connection
    from mansio.api.kafka.server.pending_response import PendingResponse
    from mansio.api.kafka.server.socket_writer import ResponsePart
    from mansio.broker.partition.partition import Partition
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.statistics import Stopwatch
    from mansio.ports import Timer
    from mansio.storage.group_commit import GroupCommit
    from mansio.storage.log import LogSlice
    from mansio.wire.headers import RequestHeader

API_KEY = int(ApiKey.FETCH)

FOLLOWER_NOTIFY_DELAY_MS = 50
"""So much later than the new leader of a partition its followers may hear of it."""

TopicAnswers = list[tuple[str | None, bytes | None, list[wire.FetchedPartition]]]


class FetchResult(NamedTuple):
    """One try at answering: the answers, how many bytes they carry, whether one of them is an error.

    `error_code`: why the whole request is refused; `group_commit`: of the logs that a follower gets copies of.
    """

    topics: TopicAnswers
    total_bytes: int
    has_error: bool
    error_code: int = 0
    by_replica: bool = False
    group_commit: GroupCommit | None = None


def fetch(
    service: BrokerServices, connection: Connection, header: RequestHeader, frame: memoryview
) -> Sequence[ResponsePart] | None:
    """Answer now if there is enough to read or something to say; otherwise park."""
    request = None
    if header.api_version == replica_fetch.VERSION and service.broker_epoch_of is not None:
        request = replica_fetch.decode_request(frame, header.body)
    if request is None:
        request = wire.decode_request(header.api_version, frame, header.body)
    if request.replica_id >= 0 and service.broker_epoch_of is not None:
        return _fetch_for_replica(service, connection, header, request)
    by_client = request.replica_id < 0
    sampled = by_client and not service.records.counters.fetches & SAMPLE_MASK
    stopwatch = service.statistics.time(service.statistics.fetch) if sampled else None
    gathered = gather(service, request, header.client_id)
    if (
        gathered.total_bytes >= request.min_bytes
        or gathered.has_error
        or request.max_wait_ms <= 0
        or not request.topics
    ):
        if stopwatch is not None:
            stopwatch.stop()
        return _encode(service, connection, header, gathered)
    waited = service.statistics.time(service.statistics.fetch_waited) if sampled else None
    parked = ParkedFetch(service, connection, header, request, waited)
    parked.park()
    return None


def _fetch_for_replica(
    service: BrokerServices, connection: Connection, header: RequestHeader, request: wire.FetchRequest
) -> Sequence[ResponsePart] | None:
    """The same for a follower, whose answer may be worth more a moment later (`fetch_coalescer`)."""
    records = service.records
    pending = len(records.pending_produces)
    gathered = _gather_for_replica(service, request, first=True)
    records.fetch_coalescer.heard(pending)
    if gathered.has_error or request.max_wait_ms <= 0 or not request.topics:
        return _encode(service, connection, header, gathered)
    found = gathered.total_bytes >= request.min_bytes
    if found and not records.fetch_coalescer.should_wait(gathered.total_bytes):
        return _encode(service, connection, header, gathered)
    parked = ParkedFetch(service, connection, header, request)
    parked.park(for_more=found)
    return None


def gather(service: BrokerServices, request: wire.FetchRequest, client_id: str | None) -> FetchResult:
    """Read every partition of the request, within its byte limits and its client's quota."""
    if request.replica_id >= 0 and service.broker_epoch_of is not None:
        return _gather_for_replica(service, request, first=False)
    room = min(request.max_bytes, service.settings.fetch_max_bytes)
    quotas = service.quotas.active
    if quotas is not None and (burst_bytes := quotas.fetch_max_bytes(client_id)) is not None:
        room = min(room, burst_bytes)
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
                service.statistics.refused(API_KEY, error.kafka_code)
                answers.append(_refused(want.index, error))
                continue
            if part is not None and total and part.length > room:
                part = None  # the first batch is over what is left: next time
            answers.append(_fetched(partition, part, request.isolation_level))
            if part is not None:
                total += part.length
                room -= part.length
        topics.append((name, topic_id, answers))
    return FetchResult(topics, total, has_error)


def _gather_for_replica(service: BrokerServices, request: wire.FetchRequest, *, first: bool) -> FetchResult:
    """The same for a follower, which is refused as a whole when its broker has a newer session than the request, or
    none that is known here: two processes, and two disks, may bear its number then. `first`: it has just come."""
    assert service.broker_epoch_of is not None
    node_id, broker_epoch = request.replica_id, request.replica_epoch
    known_epoch = service.broker_epoch_of(node_id)
    if not known_epoch or broker_epoch < known_epoch:
        service.statistics.refused(API_KEY, StaleBrokerEpoch.kafka_code)
        return FetchResult([], 0, True, StaleBrokerEpoch.kafka_code, by_replica=True)
    room = min(request.max_bytes, service.settings.fetch_max_bytes)
    total = 0
    group_commit = None
    has_error = False
    topics: TopicAnswers = []
    for name, topic_id, wanted in request.topics:
        answers = []
        for want in wanted:
            partition = None
            try:
                partition = service.records.readable(name, topic_id, want.index)
                part, diverging, urgent = partition.read_for_follower(
                    node_id, broker_epoch, want, min(room, want.max_bytes), first=first
                )
            except MansioError as error:
                has_error = True
                service.statistics.refused(API_KEY, error.kafka_code)
                answers.append(_refused_replica(partition, want.index, error))
                continue
            size = 0 if part is None else len(part) if isinstance(part, bytes) else part.length
            if total and size > room:
                part, size = None, 0  # the first batch is over what is left: next time
            has_error = has_error or urgent  # something to be told at once, that is
            if size:
                group_commit = partition.group_commit
            total += size
            room -= size
            high_watermark, start = partition.replica.high_watermark, partition.log.start_offset
            answers.append(
                wire.FetchedPartition(
                    want.index, 0, high_watermark, high_watermark, start, None, -1, size, part, diverging
                )
            )
        topics.append((name, topic_id, answers))
    return FetchResult(topics, total, has_error, by_replica=True, group_commit=group_commit)


def _refused_replica(partition: Partition | None, index: int, error: MansioError) -> wire.FetchedPartition:
    """A follower that asks for what is not there learns where this log begins."""
    refused = _refused(index, error)
    if partition is None or not isinstance(error, OffsetOutOfRange):
        return refused
    return refused._replace(high_watermark=partition.high_watermark, log_start_offset=partition.start_offset)


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
    """Damage on our disk is CORRUPT_MESSAGE: clients hand that on, while they would try a storage error for ever."""
    return wire.FetchedPartition(
        index=index,
        error_code=CorruptMessage.kafka_code if isinstance(error, CorruptLog) else error.kafka_code,
        high_watermark=-1,
        last_stable_offset=-1,
        log_start_offset=-1,
        aborted=None,
        preferred_read_replica=-1,
        records_bytes=0,
        records=None,
    )


def _encode(
    service: BrokerServices, connection: Connection, header: RequestHeader, gathered: FetchResult
) -> Sequence[ResponsePart]:
    if gathered.group_commit is not None:
        gathered.group_commit.sync_with_followers()
    if gathered.by_replica and header.api_version == replica_fetch.VERSION:
        pieces = replica_fetch.encode_response(header.correlation_id, gathered.topics, gathered.error_code)
        if pieces is not None:
            return pieces
    quotas = None if gathered.by_replica else service.quotas.active  # a copy is not a client's
    throttle_ms = 0
    if quotas is not None:
        if quotas.is_throttled(header.client_id):
            gathered = _without_records(gathered)
        throttle_ms = quotas.fetched(connection, header.client_id, gathered.total_bytes)
    if not gathered.by_replica:
        service.records.counters.fetched(gathered.total_bytes)
    return wire.encode_response(
        header.api_version, header.correlation_id, gathered.topics, throttle_ms, gathered.error_code
    )


def _without_records(gathered: FetchResult) -> FetchResult:
    """The same answer to a client that has to pause first (KIP-219)."""
    topics = [
        (name, topic_id, [answer._replace(records_bytes=0, records=None) for answer in answers])
        for name, topic_id, answers in gathered.topics
    ]
    return FetchResult(topics, 0, gathered.has_error)


class ParkedFetch:
    """A fetch that waits for more to read, for its time to be over, or for the broker to stop."""

    __slots__ = (
        "_connection",
        "_for_more",
        "_header",
        "_partitions",
        "_pending_response",
        "_request",
        "_service",
        "_stopwatch",
        "_timer",
        "_woken",
    )

    def __init__(
        self,
        service: BrokerServices,
        connection: Connection,
        header: RequestHeader,
        request: wire.FetchRequest,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._service = service
        self._stopwatch = stopwatch
        self._header = header._replace(body=0)
        self._request = request
        self._connection = connection
        self._pending_response: PendingResponse = connection.defer()
        self._pending_response.on_lost = self._leave
        self._partitions: dict[Partition, None] = {}
        self._timer: Timer | None = None
        self._woken = False
        self._for_more = False

    @property
    def by_replica(self) -> bool:
        """Is it a follower's?"""
        return self._request.replica_id >= 0 and self._service.broker_epoch_of is not None

    def park(self, *, for_more: bool = False) -> None:
        """Begin to wait. `for_more`: a follower's could be answered already.

        Who names a partition many times does not wait: each append to it would cost others as many looks.
        """
        service = self._service
        by_replica = self.by_replica
        named = 0
        for name, topic_id, wanted in self._request.topics:
            for want in wanted:
                partition = service.records.readable(name, topic_id, want.index)
                if by_replica:
                    partition.park_follower(self.wake)
                else:
                    partition.park(self.wake)
                self._partitions[partition] = None
            named += len(wanted)
        wait_ms = 0
        if named == len(self._partitions):
            wait_ms = min(self._request.max_wait_ms, service.settings.fetch_wait_ms_max)
        self._timer = service.scheduler.call_later(wait_ms, self.answer_now)
        if for_more:
            self._wait_for_more()
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
        fetch_coalescer = self._service.records.fetch_coalescer
        if self._for_more:
            if fetch_coalescer.full:
                self._waited()
            return
        gathered = gather(self._service, self._request, self._header.client_id)
        if gathered.has_error:
            self._answer(gathered)
        elif gathered.total_bytes >= self._request.min_bytes:
            if self.by_replica and fetch_coalescer.should_wait(gathered.total_bytes):
                self._wait_for_more()
            else:
                self._answer(gathered)

    def _wait_for_more(self) -> None:
        """There is something for a follower; answer when the round is full, and soon in any case."""
        assert self._timer is not None
        self._for_more = True
        self._timer.cancel()
        self._timer = self._service.scheduler.call_later(WAIT_MS, self._waited)

    def _waited(self) -> None:
        self._service.records.fetch_coalescer.waited()
        self.answer_now()

    def answer_now(self) -> None:
        """The wait is over: answer with what there is."""
        if self._timer is not None:
            self._answer(gather(self._service, self._request, self._header.client_id))

    def _answer(self, gathered: FetchResult) -> None:
        self._leave()
        if self._stopwatch is not None:
            self._stopwatch.stop()
        if not self._pending_response.abandoned:
            self._pending_response.answer(_encode(self._service, self._connection, self._header, gathered))

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        by_replica = self.by_replica
        for partition in self._partitions:
            if by_replica:
                partition.unpark_follower(self.wake)
            else:
                partition.unpark(self.wake)
        self._partitions.clear()
        self._service.records.parked_fetches.pop(self, None)


def answer_parked_followers(service: BrokerServices) -> None:
    """This broker leads something it did not: answer the followers that wait here for news of other partitions, so
    that their next requests ask for it, too. Once more a moment later, for those who hear of it later than this broker.
    """
    records = service.records
    if not records.follower_notification_scheduled:
        records.follower_notification_scheduled = True
        for delay_ms, last in ((0, False), (FOLLOWER_NOTIFY_DELAY_MS, True)):
            service.scheduler.call_later(delay_ms, _answer_followers, service, last)


def _answer_followers(service: BrokerServices, last: bool) -> None:
    if last:
        service.records.follower_notification_scheduled = False
    for parked in tuple(service.records.parked_fetches):
        if parked.by_replica:
            parked.answer_now()


def answer_parked(service: BrokerServices) -> None:
    """Answer every parked fetch with what there is: the broker stops."""
    for parked in tuple(service.records.parked_fetches):
        parked.answer_now()
