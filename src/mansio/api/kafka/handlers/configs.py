"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and ListConfigResources, for topics, groups and this broker.

Behavior: settings of topics and groups can be changed; those of the broker are read at start and read-only here. A
group can have settings before it exists, and keeps them when it is deleted.

Not obvious:
* AlterConfigs resets settings that it does not name to their defaults (therefore the incremental API exists); a setting
  named with null counts as not named.
* An empty list of names requests all of them, as null does (old clients send it).
* A resource named several times is described once, and a response has about `ENTRIES_MAX` settings at most, because a
  few bytes of a request can ask for many.
* Broker "" stands for the dynamic defaults of all brokers in Kafka; there are none here, so the result is empty.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.services.configs import ConfigResource
from mansio.config.config_def import Change, Operation
from mansio.errors import InvalidRequest, MansioError

if TYPE_CHECKING:
    from mansio.api.kafka.server.request_router import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.config.config_entries import ConfigEntry
    from mansio.wire.codec.messages import Struct

ENTRIES_MAX: Final = 250_000
"""All settings of ten thousand topics."""


async def describe_configs(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Values with source and type; synonyms and documentation on request (KIP-226, KIP-569)."""
    del context
    results = []
    remaining = ENTRIES_MAX
    asked = dict.fromkeys(
        (one.resource_type, one.resource_name, frozenset(one.configuration_keys or ()))
        for one in request.resources
    )
    for kind, name, wanted in asked:
        result: dict[str, Any] = {"resource_type": kind, "resource_name": name, "configs": []}
        try:
            if remaining <= 0:
                raise InvalidRequest("too many settings for one answer: ask for fewer resources at a time")
            entries = [
                entry for entry in service.configs.describe(kind, name) if not wanted or entry.name in wanted
            ]
        except MansioError as error:
            result |= {"error_code": error.kafka_code, "error_message": error.message}
        else:
            remaining -= len(entries)
            result["configs"] = [_shown(entry, request) for entry in entries]
        results.append(result)
    return {"results": results}


async def list_config_resources(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """The resources that have settings (KIP-1142), of the requested types, or all. Version 0 requests client metrics
    subscriptions (KIP-714), which are not supported."""
    if context.api_version == 0:
        return {"config_resources": []}
    found = service.configs.resources(dict.fromkeys(request.resource_types or ConfigResource))
    return {"config_resources": [{"resource_name": name, "resource_type": kind} for name, kind in found]}


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


async def alter_configs(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Replace all settings of a topic or group (KIP-133)."""
    del context
    return await _alter_each(service, request, replace=True)


async def incremental_alter_configs(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Change single settings, leaving the others unchanged (KIP-339)."""
    del context
    return await _alter_each(service, request, replace=False)


async def _alter_each(service: BrokerServices, request: Struct, *, replace: bool) -> dict[str, Any]:
    count = Counter((resource.resource_type, resource.resource_name) for resource in request.resources)
    results = []
    for resource in request.resources:
        kind, name = resource.resource_type, resource.resource_name
        result = {"resource_type": kind, "resource_name": name}
        try:
            if count[kind, name] > 1:
                raise InvalidRequest(f"{name!r} is in the request more than once")
            changes = _changes(resource, replace=replace)
            await service.configs.alter(
                kind, name, changes, replace=replace, validate_only=request.validate_only
            )
        except MansioError as error:
            result |= {"error_code": error.kafka_code, "error_message": error.message}
        results.append(result)
    return {"responses": results}


def _changes(resource: Struct, *, replace: bool) -> list[Change]:
    if replace:
        return [
            Change(config.name, Operation.DELETE if config.value is None else Operation.SET, config.value)
            for config in resource.configs
        ]
    return [Change(config.name, config.config_operation, config.value) for config in resource.configs]
