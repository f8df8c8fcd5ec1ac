"""DescribeShareGroupOffsets, AlterShareGroupOffsets and DeleteShareGroupOffsets (KIP-932, KIP-1226)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mansio.errors import InvalidRequest, MansioError
from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.share_groups.share_offsets import ShareOffset
    from mansio.wire.codec.messages import Struct

Fields = dict[str, Any]


def _error_fields(error: MansioError | None) -> Fields:
    if error is None:
        return {"error_code": 0, "error_message": None}
    return {"error_code": error.kafka_code, "error_message": error.message}


async def describe_share_group_offsets(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Return the start offset and lag of each requested partition of the share groups."""
    count = Counter(each.group_id for each in request.groups)
    turns = ItemTurns(service.scheduler)
    groups = []
    for each in request.groups:
        await turns.next()
        groups.append(
            await _topic_fields(service, each, context, once=count[each.group_id] == 1, turns=turns)
        )
    return {"groups": groups}


async def _topic_fields(
    service: BrokerServices, wanted: Struct, context: RequestContext, *, once: bool, turns: ItemTurns
) -> Fields:
    topics = None
    if wanted.topics is not None:
        topics = [(each.topic_name, each.partitions) for each in wanted.topics]
    try:
        if not once:  # otherwise a short request could cause a large response
            raise InvalidRequest(f"group {wanted.group_id!r} is in the request more than once")
        described = await service.share_offsets.describe(wanted.group_id, topics, caller=context.caller)
    except MansioError as error:
        return {"group_id": wanted.group_id, "topics": [], **_error_fields(error)}
    found = []
    for each in described:
        partitions = [_partition_fields(one) for one in each.partitions]
        found.append({"topic_name": each.topic, "topic_id": each.topic_id, "partitions": partitions})
        await turns.next(1 + len(partitions))
    return {"group_id": wanted.group_id, "topics": found, **_error_fields(None)}


def _partition_fields(offset: ShareOffset) -> Fields:
    return {
        "partition_index": offset.partition,
        "start_offset": offset.start_offset,
        "leader_epoch": offset.leader_epoch,
        "lag": offset.lag,
        **_error_fields(offset.error),
    }


async def alter_share_group_offsets(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Set new start offsets of a share group without members. The group is created if it does not exist."""
    start_offsets = [
        (each.topic_name, [(one.partition_index, one.start_offset) for one in each.partitions])
        for each in request.topics
    ]
    try:
        altered = await service.share_offsets.alter(request.group_id, start_offsets, caller=context.caller)
    except MansioError as error:
        return {**_error_fields(error), "responses": []}
    responses = [
        {
            "topic_name": each.topic,
            "topic_id": each.topic_id,
            "partitions": [
                {"partition_index": one.partition, **_error_fields(one.error)} for one in each.partitions
            ],
        }
        for each in altered
    ]
    return {**_error_fields(None), "responses": responses}


async def delete_share_group_offsets(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Delete the delivery state of topics of a share group without members."""
    try:
        deleted = await service.share_offsets.delete(
            request.group_id, [each.topic_name for each in request.topics], caller=context.caller
        )
    except MansioError as error:
        return {**_error_fields(error), "responses": []}
    responses = [
        {"topic_name": each.topic, "topic_id": each.topic_id, **_error_fields(each.error)} for each in deleted
    ]
    return {**_error_fields(None), "responses": responses}
