"""ShareAcknowledge (API 79): what members of share groups say of the records they have leased, and nothing else.

Always true: nobody is told of an acknowledgement that is not stored as it has to be; a request is answered once.

Source: KIP-932, KIP-1222 (renewals).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.api.kafka.handlers.share_responses import LeaderHints, checked_ids, error_for_client, lock_ms_of
from mansio.broker.coordinator.share.acknowledgements import (
    acknowledged_partitions,
    apply_acknowledgements,
    check_no_duplicates,
    persist_acknowledgements,
)
from mansio.errors import MansioError
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import share_acknowledge as wire
from mansio.wire.apis.share_acknowledge import AckResult, ShareAcknowledgeResponse

if TYPE_CHECKING:
    from mansio.api.kafka.server.connection import Connection
    from mansio.api.kafka.server.pending_response import PendingResponse
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.headers import RequestHeader


def share_acknowledge(
    service: BrokerServices, connection: Connection, header: RequestHeader, frame: memoryview
) -> None:
    """Begin a ShareAcknowledge; it is answered later. Raises `WireError`."""
    request = wire.decode_request(header.api_version, frame, header.body)
    work = _acknowledge(service, connection, header._replace(body=0), request, connection.defer())
    service.scheduler.spawn(work, name="share acknowledge")


async def _acknowledge(
    service: BrokerServices,
    connection: Connection,
    header: RequestHeader,
    request: wire.ShareAcknowledgeRequest,
    pending_response: PendingResponse,
) -> None:
    try:
        answer = await _acknowledged(service, connection, request)
        if answer.error_code:
            service.statistics.refused(int(ApiKey.SHARE_ACKNOWLEDGE), answer.error_code)
        pending_response.answer([wire.encode_response(header.api_version, header.correlation_id, answer)])
    finally:
        pending_response.abandon()


async def _acknowledged(
    service: BrokerServices, connection: Connection, request: wire.ShareAcknowledgeRequest
) -> ShareAcknowledgeResponse:
    shares = service.shares
    acks = acknowledged_partitions(request.topics)
    try:
        group, member = checked_ids(request.group_id, request.member_id)
        check_no_duplicates(acks)
        shares.sessions.acknowledge(group, member, request.session_epoch, connection=connection)
    except MansioError as error:
        return ShareAcknowledgeResponse(0, error.kafka_code, error.message, 0, [], [])
    outcomes = await apply_acknowledgements(shares, group, member, acks, is_renew_ack=request.is_renew_ack)
    await persist_acknowledgements(service.scheduler, outcomes.values())
    if not shares.sessions.holds(group, member):
        await shares.release(group, member)
    topics: dict[bytes, list[AckResult]] = {}
    leaders = LeaderHints(service)
    for (topic_id, index), outcome in outcomes.items():
        code, message = error_for_client(outcome.error)
        leader = leaders.of(topic_id, index, outcome.error)
        topics.setdefault(topic_id, []).append(AckResult(index, code, message, *leader))
    return ShareAcknowledgeResponse(
        0, 0, None, lock_ms_of(outcomes.values()), list(topics.items()), leaders.endpoints
    )
