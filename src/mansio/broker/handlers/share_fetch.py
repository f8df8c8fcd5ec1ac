"""ShareFetch and ShareAcknowledge (APIs 78 and 79): records on lease to members of share groups, and what became of
them.

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

from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.broker.coordinators.groups import check_group_id
from mansio.broker.share.acknowledging import settle, settles
from mansio.broker.share.fetching import take
from mansio.broker.share.share_partitions import RETRY_MS
from mansio.broker.share.together import together
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    CorruptLog,
    CorruptMessage,
    FencedLeaderEpoch,
    FencedStateEpoch,
    InvalidRequest,
    MansioError,
    NotCoordinator,
    NotLeaderOrFollower,
    OffsetNotAvailable,
)
from mansio.state.share_session import FINAL_EPOCH, OPEN_EPOCH
from mansio.wire import share_acknowledge as ack_wire
from mansio.wire import share_fetch as wire
from mansio.wire.share_acknowledge import AckResult, Endpoint, ShareAcknowledgeResponse
from mansio.wire.share_fetch import RECORD_LIMIT, SharePartitionData
from mansio.wire.versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.connection import Connection, Slot
    from mansio.broker.egress import Piece
    from mansio.broker.service import Service
    from mansio.broker.share.fetching import Taken
    from mansio.broker.share.live_share import LiveShare
    from mansio.broker.share.share_partitions import SharePartitions
    from mansio.ports import Promise
    from mansio.state.modern_types import TopicPartition
    from mansio.state.share_session import Session
    from mansio.state.share_types import Settle, Update
    from mansio.wire.headers import RequestHeader
    from mansio.wire.share_acknowledge import AckPartition
    from mansio.wire.share_fetch import ShareFetchRequest

    Acks = list[tuple[TopicPartition, "AckPartition"]]

MEMBER_BYTES_MAX: Final = 255
"""A member's id is kept with every range of records it has leased."""

_LATER: Final = (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress, OffsetNotAvailable)
"""Why a state cannot be had just now: a fetch waits for it, and no client is told."""


def share_fetch(service: Service, connection: Connection, header: RequestHeader, frame: memoryview) -> None:
    """Begin a ShareFetch; it is answered later. Raises `WireError`."""
    request = wire.decode_request(header.api_version, frame, header.body)
    fetching = _Fetching(service, connection, header._replace(body=0), request)
    service.scheduler.spawn(fetching.run(), name="share fetch")


def share_acknowledge(
    service: Service, connection: Connection, header: RequestHeader, frame: memoryview
) -> None:
    """Begin a ShareAcknowledge; it is answered later. Raises `WireError`."""
    request = ack_wire.decode_request(header.api_version, frame, header.body)
    work = _acknowledge(service, connection, header._replace(body=0), request, connection.defer())
    service.scheduler.spawn(work, name="share acknowledge")


def answer_parked(service: Service) -> None:
    """Answer every parked fetch with what there is: the broker stops."""
    for parked in tuple(service.shares.parked):
        parked.wait_over()


# ---------------------------------------------------------------- acknowledgements


class _Outcome:
    """What became of one partition's acknowledgements, and what is to be stored for them."""

    __slots__ = ("error", "live", "update")

    def __init__(self) -> None:
        self.error: MansioError | None = None
        self.live: LiveShare | None = None
        self.update: Update | None = None


def _acks_of(topics: Sequence[tuple[bytes, list[AckPartition]]]) -> Acks:
    return [((topic_id, part.index), part) for topic_id, parts in topics for part in parts if part.batches]


def _check_once(acks: Acks) -> None:
    if len({key for key, _ in acks}) < len(acks):
        raise InvalidRequest("a partition is named twice")


async def _settled(
    shares: SharePartitions, group: str, member: str, acks: Acks, *, is_renew_ack: bool
) -> dict[TopicPartition, _Outcome]:
    """Check what is acknowledged, and have the machines take it; nothing of it is stored yet."""
    outcomes: dict[TopicPartition, _Outcome] = {}
    checked: list[tuple[_Outcome, LiveShare, list[Settle]]] = []
    for key, part in acks:
        outcome = outcomes[key] = _Outcome()
        try:
            said = settles(part.batches, is_renew_ack=is_renew_ack)
            live = shares.find(group, *key)
            await live.loaded()
        except MansioError as error:
            outcome.error = error
        else:
            checked.append((outcome, live, said))
    for outcome, live, said in checked:  # in one turn of the loop with whatever stores it
        outcome.live = live
        try:
            outcome.update = settle(live, member, said)
        except MansioError as error:
            outcome.error = error
    return outcomes


async def _store(service: Service, outcomes: Sequence[_Outcome], member: str) -> None:
    """Store what the machines took, all at once; `error` says of each why it may not have been."""
    waiting = [each for each in outcomes if each.update is not None]
    works = [each.live.perform(each.update) for each in waiting if each.live and each.update]
    for each, error in zip(waiting, await together(service.scheduler, works, name="share acks"), strict=True):
        each.error = each.error or error


async def _acknowledge(
    service: Service,
    connection: Connection,
    header: RequestHeader,
    request: ack_wire.ShareAcknowledgeRequest,
    slot: Slot,
) -> None:
    try:
        answer = await _acknowledged(service, connection, request)
        if answer.error_code:
            service.statistics.refused(int(ApiKey.SHARE_ACKNOWLEDGE), answer.error_code)
        slot.answer([ack_wire.encode_response(header.api_version, header.correlation_id, answer)])
    finally:
        slot.abandon()


async def _acknowledged(
    service: Service, connection: Connection, request: ack_wire.ShareAcknowledgeRequest
) -> ShareAcknowledgeResponse:
    shares = service.shares
    acks = _acks_of(request.topics)
    try:
        group, member = names_of(request.group_id, request.member_id)
        _check_once(acks)
        shares.sessions.acknowledge(group, member, request.session_epoch, connection=connection)
    except MansioError as error:
        return ShareAcknowledgeResponse(0, error.kafka_code, error.message, 0, [], [])
    outcomes = await _settled(shares, group, member, acks, is_renew_ack=request.is_renew_ack)
    await _store(service, list(outcomes.values()), member)
    if not shares.sessions.holds(group, member):
        await shares.release(group, member)
    topics: dict[bytes, list[AckResult]] = {}
    leaders = _Leaders(service)
    for (topic_id, index), outcome in outcomes.items():
        code, message = _told(outcome.error)
        leader = leaders.of(topic_id, index, outcome.error)
        topics.setdefault(topic_id, []).append(AckResult(index, code, message, *leader))
    return ShareAcknowledgeResponse(
        0, 0, None, _lock_ms(outcomes.values()), list(topics.items()), leaders.endpoints
    )


# ---------------------------------------------------------------- fetches


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
        "_request",
        "_service",
        "_session",
        "_shares",
        "_slot",
        "_waiting",
    )

    def __init__(
        self, service: Service, connection: Connection, header: RequestHeader, request: ShareFetchRequest
    ) -> None:
        self._service = service
        self._shares = service.shares
        self._connection = connection
        self._header = header
        self._request = request
        self._slot: Slot = connection.defer()
        self._slot.on_lost = self.wait_over
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
        slot = self._slot
        try:
            try:
                pieces = await self._answered()
            except MansioError as error:
                self._service.statistics.refused(int(ApiKey.SHARE_FETCH), error.kafka_code)
                pieces = self._encode({}, _Leaders(self._service), error)
            slot.on_lost = None
            if not slot.abandoned:
                slot.answer(pieces)
        finally:
            slot.abandon()

    async def _answered(self) -> Sequence[Piece]:
        request, shares = self._request, self._shares
        self._group, self._member = names_of(request.group_id, request.member_id)
        group, member = self._group, self._member
        acks = _acks_of(request.topics)
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
        outcomes = await _settled(shares, group, member, acks, is_renew_ack=request.is_renew_ack)
        answers: dict[TopicPartition, SharePartitionData] = {}
        leaders = _Leaders(self._service)
        if wants:
            await self._fetch(outcomes, answers, leaders)
        else:
            await _store(self._service, list(outcomes.values()), member)
        if not shares.sessions.holds(group, member):
            await shares.release(group, member)
        for key, outcome in outcomes.items():
            code, message = _told(outcome.error)
            known = answers.get(key)
            if known is None:
                leader = leaders.of(*key, outcome.error)
                known = SharePartitionData(key[1], leader_id=leader[0], leader_epoch=leader[1])
            answers[key] = known._replace(acknowledge_error_code=code, acknowledge_error_message=message)
        self._locks_ms = self._locks_ms or _lock_ms(outcomes.values())
        return self._encode(answers, leaders)

    def _check(self, acks: Acks) -> bool:
        """Does the member want records? Raises `InvalidRequest`."""
        request = self._request
        _check_once(acks)
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
        outcomes: dict[TopicPartition, _Outcome],
        answers: dict[TopicPartition, SharePartitionData],
        leaders: _Leaders,
    ) -> None:
        """Lease what there is, storing what was acknowledged with it; wait if there is nothing."""
        unsaid = outcomes
        while True:
            taken, retry = self._take(answers, leaders)
            await self._store(unsaid, taken, answers, leaders)
            unsaid = {}
            if self._is_over or outcomes or answers or self._slot.abandoned:
                return
            if not any(each.update is not None for _, each in taken):  # a horizon moved: look again at once
                left_ms = self._deadline_ms - self._now_ms()
                if left_ms <= 0:
                    return
                await self._wait(min(left_ms, RETRY_MS) if retry else left_ms)
                if not self._service.shares.sessions.holds(self._group, self._member):
                    return  # what it leased now would be released again, and count as delivered

    def _take(
        self, answers: dict[TopicPartition, SharePartitionData], leaders: _Leaders
    ) -> tuple[list[tuple[LiveShare, Taken]], bool]:
        """What the machines give now; and whether some could not be asked. Those that are refused are answered."""
        request, service = self._request, self._service
        room = min(request.max_bytes, service.settings.fetch_bytes_max)
        quotas = service.quotas.active
        if quotas is not None:
            if quotas.must_pause(self._header.client_id):
                return [], False
            if (burst_bytes := quotas.fetch_bytes_max(self._header.client_id)) is not None:
                room = min(room, burst_bytes)
        left, retry = request.max_records, False
        strict = request.acquire_mode == RECORD_LIMIT
        found: list[tuple[LiveShare, Taken]] = []
        assert self._session is not None, "the session comes first"
        self._partitions = self._session.partitions()
        for topic_id, index in self._partitions:
            if left <= 0 or room <= 0:
                break
            try:
                live = self._shares.find(self._group, topic_id, index)
                taken = take(live, self._member, left, room, strict=strict, first=not found)
            except _LATER:
                retry = True
                continue
            except MansioError as error:
                code, message = _told(error)
                leader = leaders.of(topic_id, index, error)
                answers[topic_id, index] = SharePartitionData(
                    index, code, message, leader_id=leader[0], leader_epoch=leader[1]
                )
                continue
            if taken is not None:
                found.append((live, taken))
                left -= taken.records
                room -= taken.size_bytes
        return found, retry

    async def _store(
        self,
        outcomes: dict[TopicPartition, _Outcome],
        taken: list[tuple[LiveShare, Taken]],
        answers: dict[TopicPartition, SharePartitionData],
        leaders: _Leaders,
    ) -> None:
        """Store leases and acknowledgements, those of one share partition as one change, and put down what the member
        is to be told."""
        by_live: dict[int, tuple[LiveShare, list[Update], _Outcome | None, Taken | None]] = {}
        for outcome in outcomes.values():
            if outcome.live is not None and outcome.update is not None:
                by_live[id(outcome.live)] = (outcome.live, [outcome.update], outcome, None)
        for live, each in taken:
            _, updates, said, _ = by_live.get(id(live), (live, list[Any](), None, None))
            if each.update is not None:
                updates.append(each.update)
            by_live[id(live)] = (live, updates, said, each)
        changes = [each for each in by_live.values() if each[1]]
        works = [live.perform(*updates) for live, updates, _, _ in changes]
        errors = await together(self._service.scheduler, works, name="share leases")
        for (live, _, said, given), error in zip(changes, errors, strict=True):
            if said is not None:
                said.error = said.error or error
            if given is None or not given.acquired or self._slot.abandoned:
                continue  # who is gone has no session, and all it has is released below
            key = live.key.topic_id, live.key.partition
            try:
                if error is not None:
                    raise error
                live.check_leads()
            except MansioError as refused:
                if not isinstance(refused, _LATER):
                    leader = leaders.of(*key, refused)
                    code, message = _told(refused)
                    answers[key] = SharePartitionData(
                        key[1], code, message, leader_id=leader[0], leader_epoch=leader[1]
                    )
                continue
            self._locks_ms = self._locks_ms or live.core.settings.lock_ms
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
                live = shares.find(self._group, topic_id, index)
            except MansioError:
                continue  # it is looked at again when the time is over
            for place in (live.partition, live):
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
        leaders: _Leaders,
        error: MansioError | None = None,
    ) -> Sequence[Piece]:
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
            throttle_ms = quotas.fetched(self._connection, self._header.client_id, sent_bytes)
        service.records.counters.fetched(sent_bytes)
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


# ---------------------------------------------------------------- what both have in common


def names_of(group_id: str | None, member_id: str | None) -> tuple[str, str]:
    """Who asks. Raises `InvalidGroupId`, `InvalidRequest`."""
    check_group_id(group_id)
    if not member_id or len(member_id.encode()) > MEMBER_BYTES_MAX:
        raise InvalidRequest(f"a member's id has 1 to {MEMBER_BYTES_MAX} bytes")
    return group_id or "", member_id


def _told(error: MansioError | None) -> tuple[int, str | None]:
    """Code and message for a client: fenced is who leads no more, and damage on our disk is CORRUPT_MESSAGE, as for
    Fetch."""
    if error is None:
        return 0, None
    if isinstance(error, FencedLeaderEpoch | FencedStateEpoch):
        return NotLeaderOrFollower.kafka_code, error.message
    if isinstance(error, CorruptLog):
        return CorruptMessage.kafka_code, error.message
    return error.kafka_code, error.message


def _lock_ms(outcomes: Any) -> int:
    for outcome in outcomes:
        if outcome.live is not None and outcome.live.is_ready:
            return int(outcome.live.core.settings.lock_ms)
    return 0


class _Leaders:
    """Who leads what this broker does not, with the places of those brokers."""

    __slots__ = ("_places", "_service")

    def __init__(self, service: Service) -> None:
        self._service = service
        self._places: dict[int, Endpoint] = {}

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self._places.values())

    def of(self, topic_id: bytes, index: int, error: MansioError | None) -> tuple[int, int]:
        """(leader, leader epoch) as the metadata have it, for an answer of NOT_LEADER_OR_FOLLOWER; (-1, -1) else."""
        if error is None or _told(error)[0] != NotLeaderOrFollower.kafka_code:
            return -1, -1
        state = self._service.topics.state
        topic = state.topics_by_id.get(UUID(bytes=topic_id))
        if topic is None or not 0 <= index < len(topic.partitions):
            return -1, -1
        partition = topic.partitions[index]
        broker = state.brokers.get(partition.leader)
        if broker is None:
            return -1, -1
        if broker.node_id not in self._places:
            self._places[broker.node_id] = Endpoint(
                broker.node_id, broker.host, broker.port, broker.rack or None
            )
        return broker.node_id, partition.leader_epoch
