"""ListOffsets (2), DeleteRecords (21) and OffsetForLeaderEpoch (23).

Behavior
* ListOffsets: a partition named more than once gets INVALID_REQUEST each time, as in Kafka.
* DeleteRecords (KIP-107) responds when the new log start is flushed on every in-sync replica (Kafka's brokers do not
  wait for disks), so that deleted records do not return. Internal topics get INVALID_TOPIC_EXCEPTION, compacted ones
  without deletion POLICY_VIOLATION.
* OffsetForLeaderEpoch returns the end offset of an epoch (KIP-101, KIP-279), so that a client can detect that its
  position was truncated.
* ListOffsets and OffsetForLeaderEpoch with a replica id of 0 or more are refused unless that broker has authenticated
  on the connection.

Version notes
* ListOffsets 2: isolation level. 4: leader epochs. 7: offset of the highest timestamp (KIP-734). 8: earliest local
  offset (KIP-405; all data is local). 9: last tiered offset (none: -1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.services.records import ListedOffset, OffsetQuery, RecordsToDelete
from mansio.errors import MansioError
from mansio.host.item_turns import ItemTurns
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct

NO_LOW_WATERMARK = -1


async def list_offsets(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Return offsets by timestamp, or of the start or end of the log."""
    refusal = _authorization_error(service, request, context)
    turns = ItemTurns(service.scheduler)
    queries = []
    for topic in request.topics:
        queries += [
            OffsetQuery(topic.name, wanted.partition_index, wanted.timestamp, wanted.current_leader_epoch)
            for wanted in topic.partitions
        ]
        await turns.next(1 + len(topic.partitions))
    results = iter(
        await service.records.list_offsets(
            queries, isolation_level=request.isolation_level, caller=context.caller
        )
        if refusal is None
        else [refusal] * len(queries)
    )
    topics = []
    for topic in request.topics:
        listed = [_listed_offset_fields(wanted.partition_index, next(results)) for wanted in topic.partitions]
        topics.append({"name": topic.name, "partitions": listed})
        await turns.next(1 + len(listed))
    return {"topics": topics}


def _listed_offset_fields(index: int, found: ListedOffset | MansioError) -> dict[str, Any]:
    code = 0
    if isinstance(found, MansioError):
        code, found = found.kafka_code, ListedOffset()
    return {
        "partition_index": index,
        "error_code": code,
        "timestamp": found.timestamp_ms,
        "offset": found.offset,
        "leader_epoch": found.leader_epoch,
    }


async def delete_records(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Delete the records below an offset in several partitions."""
    turns = ItemTurns(service.scheduler)
    deletions = []
    for topic in request.topics:
        deletions += [
            RecordsToDelete(topic.name, wanted.partition_index, wanted.offset) for wanted in topic.partitions
        ]
        await turns.next(1 + len(topic.partitions))
    results = iter(
        await service.records.delete_records(deletions, timeout_ms=request.timeout_ms, caller=context.caller)
    )
    topics = []
    for topic in request.topics:
        deleted = [_deletion_fields(wanted.partition_index, next(results)) for wanted in topic.partitions]
        topics.append({"name": topic.name, "partitions": deleted})
        await turns.next(1 + len(deleted))
    return {"topics": topics}


def _deletion_fields(index: int, result: int | MansioError) -> dict[str, Any]:
    if isinstance(result, MansioError):
        return {
            "partition_index": index,
            "low_watermark": NO_LOW_WATERMARK,
            "error_code": result.kafka_code,
        }
    return {"partition_index": index, "low_watermark": result, "error_code": 0}


async def offset_for_leader_epoch(
    service: BrokerServices,
    request: Struct,
    context: RequestContext,
) -> dict[str, Any]:
    """Return the end offset of a leader epoch in each partition."""
    refusal = _authorization_error(service, request, context)
    turns = ItemTurns(service.scheduler)
    topics = []
    for topic in request.topics:
        await turns.next()
        partitions = []
        for wanted in topic.partitions:
            await turns.next()
            partitions.append(_epoch_end_offset_fields(service, topic.topic, wanted, refusal, context.caller))
        topics.append({"topic": topic.topic, "partitions": partitions})
    return {"topics": topics}


def _authorization_error(
    service: BrokerServices, request: Struct, context: RequestContext
) -> MansioError | None:
    """Return an error if the request has a replica id and the connection is not authenticated as that broker; None if
    it is, or for the negative replica ids of clients."""
    if request.replica_id < 0:
        return None
    peer, authenticator = context.peer, service.authenticator
    try:
        authenticator.require_identity(
            peer, request.replica_id, -1 if peer is None else peer.broker_epoch, context.client_host
        )
    except MansioError as error:
        return without_traceback(error)
    return None


def _epoch_end_offset_fields(
    service: BrokerServices, topic: str, wanted: Struct, refusal: MansioError | None, caller: Caller
) -> dict[str, Any]:
    try:
        if refusal is not None:
            raise copied(refusal)
        end = service.records.offset_for_leader_epoch(
            topic,
            None,
            wanted.partition,
            wanted.leader_epoch,
            current_leader_epoch=wanted.current_leader_epoch,
            caller=caller,
        )
    except MansioError as error:
        return {
            "error_code": error.kafka_code,
            "partition": wanted.partition,
            "leader_epoch": -1,
            "end_offset": -1,
        }
    return {
        "error_code": 0,
        "partition": wanted.partition,
        "leader_epoch": end.leader_epoch,
        "end_offset": end.end_offset,
    }
