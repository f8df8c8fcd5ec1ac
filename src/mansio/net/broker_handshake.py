"""Handshake with another broker, on the side that connected. The other side: `api.kafka.server.broker_handshake`.

Invariant: nothing else is sent on the connection before both sides have proved themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mansio.errors import ConnectionLost, MansioError, error_for_code
from mansio.state.broker_handshake import NONCE_BYTES, BrokerIdentity, Handshake
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from mansio.ports import Random
    from mansio.state.broker_handshake import ClusterSecret

    Exchange = Callable[[ApiKey, Mapping[str, Any]], Awaitable[Any]]
    """Sends a request with these fields, in version 0, and returns the decoded response."""


class BrokerCredentials(NamedTuple):
    """What a broker authenticates with. `broker_epoch` is 0 while it is not registered."""

    node_id: int
    cluster_id: str
    secret: Callable[[], ClusterSecret | None]
    broker_epoch: Callable[[], int]
    random: Random

    def identity(self) -> BrokerIdentity:
        """This broker in its current session. Raises `ConnectionLost` if it has none: no broker would accept it."""
        epoch = self.broker_epoch()
        if epoch == 0:
            raise ConnectionLost("this broker has no session")
        return BrokerIdentity(self.node_id, epoch)


async def authenticate(
    exchange: Exchange, credentials: BrokerCredentials, identity: BrokerIdentity, node_id: int
) -> None:
    """Authenticate as `identity` with broker `node_id`, and that broker here. Raises `ConnectionLost` if one of them
    does not accept the other; the connection has to be closed then."""
    secret = credentials.secret()
    if secret is None:
        raise ConnectionLost("the cluster has no secret")
    nonce = credentials.random.bytes(NONCE_BYTES)
    try:
        challenge = await exchange(ApiKey.CHALLENGE_BROKER, {"nonce": nonce})
        _check(challenge)
        handshake = Handshake(credentials.cluster_id, identity, node_id, nonce, challenge.nonce)
        fields = {**identity._asdict(), "proof": handshake.dialler_proof(secret)}
        answer = await exchange(ApiKey.AUTHENTICATE_BROKER, fields)
        _check(answer)
    except ConnectionLost:
        raise
    except MansioError as error:
        raise ConnectionLost(f"broker {node_id} did not accept this broker: {error.message}") from error
    if not handshake.is_listener_proof(secret, answer.proof):
        raise ConnectionLost(f"what listens at the address of broker {node_id} is not that broker")


def _check(response: Any) -> None:
    if response.error_code:
        raise error_for_code(response.error_code, response.error_message or "")
