"""ReceiveRecords (20109), ReleaseLeases (20110) and RegisterShareGroup (20111), which brokers send for clients that may
ask any broker. Their fields are defined in `mansio.wire.apis.mansio_apis`.

Behavior: only an authenticated broker of the cluster may send them, in a ForwardRequest with the identity of the
client, whose rights this broker asks for again. The release of leases needs no right. ReceiveRecords leases the
available records of the partitions that this broker leads, or, for 0 records, waits until one may be available: many
clients share such a wait, so it comes without a ForwardRequest.
Not obvious: the member id of a receive is chosen by the sender, so that its client gets records of several brokers as
those of one member, and so that a receive without an answer can be released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.coordinator.share.received_records import ReceivedRecord
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def receive_records(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Lease records for a member without a session, or wait for one."""
    _require_sender(service, request, context)
    if not request.records_max:
        is_available = await service.receive.wait_for_records(
            request.group_id, request.topics, max_wait_ms=request.wait_ms
        )
        return {"is_available": is_available}
    result = await service.receive.receive_records(
        request.group_id,
        request.topics,
        max_records=request.records_max,
        max_wait_ms=0,
        max_bytes=request.bytes_max,
        lease_ms=request.lease_ms,
        member_id=request.member_id,
        caller=context.forwarding_caller,
    )
    partitions: dict[tuple[str, int], dict[str, Any]] = {}
    for record in result.records:
        key = record.topic, record.partition
        if key not in partitions:
            partitions[key] = {
                "topic": record.topic,
                "topic_id": record.topic_id,
                "partition_index": record.partition,
                "error_code": 0,
                "records": [],
            }
        partitions[key]["records"].append(_record_fields(record))
    failed = [
        {
            "topic": topic,
            "topic_id": None,
            "partition_index": index,
            "error_code": error.kafka_code,
            "error_message": error.message,
        }
        for (topic, index), error in result.errors.items()
    ]
    return {
        "throttle_time_ms": result.throttle_ms,
        "lock_ms": result.lock_ms,
        "partitions": [*partitions.values(), *failed],
    }


def _record_fields(record: ReceivedRecord) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "delivery_count": record.delivery_count,
        "timestamp_ms": record.timestamp_ms,
        "key": record.key,
        "value": record.value,
        "headers": [{"name": name, "value": value} for name, value in record.headers],
    }


async def release_leases(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Release the leases of a member."""
    _require_sender(service, request, context)
    await service.receive.release(request.group_id, request.member_id)
    return {}


async def register_share_group(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Create a share group that this broker coordinates."""
    _require_sender(service, request, context)
    await service.leases.register_here(request.group_id, request.topics, caller=context.forwarding_caller)
    return {}


def _require_sender(service: BrokerServices, request: Struct, context: RequestContext) -> None:
    service.authenticator.require_identity(
        context.peer, request.node_id, request.broker_epoch, context.client_host
    )
