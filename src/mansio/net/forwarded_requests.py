"""ForwardRequest (20115), on the side of the broker that sends it.

`api.kafka.server.forwarded_requests` implements the side that runs the request inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import ConnectionLost, error_for_code
from mansio.ports import ForwardedAnswer
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from mansio.ports import ForwardedClient
    from mansio.state.broker_handshake import BrokerIdentity

VERSION: Final = 0
FORWARDER_CLIENT_ID: Final = "mansio-forwarder"


def encode_forwarded(
    identity: BrokerIdentity, request: bytes, *, client: ForwardedClient, is_own: bool
) -> bytes:
    """Return the ForwardRequest of broker `identity`, with its length first; see `ports.ForwardingPeers.forward`."""
    fields = {
        "node_id": identity.node_id,
        "broker_epoch": identity.broker_epoch,
        "is_own": is_own,
        "client_address": client.address,
        "user": client.user,
        "listener": client.listener,
        "credential_revision": client.credential_revision,
        "request": request,
        "groups": client.groups,
        "credential_id": client.credential_id,
        "is_by_token": client.is_by_token,
    }
    return messages.encode_request(ApiKey.FORWARD_REQUEST, VERSION, 0, FORWARDER_CLIENT_ID, fields)


def decode_forwarded(response: bytes, node_id: int) -> ForwardedAnswer:
    """Return the answer of broker `node_id` to the request inside. Raises `ConnectionLost` if that broker has not
    accepted it, for example because it does not know the epoch of this broker yet, or has ended it without an
    answer."""
    _, found = messages.decode_response_frame(ApiKey.FORWARD_REQUEST, VERSION, response)
    if found.error_code:
        refusal = error_for_code(found.error_code, found.error_message or "")
        raise ConnectionLost(f"broker {node_id} did not accept the request: {refusal.message}")
    return ForwardedAnswer(found.response, found.throttle_time_ms)
