"""DescribeClientQuotas and AlterClientQuotas (KIP-546).

Behavior: each entity of a request is changed or rejected on its own. `producer_byte_rate` and `consumer_byte_rate` are
enforced; other keys are rejected with the reason. Entities are client ids, users, and client ids of users; quotas by
address are not supported. Removing a key that is not set is no error, as in Kafka.

Not obvious: a null name stands for the default of its kind; a filter without components requests all quotas.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import InvalidRequest, MansioError, UnsupportedVersion
from mansio.state.quota import Entity, Name, Part

if TYPE_CHECKING:
    from mansio.api.kafka.server.request_router import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct

USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"
FIELDS: Final = {USER: "user", CLIENT_ID: "client_id"}

EXACT: Final = 0
DEFAULT: Final = 1
ANY: Final = 2


async def describe_client_quotas(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """The quotas of the entities that match all components of the filter; with `strict` also only those without other
    components."""
    del context
    components: list[Struct] = request.components or []
    _check_filter(components)
    found = []
    for entity, values in service.quotas.all():
        if _fits(entity, components, strict=request.strict):
            found.append(
                {
                    "entity": _shown(entity),
                    "values": [{"key": key, "value": value} for key, value in sorted(values.items())],
                }
            )
    return {"entries": found}


def _check_filter(components: list[Struct]) -> None:
    kinds = [component.entity_type for component in components]
    for kind in kinds:
        if kind == "":
            raise InvalidRequest("a filter names no kind of entity")
        if kind not in FIELDS and kind != IP:
            raise UnsupportedVersion(f"{kind!r}: quotas are for user and client-id")
    if len(set(kinds)) != len(kinds):
        raise InvalidRequest("a filter names a kind of entity more than once")
    if IP in kinds and len(kinds) > 1:
        raise InvalidRequest("ip does not go together with other kinds of entities")
    for component in components:
        if component.match_type not in (EXACT, DEFAULT, ANY):
            raise InvalidRequest(f"unknown match type {component.match_type}")
        if component.match_type == EXACT and component.match is None:
            raise InvalidRequest("an exact match needs a name")


def _fits(entity: Entity, components: list[Struct], *, strict: bool) -> bool:
    for component in components:
        if component.entity_type == IP:
            return False
        name: Name = getattr(entity, FIELDS[component.entity_type])
        if name is Part.ABSENT:
            return False
        if component.match_type == EXACT and name != component.match:
            return False
        if component.match_type == DEFAULT and name is not Part.DEFAULT:
            return False
    return not (strict and components) or len(_shown(entity)) == len(components)


def _shown(entity: Entity) -> list[dict[str, Any]]:
    return [
        {"entity_type": kind, "entity_name": None if name is Part.DEFAULT else name}
        for kind, field in FIELDS.items()
        if (name := getattr(entity, field)) is not Part.ABSENT
    ]


async def alter_client_quotas(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Set and remove quotas; each entry on its own, durable and effective when answered."""
    del context
    count = Counter(_identity(entry) for entry in request.entries)
    results = []
    for entry in request.entries:
        result: dict[str, Any] = {"entity": entry.entity}
        try:
            if count[_identity(entry)] > 1:
                raise InvalidRequest("an entity is in the request more than once")
            changes: dict[str, float | None] = {}
            for change in entry.ops:
                if change.key in changes:
                    raise InvalidRequest(f"{change.key} is changed twice")
                changes[change.key] = None if change.remove else change.value
            await service.quotas.alter(_entity(entry), changes, validate_only=request.validate_only)
        except MansioError as error:
            result |= {"error_code": error.kafka_code, "error_message": error.message}
        results.append(result)
    return {"entries": results}


def _identity(entry: Struct) -> tuple[tuple[str, str | None], ...]:
    return tuple(sorted((part.entity_type, part.entity_name or "") for part in entry.entity))


def _entity(entry: Struct) -> Entity:
    names: dict[str, Name] = {}
    for part in entry.entity:
        kind = part.entity_type
        if kind == IP:
            raise InvalidRequest("quotas by ip limit new connections by rate, which is not offered")
        if kind not in FIELDS:
            raise InvalidRequest(f"{kind!r}: quotas are for user and client-id")
        if FIELDS[kind] in names:
            raise InvalidRequest(f"{kind} is named twice in one entity")
        names[FIELDS[kind]] = Part.DEFAULT if part.entity_name is None else part.entity_name
    if not names:
        raise InvalidRequest("an entity needs a user, a client-id, or both")
    return Entity(**names)
