"""ConsumerGroupHeartbeat and ConsumerGroupDescribe (KIP-848).

Version notes: ConsumerGroupHeartbeat 0 has no regular expressions, and the broker generates the id of a new
member; from version 1 on the client generates it. ConsumerGroupDescribe 1 marks members of the classic protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.api.kafka.handlers.group_responses import described_groups, group_error_fields, heartbeat_fields
from mansio.errors import InvalidRequest, MansioError
from mansio.state.consumer_group.types import JOIN_EPOCH, Heartbeat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.coordinator.group.group_inspection import AssignedTopic, DescribedConsumerMember
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct
    from mansio.wire.topic_partition import TopicIdPartition

Fields = dict[str, Any]

MEMBER_TYPE_CLASSIC: Final = 0
MEMBER_TYPE_CONSUMER: Final = 1


async def consumer_group_heartbeat(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Process the heartbeat of a member that joins, stays in or leaves a consumer group."""
    try:
        heartbeat = _heartbeat_request(service, request, context)
        answer = await service.group_service.consumer_heartbeat(
            request.group_id, heartbeat, caller=context.caller
        )
    except MansioError as error:
        return {"error_code": error.kafka_code, "error_message": error.message}
    return heartbeat_fields(answer)


def _heartbeat_request(service: BrokerServices, request: Struct, context: RequestContext) -> Heartbeat:
    member_id = request.member_id
    if not member_id:
        if context.api_version > 0 or request.member_epoch != JOIN_EPOCH:
            raise InvalidRequest("a member id is required")
        member_id = service.group_service.new_member_id()
    return Heartbeat(
        member_id=member_id,
        member_epoch=request.member_epoch,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        client_id=context.client_id or "",
        client_host=f"/{context.client_host}",
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        topic_names=None if request.subscribed_topic_names is None else tuple(request.subscribed_topic_names),
        topic_regex=request.subscribed_topic_regex,
        assignor=request.server_assignor,
        owned=None if request.topic_partitions is None else _owned_partitions(request.topic_partitions),
    )


def _owned_partitions(topics: Iterable[Struct]) -> frozenset[TopicIdPartition]:
    return frozenset((each.topic_id or bytes(16), index) for each in topics for index in each.partitions)


async def consumer_group_describe(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Describe each group once, even if the request repeats its id: otherwise a small request could cause a response of
    many megabytes."""
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
        found = service.group_service.describe_consumer_group(group_id, caller=caller)
    except MansioError as error:
        return group_error_fields(group_id, error)
    return {
        "group_id": group_id,
        "group_state": found.state,
        "group_epoch": found.group_epoch,
        "assignment_epoch": found.assignment_epoch,
        "assignor_name": found.assignor,
        "members": [_member_fields(each) for each in found.members],
    }


def _member_fields(member: DescribedConsumerMember) -> Fields:
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": member.topic_names,
        "subscribed_topic_regex": member.topic_regex,
        "assignment": {"topic_partitions": _assigned_topic_fields(member.assigned)},
        "target_assignment": {"topic_partitions": _assigned_topic_fields(member.target)},
        "member_type": MEMBER_TYPE_CLASSIC if member.is_classic else MEMBER_TYPE_CONSUMER,
    }


def _assigned_topic_fields(topics: Iterable[AssignedTopic]) -> list[Fields]:
    return [
        {"topic_id": each.topic_id, "topic_name": each.topic, "partitions": each.partitions}
        for each in topics
    ]
