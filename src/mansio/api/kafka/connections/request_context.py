"""Context of a request: what its handler knows of the header and of the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mansio.broker.services.cluster import ServedListener
    from mansio.state.broker_handshake import BrokerIdentity


class RequestContext(NamedTuple):
    """Header fields and connection data of one request. `listener`: the one through which it came. `peer`: the
    broker that has authenticated on the connection, None for a client."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    client_host: str
    listener: ServedListener
    peer: BrokerIdentity | None = None
