"""DescribeAcls, CreateAcls, DeleteAcls and DescribeUserScramCredentials: Mansio has no authorizer and no users.

Behavior: requests about ACLs are rejected with SECURITY_DISABLED in the fields in which Kafka's tools expect it, so
that they report that access control is off. No user has SCRAM credentials; Kafka's tools request them together with
quotas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct

# Kafka's error codes.
SECURITY_DISABLED: Final = 54
RESOURCE_NOT_FOUND: Final = 91
SECURITY_DISABLED_FIELDS: Final = {
    "error_code": SECURITY_DISABLED,
    "error_message": "No authorizer is configured: every operation is allowed",
}


async def describe_acls(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Reject the whole request with SECURITY_DISABLED."""
    del service, request, context
    return {**SECURITY_DISABLED_FIELDS, "resources": []}


async def create_acls(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Reject each ACL of the request with SECURITY_DISABLED."""
    del service, context
    return {"results": [SECURITY_DISABLED_FIELDS for _ in request.creations]}


async def delete_acls(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Reject each filter of the request with SECURITY_DISABLED."""
    del service, context
    return {"filter_results": [{**SECURITY_DISABLED_FIELDS, "matching_acls": []} for _ in request.filters]}


async def describe_user_scram_credentials(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return RESOURCE_NOT_FOUND for each requested user, because no user has credentials (KIP-554)."""
    del service, context
    return {
        "results": [
            {
                "user": user.name,
                "error_code": RESOURCE_NOT_FOUND,
                "error_message": f"user {user.name!r} has no credentials",
            }
            for user in request.users or ()
        ]
    }
