"""ShareFetch (API 78): records on lease to members of share groups, and what became of those they had.

A ShareFetch says what the member is done with and gets more: both are stored as one change of a share partition's state
where both concern it. One that finds nothing is parked, with the partitions and with their share partitions, and tried
again when one of them has something; a request that brought acknowledgements is answered at once all the same, so that
they are confirmed.

Always true: nobody is told of a lease, or of an acknowledgement, that is not stored as it has to be; leases are told
only by who leads, and only to who is still there; a request is answered once; an offset is leased only with its bytes
in the same answer.

Source: KIP-932, KIP-1206 (acquire mode), KIP-1222 (renewals). Ours: `min_bytes` above 1 is as good as 1, because what
is leased cannot wait for more to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.api.kafka.handlers.share_responses import LeaderHints, checked_ids, error_for_client, lock_ms_of
from mansio.broker.coordinator.share.acknowledgements import (
    acknowledged_partitions,
    apply_acknowledgements,
    check_no_duplicates,
    persist_acknowledgements,
)
from mansio.broker.coordinator.share.acquisition import acquire_records
from mansio.broker.coordinator.share.gather_results import gather_results
from mansio.broker.coordinator.share.share_partition_manager import RETRY_MS
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    InvalidRequest,
    MansioError,
    NotCoordinator,
    OffsetNotAvailable,
)
from mansio.state.share_group.share_sessions import FINAL_EPOCH, OPEN_EPOCH
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import share_fetch as wire
from mansio.wire.apis.share_fetch import RECORD_LIMIT, SharePartitionData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.api.kafka.server.connection import Connection
    from mansio.api.kafka.server.pending_response import PendingResponse
    from mansio.api.kafka.server.socket_writer import ResponsePart
    from mansio.broker.coordinator.share.acknowledgements import AcknowledgeOutcome, Acks
    from mansio.broker.coordinator.share.acquisition import AcquiredRecords
    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.ports import Promise
    from mansio.state.consumer_group.types import TopicPartition
    from mansio.state.share_group.share_sessions import Session
    from mansio.state.share_partition.types import Update
    from mansio.wire.apis.share_fetch import ShareFetchRequest
    from mansio.wire.headers import RequestHeader

_LATER: Final = (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress, OffsetNotAvailable)
"""Why a state cannot be had just now: a fetch waits for it, and no client is told."""


def share_fetch(
    service: BrokerServices, connection: Connection, header: RequestHeader, frame: memoryview
) -> None:
    """Begin a ShareFetch; it is answered later. Raises `WireError`."""
    request = wire.decode_request(header.api_version, frame, header.body)
    fetching = _Fetching(service, connection, header._replace(body=0), request)
    service.scheduler.spawn(fetching.run(), name="share fetch")


def answer_parked(service: BrokerServices) -> None:
    """Answer every parked fetch with what there is: the broker stops."""
    for parked in tuple(service.shares.parked):
        parked.wait_over()


class _Fetching:
    """One ShareFetch, from its arrival to its answer."""

    __slots__ = (
        "_connection",
        "_deadline_ms",
        "_group",
        "_header",
        "_is_over",
        "_locks_ms",
        "_member",
        "_partitions",
        "_pending_response",
        "_request",
        "_service",
        "_session",
        "_shares",
        "_waiting",
    )

    def __init__(
        self,
        service: BrokerServices,
        connection: Connection,
        header: RequestHeader,
        request: ShareFetchRequest,
    ) -> None:
        self._service = service
        self._shares = service.shares
        self._connection = connection
        self._header = header
        self._request = request
        self._pending_response: PendingResponse = connection.defer()
        self._pending_response.on_lost = self.wait_over
        self._group = self._member = ""
        self._session: Session | None = None
        self._partitions: list[TopicPartition] = []
        self._waiting: Promise[None] | None = None
        self._is_over = False
        self._locks_ms = 0
        wait_ms = max(0, min(request.max_wait_ms, service.settings.fetch_wait_ms_max))
        self._deadline_ms = self._now_ms() + wait_ms

    def _now_ms(self) -> float:
        return self._service.clock.monotonic() * 1000

    async def run(self) -> None:
        """Do all of it."""
        pending_response = self._pending_response
        try:
            try:
                pieces = await self._answered()
            except MansioError as error:
                self._service.statistics.refused(int(ApiKey.SHARE_FETCH), error.kafka_code)
                pieces = self._encode({}, LeaderHints(self._service), error)
            pending_response.on_lost = None
            if not pending_response.abandoned:
                pending_response.answer(pieces)
        finally:
            pending_response.abandon()

    async def _answered(self) -> Sequence[ResponsePart]:
        request, shares = self._request, self._shares
        self._group, self._member = checked_ids(request.group_id, request.member_id)
        group, member = self._group, self._member
        acks = acknowledged_partitions(request.topics)
        wants = self._check(acks)
        forget = [(topic_id, index) for topic_id, indexes in request.forgotten for index in indexes]
        left_out = frozenset(forget)
        named = [(topic_id, part.index) for topic_id, parts in request.topics for part in parts]
        self._session = shares.sessions.fetch(
            group,
            member,
            request.session_epoch,
            [each for each in named if each not in left_out],
            forget,
            has_acks=bool(acks),
            connection=self._connection,
        )
        if self._session.replaced:
            await shares.release(group, member)
        outcomes = await apply_acknowledgements(
            shares, group, member, acks, is_renew_ack=request.is_renew_ack
        )
        answers: dict[TopicPartition, SharePartitionData] = {}
        leaders = LeaderHints(self._service)
        if wants:
            await self._fetch(outcomes, answers, leaders)
        else:
            await persist_acknowledgements(self._service.scheduler, outcomes.values())
        if not shares.sessions.holds(group, member):
            await shares.release(group, member)
        for key, outcome in outcomes.items():
            code, message = error_for_client(outcome.error)
            known = answers.get(key)
            if known is None:
                leader = leaders.of(*key, outcome.error)
                known = SharePartitionData(key[1], leader_id=leader[0], leader_epoch=leader[1])
            answers[key] = known._replace(acknowledge_error_code=code, acknowledge_error_message=message)
        self._locks_ms = self._locks_ms or lock_ms_of(outcomes.values())
        return self._encode(answers, leaders)

    def _check(self, acks: Acks) -> bool:
        """Does the member want records? Raises `InvalidRequest`."""
        request = self._request
        check_no_duplicates(acks)
        wants = request.max_records > 0 and request.max_bytes > 0
        if request.is_renew_ack:
            if request.max_records or request.max_bytes or request.min_bytes or request.max_wait_ms:
                raise InvalidRequest("a request that renews leases cannot ask for records")
        elif request.max_records < 0 or request.max_bytes < 0:
            raise InvalidRequest("a number of records or bytes below 0")
        if request.acquire_mode not in (wire.BATCH_OPTIMIZED, RECORD_LIMIT):
            raise InvalidRequest(f"there is no acquire mode {request.acquire_mode}")
        if request.session_epoch == FINAL_EPOCH:
            if request.forgotten:
                raise InvalidRequest("a session that ends forgets nothing")
            return False
        if request.session_epoch == OPEN_EPOCH and acks:
            raise InvalidRequest("a new share session has nothing to acknowledge")
        return wants and not request.is_renew_ack

    # Looking, and waiting

    async def _fetch(
        self,
        outcomes: dict[TopicPartition, AcknowledgeOutcome],
        answers: dict[TopicPartition, SharePartitionData],
        leaders: LeaderHints,
    ) -> None:
        """Lease what there is, storing what was acknowledged with it; wait if there is nothing."""
        unsaid = outcomes
        while True:
            # Who is gone is given nothing: it may have a session on another connection, which would never know.
            taken, retry = ([], False) if self._pending_response.abandoned else self._take(answers, leaders)
            await self._store(unsaid, taken, answers, leaders)
            unsaid = {}
            if self._is_over or outcomes or answers or self._pending_response.abandoned:
                return
            if not any(each.update is not None for _, each in taken):  # a horizon moved: look again at once
                left_ms = self._deadline_ms - self._now_ms()
                if left_ms <= 0:
                    return
                await self._wait(min(left_ms, RETRY_MS) if retry else left_ms)
                if not self._service.shares.sessions.holds(self._group, self._member):
                    return  # what it leased now would be released again, and count as delivered

    def _take(
        self, answers: dict[TopicPartition, SharePartitionData], leaders: LeaderHints
    ) -> tuple[list[tuple[SharePartitionLeader, AcquiredRecords]], bool]:
        """What the machines give now; and whether some could not be asked. Those that are refused are answered."""
        request, service = self._request, self._service
        room = min(request.max_bytes, service.settings.fetch_max_bytes)
        quotas = service.quotas.active
        if quotas is not None:
            if quotas.is_throttled(self._header.client_id):
                return [], False
            if (burst_bytes := quotas.fetch_max_bytes(self._header.client_id)) is not None:
                room = min(room, burst_bytes)
        left, retry = request.max_records, False
        strict = request.acquire_mode == RECORD_LIMIT
        found: list[tuple[SharePartitionLeader, AcquiredRecords]] = []
        assert self._session is not None, "the session comes first"
        self._partitions = self._session.partitions()
        for topic_id, index in self._partitions:
            if left <= 0 or room <= 0:
                break
            try:
                share_partition = self._shares.find(self._group, topic_id, index)
                # A defect ends it: what was said of its records, or taken, would stay under way for ever.
                taken = share_partition.call(
                    acquire_records, share_partition, self._member, left, room, strict=strict, first=not found
                )
            except _LATER:
                retry = True
                continue
            except MansioError as error:
                answers[topic_id, index] = _refused((topic_id, index), error, leaders)
                continue
            if taken is not None:
                found.append((share_partition, taken))
                left -= taken.records
                room -= taken.size_bytes
        return found, retry

    async def _store(
        self,
        outcomes: dict[TopicPartition, AcknowledgeOutcome],
        taken: list[tuple[SharePartitionLeader, AcquiredRecords]],
        answers: dict[TopicPartition, SharePartitionData],
        leaders: LeaderHints,
    ) -> None:
        """Store leases and acknowledgements, those of one share partition as one change, and put down what the member
        is to be told."""
        changes = _changes(outcomes.values(), taken)
        works = [share_partition.persist(*updates) for share_partition, updates, _, _ in changes]
        errors = await gather_results(self._service.scheduler, works, name="share leases")
        for (share_partition, _, said, given), error in zip(changes, errors, strict=True):
            if said is not None:
                said.error = said.error or error
            if given is not None and given.acquired and not self._pending_response.abandoned:
                self._put_down(share_partition, given, error, answers, leaders)
            # else: who is gone has no session, and all it has is released below

    def _put_down(
        self,
        share_partition: SharePartitionLeader,
        given: AcquiredRecords,
        error: MansioError | None,
        answers: dict[TopicPartition, SharePartitionData],
        leaders: LeaderHints,
    ) -> None:
        """What is answered of leases that were stored, or failed to be."""
        key = share_partition.key.topic_id, share_partition.key.partition
        try:
            if error is not None:
                raise error
            share_partition.ensure_leader()
        except MansioError as refused:
            if not isinstance(refused, _LATER):
                answers[key] = _refused(key, refused, leaders)
            return
        self._locks_ms = self._locks_ms or share_partition.state_machine.settings.lock_ms
        answers[key] = SharePartitionData(
            key[1], records_bytes=given.size_bytes, records=given.slices, acquired=given.acquired
        )

    async def _wait(self, at_most_ms: float) -> None:
        """Until something of the session has moved, the time is over, or nobody waits any more."""
        scheduler, shares = self._service.scheduler, self._shares
        self._waiting = scheduler.promise()
        parked: list[Callable[[Callable[[], None]], None]] = []
        for topic_id, index in self._partitions:
            try:
                share_partition = shares.find(self._group, topic_id, index)
            except MansioError:
                continue  # it is looked at again when the time is over
            for place in (share_partition.partition, share_partition):
                place.park(self._wake)
                parked.append(place.unpark)
        timer = scheduler.call_later(at_most_ms, self._wake)
        shares.parked[self] = None
        try:
            await self._waiting
        finally:
            del shares.parked[self]
            timer.cancel()
            for unpark in parked:
                unpark(self._wake)
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def wait_over(self) -> None:
        """Wait no more: answer with what there is."""
        self._is_over = True
        self._wake()

    # Answering

    def _encode(
        self,
        answers: dict[TopicPartition, SharePartitionData],
        leaders: LeaderHints,
        error: MansioError | None = None,
    ) -> Sequence[ResponsePart]:
        service = self._service
        topics: dict[bytes, list[SharePartitionData]] = {}
        sent_bytes = 0
        for (topic_id, _), answer in answers.items():
            topics.setdefault(topic_id, []).append(answer)
            sent_bytes += answer.records_bytes
            if answer.error_code:
                service.statistics.refused(int(ApiKey.SHARE_FETCH), answer.error_code)
        quotas, throttle_ms = service.quotas.active, 0
        if quotas is not None:
            throttle_ms = quotas.record_fetch(self._header.client_id, sent_bytes)
            if throttle_ms:
                self._connection.pause_reading_ms(throttle_ms)
        service.fetch.counters.fetched(sent_bytes)
        return wire.encode_response(
            self._header.api_version,
            self._header.correlation_id,
            list(topics.items()),
            lock_ms=self._locks_ms,
            throttle_ms=throttle_ms,
            error_code=0 if error is None else error.kafka_code,
            error_message=None if error is None else error.message,
            endpoints=leaders.endpoints,
        )


def _changes(
    outcomes: Iterable[AcknowledgeOutcome], taken: Sequence[tuple[SharePartitionLeader, AcquiredRecords]]
) -> list[tuple[SharePartitionLeader, list[Update], AcknowledgeOutcome | None, AcquiredRecords | None]]:
    """What is to be stored of each share partition: what was said of it, and what was taken."""
    by_live: dict[
        int, tuple[SharePartitionLeader, list[Update], AcknowledgeOutcome | None, AcquiredRecords | None]
    ] = {}
    for outcome in outcomes:
        if outcome.share_partition is not None and outcome.update is not None:
            by_live[id(outcome.share_partition)] = (outcome.share_partition, [outcome.update], outcome, None)
    for share_partition, each in taken:
        known = by_live.get(id(share_partition))
        updates = [] if known is None else known[1]
        if each.update is not None:
            updates.append(each.update)
        by_live[id(share_partition)] = (share_partition, updates, None if known is None else known[2], each)
    return [each for each in by_live.values() if each[1]]


def _refused(key: TopicPartition, error: MansioError, leaders: LeaderHints) -> SharePartitionData:
    code, message = error_for_client(error)
    leader_id, leader_epoch = leaders.of(*key, error)
    return SharePartitionData(key[1], code, message, leader_id=leader_id, leader_epoch=leader_epoch)
