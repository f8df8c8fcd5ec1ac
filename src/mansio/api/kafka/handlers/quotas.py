"""DescribeClientQuotas and AlterClientQuotas (KIP-546).

Behavior: each entity of a request is changed or rejected on its own. `producer_byte_rate`, `consumer_byte_rate` and
`controller_mutation_rate` are enforced for client ids, users, and client ids of users, `connection_creation_rate` for
addresses (KIP-612); other keys are rejected with the reason. Removing a key that is not set is no error, as in Kafka.

Not obvious: a null name stands for the default of its entity type; a filter without components requests all quotas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.services.quotas import ENTITY_FIELDS, QuotaAlteration, QuotaFilter
from mansio.host.item_turns import ItemTurns
from mansio.state.quota import NonLiteralName, QuotaEntity

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def describe_client_quotas(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the quotas of the entities that match all components of the filter. With `strict`, entities with other
    components are left out."""
    filters = [
        QuotaFilter(component.entity_type, component.match_type, component.match)
        for component in request.components or ()
    ]
    return {
        "entries": [
            {
                "entity": _entity(entity),
                "values": [{"key": key, "value": value} for key, value in sorted(values.items())],
            }
            for entity, values in service.quotas.describe(
                filters, strict=request.strict, caller=context.caller
            )
        ]
    }


def _entity(entity: QuotaEntity) -> list[dict[str, Any]]:
    return [
        {"entity_type": kind, "entity_name": None if name is NonLiteralName.DEFAULT else name}
        for kind, field in ENTITY_FIELDS.items()
        if (name := getattr(entity, field)) is not NonLiteralName.ABSENT
    ]


async def alter_client_quotas(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Set and remove quotas. Each entry succeeds or fails by itself. When answered, a change is durable and effective
    on this broker; other brokers follow."""
    turns = ItemTurns(service.scheduler)
    alterations = []
    for entry in request.entries:
        await turns.next()
        entity = [(part.entity_type, part.entity_name) for part in entry.entity]
        changes = [(change.key, None if change.remove else change.value) for change in entry.ops]
        alterations.append(QuotaAlteration(entity, changes))
    errors = await service.quotas.alter_each(
        alterations, validate_only=request.validate_only, caller=context.caller
    )
    entries = []
    for entry, error in zip(request.entries, errors, strict=True):
        await turns.next()
        result: dict[str, Any] = {"entity": entry.entity}
        if error is not None:
            result |= {"error_code": error.kafka_code, "error_message": error.message}
        entries.append(result)
    return {"entries": entries}
