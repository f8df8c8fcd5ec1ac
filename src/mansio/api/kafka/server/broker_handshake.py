"""ChallengeBroker (20103) and AuthenticateBroker (20104): a broker of the cluster authenticates its connection.

Behavior: see `state.broker_handshake`. A connection has at most one challenge, which one proof uses up, and one
identity in its life. A failed handshake is answered with CLUSTER_AUTHORIZATION_FAILED (for a broker with another
epoch than the registered one with STALE_BROKER_EPOCH), and the connection is closed: there is one guess per connection.

From version 1 of AuthenticateBroker on, the responses on the connection may overtake.

Both are answered in order and without waiting, so that the request behind a handshake finds its outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.errors import MansioError, WireError
from mansio.state.broker_handshake import BrokerIdentity
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.api.kafka.connections.connection import Connection
    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct
    from mansio.wire.headers import RequestHeader

UNORDERED_VERSION = 1
"""Version of AuthenticateBroker from which on responses on the connection may overtake."""

HANDSHAKE_KEYS = frozenset((ApiKey.CHALLENGE_BROKER, ApiKey.AUTHENTICATE_BROKER))


def handshake(
    service: BrokerServices,
    connection: Connection,
    header: RequestHeader,
    frame: memoryview,
    certificate_sha256: bytes,
) -> Sequence[ResponsePart]:
    """Process ChallengeBroker or AuthenticateBroker and send the response. `certificate_sha256`: of the certificate
    that the connection has of this broker, empty without TLS. Raises `WireError` if the frame is not a valid
    request."""
    key = header.api_key
    request = messages.decode_request(key, header.api_version, bytes(frame[header.body_position :]))
    fields: Mapping[str, Any]
    try:
        if key == ApiKey.CHALLENGE_BROKER:
            fields = _challenge(service, connection, request, certificate_sha256)
        else:
            fields = _authenticate(service, connection, request)
        connection.is_unordered = (
            key == ApiKey.AUTHENTICATE_BROKER and header.api_version >= UNORDERED_VERSION
        )
    except WireError:
        raise
    except MansioError as error:
        service.statistics.count_error(key, error.kafka_code)
        fields = {"error_code": error.kafka_code, "error_message": error.message}
        connection.close_after_response()
    return [messages.encode_response(key, header.api_version, header.correlation_id, fields)]


def _challenge(
    service: BrokerServices, connection: Connection, request: Struct, certificate_sha256: bytes
) -> dict[str, Any]:
    connection.challenge = challenge = service.authenticator.begin_handshake(
        request.nonce, connection.peer, connection.client_host, certificate_sha256
    )
    return {"nonce": challenge.listener_nonce}


def _authenticate(service: BrokerServices, connection: Connection, request: Struct) -> dict[str, Any]:
    challenge, connection.challenge = connection.challenge, None
    claimed = BrokerIdentity(request.node_id, request.broker_epoch)
    proof = service.authenticator.authenticate(challenge, claimed, request.proof, connection.client_host)
    connection.peer = claimed
    return {"proof": proof}
