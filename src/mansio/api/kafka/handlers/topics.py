"""CreateTopics, DeleteTopics, CreatePartitions: each item of a request succeeds or fails on its own.

Behavior: the response is sent when everything requested is done and durable; `timeout_ms` is not needed for that. What
exceeds the client's quota is refused, or executed before the client is throttled, by the version of the request. A
request ends with its connection, between two items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.broker.services.topic_admin import TopicGrowth, TopicReference
from mansio.broker.topics.topics import NewTopic
from mansio.errors import InvalidRequest, MansioError, TopicAuthorizationFailed
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.topic_admin import CreatedTopic
    from mansio.wire.codec.messages import Struct

STRICT_VERSION_MIN: Final = {ApiKey.CREATE_TOPICS: 6, ApiKey.DELETE_TOPICS: 5, ApiKey.CREATE_PARTITIONS: 3}
"""First version with THROTTLING_QUOTA_EXCEEDED; earlier ones are executed, and the client is throttled afterwards."""

UNKNOWN_COUNT: Final = -1
"""Number of partitions and replicas of a topic that was not created, or whose settings the client may not see."""


def _is_strict(context: RequestContext) -> bool:
    return context.api_version >= STRICT_VERSION_MIN[ApiKey(context.api_key)]


async def create_topics(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Create topics (KIP-4). The response has the effective settings (KIP-525) and the id (KIP-516) of each topic."""
    done = await service.topic_admin.create_each(
        [(item.name, _new_topic(item)) for item in request.topics],
        validate_only=request.validate_only,
        is_strict=_is_strict(context),
        caller=context.caller,
    )
    context.throttle(done.throttle_ms)
    return {
        "topics": [
            {"name": item.name, **_created_topic_fields(result)}
            for item, result in zip(request.topics, done.results, strict=True)
        ],
        "throttle_time_ms": done.throttle_ms,
    }


def _new_topic(item: Struct) -> NewTopic | InvalidRequest:
    assignments = {one.partition_index: one.broker_ids for one in item.assignments}
    if len(assignments) != len(item.assignments):
        return InvalidRequest("a partition is assigned more than once")
    return NewTopic(
        name=item.name,
        partitions=item.num_partitions,
        replication_factor=item.replication_factor,
        assignments=assignments or None,
        configs=[(config.name, config.value) for config in item.configs],
    )


def _created_topic_fields(result: CreatedTopic | MansioError) -> dict[str, Any]:
    unknown = {"num_partitions": UNKNOWN_COUNT, "replication_factor": UNKNOWN_COUNT}
    if isinstance(result, MansioError):
        return {**_error_fields(result), **unknown}
    topic = result.topic
    if result.configs is None:
        refusal = {"topic_config_error_code": TopicAuthorizationFailed.kafka_code, "configs": []}
        return {"topic_id": topic.topic_id, **unknown, **refusal}
    return {
        "topic_id": topic.topic_id,
        "num_partitions": len(topic.partitions),
        "replication_factor": topic.replication_factor,
        "configs": [
            {
                "name": entry.name,
                "value": entry.value,
                "read_only": entry.read_only,
                "config_source": int(entry.source),
            }
            for entry in result.configs
        ],
    }


async def delete_topics(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Delete topics by name or, from version 6 on, by id."""
    if context.api_version >= 6:
        wanted = [
            TopicReference(item.name, None if item.topic_id is None else UUID(bytes=item.topic_id))
            for item in request.topics
        ]
    else:
        wanted = [TopicReference(name) for name in request.topic_names]
    done = await service.topic_admin.delete_each(wanted, is_strict=_is_strict(context), caller=context.caller)
    context.throttle(done.throttle_ms)
    return {
        "responses": [
            {"name": each.name, "topic_id": each.topic_id, **_error_fields(each.error)}
            for each in done.results
        ],
        "throttle_time_ms": done.throttle_ms,
    }


async def create_partitions(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Add partitions to existing topics (KIP-195)."""
    wanted = [
        TopicGrowth(
            item.name,
            item.count,
            None if item.assignments is None else [one.broker_ids for one in item.assignments],
        )
        for item in request.topics
    ]
    done = await service.topic_admin.add_partitions_each(
        wanted,
        validate_only=request.validate_only,
        is_strict=_is_strict(context),
        caller=context.caller,
    )
    context.throttle(done.throttle_ms)
    return {
        "results": [
            {"name": each.name, **_error_fields(error)}
            for each, error in zip(wanted, done.results, strict=True)
        ],
        "throttle_time_ms": done.throttle_ms,
    }


def _error_fields(error: MansioError | None) -> dict[str, Any]:
    return {} if error is None else {"error_code": error.kafka_code, "error_message": error.message}
