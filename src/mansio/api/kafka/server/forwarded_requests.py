"""ForwardRequest (20115): a request that another broker forwards for its client, or makes for itself.

Behavior: only an authenticated broker of the cluster may send it. The request inside runs as if its client had sent it
to this broker: with the client's id, address and user (KIP-590). A client over its quota is not delayed here: the
throttle time is in the response, and the broker that forwards applies it.
Not obvious: a request that breaks the protocol has an error in the response and leaves the connection open, because the
connection serves other clients.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mansio.api.kafka.server.direct_requests import DirectRequest
from mansio.broker.routing.caller import session_of
from mansio.errors import MansioError
from mansio.ports import ForwardedClient
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from mansio.wire.framing import LENGTH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from mansio.api.kafka.connections.connection import Connection
    from mansio.api.kafka.connections.pending_response import PendingResponse
    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.api.kafka.server.direct_requests import RequestServer
    from mansio.wire.headers import RequestHeader


def forward(
    server: RequestServer, connection: Connection, header: RequestHeader, frame: memoryview
) -> Sequence[ResponsePart] | None:
    """Start the request inside a ForwardRequest. Return the response if the sender is refused; otherwise it is sent
    later. Raises `WireError` if the frame is not a valid request."""
    request = messages.decode_request(
        header.api_key, header.api_version, bytes(frame[header.body_position :])
    )
    try:
        peer = server.service.authenticator.require_identity(
            connection.peer, request.node_id, request.broker_epoch, connection.client_host
        )
    except MansioError as error:
        server.service.statistics.count_error(header.api_key, error.kafka_code)
        return [_encode(header, {"error_code": error.kafka_code, "error_message": error.message})]
    response = connection.defer_response()
    release = connection.hold_request(len(frame))
    client = ForwardedClient(
        request.client_address,
        request.user,
        request.listener,
        request.credential_revision,
        tuple(request.groups),
        request.credential_id,
        request.is_by_token,
    )
    direct = DirectRequest(
        client.address,
        session_of(client),
        peer if request.is_own else None,
        partial(_answer, header, response, release),
        connection.listener,
        is_forwarded=True,
    )
    response.on_lost(direct.cancel)
    direct.begin(server, memoryview(request.request))
    return None


def _answer(
    header: RequestHeader, response: PendingResponse, release: Callable[[], None], direct: DirectRequest
) -> None:
    release()
    error = direct.error
    fields: dict[str, Any] = {"throttle_time_ms": direct.throttle_ms}
    if error is None:
        fields["response"] = direct.response[LENGTH_BYTES:]
    else:
        fields |= {"error_code": error.kafka_code, "error_message": error.message}
    response.answer([_encode(header, fields)])


def _encode(header: RequestHeader, fields: Mapping[str, Any]) -> bytes:
    return messages.encode_response(ApiKey.FORWARD_REQUEST, header.api_version, header.correlation_id, fields)
