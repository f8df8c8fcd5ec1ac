"""DescribeAcls, CreateAcls and DeleteAcls: Mansio has no authorizer.

Behavior: requests about ACLs are rejected with SECURITY_DISABLED in the fields in which Kafka's tools expect it, so
that they report that access control is off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct

SECURITY_DISABLED: Final = 54
"""Kafka's error code."""
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
