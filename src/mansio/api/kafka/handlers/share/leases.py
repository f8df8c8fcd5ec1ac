"""AcknowledgeRecords (20100), DescribeLeases (20101) and RedriveRecords (20102), APIs of Mansio for share groups. Their
fields are defined in `mansio.wire.apis.mansio_apis`.

Behavior: the leader of a partition answers requests about it; each partition of a request succeeds or fails on its own.
Acknowledgements and redrives are stored before they are answered. DescribeLeases loads the state of a share partition
that is not in memory, and never creates a state.
Not obvious: a redrive is answered with the number of records that it made available again. If a client repeats a
request with the same redrive id, records that the earlier request made available again are counted as `repeated`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.api.kafka.handlers.share.share_fetch import error_for_client
from mansio.api.kafka.large_requests import decoded
from mansio.broker.services.share_groups.share import PartitionAcknowledgements
from mansio.host.item_turns import ItemTurns
from mansio.state.share_partition.types import AcknowledgementBatch
from mansio.wire.apis import acknowledge_records as wire
from mansio.wire.apis.acknowledge_records import AcknowledgedPartition

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.share_groups.share import SharePartitionDescription
    from mansio.wire.codec.messages import Struct


async def acknowledge_records(service: BrokerServices, request: bytes, context: RequestContext) -> bytes:
    """Accept, release, reject or renew leased records. The client needs no share session."""
    group, member, partitions = await decoded(service, wire.decode_request, memoryview(request))
    turns = ItemTurns(service.scheduler) if len(partitions) > 1 else None
    parts = []
    for topic_id, index, batches in partitions:
        part = PartitionAcknowledgements(topic_id, index, [AcknowledgementBatch(*batch) for batch in batches])
        parts.append(part)
        if turns is not None:
            await turns.next(1 + len(batches))
    topics: dict[bytes, list[AcknowledgedPartition]] = {}
    lock_ms = 0
    for result in await service.share_service.acknowledge(group, member, parts, caller=context.caller):
        code, message = error_for_client(result.error)
        if code:
            service.statistics.count_error(context.api_key, code)
        lock_ms = result.lock_ms or lock_ms
        acknowledged = AcknowledgedPartition(result.partition, code, message)
        topics.setdefault(result.topic_id, []).append(acknowledged)
        if turns is not None:
            await turns.next()
    return wire.encode_response(context.correlation_id, topics, lock_ms=lock_ms)


async def describe_leases(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return leases and record counts of share partitions of a group."""
    wanted = None
    if request.topics is not None:
        wanted = [(topic.topic_id or b"", index) for topic in request.topics for index in topic.partitions]
    found = await service.share_service.describe_leases(
        request.group_id,
        wanted,
        ranges_max=request.ranges_max,
        caller=context.caller,
        with_states=request.with_states,
        from_offset=request.from_offset,
    )
    topics: dict[bytes, list[dict[str, Any]]] = {}
    for each in found:
        topics.setdefault(each.topic_id, []).append(_share_partition_fields(each))
    return {
        "topics": [
            {"topic_id": topic_id or None, "partitions": partitions}
            for topic_id, partitions in topics.items()
        ]
    }


def _share_partition_fields(found: SharePartitionDescription) -> dict[str, Any]:
    error, counts = found.error, found.counts
    if error is not None:
        code, message = error.kafka_code, error.message
        return {"partition_index": found.partition, "error_code": code, "error_message": message}
    assert counts is not None, "a description without error has counts"
    return {
        "partition_index": found.partition,
        "start_offset": counts.start_offset,
        "end_offset": counts.end_offset,
        "lag": counts.lag,
        "leased": counts.leased,
        "in_backoff": counts.in_backoff,
        "withheld": counts.withheld,
        "archiving": counts.archiving,
        "dead": counts.dead,
        "dead_letter_error": found.dead_letter_error,
        "holders": [
            {"member_id": one.member_id, "leased": one.leased, "oldest_ms": one.oldest_ms}
            for one in counts.holders
        ],
        "ranges": [
            {
                "first_offset": each.first_offset,
                "last_offset": each.last_offset,
                "member_id": each.member_id,
                "delivery_count": each.delivery_count,
                "age_ms": each.age_ms,
                "lease_ms": each.lease_ms,
                "state": each.state,
                "due_ms": each.due_ms,
            }
            for each in found.ranges
        ],
        "priorities": [
            {
                "priority": number,
                "start_offset": each.start_offset,
                "end_offset": each.end_offset,
                "lag": each.lag,
                "leased": each.leased,
                "in_backoff": each.in_backoff,
                "dead": each.dead,
            }
            for number, each in found.by_number
        ],
        "keys_at_lease_limit": found.limited_keys.at_lease_limit,
        "keys_at_rate_limit": found.limited_keys.at_rate_limit,
        "limited_keys": [{"key": key} for key in found.limited_keys.keys],
        "isolated_key_count": found.isolated_count,
        "isolated_keys": [{"key": key} for key in found.isolated_keys],
    }


async def redrive_records(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Offer dead-lettered records of one partition to their share group again."""
    offsets = None
    if request.offsets is not None:
        offsets = [(one.first_offset, one.last_offset) for one in request.offsets]
    result, dead = await service.share_service.redrive(
        request.group_id,
        request.topic_id or b"",
        request.partition_index,
        redrive_id=request.redrive_id,
        offsets=offsets,
        records_max=request.most,
        caller=context.caller,
    )
    return {
        "redriven": result.redriven,
        "repeated": result.repeated,
        "deleted": result.deleted,
        "dead": dead,
    }
