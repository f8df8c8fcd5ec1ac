"""The client session of a caller, and what of it travels to another broker."""

from __future__ import annotations

from dataclasses import replace

from mansio.broker.routing.caller import ANONYMOUS, ANONYMOUS_SESSION, Caller, ClientSession, session_of
from mansio.net.forwarded_requests import encode_forwarded
from mansio.ports import NO_CLIENT, ForwardedClient
from mansio.state.broker_handshake import BrokerIdentity
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from mansio.wire.headers import read_request_header

ALICE = ClientSession(
    "alice", "SASL_SSL", 1_000, 7, groups=("night shift", "b"), credential_id="0123", is_by_token=True
)


def test_a_client_without_authentication_is_kafkas_anonymous_user() -> None:
    assert ANONYMOUS.session.principal == "User:ANONYMOUS"
    assert ALICE.principal == "User:alice"
    assert ANONYMOUS.forwarded == NO_CLIENT
    assert session_of(NO_CLIENT) == ANONYMOUS_SESSION


def test_user_groups_listener_and_kind_of_log_in_travel_with_a_forwarded_request() -> None:
    caller = Caller(ALICE, "id", "10.0.0.1")
    assert caller.forwarded == ForwardedClient(
        "10.0.0.1", "alice", "SASL_SSL", 7, ("night shift", "b"), "0123", True
    )
    frame = encode_forwarded(BrokerIdentity(1, 5), b"request", client=caller.forwarded, is_own=False)[4:]
    header = read_request_header(frame)
    request = messages.decode_request(ApiKey.FORWARD_REQUEST, 0, frame[header.body_position :])
    sent = ForwardedClient(
        request.client_address,
        request.user,
        request.listener,
        request.credential_revision,
        tuple(request.groups),
        request.credential_id,
        request.is_by_token,
    )
    assert sent == caller.forwarded
    assert session_of(sent) == replace(ALICE, expires_ms=None), "the other broker ends the session"
