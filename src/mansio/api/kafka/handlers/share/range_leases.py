"""LeaseRanges (20134) and AlterRangeLeases (20135), APIs of Mansio for members of share groups that read by Fetch.
Their fields are defined in `mansio.wire.apis.mansio_apis`.

Behavior: the leader of a partition answers requests about it; each partition of a request succeeds or fails on its own.
Leases are stored durably before they are answered. LeaseRanges has only the partitions with leases or an error in its
answer.
Not obvious: leases of an answer that was lost are those that the next AlterRangeLeases of the member does not name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.api.kafka.handlers.share.share_fetch import error_for_client
from mansio.errors import InvalidRequest
from mansio.state.share_partition.types import AcquiredRange, RangeOperation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.share_groups.range_leases import RangesOfPartition
    from mansio.wire.codec.messages import Struct


async def lease_ranges(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Lease ranges of offsets to a member without a session."""
    partitions = [(topic.topic_id or b"", index) for topic in request.topics for index in topic.partitions]
    found = await service.range_leases.lease(
        request.group_id,
        request.member_id,
        partitions,
        max_records=request.records_max,
        lease_ms=request.lease_ms,
        max_wait_ms=request.wait_ms,
        caller=context.caller,
    )
    return _fields(service, context, found)


async def alter_range_leases(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Keep, claim or accept range leases of a member, and release its other ones if it asks for that."""
    wanted = {
        (topic.topic_id or b"", part.partition_index): [
            AcquiredRange(each.first_offset, each.last_offset, each.delivery_count) for each in part.ranges
        ]
        for topic in request.topics
        for part in topic.partitions
    }
    found = await service.range_leases.alter(
        request.group_id,
        request.member_id,
        wanted,
        lease_ms=request.lease_ms,
        operation=range_operation(request.operation),
        releases_others=request.releases_others,
        caller=context.caller,
    )
    return _fields(service, context, found)


def range_operation(number: int) -> RangeOperation:
    """Return the operation with a number. Raises `InvalidRequest`."""
    try:
        return RangeOperation(number)
    except ValueError as error:
        raise InvalidRequest(f"unknown operation {number}") from error


def _range_fields(ranges: Iterable[AcquiredRange]) -> list[dict[str, Any]]:
    return [
        {"first_offset": first, "last_offset": last, "delivery_count": deliveries}
        for first, last, deliveries in ranges
    ]


def _fields(
    service: BrokerServices, context: RequestContext, found: Iterable[RangesOfPartition]
) -> dict[str, Any]:
    topics: dict[bytes, list[dict[str, Any]]] = {}
    order, is_committed_only = "", False
    for each in found:
        code, message = error_for_client(each.error)
        if code:
            service.statistics.count_error(context.api_key, code)
        order, is_committed_only = each.order or order, is_committed_only or each.is_committed_only
        topics.setdefault(each.topic_id, []).append(
            {
                "partition_index": each.partition,
                "error_code": code,
                "error_message": message,
                "ranges": _range_fields(each.ranges),
                "ended_ranges": _range_fields(each.ended),
            }
        )
    return {
        "order": order,
        "isolation_level": int(is_committed_only),
        "topics": [
            {"topic_id": topic_id or None, "partitions": partitions}
            for topic_id, partitions in topics.items()
        ],
    }
