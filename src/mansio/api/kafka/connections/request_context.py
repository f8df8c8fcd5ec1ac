"""Context of a request: what its handler knows of the header and of the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.routing.caller import ANONYMOUS_SESSION, Caller
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.routing.caller import ClientSession
    from mansio.broker.services.cluster import ServedListener
    from mansio.state.broker_handshake import BrokerIdentity


API_NAMES: Final = {int(key): key.name for key in ApiKey}
"""Names of the APIs by key."""


def _ignore_throttle_time(throttle_ms: int) -> None:
    """Do nothing: there is no connection."""


class RequestContext(NamedTuple):
    """Header fields and connection data of one request. `listener`: the one through which it came. `session`: who the
    client is; `BROKER_SESSION` for a broker of the cluster. `peer`: the broker that has authenticated on the
    connection, None for a client. `is_confidential`: whether nobody else can read the connection: it is encrypted, or
    comes from this machine. `throttle`: begins no later request for some milliseconds, because the client exceeds a
    quota. `forwarding_session`: the client for which a broker makes its own request."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    client_host: str
    listener: ServedListener
    peer: BrokerIdentity | None = None
    session: ClientSession = ANONYMOUS_SESSION
    is_confidential: bool = False
    throttle: Callable[[int], None] = _ignore_throttle_time
    forwarding_session: ClientSession = ANONYMOUS_SESSION

    @property
    def caller(self) -> Caller:
        """The client as services know it."""
        return Caller(self.session, self.client_id or "", self.client_host, api=API_NAMES[self.api_key])

    @property
    def forwarding_caller(self) -> Caller:
        """The client for which another broker makes a request that only brokers may send."""
        return Caller(
            self.forwarding_session, self.client_id or "", self.client_host, api=API_NAMES[self.api_key]
        )
