"""ElectLeaders, AlterPartitionReassignments, ListPartitionReassignments, UnregisterBroker (KIP-460, KIP-455,
KIP-631)."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from mansio.broker.services.elections import ElectionResult
from mansio.errors import ClusterAuthorizationFailed, FeatureNotFinalized, MansioError, Unavailable
from mansio.host.item_turns import ItemTurns
from mansio.metadata.reassignment import Reassignment
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def elect_leaders(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Elect leaders of the requested partitions, or of all, in preferred or unclean elections.

    A refusal has the error, which version 0 does not have, and once more for each requested partition, as in Kafka."""
    wanted = request.topic_partitions
    partitions = (
        None if wanted is None else [(item.topic, each) for item in wanted for each in item.partitions]
    )
    refusal: dict[str, Any] = {}
    try:
        results = await service.elections.elect_leaders(
            partitions,
            election_type=request.election_type,
            timeout_ms=request.timeout_ms,
            caller=context.caller,
        )
    except ClusterAuthorizationFailed as error:
        refused = without_traceback(error)
        refusal = {"error_code": refused.kafka_code}
        results = [ElectionResult(topic, index, refused) for topic, index in partitions or ()]
    group_by_topic_id: dict[str, list[dict[str, Any]]] = {item.topic: [] for item in wanted or ()}
    turns = ItemTurns(service.scheduler)
    for result in results:
        await turns.next()
        code, message = (0, None) if result.error is None else (result.error.kafka_code, result.error.message)
        group_by_topic_id.setdefault(result.topic, []).append(
            {"partition_id": result.partition, "error_code": code, "error_message": message}
        )
    return {
        **refusal,
        "replica_election_results": [
            {"topic": topic, "partition_result": partitions}
            for topic, partitions in group_by_topic_id.items()
        ],
    }


async def alter_partition_reassignments(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Begin or cancel reassignments; each partition succeeds or fails on its own.

    A refusal has the error, and once more for each partition, as in Kafka. Version 0 may change the number of replicas
    (KIP-860)."""
    wanted = [
        Reassignment(topic.name, each.partition_index, each.replicas)
        for topic in request.topics
        for each in topic.partitions
    ]
    may_change_factor = request.allow_replication_factor_change
    refusal: dict[str, Any] = {}
    try:
        errors: Sequence[MansioError | None] = await service.reassignments.alter(
            wanted, may_change_factor=may_change_factor, caller=context.caller
        )
    except (ClusterAuthorizationFailed, FeatureNotFinalized, Unavailable) as error:
        refused = without_traceback(error)
        refusal = {"error_code": refused.kafka_code, "error_message": refused.message}
        errors = [refused] * len(wanted)
    results = zip(wanted, errors, strict=True)
    return {
        **refusal,
        "allow_replication_factor_change": may_change_factor,
        "responses": [
            {"name": topic.name, "partitions": [_result(*next(results)) for _ in topic.partitions]}
            for topic in request.topics
        ],
    }


def _result(wanted: Reassignment, error: MansioError | None) -> dict[str, Any]:
    result: dict[str, Any] = {"partition_index": wanted.partition}
    return (
        result if error is None else result | {"error_code": error.kafka_code, "error_message": error.message}
    )


async def unregister_broker(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Forget a broker that has left the cluster for good (KIP-631)."""
    try:
        await service.reassignments.unregister(request.broker_id, caller=context.caller)
    except MansioError as error:
        return {"error_code": error.kafka_code, "error_message": error.message}
    return {}


async def list_partition_reassignments(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the ongoing reassignments of the requested partitions, or of all."""
    wanted = request.topics
    found = await service.reassignments.list_ongoing(
        None
        if wanted is None
        else [(item.name, index) for item in wanted for index in item.partition_indexes],
        caller=context.caller,
    )
    return {
        "topics": [
            {
                "name": name,
                "partitions": [
                    {
                        "partition_index": each.partition,
                        "replicas": each.state.replicas,
                        "adding_replicas": each.state.adding,
                        "removing_replicas": each.state.removing,
                    }
                    for each in partitions
                ],
            }
            for name, partitions in groupby(found, key=lambda each: each.topic)
        ]
    }
