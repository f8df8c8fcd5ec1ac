"""CreateTopics, DeleteTopics, CreatePartitions: each item of a request succeeds or fails on its own.

Behavior: the response is sent when everything requested is done and durable; `timeout_ms` is not needed for that. What
exceeds the client's quota is refused, or executed before the client is throttled, by the version of the request.

A request with more than `ITEMS_MAX` items is refused before the first. A request ends with its connection, between two
items.

Not obvious: an item that is named twice in a request is rejected in both positions and not executed, as in Kafka.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import UUID

from mansio.api.kafka.handlers.mutation_throttling import mutation_quota, throttle_mutations
from mansio.broker.topics.topics import NewTopic
from mansio.config.item_limit import too_many_items
from mansio.errors import InvalidRequest, MansioError
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.metadata.model import Topic
    from mansio.wire.codec.messages import Struct


async def create_topics(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Create topics (KIP-4). The response has the effective settings (KIP-525) and the id (KIP-516) of each topic."""
    refused = too_many_items(len(request.topics))
    if refused is not None:
        fields = {**_error_fields(refused), "num_partitions": -1, "replication_factor": -1}
        return {"topics": [{"name": item.name, **fields} for item in request.topics]}
    repeated = _find_duplicates(item.name for item in request.topics)
    quota = mutation_quota(service, context)
    results = []
    for item in request.topics:
        try:
            if item.name in repeated:
                raise InvalidRequest(f"topic {item.name!r} is in the request more than once")
            topic = await service.topics.create(
                _new_topic(item), validate_only=request.validate_only, quota=quota
            )
        except MansioError as error:
            results.append(
                {"name": item.name, **_error_fields(error), "num_partitions": -1, "replication_factor": -1}
            )
        else:
            results.append(_created_topic_fields(service, topic))
    return {"topics": results, "throttle_time_ms": throttle_mutations(service, context, quota)}


def _new_topic(item: Struct) -> NewTopic:
    assignments = {one.partition_index: one.broker_ids for one in item.assignments}
    if len(assignments) != len(item.assignments):
        raise InvalidRequest("a partition is assigned more than once")
    return NewTopic(
        name=item.name,
        partitions=item.num_partitions,
        replication_factor=item.replication_factor,
        assignments=assignments or None,
        configs=[(config.name, config.value) for config in item.configs],
    )


def _created_topic_fields(service: BrokerServices, topic: Topic) -> dict[str, Any]:
    return {
        "name": topic.name,
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
            for entry in service.topics.describe(topic)
        ],
    }


async def delete_topics(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Delete topics by name or, from version 6 on, by id."""
    wanted: list[tuple[str | None, bytes | None]]
    if context.api_version >= 6:
        wanted = [(item.name, item.topic_id) for item in request.topics]
    else:
        wanted = [(name, None) for name in request.topic_names]
    refused = too_many_items(len(wanted))
    if refused is not None:
        fields = _error_fields(refused)
        return {"responses": [{"name": name, "topic_id": topic_id, **fields} for name, topic_id in wanted]}
    found = [_find_topic_to_delete(service, name, topic_id) for name, topic_id in wanted]
    repeated = _find_duplicates(one.topic_id for one in found if not isinstance(one, MansioError))
    quota = mutation_quota(service, context)
    results = []
    for (name, topic_id), one in zip(wanted, found, strict=True):
        result: dict[str, Any] = {"name": name, "topic_id": topic_id}
        try:
            if isinstance(one, MansioError):
                raise copied(one)
            result = {"name": one.name, "topic_id": one.topic_id}
            if one.topic_id in repeated:
                raise InvalidRequest(f"topic {one.name!r} is in the request more than once")
            await service.topics.delete(one, quota=quota)
        except MansioError as error:
            result |= _error_fields(error)
        results.append(result)
    return {"responses": results, "throttle_time_ms": throttle_mutations(service, context, quota)}


def _find_topic_to_delete(
    service: BrokerServices, name: str | None, topic_id: bytes | None
) -> Topic | MansioError:
    try:
        if name is None:
            if topic_id is None:
                raise InvalidRequest("a topic must be named, or given by its id")
            return service.topics.find_by_id(UUID(bytes=topic_id))
        if topic_id is not None:
            raise InvalidRequest("a topic is either named or given by its id, not both")
        return service.topics.find(name)
    except MansioError as error:
        return without_traceback(error)


async def create_partitions(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Add partitions to existing topics (KIP-195)."""
    refused = too_many_items(len(request.topics))
    if refused is not None:
        fields = _error_fields(refused)
        return {"results": [{"name": item.name, **fields} for item in request.topics]}
    repeated = _find_duplicates(item.name for item in request.topics)
    quota = mutation_quota(service, context)
    results = []
    for item in request.topics:
        result: dict[str, Any] = {"name": item.name}
        assignments = None if item.assignments is None else [one.broker_ids for one in item.assignments]
        try:
            if item.name in repeated:
                raise InvalidRequest(f"topic {item.name!r} is in the request more than once")
            await service.topics.add_partitions(
                item.name, item.count, assignments, validate_only=request.validate_only, quota=quota
            )
        except MansioError as error:
            result |= _error_fields(error)
        results.append(result)
    return {"results": results, "throttle_time_ms": throttle_mutations(service, context, quota)}


def _find_duplicates(items: Iterable[Any]) -> set[Any]:
    return {item for item, count in Counter(items).items() if count > 1}


def _error_fields(error: MansioError) -> dict[str, Any]:
    return {"error_code": error.kafka_code, "error_message": error.message}
