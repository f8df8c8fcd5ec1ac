"""DescribeHotPartitions (20128) and DescribePartitionRates (20129), APIs of Mansio.

Behavior: a broker describes the partitions that it leads itself; a client asks all brokers.
Not obvious: the keys of a partition are data, and need READ on its topic. Without it the partition is described
without keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.hot_partitions import DescribedHotPartition
    from mansio.wire.codec.messages import Struct

KEYS_MAX: Final = 20
"""Maximum number of keys of each partition in a response."""


async def describe_hot_partitions(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return load and hot partitions of this broker."""
    found = service.hot_partitions.describe(min(request.keys_max, KEYS_MAX), caller=context.caller)
    return {
        "window_ms": found.window_ms,
        "rate": found.load.rate,
        "busy": found.load.busy,
        "partitions": [_partition_fields(each) for each in found.partitions],
    }


def _partition_fields(hot: DescribedHotPartition) -> dict[str, Any]:
    fields = {
        "topic": hot.topic,
        "topic_id": hot.topic_id,
        "partition_index": hot.partition,
        "partition_count": hot.skew.partition_count,
        "rate": hot.skew.rate,
        "median_rate": hot.skew.median,
        "topic_rate": hot.skew.topic_rate,
        "led_s": hot.led_s,
        "key_access": hot.key_access,
    }
    if (sample := hot.sample) is not None:
        fields |= {
            "sampled_records": sample.records,
            "sampled_batches": sample.batches,
            "records_without_key": sample.without_key,
            "count_error": sample.error,
            "keys": [each._asdict() for each in sample.keys],
        }
    return fields


async def describe_partition_rates(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the rates of partitions that this broker leads. Only a broker may ask."""
    service.authenticator.require_identity(
        context.peer, request.node_id, request.broker_epoch, context.client_host
    )
    turns = ItemTurns(service.scheduler)
    topics = []
    for topic_id in request.topic_ids:
        if topic_id is not None:
            rates = service.hot_partitions.rates_for_others(topic_id)
            topics.append({"topic_id": topic_id, "rates": rates})
            await turns.next(1 + len(rates))
    return {"topics": topics}
