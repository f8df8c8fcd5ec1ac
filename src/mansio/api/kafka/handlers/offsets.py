"""OffsetCommit, TxnOffsetCommit, OffsetFetch and OffsetDelete.

Version notes: OffsetCommit 2-4 carry a retention time, which is ignored (`offsets.retention.minutes` applies to all).
OffsetFetch 8+ requests several groups (KIP-709); 2+ with null topics requests all offsets (before version 8 the
error of the group is at the top level; in version 1 only in each partition). With require-stable (7+) partitions with
an offset of an open transaction get UNSTABLE_OFFSET_COMMIT (KIP-447). TxnOffsetCommit 3+ names the member of the group;
5+ adds the group's partition of `__consumer_offsets` to the transaction (KIP-890). Errors that older versions do not
know are replaced by those that Kafka sends: before version 2 COORDINATOR_LOAD_IN_PROGRESS, before 4
TRANSACTION_ABORTABLE.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from mansio.api.kafka.handlers.group_responses import error_code
from mansio.broker.coordinator.group.offset_manager import OffsetToCommit
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    InvalidRequest,
    MansioError,
    TopicAuthorizationFailed,
    UnstableOffsetCommit,
)
from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct
    from mansio.wire.internal_records.offset_and_group_records import CommittedOffset
    from mansio.wire.topic_partition import PartitionKey

ADDING_VERSION_MIN: Final = 5
"""Version from which TxnOffsetCommit adds the partition of the group to the transaction."""
INVALID_TXN_STATE: Final = 48
TRANSACTION_ABORTABLE: Final = 120

Fields = dict[str, Any]


async def offset_commit(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Commit offsets of a group; answer once they are durable."""
    offsets = _offsets_to_commit(request)
    codes: list[int]
    try:
        results = await service.group_service.commit_offsets(
            request.group_id,
            offsets,
            member_id=request.member_id,
            instance_id=request.group_instance_id,
            generation=request.generation_id_or_member_epoch,
            caller=context.caller,
        )
        codes = [error_code(each) for each in results]
    except MansioError as error:
        codes = [error.kafka_code] * len(offsets)
    return {"topics": _offset_topic_fields([(each.topic, each.partition) for each in offsets], codes)}


async def txn_offset_commit(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Commit offsets of a group as a part of a transaction; answer once they are durable."""
    version = context.api_version
    offsets = _offsets_to_commit(request, has_leader_epoch=version >= 2)
    member: Fields = {}
    if version >= 3:
        member = {
            "member_id": request.member_id,
            "instance_id": request.group_instance_id,
            "generation": request.generation_id,
        }
    codes: list[int]
    try:
        results = await service.group_service.commit_offsets_in_transaction(
            request.transactional_id,
            request.group_id,
            request.producer_id,
            request.producer_epoch,
            offsets,
            adds=version >= ADDING_VERSION_MIN,
            caller=context.caller,
            **member,
        )
        codes = [error_code(each) for each in results]
    except MansioError as error:
        codes = [_txn_error_code(error.kafka_code, version)] * len(offsets)
    return {"topics": _offset_topic_fields([(each.topic, each.partition) for each in offsets], codes)}


def _txn_error_code(code: int, version: int) -> int:
    """Return the code for an error of TxnOffsetCommit that clients of this version handle."""
    if version < 2 and code == CoordinatorLoadInProgress.kafka_code:
        return CoordinatorNotAvailable.kafka_code
    if version < 4 and code == TRANSACTION_ABORTABLE:
        return INVALID_TXN_STATE
    return code


def _offsets_to_commit(request: Struct, *, has_leader_epoch: bool = True) -> list[OffsetToCommit]:
    return [
        OffsetToCommit(
            topic.name,
            each.partition_index,
            each.committed_offset,
            each.committed_leader_epoch if has_leader_epoch else -1,
            each.committed_metadata or "",
        )
        for topic in request.topics
        for each in topic.partitions
    ]


async def offset_fetch(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Return the committed offsets of one or more groups."""
    version = context.api_version
    if version >= 8:
        named = Counter(each.group_id for each in request.groups)
        turns = ItemTurns(service.scheduler)
        groups = []
        for each in request.groups:
            if named[each.group_id] > 1:
                groups.append(_duplicate_group(each))
                continue
            found = await _fetch(service, each, context, requires_stable=request.require_stable)
            groups.append(found)
            await turns.next(1 + sum(len(topic["partitions"]) for topic in found["topics"]))
        return {"groups": groups}
    answer = await _fetch(
        service, request, context, requires_stable=version >= 7 and bool(request.require_stable)
    )
    del answer["group_id"]
    return answer


def _duplicate_group(asked: Struct) -> Fields:
    """Return an error for a group that the request names more than once: otherwise a short request could cause a very
    large response."""
    return {"group_id": asked.group_id, "topics": [], "error_code": InvalidRequest.kafka_code}


async def _fetch(
    service: BrokerServices, request: Struct, context: RequestContext, *, requires_stable: bool
) -> Fields:
    version = context.api_version
    wanted = None
    if request.topics is not None:
        wanted = [(topic.name, index) for topic in request.topics for index in topic.partition_indexes]
    code = 0
    found: dict[PartitionKey, CommittedOffset] = {}
    unstable: frozenset[PartitionKey] = frozenset()
    refused: frozenset[PartitionKey] = frozenset()
    try:
        member_id, member_epoch = "", -1
        if version >= 9:
            member_id, member_epoch = request.member_id or "", request.member_epoch
        found, unstable, refused = await service.group_service.fetch_offsets(
            request.group_id,
            wanted,
            member_id=member_id,
            member_epoch=member_epoch,
            requires_stable=requires_stable,
            caller=context.caller,
        )
    except MansioError as error:
        code = error.kafka_code
    topics: dict[str, list[Fields]] = {}
    for key in wanted if wanted is not None else sorted({*found, *unstable}):
        committed = found.get(key)
        topics.setdefault(key[0], []).append(
            {
                "partition_index": key[1],
                "committed_offset": -1 if committed is None else committed.offset,
                "committed_leader_epoch": -1 if committed is None else committed.leader_epoch,
                "metadata": "" if committed is None else committed.metadata,
                "error_code": TopicAuthorizationFailed.kafka_code
                if key in refused
                else _partition_code(code, version, is_unstable=key in unstable),
            }
        )
    return {
        "group_id": request.group_id,
        "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
        "error_code": code,
    }


def _partition_code(code: int, version: int, *, is_unstable: bool) -> int:
    if is_unstable:
        return UnstableOffsetCommit.kafka_code
    return code if version < 2 else 0


async def offset_delete(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Delete committed offsets of a group."""
    wanted = [(topic.name, each.partition_index) for topic in request.topics for each in topic.partitions]
    try:
        results = await service.group_service.delete_offsets(request.group_id, wanted, caller=context.caller)
    except MansioError as error:
        return {"error_code": error.kafka_code}
    return {"topics": _offset_topic_fields(wanted, [error_code(each) for each in results])}


def _offset_topic_fields(partitions: Sequence[PartitionKey], codes: Sequence[int]) -> list[Fields]:
    topics: dict[str, list[Fields]] = {}
    for (topic, partition), code in zip(partitions, codes, strict=True):
        topics.setdefault(topic, []).append({"partition_index": partition, "error_code": code})
    return [{"name": name, "partitions": answered} for name, answered in topics.items()]
