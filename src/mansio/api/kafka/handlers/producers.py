"""DescribeProducers (KIP-664).

Behavior: the producers in a partition's producer state are returned, with the start of the open transaction and the
coordinator epoch of the last marker. A partition named several times is returned once, and a response has at most
`PRODUCERS_MAX` producers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.errors import MansioError
from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.records import DescribedProducer
    from mansio.wire.codec.messages import Struct

UNKNOWN_VALUE: Final = -1
"""Value of a numeric field that a producer does not have, as in Kafka."""

PRODUCERS_MAX: Final = 100_000
"""Maximum number of producers in a response. Without it a short request could cause a very large response, because a
partition may have more than ten thousand producers."""


async def describe_producers(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the idempotent producers of each partition, with their last sequence and its time."""
    turns, caller = ItemTurns(service.scheduler), context.caller
    asked: dict[str, dict[int, None]] = {}
    for topic in request.topics:
        asked.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
    remaining = PRODUCERS_MAX
    topics = []
    for name, indexes in asked.items():
        partitions = []
        for index in indexes:
            found = _partition_fields(service, name, index, remaining, caller)
            count = len(found.get("active_producers", ()))
            remaining -= count
            partitions.append(found)
            await turns.next(1 + count)
        topics.append({"name": name, "partitions": partitions})
    return {"topics": topics}


def _partition_fields(
    service: BrokerServices, topic: str, index: int, remaining: int, caller: Caller
) -> dict[str, Any]:
    try:
        found = service.records.describe_producers(topic, index, producers_max=remaining, caller=caller)
    except MansioError as error:
        return {"partition_index": index, "error_code": error.kafka_code, "error_message": error.message}
    return {"partition_index": index, "active_producers": [_producer_fields(each) for each in found]}


def _producer_fields(found: DescribedProducer) -> dict[str, Any]:
    producer, start_offset = found.producer, found.transaction_start_offset
    return {
        "producer_id": found.producer_id,
        "producer_epoch": producer.epoch,
        "last_sequence": producer.batches[-1].last_sequence if producer.batches else UNKNOWN_VALUE,
        "last_timestamp": producer.last_seen_ms,
        "coordinator_epoch": producer.coordinator_epoch,
        "current_txn_start_offset": UNKNOWN_VALUE if start_offset is None else start_offset,
    }
