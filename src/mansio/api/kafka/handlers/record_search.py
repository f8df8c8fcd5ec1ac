"""SearchRecords (20131), an API of Mansio: one step of a search for records by key or id. Its fields are defined in
`mansio.wire.apis.mansio_apis`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.services.record_search import RecordQuery

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def search_records(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Search a part of a partition."""
    query = RecordQuery(
        request.key,
        request.record_id,
        request.offset,
        request.end_offset,
        request.since_ms,
        request.until_ms,
        request.max_matches,
        request.max_wait_ms,
    )
    step = await service.record_search.search(
        request.topic, request.partition_index, query, caller=context.caller
    )
    return {
        "next_offset": step.next_offset,
        "end_offset": step.end_offset,
        "matches": [{"offset": offset, "timestamp_ms": time_ms} for offset, time_ms in step.matches],
        "skipped": [each._asdict() for each in step.skipped],
        "searched_bytes": step.searched_bytes,
        "left_bytes": step.left_bytes,
    }
