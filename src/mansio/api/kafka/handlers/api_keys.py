"""CreateApiKey, DescribeApiKeys and DeleteApiKey: API keys of users, Mansio's own.

Behavior: the answer to CreateApiKey has the key itself, which is not stored; it is given on an encrypted
connection, or on the broker's machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.wire.apis.mansio_apis import NO_END_MS

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.state.authentication.api_keys import StoredApiKey
    from mansio.wire.codec.messages import Struct


async def create_api_key(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Create a key of a user."""
    created = await service.api_keys.create(
        request.user,
        request.description,
        None if request.valid_ms == NO_END_MS else request.valid_ms,
        is_confidential=context.is_confidential,
        caller=context.caller,
    )
    return {"api_key": _described(created.api_key), "key": created.text.encode()}


async def describe_api_keys(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the keys of the user, or of all users without one."""
    return {
        "api_keys": [_described(each) for each in service.api_keys.list(request.user, caller=context.caller)]
    }


async def delete_api_key(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Delete a key."""
    await service.api_keys.delete(request.key_id, caller=context.caller)
    return {}


def _described(key: StoredApiKey) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "user": key.user,
        "created_ms": key.created_ms,
        "expires_ms": NO_END_MS if key.expires_ms is None else key.expires_ms,
        "description": key.description,
    }
