"""SaslHandshake and SaslAuthenticate of a client that need not authenticate, or has done so.

Behavior: rejected with ILLEGAL_SASL_STATE, as in Kafka; the connection stays open. The requests of a client that has to
authenticate do not get here (`api.kafka.server.sasl_gate`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mansio.errors import IllegalSaslState

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def sasl_handshake(service: BrokerServices, request: Struct, context: RequestContext) -> NoReturn:
    """Reject the request."""
    del service, request, context
    raise IllegalSaslState("The connection needs no authentication, or is authenticated.")


async def sasl_authenticate(service: BrokerServices, request: Struct, context: RequestContext) -> NoReturn:
    """Reject the request."""
    del service, request, context
    raise IllegalSaslState("The connection needs no authentication, or is authenticated.")
