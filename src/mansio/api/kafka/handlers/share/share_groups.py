"""ShareGroupHeartbeat and ShareGroupDescribe (KIP-932)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.api.kafka.handlers.group_responses import (
    described_groups,
    group_by_topic_id,
    group_error_fields,
    heartbeat_fields,
)
from mansio.errors import MansioError
from mansio.state.share_group.group import ShareHeartbeat

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.state.share_group.group import ShareGroupMember
    from mansio.wire.codec.messages import Struct

Fields = dict[str, Any]

ASSIGNOR: Final = "simple"
"""Name of the assignor of share groups in ShareGroupDescribe responses (Kafka `SimpleAssignor`)."""


async def share_group_heartbeat(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Process the heartbeat of a member that joins, stays in or leaves a share group. The response has the member's
    epoch, and its assigned partitions if they have changed."""
    try:
        answer = await service.group_service.share_heartbeat(
            request.group_id, _heartbeat(request, context), caller=context.caller
        )
    except MansioError as error:
        return {"error_code": error.kafka_code, "error_message": error.message}
    return heartbeat_fields(answer)


def _heartbeat(request: Struct, context: RequestContext) -> ShareHeartbeat:
    names = request.subscribed_topic_names
    return ShareHeartbeat(
        member_id=request.member_id,
        member_epoch=request.member_epoch,
        rack_id=request.rack_id,
        client_id=context.client_id or "",
        client_host=f"/{context.client_host}",
        topic_names=None if names is None else tuple(names),
    )


async def share_group_describe(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Describe share groups with their members and assignments. A group that occurs twice in the request is described
    once."""
    caller = context.caller
    return await described_groups(
        service,
        request.group_ids,
        lambda group_id: _describe(service, group_id, caller),
        has_operations=request.include_authorized_operations,
        caller=caller,
    )


def _describe(service: BrokerServices, group_id: str, caller: Caller) -> Fields:
    try:
        found = service.group_service.describe_share_group(group_id, caller=caller)
    except MansioError as error:
        return group_error_fields(group_id, error)
    return {
        "group_id": group_id,
        "group_state": found.state,
        "group_epoch": found.group_epoch,
        "assignment_epoch": found.assignment_epoch,
        "assignor_name": ASSIGNOR,
        "members": [_describe_member(service, each) for each in found.members],
    }


def _describe_member(service: BrokerServices, member: ShareGroupMember) -> Fields:
    name_of = service.group_service.topic_name
    named = [
        {**each, "topic_name": name}
        for each in group_by_topic_id(sorted(member.current.assigned))
        if (name := name_of(each["topic_id"])) is not None
    ]
    return {
        "member_id": member.member_id,
        "rack_id": member.metadata.rack_id,
        "member_epoch": member.current.epoch,
        "client_id": member.metadata.client_id,
        "client_host": member.metadata.client_host,
        "subscribed_topic_names": member.metadata.topic_names,
        "assignment": {"topic_partitions": named},
    }
