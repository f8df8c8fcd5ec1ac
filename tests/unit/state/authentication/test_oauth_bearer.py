"""OAUTHBEARER: one message with one token; a refusal is answered as in RFC 7628, for each next message of the
client."""

from __future__ import annotations

import pytest

from mansio.config.security import OAUTHBEARER
from mansio.errors import SaslAuthenticationFailed, UnsupportedSaslMechanism
from mansio.state.authentication.oauth_bearer import (
    FAILURE_ANSWER,
    INVALID_TOKEN,
    MESSAGE_BYTES_MAX,
    OAuthBearerServer,
    bearer_message,
)
from mansio.state.authentication.outcomes import NO_KEYS, Accepted, Challenge, Refused, Rejected
from mansio.state.authentication.sasl_session import (
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Decision,
    Gate,
    SaslSession,
)
from support.credentials import directory

END_MS = 300_000


def verify(token: str, now_ms: int) -> Accepted | Rejected | Refused:
    if token == "none":
        return Refused(NO_KEYS)
    if token.startswith("good.") and now_ms < END_MS:
        return Accepted(token.removeprefix("good."), valid_until_ms=END_MS, groups=("g",))
    return Rejected("wrong")


def first(message: bytes) -> Challenge | Accepted | Rejected | Refused:
    return OAuthBearerServer(verify).step(message, 0)


def test_message_of_the_rfc_is_accepted_with_and_without_user_and_extensions() -> None:
    alice = Accepted("alice", valid_until_ms=END_MS, groups=("g",))
    assert first(bearer_message("good.alice")) == alice
    assert first(b"n,a=alice,\x01auth=bearer good.alice\x01\x01") == alice
    assert first(b"n,,\x01host=a.example\x01port=1\x01auth=Bearer  good.alice\x01traceId=7\x01\x01") == alice


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x01",
        b"n,,\x01\x01",
        b"n,,\x01auth=Basic good.alice\x01\x01",
        b"n,,\x01auth=Bearer\x01\x01",
        b"n,,\x01auth=Bearer good.alice\x01",
        b"n,,auth=Bearer good.alice\x01\x01",
        b"y,,\x01auth=Bearer good.alice\x01\x01",
        b"n,a=bob,\x01auth=Bearer good.alice\x01\x01",
        b"n,,\x01auth=Bearer good.alice\x01auth=Bearer good.bob\x01\x01",
        b"n,,\x01auth=Bearer good.alice\x01\x01\x01",
        b"n,,\x01auth=Bearer good.ali\x00ce\x01\x01",
        b"n,,\x01auth=Bearer \xff\x01\x01",
        b"n,,\x01auth=Bearer wrong\x01\x01",
        b"n,,\x01auth=Bearer " + b"a" * MESSAGE_BYTES_MAX + b"\x01\x01",
    ],
)
def test_anything_else_is_refused_and_the_error_follows_the_answer_of_the_client(message: bytes) -> None:
    server = OAuthBearerServer(verify)
    assert server.step(message, 0) == Challenge(INVALID_TOKEN)
    assert isinstance(server.step(bearer_message("good.alice"), 0), Rejected)
    assert isinstance(server.step(FAILURE_ANSWER, 0), Rejected)


def session(mechanisms: tuple[str, ...] = (OAUTHBEARER,), *, is_confidential: bool = True) -> SaslSession:
    return SaslSession(
        mechanisms, directory(), lambda: b"", is_confidential=is_confidential, verify_token=verify
    )


def log_in(one: SaslSession, token: str, now_ms: int = 0) -> Decision:
    assert one.gate(SASL_HANDSHAKE, 1, now_ms) is Gate.HANDSHAKE
    assert one.handshake(1, OAUTHBEARER, now_ms).error_code == 0
    return send(one, bearer_message(token), now_ms)


def send(one: SaslSession, message: bytes, now_ms: int = 0) -> Decision:
    assert one.gate(SASL_AUTHENTICATE, 2, now_ms) is Gate.AUTHENTICATE
    found = one.authenticate(message, now_ms)
    assert isinstance(found, Decision)
    return found


def test_session_ends_with_the_token_and_another_token_of_the_user_continues_it() -> None:
    one = session()
    assert log_in(one, "good.alice").session_lifetime_ms == END_MS
    assert one.user is not None
    assert (one.user.name, one.user.groups, one.expires_ms) == ("alice", ("g",), END_MS)
    assert one.revalidate()
    assert one.is_expired(END_MS + 1)
    assert log_in(one, "good.alice", 200_000).session_lifetime_ms == END_MS - 200_000
    log_in(one, "good.bob", 210_000)
    assert one.user.name == "alice"
    assert not one.is_authenticated


def test_failure_is_answered_with_one_text() -> None:
    one = session()
    assert log_in(one, "wrong").auth_bytes == INVALID_TOKEN
    failed = send(one, FAILURE_ANSWER)
    assert failed.error_code == SaslAuthenticationFailed.kafka_code
    assert failed.error_message is not None
    assert "wrong" not in failed.error_message


def test_without_keys_the_connection_is_closed_without_an_answer() -> None:
    one = session()
    assert one.gate(SASL_HANDSHAKE, 1, 0) is Gate.HANDSHAKE
    one.handshake(1, OAUTHBEARER, 0)
    assert one.authenticate(bearer_message("none"), 0) == Refused(NO_KEYS)
    assert not one.is_authenticated


def test_tokens_are_not_asked_for_on_a_connection_that_others_can_read() -> None:
    one = session((OAUTHBEARER, "SCRAM-SHA-256"), is_confidential=False)
    one.gate(SASL_HANDSHAKE, 1, 0)
    refused = one.handshake(1, OAUTHBEARER, 0)
    assert refused.error_code == UnsupportedSaslMechanism.kafka_code
    assert refused.mechanisms == ("SCRAM-SHA-256",)
