"""ShareFetch (API 78) and ShareAcknowledge (API 79).

ShareFetch leases records to a member of a share group, and acknowledges records that were leased before. It waits while
no records are available, unless it contains acknowledgements; then it is answered at once.

Invariants: leases are reported only to a connected member; a request is answered once.

Source: KIP-932, KIP-1206 (acquire mode), KIP-1222 (renewals). Deviation: `min_bytes` above 1 counts as 1, because
leased records cannot wait for more to arrive.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from mansio.api.kafka.connections.connection_grants import new_grants
from mansio.broker.routing.routes import available_leader
from mansio.broker.services.share_groups.exchange import ShareExchange, plan_exchange
from mansio.broker.services.share_groups.share import (
    PartitionAcknowledgements,
    ReceiveOperation,
    check_partitions_unique,
    find_lock_ms,
    validate_ids,
)
from mansio.errors import (
    CorruptLog,
    CorruptMessage,
    FencedLeaderEpoch,
    FencedStateEpoch,
    InvalidRequest,
    MansioError,
    NotLeaderOrFollower,
)
from mansio.logs import fields
from mansio.state.share_partition.types import ACCEPT, LEASE_MS_MAX, AcknowledgementBatch
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import share_acknowledge as acknowledge_wire
from mansio.wire.apis import share_fetch as wire
from mansio.wire.apis.share_acknowledge import AckResult, Endpoint, ShareAcknowledgeResponse
from mansio.wire.apis.share_fetch import RECORD_LIMIT, SharePartitionData
from mansio.wire.field_values import FINAL_SHARE_SESSION_EPOCH, OPEN_SHARE_SESSION_EPOCH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.api.kafka.connections.connection import Connection
    from mansio.api.kafka.connections.pending_response import PendingResponse
    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.broker.services.authorization import Grants
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.cluster import ServedListener
    from mansio.broker.services.share_groups.exchange import Accepted
    from mansio.broker.services.share_groups.share import AcknowledgeResult, ReceivedPartition
    from mansio.state.share_group.share_sessions import ShareSession
    from mansio.wire.apis.share_acknowledge import AckPartition, Topic
    from mansio.wire.apis.share_fetch import ShareFetchRequest
    from mansio.wire.headers import RequestHeader
    from mansio.wire.topic_partition import TopicIdPartition

logger = logging.getLogger(__name__)


def share_fetch(
    service: BrokerServices, connection: Connection, header: RequestHeader, frame: memoryview
) -> Sequence[ResponsePart] | None:
    """Process a ShareFetch request. Return the response, or None if it is sent later. Raises `WireError`."""
    request = wire.decode_request(header.api_version, frame, header.body_position)
    exchange = _plan_exchange(service, connection, header, request)
    if exchange is None:
        fetch = _ShareFetch(service, connection, header, request)
        service.scheduler.spawn(fetch.run(), name="share fetch")
        return None
    exchange.start(request.member_id or "", request.lease_ms)
    if exchange.is_complete:
        return _encode_exchange(service, connection, header, exchange)
    connection.queue_exclusive_response(exchange)
    return None


def _plan_exchange(
    service: BrokerServices, connection: Connection, header: RequestHeader, request: ShareFetchRequest
) -> ShareExchange | None:
    """Return the exchange that the request asks for, after the share session has advanced; None if `_ShareFetch` has to
    process it."""
    if (
        request.forgotten_topics
        or request.is_renew_ack
        or request.max_records < 0
        or request.max_bytes < 0
        or request.acquire_mode not in (wire.BATCH_OPTIMIZED, RECORD_LIMIT)
        or not -1 <= request.lease_ms <= LEASE_MS_MAX
        or service.quotas.active is not None
    ):
        return None
    found = _find_session(service, request.group_id, request.member_id, request.session_epoch, request.topics)
    if found is None:
        return None
    session, accepted = found
    wants_records = request.max_records > 0 and request.max_bytes > 0
    candidates = session.upcoming_partitions() if wants_records else ()
    if service.authorization.is_enabled:  # no call more than without it, if all is known to be allowed
        grants = connection.grants
        if (
            grants is None
            or grants.revision != grants.rules.revision
            or session.group not in grants.groups
            or (accepted is not None and accepted[0][0] not in grants.readable)
        ):
            return None
        for topic_id, _ in candidates:
            if topic_id not in grants.readable:
                return None
    plans = plan_exchange(
        service.share_partition_manager,
        session.group,
        session.member,
        accepted,
        candidates,
        max_records=request.max_records,
        max_bytes=min(request.max_bytes, service.settings.fetch_max_bytes),
        strict=request.acquire_mode == RECORD_LIMIT,
    )
    if plans is None:
        return None
    service.share_partition_manager.sessions.advance(session, connection)
    if len(candidates) > 1:
        session.rotate()
    on_done = partial(_respond, service, connection, header, session, _encode_exchange)
    return ShareExchange(plans, on_done)


def _find_session(
    service: BrokerServices, group: str | None, member: str | None, epoch: int, topics: Sequence[Topic]
) -> tuple[ShareSession, Accepted | None] | None:
    """Return the session of a request that changes no partitions of it, and what it accepts; None if the request does
    anything else, or is invalid."""
    if len(topics) > 1 or epoch <= OPEN_SHARE_SESSION_EPOCH or not group or not member:
        return None
    session = service.share_partition_manager.sessions.find(group, member, epoch)
    if session is None or not topics:
        return None if session is None else (session, None)
    topic_id, parts = topics[0]
    if len(parts) != 1 or (place := (topic_id, parts[0].index)) not in session:
        return None
    ranges = []
    for first, last, types in parts[0].batches:
        if len(types) not in (1, last - first + 1) or types.count(ACCEPT) != len(types):
            return None
        ranges.append((first, last))
    return session, ((place, ranges) if ranges else None)


def _respond(
    service: BrokerServices,
    connection: Connection,
    header: RequestHeader,
    session: ShareSession,
    encode: Callable[[BrokerServices, Connection, RequestHeader, ShareExchange], Sequence[ResponsePart]],
    exchange: ShareExchange,
) -> None:
    """Send the response of an exchange that is complete now. Release what it has leased if the session of the member
    has ended meanwhile."""
    shares = service.share_partition_manager
    if session.releases_leases and not shares.sessions.has_session(session.group, session.member):
        releases = shares.release_leases(session.group, session.member)
        service.scheduler.spawn(releases, name="release leases")
    if connection.closed:
        return
    try:
        exchange.respond(encode(service, connection, header, exchange))
    except Exception as error:  # there will be no response; the share partition is not concerned
        logger.exception("share_response_failed", extra=fields(reason=error))
        connection.abort()
        return
    connection.on_response_complete(exchange)


def _encode_exchange(
    service: BrokerServices, connection: Connection, header: RequestHeader, exchange: ShareExchange
) -> Sequence[ResponsePart]:
    usual = exchange.usual_result()
    if usual is not None:
        plan, acquired = usual
        key, records = plan.leader.key, plan.records
        assert records is not None, "records are leased"
        service.fetch.counters.count_fetch(records.length)
        return wire.encode_usual_response(
            header.correlation_id,
            key.topic_id,
            key.partition,
            exchange.lock_ms,
            records,
            records.length,
            acquired,
        )
    leaders = LeaderHints(service, connection.listener)
    received, results = exchange.results()
    merged = _merge_results(received, results, leaders)
    return _encode(service, connection, header, merged, leaders, exchange.lock_ms)


def answer_parked_requests(service: BrokerServices) -> None:
    """Answer all ShareFetch requests that wait for records, because the broker stops."""
    for parked in tuple(service.share_partition_manager.parked):
        parked.finish()


class _ShareFetch:
    """One ShareFetch request, from its arrival to its response."""

    __slots__ = ("_connection", "_header", "_pending_response", "_receive", "_request", "_service")

    def __init__(
        self,
        service: BrokerServices,
        connection: Connection,
        header: RequestHeader,
        request: ShareFetchRequest,
    ) -> None:
        self._service = service
        self._connection = connection
        self._header = header
        self._request = request
        self._receive: ReceiveOperation | None = None
        self._pending_response: PendingResponse = connection.defer_response()
        self._pending_response.on_lost(self._finish)

    def _finish(self) -> None:
        if self._receive is not None:
            self._receive.finish()

    async def run(self) -> None:
        """Process the request and send the response, or an error response."""
        pending_response = self._pending_response
        try:
            try:
                parts = await self._process()
            except MansioError as error:
                self._service.statistics.count_error(int(ApiKey.SHARE_FETCH), error.kafka_code)
                leaders = LeaderHints(self._service, self._connection.listener)
                parts = _encode(self._service, self._connection, self._header, {}, leaders, 0, error)
            pending_response.on_lost(None)
            if not pending_response.is_abandoned:
                pending_response.answer(parts)
        finally:
            pending_response.abandon()

    async def _process(self) -> Sequence[ResponsePart]:
        request, service = self._request, self._service
        share, shares = service.share_service, service.share_partition_manager
        grants = self._connection.grants
        if grants is None and service.authorization.is_enabled:
            grants = new_grants(service, self._connection, self._header.client_id)
        if grants is not None and (
            grants.revision != grants.rules.revision or request.group_id not in grants.groups
        ):
            grants.check_group(request.group_id or "", "SHARE_FETCH")
        group, member = validate_ids(request.group_id, request.member_id)
        parts = acknowledgements_by_partition(request.topics)
        wants_records = self._check(parts)
        forget = [(topic_id, index) for topic_id, indexes in request.forgotten_topics for index in indexes]
        forgotten = frozenset(forget)
        named = [(topic_id, part.index) for topic_id, named in request.topics for part in named]
        session = shares.sessions.fetch(
            group,
            member,
            request.session_epoch,
            [each for each in named if each not in forgotten],
            forget,
            has_acks=bool(parts),
            connection=self._connection,
            keeps_leases=request.keeps_leases,
        )
        receive = None
        if wants_records:
            receive = self._receive = ReceiveOperation(
                share,
                group,
                member,
                user=self._connection.session.user,
                client_id=self._header.client_id,
                grants=grants,
                partitions=session.partitions,
                is_connected=lambda: not self._pending_response.is_abandoned,
                is_active=lambda: shares.sessions.has_session(group, member),
                max_records=request.max_records,
                max_bytes=request.max_bytes,
                max_wait_ms=request.max_wait_ms,
                strict=request.acquire_mode == RECORD_LIMIT,
                lease_ms=request.lease_ms,
            )
        if session.replaces_older and not session.keeps_leases:
            await shares.release_leases(group, member)
        results = await share.apply_acknowledgements(
            group, member, parts, allows_renewal=request.is_renew_ack, grants=grants
        )
        received: Mapping[TopicIdPartition, ReceivedPartition] = {}
        if receive is not None:
            received = await receive.run(results)
        else:
            await share.store_acknowledgements(results)
        if session.releases_leases and not shares.sessions.has_session(group, member):
            await shares.release_leases(group, member)
        leaders = LeaderHints(service, self._connection.listener)
        lock_ms = receive.lock_ms if receive is not None else 0
        merged = _merge_results(received, results, leaders)
        lock_ms = lock_ms or find_lock_ms(results)
        return _encode(service, self._connection, self._header, merged, leaders, lock_ms)

    def _check(self, parts: Sequence[PartitionAcknowledgements]) -> bool:
        """Check the request and return whether the member wants records. Raises `InvalidRequest`."""
        request = self._request
        check_partitions_unique(parts)
        wants_records = request.max_records > 0 and request.max_bytes > 0
        if request.is_renew_ack:
            if request.max_records or request.max_bytes or request.min_bytes or request.max_wait_ms:
                raise InvalidRequest("a request with renewals cannot fetch records")
        elif request.max_records < 0 or request.max_bytes < 0:
            raise InvalidRequest("max_records and max_bytes must not be negative")
        if request.acquire_mode not in (wire.BATCH_OPTIMIZED, RECORD_LIMIT):
            raise InvalidRequest(f"unknown acquire mode {request.acquire_mode}")
        if request.session_epoch == FINAL_SHARE_SESSION_EPOCH:
            if request.forgotten_topics:
                raise InvalidRequest("the request that ends a session cannot forget partitions")
            return False
        if request.session_epoch == OPEN_SHARE_SESSION_EPOCH and parts:
            raise InvalidRequest("a new share session has nothing to acknowledge")
        return wants_records and not request.is_renew_ack


def _encode(
    service: BrokerServices,
    connection: Connection,
    header: RequestHeader,
    partitions: dict[TopicIdPartition, SharePartitionData],
    leaders: LeaderHints,
    lock_ms: int,
    error: MansioError | None = None,
) -> Sequence[ResponsePart]:
    topics: dict[bytes, list[SharePartitionData]] = {}
    sent_bytes = 0
    for (topic_id, _), data in partitions.items():
        topics.setdefault(topic_id, []).append(data)
        sent_bytes += data.records_bytes
        if data.error_code:
            service.statistics.count_error(int(ApiKey.SHARE_FETCH), data.error_code)
    quotas, throttle_ms = service.quotas.active, 0
    if quotas is not None:
        throttle_ms = quotas.record_fetch(connection.session.user, header.client_id, sent_bytes)
        if throttle_ms:
            connection.pause_reading_ms(throttle_ms)
    service.fetch.counters.count_fetch(sent_bytes)
    return wire.encode_response(
        header.api_version,
        header.correlation_id,
        list(topics.items()),
        lock_ms=lock_ms,
        throttle_ms=throttle_ms,
        error_code=0 if error is None else error.kafka_code,
        error_message=None if error is None else error.message,
        endpoints=leaders.endpoints,
    )


def _merge_results(
    received: Mapping[TopicIdPartition, ReceivedPartition],
    results: Sequence[AcknowledgeResult],
    leaders: LeaderHints,
) -> dict[TopicIdPartition, SharePartitionData]:
    """Combine leased records and results of acknowledgements by partition."""
    found: dict[TopicIdPartition, SharePartitionData] = {}
    for key, each in received.items():
        if each.error is None:
            found[key] = SharePartitionData(
                key[1], records_bytes=each.size_bytes, records=each.slices, acquired=each.acquired
            )
            continue
        code, message = error_for_client(each.error)
        leader_id, leader_epoch = leaders.leader_of(*key, each.error)
        found[key] = SharePartitionData(key[1], code, message, leader_id=leader_id, leader_epoch=leader_epoch)
    for result in results:
        key = result.topic_id, result.partition
        data = found.get(key)
        if data is None:
            leader_id, leader_epoch = leaders.leader_of(*key, result.error)
            data = SharePartitionData(key[1], leader_id=leader_id, leader_epoch=leader_epoch)
        if result.error is not None:
            code, message = error_for_client(result.error)
            data = data._replace(acknowledge_error_code=code, acknowledge_error_message=message)
        found[key] = data
    return found


def acknowledgements_by_partition(
    topics: Sequence[tuple[bytes, list[AckPartition]]],
) -> list[PartitionAcknowledgements]:
    """Convert the decoded topics of a request into acknowledgements, one item per partition that has any."""
    return [
        PartitionAcknowledgements(
            topic_id, part.index, [AcknowledgementBatch(*batch) for batch in part.batches]
        )
        for topic_id, parts in topics
        for part in parts
        if part.batches
    ]


def error_for_client(error: MansioError | None) -> tuple[int, str | None]:
    """Return the Kafka error code and the message for a client; (0, None) if `error` is None. Errors for which Kafka's
    share group APIs have no code are replaced by the nearest one that clients handle."""
    if error is None:
        return 0, None
    if isinstance(error, FencedLeaderEpoch | FencedStateEpoch):
        return NotLeaderOrFollower.kafka_code, error.message
    if isinstance(error, CorruptLog):
        return CorruptMessage.kafka_code, error.message
    return error.kafka_code, error.message


class LeaderHints:
    """Current leaders of the partitions of one response that this broker does not lead, with their endpoints."""

    __slots__ = ("_endpoints", "_listener", "_service")

    def __init__(self, service: BrokerServices, listener: ServedListener) -> None:
        """Create hints for a client that asks through `listener`."""
        self._service = service
        self._listener = listener
        self._endpoints: dict[int, Endpoint] = {}

    @property
    def endpoints(self) -> list[Endpoint]:
        """Endpoints of all leaders that `leader_of` has returned."""
        return list(self._endpoints.values())

    def leader_of(self, topic_id: bytes, index: int, error: MansioError | None) -> tuple[int, int]:
        """Return the leader and leader epoch of a partition according to the metadata if a client gets `error` as
        NOT_LEADER_OR_FOLLOWER and can reach the leader through its listener; (-1, -1) otherwise."""
        if error is None or error_for_client(error)[0] != NotLeaderOrFollower.kafka_code:
            return -1, -1
        state = self._service.topics.state
        topic = state.topics_by_id.get(UUID(bytes=topic_id))
        if topic is None or not 0 <= index < len(topic.partitions):
            return -1, -1
        partition = topic.partitions[index]
        broker = available_leader(state, partition)
        endpoint = None if broker is None else broker.endpoints.get(self._listener.name)
        if endpoint is None:
            return -1, -1
        if endpoint.node_id not in self._endpoints:
            self._endpoints[endpoint.node_id] = Endpoint(
                endpoint.node_id, endpoint.host, endpoint.port, endpoint.rack or None
            )
        return endpoint.node_id, partition.leader_epoch


def share_acknowledge(
    service: BrokerServices, connection: Connection, header: RequestHeader, frame: memoryview
) -> Sequence[ResponsePart] | None:
    """Process a ShareAcknowledge request. Return the response, or None if it is sent later. Raises `WireError`."""
    request = acknowledge_wire.decode_request(header.api_version, frame, header.body_position)
    exchange = _plan_acknowledgement(service, connection, header, request)
    if exchange is not None:
        exchange.start(request.member_id or "", -1)
        if exchange.is_complete:
            return _encode_acknowledgement(service, connection, header, exchange)
        connection.queue_exclusive_response(exchange)
        return None
    grants = connection.grants
    if grants is None and service.authorization.is_enabled:
        grants = new_grants(service, connection, header.client_id)
    work = _answer(service, connection, header, request, grants, connection.defer_response())
    service.scheduler.spawn(work, name="share acknowledge")
    return None


def _plan_acknowledgement(
    service: BrokerServices,
    connection: Connection,
    header: RequestHeader,
    request: acknowledge_wire.ShareAcknowledgeRequest,
) -> ShareExchange | None:
    """As `_plan_exchange`; None if `_answer` has to process the request."""
    if request.is_renew_ack:
        return None
    found = _find_session(service, request.group_id, request.member_id, request.session_epoch, request.topics)
    if found is None:
        return None
    session, accepted = found
    if accepted is None:
        return None
    grants = connection.grants
    if service.authorization.is_enabled and (
        grants is None
        or grants.revision != grants.rules.revision
        or session.group not in grants.groups
        or accepted[0][0] not in grants.readable
    ):
        return None
    shares = service.share_partition_manager
    plans = plan_exchange(
        shares, session.group, session.member, accepted, (), max_records=0, max_bytes=0, strict=True
    )
    if plans is None:
        return None
    shares.sessions.advance(session, connection)
    on_done = partial(_respond, service, connection, header, session, _encode_acknowledgement)
    return ShareExchange(plans, on_done)


def _encode_acknowledgement(
    service: BrokerServices, connection: Connection, header: RequestHeader, exchange: ShareExchange
) -> Sequence[ResponsePart]:
    _, results = exchange.results()
    response = _acknowledged(service, connection, results, exchange.lock_ms)
    return (acknowledge_wire.encode_response(header.api_version, header.correlation_id, response),)


async def _answer(
    service: BrokerServices,
    connection: Connection,
    header: RequestHeader,
    request: acknowledge_wire.ShareAcknowledgeRequest,
    grants: Grants | None,
    pending_response: PendingResponse,
) -> None:
    try:
        response = await _acknowledge(service, connection, request, grants)
        if response.error_code:
            service.statistics.count_error(int(ApiKey.SHARE_ACKNOWLEDGE), response.error_code)
        pending_response.answer(
            [acknowledge_wire.encode_response(header.api_version, header.correlation_id, response)]
        )
    finally:
        pending_response.abandon()


async def _acknowledge(
    service: BrokerServices,
    connection: Connection,
    request: acknowledge_wire.ShareAcknowledgeRequest,
    grants: Grants | None,
) -> ShareAcknowledgeResponse:
    share, sessions = service.share_service, service.share_partition_manager.sessions
    parts = acknowledgements_by_partition(request.topics)
    try:
        if grants is not None and (
            grants.revision != grants.rules.revision or request.group_id not in grants.groups
        ):
            grants.check_group(request.group_id or "", "SHARE_ACKNOWLEDGE")
        group, member = validate_ids(request.group_id, request.member_id)
        check_partitions_unique(parts)
        session = sessions.acknowledge(group, member, request.session_epoch, connection=connection)
    except MansioError as error:
        return ShareAcknowledgeResponse(0, error.kafka_code, error.message, 0, [], [])
    results = await share.apply_acknowledgements(
        group, member, parts, allows_renewal=request.is_renew_ack, grants=grants
    )
    await share.store_acknowledgements(results)
    if session.releases_leases and not sessions.has_session(group, member):
        await service.share_partition_manager.release_leases(group, member)
    return _acknowledged(service, connection, results, find_lock_ms(results))


def _acknowledged(
    service: BrokerServices, connection: Connection, results: Sequence[AcknowledgeResult], lock_ms: int
) -> ShareAcknowledgeResponse:
    topics: dict[bytes, list[AckResult]] = {}
    leaders = LeaderHints(service, connection.listener)
    for result in results:
        code, message = error_for_client(result.error)
        leader = leaders.leader_of(result.topic_id, result.partition, result.error)
        topics.setdefault(result.topic_id, []).append(AckResult(result.partition, code, message, *leader))
    return ShareAcknowledgeResponse(0, 0, None, lock_ms, list(topics.items()), leaders.endpoints)
