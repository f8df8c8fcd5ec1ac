"""OffsetCommit, OffsetFetch and OffsetDelete.

Version notes: OffsetCommit 2-4 carry a retention time, which is ignored (`offsets.retention.minutes` applies to all).
OffsetFetch 8+ requests several groups (KIP-709); 2+ with null topics requests all offsets (before version 8 the
error of the group is at the top level; in version 1 only in each partition). Require-stable (7+) is always
fulfilled: there are no transactions.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mansio.api.kafka.handlers.group_responses import error_code
from mansio.broker.coordinator.group.offset_manager import OffsetToCommit
from mansio.errors import InvalidRequest, MansioError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.kafka.server.request_router import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct
    from mansio.wire.internal_records.offset_and_group_records import CommittedOffset

Fields = dict[str, Any]
TopicPartition = tuple[str, int]


async def offset_commit(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Commit offsets of a group; answer once they are durable."""
    offsets = [
        OffsetToCommit(
            topic.name,
            each.partition_index,
            each.committed_offset,
            each.committed_leader_epoch,
            each.committed_metadata or "",
        )
        for topic in request.topics
        for each in topic.partitions
    ]
    codes: list[int]
    try:
        results = await service.group_service.commit_offsets(
            request.group_id,
            offsets,
            member_id=request.member_id,
            instance_id=request.group_instance_id,
            generation=request.generation_id_or_member_epoch,
        )
        codes = [error_code(each) for each in results]
    except MansioError as error:
        codes = [error.kafka_code] * len(offsets)
    return {"topics": _offset_topic_fields([(each.topic, each.partition) for each in offsets], codes)}


async def offset_fetch(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Return the committed offsets of one or more groups."""
    version = context.api_version
    if version >= 8:
        named = Counter(each.group_id for each in request.groups)
        return {
            "groups": [
                _duplicate_group(each) if named[each.group_id] > 1 else await _fetch(service, each, version)
                for each in request.groups
            ]
        }
    answer = await _fetch(service, request, version)
    del answer["group_id"]
    return answer


def _duplicate_group(asked: Struct) -> Fields:
    """Return an error for a group that the request names more than once: otherwise a short request could cause a very
    large response."""
    return {"group_id": asked.group_id, "topics": [], "error_code": InvalidRequest.kafka_code}


async def _fetch(service: BrokerServices, request: Struct, version: int) -> Fields:
    wanted = None
    if request.topics is not None:
        wanted = [(topic.name, index) for topic in request.topics for index in topic.partition_indexes]
    code = 0
    found: dict[TopicPartition, CommittedOffset] = {}
    try:
        member_id, member_epoch = "", -1
        if version >= 9:
            member_id, member_epoch = request.member_id or "", request.member_epoch
        found = await service.group_service.fetch_offsets(
            request.group_id, wanted, member_id=member_id, member_epoch=member_epoch
        )
    except MansioError as error:
        code = error.kafka_code
    topics: dict[str, list[Fields]] = {}
    for key in wanted if wanted is not None else sorted(found):
        committed = found.get(key)
        topics.setdefault(key[0], []).append(
            {
                "partition_index": key[1],
                "committed_offset": -1 if committed is None else committed.offset,
                "committed_leader_epoch": -1 if committed is None else committed.leader_epoch,
                "metadata": "" if committed is None else committed.metadata,
                "error_code": code if version < 2 else 0,
            }
        )
    return {
        "group_id": request.group_id,
        "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
        "error_code": code,
    }


async def offset_delete(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Delete committed offsets of a group."""
    wanted = [(topic.name, each.partition_index) for topic in request.topics for each in topic.partitions]
    try:
        results = await service.group_service.delete_offsets(request.group_id, wanted)
    except MansioError as error:
        return {"error_code": error.kafka_code}
    return {"topics": _offset_topic_fields(wanted, [error_code(each) for each in results])}


def _offset_topic_fields(partitions: Sequence[TopicPartition], codes: Sequence[int]) -> list[Fields]:
    topics: dict[str, list[Fields]] = {}
    for (topic, partition), code in zip(partitions, codes, strict=True):
        topics.setdefault(topic, []).append({"partition_index": partition, "error_code": code})
    return [{"name": name, "partitions": answered} for name, answered in topics.items()]
