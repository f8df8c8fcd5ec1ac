"""TraceRecord (20125) and ReadTrace (20130), APIs of Mansio for the history of a record. Their fields are defined in
`mansio.wire.apis.mansio_apis`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from uuid import UUID

from mansio.broker.trace.trace_peers import failed_record_fields, local_trace_fields

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def trace_record(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Return the timeline of a record."""
    caller, traces = context.caller, service.traces
    topic, partition, offset = request.topic, request.partition_index, request.offset
    if request.group:
        topic, partition, offset = await traces.last_failed(request.group, caller=caller)
    timeline = await traces.trace(topic, partition, offset, caller=caller)
    return {
        "topic": topic,
        "partition_index": partition,
        "offset": offset,
        "events": [each._asdict() for each in timeline.events],
        "total_ms": timeline.total_ms,
        "uncertainties": list(timeline.uncertainties),
        "facts": asdict(timeline.facts),
    }


async def read_trace(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Return what this broker knows of a record. Only a broker may ask."""
    service.authenticator.require_identity(
        context.peer, request.node_id, request.broker_epoch, context.client_host
    )
    if request.failed_group:
        failed = await service.traces.reader.last_failed(request.failed_group)
        return {"failed": None if failed is None else failed_record_fields(failed)}
    found = await service.traces.reader.read(
        UUID(bytes=request.topic_id or bytes(16)),
        request.partition_index,
        request.offset,
        accepted_offset=request.accepted_offset,
        needs_facts=request.needs_facts,
    )
    return local_trace_fields(found)
