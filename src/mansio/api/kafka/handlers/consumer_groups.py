"""ConsumerGroupHeartbeat and ConsumerGroupDescribe: groups whose partitions the broker assigns (KIP-848).

Translates only: requests into calls on `service.groups`, its answers and errors into response fields.

Version notes: ConsumerGroupHeartbeat 0 has no regular expressions, and a member without an id is given one; from 1 on
it comes with its own. ConsumerGroupDescribe 1 tells members of the classic protocol from the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.api.kafka.handlers.group_responses import describe_error, heartbeat_fields
from mansio.broker.coordinator.group.error_mapping import NAME_BYTES_MAX, check_group_id
from mansio.errors import InvalidRequest, MansioError
from mansio.metadata.topic_plan import TOPIC_NAME_CHARACTERS_MAX
from mansio.state.consumer_group.types import JOIN_EPOCH, LEAVE_STATIC_EPOCH, Heartbeat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.api.kafka.server.request_context import RequestContext
    from mansio.broker.coordinator.group.group_inspection import AssignedTopic, DescribedConsumerMember
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.state.consumer_group.types import TopicPartition
    from mansio.wire.codec.messages import Struct

Fields = dict[str, Any]

TOPIC_NAMES_MAX: Final = 10_000
"""Names one member may subscribe to; whoever wants more subscribes by an expression."""
CLASSIC_MEMBER: Final = 0
CONSUMER_MEMBER: Final = 1


async def consumer_group_heartbeat(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """A member joins, is alive, or leaves; it is told its epoch, and its partitions when they are others."""
    try:
        asked = _heartbeat_request(service, request, context)
        answer = await service.groups.consumer_heartbeat(request.group_id, asked)
    except MansioError as error:
        return {"error_code": error.kafka_code, "error_message": error.message}
    return heartbeat_fields(answer)


def _heartbeat_request(service: BrokerServices, request: Struct, context: RequestContext) -> Heartbeat:
    """The request, checked as far as that needs no group."""
    names = (request.instance_id, request.rack_id, request.server_assignor, request.subscribed_topic_regex)
    if any(len(name.encode()) > NAME_BYTES_MAX for name in (request.member_id, *names) if name):
        raise InvalidRequest("a name is too long")
    if "" in (request.instance_id, request.rack_id, request.server_assignor):
        raise InvalidRequest("an instance id, a rack or an assignor is null or has a name")
    if request.member_epoch < LEAVE_STATIC_EPOCH:
        raise InvalidRequest(f"{request.member_epoch} is not an epoch")
    topic_names = request.subscribed_topic_names
    if topic_names is not None and len(topic_names) > TOPIC_NAMES_MAX:
        raise InvalidRequest(f"a member may subscribe to {TOPIC_NAMES_MAX} topics by name")
    if any(len(name) > TOPIC_NAME_CHARACTERS_MAX for name in topic_names or ()):
        raise InvalidRequest(f"the name of a topic has at most {TOPIC_NAME_CHARACTERS_MAX} characters")
    member_id = request.member_id
    if not member_id:
        if context.api_version > 0 or request.member_epoch != JOIN_EPOCH:
            raise InvalidRequest("a member has to say who it is")
        member_id = service.groups.new_member_id()
    return Heartbeat(
        member_id=member_id,
        member_epoch=request.member_epoch,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        client_id=context.client_id or "",
        client_host=f"/{context.client_host}",
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        topic_names=None if topic_names is None else tuple(topic_names),
        topic_regex=request.subscribed_topic_regex,
        assignor=request.server_assignor,
        owned=None if request.topic_partitions is None else _owned(request.topic_partitions),
    )


def _owned(topics: Iterable[Struct]) -> frozenset[TopicPartition]:
    return frozenset((each.topic_id or bytes(16), index) for each in topics for index in each.partitions)


async def consumer_group_describe(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Each group with its members, what they have and what they are to have; once, however often it is named: a name
    is three bytes to send, and a large group megabytes to answer."""
    return {"groups": [_describe(service, group_id) for group_id in dict.fromkeys(request.group_ids)]}


def _describe(service: BrokerServices, group_id: str) -> Fields:
    try:
        check_group_id(group_id)
        found = service.groups.inspection.describe_consumer(group_id)
    except MansioError as error:
        return describe_error(group_id, error)
    return {
        "group_id": group_id,
        "group_state": found.state,
        "group_epoch": found.group_epoch,
        "assignment_epoch": found.assignment_epoch,
        "assignor_name": found.assignor,
        "members": [_described(each) for each in found.members],
    }


def _described(member: DescribedConsumerMember) -> Fields:
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": member.topic_names,
        "subscribed_topic_regex": member.topic_regex,
        "assignment": {"topic_partitions": _named(member.assigned)},
        "target_assignment": {"topic_partitions": _named(member.target)},
        "member_type": CLASSIC_MEMBER if member.is_classic else CONSUMER_MEMBER,
    }


def _named(topics: Iterable[AssignedTopic]) -> list[Fields]:
    return [
        {"topic_id": each.topic_id, "topic_name": each.topic, "partitions": each.partitions}
        for each in topics
    ]
