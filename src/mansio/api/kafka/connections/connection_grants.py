"""Grants of a connection: what its client may read and write, kept from request to request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.routing.caller import Caller

if TYPE_CHECKING:
    from mansio.api.kafka.connections.connection import Connection
    from mansio.broker.services.authorization import Grants
    from mansio.broker.services.broker_services import BrokerServices


def new_grants(service: BrokerServices, connection: Connection, client_id: str | None) -> Grants | None:
    """Return the grants of the client of a connection, None if it may do everything. Its later requests find them as
    `Connection.grants`; those of another broker ask again whether its session is still registered. A request that a
    broker has forwarded has those of the client, also if it is the broker's own."""
    session = connection.session
    if not connection.is_forwarded:
        session = service.authenticator.session_of(session, connection.peer)
    grants = service.authorization.grants(Caller(session, client_id or "", connection.client_host))
    if connection.peer is None:
        connection.grants = grants
    return grants
