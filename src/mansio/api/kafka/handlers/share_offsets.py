"""DescribeShareGroupOffsets, AlterShareGroupOffsets and DeleteShareGroupOffsets.

Handled by the group coordinator, which calls the broker that keeps the state. Altering replaces the state of a share
partition in a higher state epoch, so that its leader is fenced with its next write; a leader on this broker ends
at once.

Invariants: a group with members is not altered. Topics of a group are altered or deleted one at a time; errors are
reported per partition or topic.

Source: KIP-932, KIP-1226 (lag).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.coordinator.group.error_mapping import as_coordinator_error, check_group_id
from mansio.errors import (
    InvalidRequest,
    MansioError,
    NonEmptyGroup,
    UnknownTopicOrPartition,
)
from mansio.state.share_partition.types import ShareKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.kafka.server.request_router import RequestContext
    from mansio.broker.coordinator.group.group_store import GroupEntry
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.state.share_group.group import ShareGroup
    from mansio.state.share_partition.types import ShareSummary
    from mansio.wire.codec.messages import Struct

Fields = dict[str, Any]

UNKNOWN: Final = -1
NO_TOPIC: Final = bytes(16)
NO_ERROR: Final[tuple[int, str | None]] = (0, None)


async def describe_share_group_offsets(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Start offset and lag of each partition of the groups."""
    named = Counter(each.group_id for each in request.groups)
    return {
        "groups": [await _described(service, each, once=named[each.group_id] == 1) for each in request.groups]
    }


async def _described(service: BrokerServices, asked: Struct, *, once: bool) -> Fields:
    try:
        check_group_id(asked.group_id)
        if not once:  # a short request would cause a large response
            raise InvalidRequest(f"group {asked.group_id!r} is in the request more than once")
        _, group = service.groups.share_groups.find(asked.group_id)
        topics = [await _described_topic(service, group, *each) for each in _wanted(service, group, asked)]
    except MansioError as error:
        code, message = _error_for_client(error)
        failed = {"error_code": code, "error_message": message}
        return {"group_id": asked.group_id, "topics": [], **failed}
    return {"group_id": asked.group_id, "topics": topics, "error_code": 0, "error_message": None}


def _wanted(service: BrokerServices, group: ShareGroup, asked: Struct) -> list[tuple[str, Sequence[int]]]:
    if asked.topics is not None:
        return [(each.topic_name, each.partitions) for each in asked.topics]
    name_of = service.groups.topic_resolver.name_of
    return [
        (name, each.partitions)
        for each in group.state_partitions.initialized
        if (name := name_of(each.topic_id)) is not None
    ]


async def _described_topic(
    service: BrokerServices, group: ShareGroup, name: str, indexes: Sequence[int]
) -> Fields:
    topic = service.topics.state.topics.get(name)
    topic_id = NO_TOPIC if topic is None else topic.topic_id.bytes
    partitions = []
    for index in indexes:
        try:
            if topic is None or not 0 <= index < len(topic.partitions):
                raise UnknownTopicOrPartition(f"there is no partition {name}-{index}")
            key = ShareKey(group.group_id, topic_id, index)
            partitions.append(await _described_partition(service, name, key))
        except MansioError as error:
            partitions.append(
                {
                    "partition_index": index,
                    "start_offset": UNKNOWN,
                    "leader_epoch": 0,
                    "lag": UNKNOWN,
                    "error_code": error.kafka_code,
                    "error_message": error.message,
                }
            )
    return {"topic_name": name, "topic_id": topic_id, "partitions": partitions}


async def _described_partition(service: BrokerServices, name: str, key: ShareKey) -> Fields:
    summary = await service.shares.persister.summary(key)
    fields: Fields = {"partition_index": key.partition, "error_code": 0, "error_message": None}
    if summary is None:
        return {**fields, "start_offset": UNKNOWN, "leader_epoch": 0, "lag": UNKNOWN}
    lag = _lag(service, name, key, summary)
    return {
        **fields,
        "start_offset": summary.start_offset,
        "leader_epoch": max(summary.leader_epoch, 0),
        "lag": lag,
    }


def _lag(service: BrokerServices, name: str, key: ShareKey, summary: ShareSummary) -> int:
    """Lag of a share partition; -1 without a local replica. The end of a replica may lag behind its leader."""
    partition = service.partitions.get(name, key.partition)
    if partition is None:
        return UNKNOWN
    start = max(summary.start_offset, partition.start_offset)
    return max(partition.high_watermark - start - summary.done_count, 0)


def _error_for_client(error: MansioError) -> tuple[int, str]:
    """Code and message; errors of the group's log are mapped to those of a coordinator."""
    if not isinstance(error, UnknownTopicOrPartition):
        error = as_coordinator_error(error)
    return error.kafka_code, error.message


# ---------------------------------------------------------------- changing


def _empty(service: BrokerServices, group_id: str) -> tuple[GroupEntry, ShareGroup]:
    check_group_id(group_id)
    entry, group = service.groups.share_groups.find(group_id)
    _check_empty(group)
    return entry, group


def _check_empty(group: ShareGroup) -> None:
    if group.members:
        raise NonEmptyGroup(f"group {group.group_id!r} has members")


async def alter_share_group_offsets(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Set new start offsets; leases and delivery state of these partitions are dropped. A group that does not exist is
    created with them, so that an administrator can set where it will begin (KAFKA-19662)."""
    topics = service.topics.state.topics
    group: ShareGroup | None = None
    try:
        check_group_id(request.group_id)
        if any(
            asked.topic_name in topics
            and 0 <= each.partition_index < len(topics[asked.topic_name].partitions)
            for asked in request.topics
            for each in asked.partitions
        ):
            entry, group = await service.groups.share_groups.find_or_create(request.group_id)
            _check_empty(group)
    except MansioError as error:
        code, reason = _error_for_client(error)
        return {"error_code": code, "error_message": reason, "responses": []}
    responses = []
    for asked in request.topics:
        topic = topics.get(asked.topic_name)
        topic_id = NO_TOPIC if topic is None else topic.topic_id.bytes
        results, altered = [], []
        for each in asked.partitions:
            error_code, message = NO_ERROR
            try:
                if topic is None or not 0 <= each.partition_index < len(topic.partitions):
                    raise UnknownTopicOrPartition(
                        f"there is no partition {asked.topic_name}-{each.partition_index}"
                    )
                await _altered(
                    service, ShareKey(request.group_id, topic_id, each.partition_index), each.start_offset
                )
                altered.append(each.partition_index)
            except MansioError as error:
                error_code, message = _error_for_client(error)
            results.append(
                {
                    "partition_index": each.partition_index,
                    "error_code": error_code,
                    "error_message": message,
                }
            )
        if altered and topic is not None and group is not None:
            every = range(len(topic.partitions))  # from then on the other partitions do not count as added
            await _record_state(service, entry, group, topic_id, asked.topic_name, every)
        responses.append({"topic_name": asked.topic_name, "topic_id": topic_id, "partitions": results})
    return {"error_code": 0, "error_message": None, "responses": responses}


async def _altered(service: BrokerServices, key: ShareKey, start_offset: int) -> None:
    if start_offset < 0:
        raise InvalidRequest(f"{start_offset} is not an offset")
    shares = service.shares
    await shares.wait_for_dead_letters(key)
    summary = await shares.persister.summary(key)
    await shares.persister.initialize(key, 0 if summary is None else summary.state_epoch + 1, start_offset)
    shares.forget(key)


async def _record_state(
    service: BrokerServices,
    entry: GroupEntry,
    group: ShareGroup,
    topic_id: bytes,
    name: str,
    indexes: Sequence[int],
) -> None:
    """Record partitions with state in the group, so that the state is deleted with the group."""
    if not entry.is_unloaded and entry.group is group:
        await service.groups.share_groups.initialized(entry, group, topic_id, name, indexes)


async def delete_share_group_offsets(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Delete the state of topics; the group starts in them like a new one."""
    try:
        entry, group = _empty(service, request.group_id)
    except MansioError as error:
        return {"error_code": error.kafka_code, "error_message": error.message, "responses": []}
    responses = []
    for asked in request.topics:
        topic = service.topics.state.topics.get(asked.topic_name)
        topic_id = NO_TOPIC if topic is None else topic.topic_id.bytes
        error_code, message = NO_ERROR
        try:
            if topic is None:
                raise UnknownTopicOrPartition(f"there is no topic {asked.topic_name!r}")
            await service.groups.share_groups.delete_topics(entry, group, [topic_id])
        except MansioError as error:
            error_code, message = _error_for_client(error)
        responses.append(
            {
                "topic_name": asked.topic_name,
                "topic_id": topic_id,
                "error_code": error_code,
                "error_message": message,
            }
        )
    return {"error_code": 0, "error_message": None, "responses": responses}
