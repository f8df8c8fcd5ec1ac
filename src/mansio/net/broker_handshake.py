"""Handshake with another broker, on the side that opened the connection.

`api.kafka.server.broker_handshake` implements the side that accepted the connection.

Invariant: no other request is sent on the connection before both brokers have authenticated.
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
    """Identity and secret with which a broker authenticates. `broker_epoch` returns 0 while the broker is not
    registered; `secret` returns None while the cluster has no secret."""

    node_id: int
    cluster_id: str
    secret: Callable[[], ClusterSecret | None]
    broker_epoch: Callable[[], int]
    random: Random

    def identity(self) -> BrokerIdentity:
        """Id and current epoch of this broker. Raises `ConnectionLost` while this broker is not registered, because no
        other broker would accept it."""
        epoch = self.broker_epoch()
        if epoch == 0:
            raise ConnectionLost("this broker has no session")
        return BrokerIdentity(self.node_id, epoch)


async def authenticate(
    exchange: Exchange,
    credentials: BrokerCredentials,
    identity: BrokerIdentity,
    node_id: int,
    certificate_sha256: bytes = b"",
) -> None:
    """Authenticate as `identity` with broker `node_id`, and verify that the peer is that broker. `certificate_sha256`:
    of the certificate that the peer has shown; empty without TLS.

    Raises `ConnectionLost` if one of the brokers does not accept the other; the caller must then close the connection.
    """
    secret = credentials.secret()
    if secret is None:
        raise ConnectionLost("the cluster has no secret")
    nonce = credentials.random.bytes(NONCE_BYTES)
    try:
        challenge = await exchange(ApiKey.CHALLENGE_BROKER, {"nonce": nonce})
        _check(challenge)
        handshake = Handshake(
            credentials.cluster_id, identity, node_id, nonce, challenge.nonce, certificate_sha256
        )
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
