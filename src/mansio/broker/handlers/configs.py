"""DescribeConfigs, AlterConfigs and IncrementalAlterConfigs, for topics and this broker.

Behaviour: settings of a topic can be changed; those of the broker are read at start and shown read-only.
Non-obvious: AlterConfigs takes settings it does not name back to their defaults (that is why there is the other); a
setting named with null is one it does not name. An empty list of names asks for all of them, as null does (old clients
send it). Broker "" stands for the dynamic defaults of all brokers in Kafka; here there are none, so the answer is
empty.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from mansio.cluster.config_entries import ConfigEntry, broker_entries
from mansio.cluster.topic_config import Change, Operation
from mansio.cluster.topic_plan import check_topic_name
from mansio.errors import InvalidRequest, MansioError

if TYPE_CHECKING:
    from mansio.broker.context import RequestContext
    from mansio.broker.service import Service
    from mansio.wire.messages import Struct

TOPIC: Final = 2
BROKER: Final = 4


async def describe_configs(service: Service, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Values with source and type; synonyms and documentation for who asks (KIP-226, KIP-569)."""
    del context
    results = []
    for resource in request.resources:
        result: dict[str, Any] = {
            "resource_type": resource.resource_type,
            "resource_name": resource.resource_name,
            "configs": [],
        }
        try:
            entries = _entries(service, resource.resource_type, resource.resource_name)
        except MansioError as error:
            result |= {"error_code": error.kafka_code, "error_message": error.message}
        else:
            wanted = set(resource.configuration_keys or ())
            result["configs"] = [
                _shown(entry, request) for entry in entries if not wanted or entry.name in wanted
            ]
        results.append(result)
    return {"results": results}


def _entries(service: Service, kind: int, name: str) -> list[ConfigEntry]:
    if kind == TOPIC:
        check_topic_name(name)
        return service.topics.describe(service.topics.find(name))
    if kind != BROKER:
        raise InvalidRequest(f"resource type {kind}: only topics (2) and brokers (4) have settings here")
    if name == "":
        return []
    _check_own(service, name)
    return broker_entries(service.settings)


def _check_own(service: Service, name: str) -> None:
    if name != str(service.settings.node_id):
        raise InvalidRequest(f"broker {name!r} was asked for, but this is broker {service.settings.node_id}")


def _shown(entry: ConfigEntry, request: Struct) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": entry.name,
        "value": entry.value,
        "read_only": entry.read_only,
        "config_source": int(entry.source),
        "config_type": int(entry.kind),
        "synonyms": [],
    }
    if request.include_synonyms:
        shown["synonyms"] = [
            {"name": synonym.name, "value": synonym.value, "source": int(synonym.source)}
            for synonym in entry.synonyms
        ]
    if request.include_documentation:
        shown["documentation"] = entry.documentation
    return shown


async def alter_configs(service: Service, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Replace all settings of a topic (KIP-133)."""
    del context
    return await _alter_each(service, request, replace=True)


async def incremental_alter_configs(
    service: Service, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Change single settings, leaving the others alone (KIP-339)."""
    del context
    return await _alter_each(service, request, replace=False)


async def _alter_each(service: Service, request: Struct, *, replace: bool) -> dict[str, Any]:
    count = Counter((resource.resource_type, resource.resource_name) for resource in request.resources)
    results = []
    for resource in request.resources:
        kind, name = resource.resource_type, resource.resource_name
        result = {"resource_type": kind, "resource_name": name}
        try:
            if count[kind, name] > 1:
                raise InvalidRequest(f"{name!r} is in the request more than once")
            await _alter(service, resource, replace=replace, validate_only=request.validate_only)
        except MansioError as error:
            result |= {"error_code": error.kafka_code, "error_message": error.message}
        results.append(result)
    return {"responses": results}


async def _alter(service: Service, resource: Struct, *, replace: bool, validate_only: bool) -> None:
    if resource.resource_type == BROKER:
        raise InvalidRequest("the broker's settings are read at start: set them in its file or environment")
    if resource.resource_type != TOPIC:
        raise InvalidRequest(f"resource type {resource.resource_type}: only topics (2) can be changed here")
    check_topic_name(resource.resource_name)
    if replace:
        changes = [
            Change(config.name, Operation.DELETE if config.value is None else Operation.SET, config.value)
            for config in resource.configs
        ]
    else:
        changes = [Change(config.name, config.config_operation, config.value) for config in resource.configs]
    await service.topics.alter_configs(
        resource.resource_name, changes, replace=replace, validate_only=validate_only
    )
