"""ShareAcknowledge (API 79): acknowledges leased records in a share session.

Invariant: an acknowledgement is reported once it is stored as it has to be; a request is answered once.

Source: KIP-932, KIP-1222 (renewals).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.api.kafka.handlers.share_responses import LeaderHints, acknowledgements_of, error_for_client
from mansio.broker.services.share import check_unique, checked_ids, lock_ms_of
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
    """Start a ShareAcknowledge, which is answered later. Raises `WireError`."""
    request = wire.decode_request(header.api_version, frame, header.body)
    work = _answer(service, connection, header._replace(body=0), request, connection.defer())
    service.scheduler.spawn(work, name="share acknowledge")


async def _answer(
    service: BrokerServices,
    connection: Connection,
    header: RequestHeader,
    request: wire.ShareAcknowledgeRequest,
    pending_response: PendingResponse,
) -> None:
    try:
        response = await _acknowledge(service, connection, request)
        if response.error_code:
            service.statistics.refused(int(ApiKey.SHARE_ACKNOWLEDGE), response.error_code)
        pending_response.answer([wire.encode_response(header.api_version, header.correlation_id, response)])
    finally:
        pending_response.abandon()


async def _acknowledge(
    service: BrokerServices, connection: Connection, request: wire.ShareAcknowledgeRequest
) -> ShareAcknowledgeResponse:
    share, sessions = service.share, service.shares.sessions
    parts = acknowledgements_of(request.topics)
    try:
        group, member = checked_ids(request.group_id, request.member_id)
        check_unique(parts)
        sessions.acknowledge(group, member, request.session_epoch, connection=connection)
    except MansioError as error:
        return ShareAcknowledgeResponse(0, error.kafka_code, error.message, 0, [], [])
    results = await share.prepare(group, member, parts, allows_renewal=request.is_renew_ack)
    await share.store(results)
    if not sessions.holds(group, member):
        await service.shares.release(group, member)
    topics: dict[bytes, list[AckResult]] = {}
    leaders = LeaderHints(service)
    for result in results:
        code, message = error_for_client(result.error)
        leader = leaders.of(result.topic_id, result.partition, result.error)
        topics.setdefault(result.topic_id, []).append(AckResult(result.partition, code, message, *leader))
    return ShareAcknowledgeResponse(0, 0, None, lock_ms_of(results), list(topics.items()), leaders.endpoints)
