"""DescribeSchemas (20132) and AlterSchemas (20133), APIs of Mansio: the operations of the schema registry. Their fields
are defined in `mansio.wire.apis.mansio_apis`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mansio.errors import InvalidRequest, SchemaRegistryRefusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def describe_schemas(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the result of an operation that changes nothing."""
    return await _answer(service.schemas.describe, request, context)


async def alter_schemas(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Do an operation that changes something, and return its result."""
    return await _answer(service.schemas.alter, request, context)


async def _answer(
    operate: Callable[..., Awaitable[Any]], request: Struct, context: RequestContext
) -> dict[str, Any]:
    try:
        arguments = json.loads(request.arguments or b"{}")
    except (ValueError, RecursionError):
        raise InvalidRequest("the arguments are not JSON") from None
    if not isinstance(arguments, dict):
        raise InvalidRequest("the arguments are a JSON object")
    try:
        result = await operate(request.operation, request.subject, arguments, caller=context.caller)
    except SchemaRegistryRefusal as error:
        return {
            "error_code": error.kafka_code,
            "error_message": error.message,
            "registry_code": error.code,
            "result": b"",
        }
    return {"result": json.dumps(result, separators=(",", ":")).encode()}
