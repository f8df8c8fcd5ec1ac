"""ShareAcknowledge (API 79): what members of share groups say of the records they have leased, and nothing else.

Always true: nobody is told of an acknowledgement that is not stored as it has to be; a request is answered once.

Source: KIP-932, KIP-1222 (renewals).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.handlers.share_answers import Leaders, lock_ms_of, names_of, told
from mansio.broker.share.said import acks_of, check_once, settled, store
from mansio.errors import MansioError
from mansio.wire import share_acknowledge as wire
from mansio.wire.share_acknowledge import AckResult, ShareAcknowledgeResponse
from mansio.wire.versions import ApiKey

if TYPE_CHECKING:
    from mansio.broker.connection import Connection
    from mansio.broker.service import Service
    from mansio.broker.slot import Slot
    from mansio.wire.headers import RequestHeader


def share_acknowledge(
    service: Service, connection: Connection, header: RequestHeader, frame: memoryview
) -> None:
    """Begin a ShareAcknowledge; it is answered later. Raises `WireError`."""
    request = wire.decode_request(header.api_version, frame, header.body)
    work = _acknowledge(service, connection, header._replace(body=0), request, connection.defer())
    service.scheduler.spawn(work, name="share acknowledge")


async def _acknowledge(
    service: Service,
    connection: Connection,
    header: RequestHeader,
    request: wire.ShareAcknowledgeRequest,
    slot: Slot,
) -> None:
    try:
        answer = await _acknowledged(service, connection, request)
        if answer.error_code:
            service.statistics.refused(int(ApiKey.SHARE_ACKNOWLEDGE), answer.error_code)
        slot.answer([wire.encode_response(header.api_version, header.correlation_id, answer)])
    finally:
        slot.abandon()


async def _acknowledged(
    service: Service, connection: Connection, request: wire.ShareAcknowledgeRequest
) -> ShareAcknowledgeResponse:
    shares = service.shares
    acks = acks_of(request.topics)
    try:
        group, member = names_of(request.group_id, request.member_id)
        check_once(acks)
        shares.sessions.acknowledge(group, member, request.session_epoch, connection=connection)
    except MansioError as error:
        return ShareAcknowledgeResponse(0, error.kafka_code, error.message, 0, [], [])
    outcomes = await settled(shares, group, member, acks, is_renew_ack=request.is_renew_ack)
    await store(service.scheduler, outcomes.values())
    if not shares.sessions.holds(group, member):
        await shares.release(group, member)
    topics: dict[bytes, list[AckResult]] = {}
    leaders = Leaders(service)
    for (topic_id, index), outcome in outcomes.items():
        code, message = told(outcome.error)
        leader = leaders.of(topic_id, index, outcome.error)
        topics.setdefault(topic_id, []).append(AckResult(index, code, message, *leader))
    return ShareAcknowledgeResponse(
        0, 0, None, lock_ms_of(outcomes.values()), list(topics.items()), leaders.endpoints
    )
