"""CreateSqsAccessKey, DescribeSqsAccessKeys and DeleteSqsAccessKey, Mansio's own.

Behavior: a secret is returned once, and only on an encrypted connection or to the broker's machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def create_sqs_access_key(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Create an access key of a user."""
    created = await service.sqs_access_keys.create(
        request.user, is_confidential=context.is_confidential, caller=context.caller
    )
    return {"key_id": created.key_id, "secret": created.secret}


async def describe_sqs_access_keys(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the access keys of a user, or of all."""
    return {
        "access_keys": [
            {
                "key_id": key.key_id,
                "user": key.user,
                "created_ms": key.created_ms,
                "secrets_key_id": key.secret.key_id,
            }
            for key in service.sqs_access_keys.describe(request.user, caller=context.caller)
        ]
    }


async def delete_sqs_access_key(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Delete an access key."""
    await service.sqs_access_keys.delete(request.key_id, caller=context.caller)
    return {}
