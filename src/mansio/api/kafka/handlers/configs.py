"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and ListConfigResources, for topics, groups and this broker.

Not obvious:
* AlterConfigs resets settings that it does not name to their defaults (therefore the incremental API exists); a setting
  named with null counts as not named.
* An empty list of names requests all of them, as null does (old clients send it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.services.configs import ConfigAlteration, ConfigQuery, ConfigResource
from mansio.config.config_def import Change, Operation
from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.config.config_entries import ConfigEntry
    from mansio.wire.codec.messages import Struct


async def describe_configs(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return settings with value, source and type; if requested, also synonyms and documentation (KIP-226, KIP-569)."""
    turns = ItemTurns(service.scheduler)
    queries: dict[ConfigQuery, None] = {}
    for one in request.resources:
        await turns.next()
        resource = ConfigResource(one.resource_type, one.resource_name)
        queries[ConfigQuery(resource, frozenset(one.configuration_keys or ()))] = None
    results = []
    for found in service.configs.describe(queries, caller=context.caller):
        await turns.next(1 + len(found.entries))
        result = {
            **_resource(found.resource),
            "configs": [_entry(entry, request) for entry in found.entries],
        }
        if found.error is not None:
            result |= {"error_code": found.error.kafka_code, "error_message": found.error.message}
        results.append(result)
    return {"results": results}


def _resource(resource: ConfigResource) -> dict[str, Any]:
    return {"resource_type": resource.kind, "resource_name": resource.name}


def _entry(entry: ConfigEntry, request: Struct) -> dict[str, Any]:
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


async def list_config_resources(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the resources that have settings (KIP-1142), of the requested types, or all. Version 0 requests client
    metrics subscriptions (KIP-714), which are not supported."""
    found = service.configs.list_resources(request.resource_types or (), caller=context.caller)
    if context.api_version == 0:
        return {"config_resources": []}
    return {"config_resources": [_resource(resource) for resource in found]}


async def alter_configs(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Replace all settings of each resource: settings that the request does not name are reset (KIP-133)."""

    def change(config: Struct) -> Change:
        return Change(config.name, Operation.DELETE if config.value is None else Operation.SET, config.value)

    return await _alter(service, request, context, change, replace=True)


async def incremental_alter_configs(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Change the settings that the request names and leave the others unchanged (KIP-339)."""

    def change(config: Struct) -> Change:
        return Change(config.name, config.config_operation, config.value)

    return await _alter(service, request, context, change, replace=False)


async def _alter(
    service: BrokerServices,
    request: Struct,
    context: RequestContext,
    change: Callable[[Struct], Change],
    *,
    replace: bool,
) -> dict[str, Any]:
    turns = ItemTurns(service.scheduler)
    alterations = []
    for one in request.resources:
        await turns.next()
        resource = ConfigResource(one.resource_type, one.resource_name)
        alterations.append(ConfigAlteration(resource, [change(config) for config in one.configs]))
    errors = await service.configs.alter(
        alterations, replace=replace, validate_only=request.validate_only, caller=context.caller
    )
    responses = []
    for alteration, error in zip(alterations, errors, strict=True):
        await turns.next()
        response = _resource(alteration.resource)
        if error is not None:
            response |= {"error_code": error.kafka_code, "error_message": error.message}
        responses.append(response)
    return {"responses": responses}
