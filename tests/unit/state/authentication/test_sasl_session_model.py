"""The SASL session of a connection: every API in every state, against a table; no request is served to a stranger."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.config.security import PLAIN, SASL_MECHANISMS
from mansio.state.authentication.credentials import CredentialDirectory, ScramCredential, ScramMechanism
from mansio.state.authentication.outcomes import Accepted, Refused, Rejected
from mansio.state.authentication.plain import PasswordCheck
from mansio.state.authentication.sasl_session import (
    AUTHENTICATE_VERSION_MAX,
    BROKER_HANDSHAKE,
    REAUTHENTICATION_INTERVAL_MS,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    AuthenticatedUser,
    Closing,
    Decision,
    Gate,
    SaslSession,
)
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey, is_supported
from support.credentials import (
    NONCE,
    SERVER_SECRET,
    SHA_512,
    ScramPeer,
    credential,
    directory,
    reachable_texts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SESSION_MS = 60_000
PASSWORD = "correct horse"
ALICE = credential(PASSWORD).with_password("new", 40_000)
USERS = directory(alice=(ALICE, credential("other", SHA_512)), bob=credential("bobs"))
SCRAM = "SCRAM-SHA-256"

ILLEGAL, UNSUPPORTED_MECHANISM, FAILED, UNSUPPORTED = 34, 33, 58, 35
APIS = (*SUPPORTED_APIS, 999, -1)


def session(mechanisms: tuple[str, ...] = SASL_MECHANISMS, session_ms: int = SESSION_MS) -> SaslSession:
    return SaslSession(mechanisms, USERS, lambda: NONCE, session_ms)


def shake(one: SaslSession, mechanism: str = SCRAM, now_ms: int = 0) -> Decision:
    assert one.gate(SASL_HANDSHAKE, 1, now_ms) is Gate.HANDSHAKE
    return one.handshake(1, mechanism, now_ms)


def send(one: SaslSession, token: bytes, now_ms: int = 0) -> Decision | PasswordCheck:
    assert one.gate(SASL_AUTHENTICATE, 2, now_ms) is Gate.AUTHENTICATE
    step = one.authenticate(token, now_ms)
    assert not isinstance(step, Refused)
    return step


def prove(one: SaslSession, user: str, password: str, now_ms: int = 0, mechanism: str = SCRAM) -> Decision:
    """The exchange after the handshake."""
    peer = ScramPeer(user, password, ScramMechanism(mechanism))
    challenge = send(one, peer.first(), now_ms)
    assert isinstance(challenge, Decision)
    if challenge.error_code:
        return challenge
    decision = send(one, peer.final(challenge.auth_bytes), now_ms)
    assert isinstance(decision, Decision)
    return decision


def new() -> SaslSession:
    return session()


def versioned() -> SaslSession:
    one = new()
    assert one.gate(ApiKey.API_VERSIONS, 4, 0) is Gate.SERVE
    return one


def tokens() -> SaslSession:
    one = versioned()
    assert shake(one).error_code == 0
    return one


def challenged() -> SaslSession:
    one = tokens()
    send(one, ScramPeer("alice", "new").first())
    return one


def checking() -> SaslSession:
    one = new()
    shake(one, PLAIN)
    assert isinstance(send(one, b"\0alice\0new"), PasswordCheck)
    return one


def authenticated() -> SaslSession:
    one = tokens()
    assert prove(one, "alice", "new").error_code == 0
    return one


def endless() -> SaslSession:
    one = session(session_ms=0)
    shake(one)
    prove(one, "alice", "new")
    return one


def expired() -> SaslSession:
    one = authenticated()
    one.expires_ms = -1
    return one


def reauthenticating() -> SaslSession:
    one = expired()
    shake(one)
    return one


def closed() -> SaslSession:
    one = tokens()
    assert prove(one, "alice", "wrong").closing is Closing.DELAYED
    return one


SERVED, SHAKE, TOKEN = Gate.SERVE, Gate.HANDSHAKE, Gate.AUTHENTICATE
REFUSED, ILLEGAL_AND_CLOSED, CLOSED = (
    (ILLEGAL, Closing.NEVER),
    (ILLEGAL, Closing.AFTER_ANSWER),
    (0, Closing.NOW),
)
TABLE: dict[Callable[[], SaslSession], tuple[object, object, object, object]] = {
    # ApiVersions, SaslHandshake, SaslAuthenticate, others
    new: (SERVED, SHAKE, ILLEGAL_AND_CLOSED, ILLEGAL_AND_CLOSED),
    versioned: (ILLEGAL_AND_CLOSED, SHAKE, ILLEGAL_AND_CLOSED, ILLEGAL_AND_CLOSED),
    tokens: (ILLEGAL_AND_CLOSED, ILLEGAL_AND_CLOSED, TOKEN, ILLEGAL_AND_CLOSED),
    challenged: (ILLEGAL_AND_CLOSED, ILLEGAL_AND_CLOSED, TOKEN, ILLEGAL_AND_CLOSED),
    checking: (ILLEGAL_AND_CLOSED, ILLEGAL_AND_CLOSED, ILLEGAL_AND_CLOSED, ILLEGAL_AND_CLOSED),
    authenticated: (SERVED, SHAKE, REFUSED, SERVED),
    endless: (SERVED, REFUSED, REFUSED, SERVED),
    expired: (CLOSED, SHAKE, CLOSED, CLOSED),
    reauthenticating: (ILLEGAL_AND_CLOSED, ILLEGAL_AND_CLOSED, TOKEN, ILLEGAL_AND_CLOSED),
    closed: (CLOSED, CLOSED, CLOSED, CLOSED),
}
VERSIONS: dict[int, int] = {SASL_HANDSHAKE: 1, SASL_AUTHENTICATE: 2}
COLUMNS: dict[int, int] = {ApiKey.API_VERSIONS: 0, SASL_HANDSHAKE: 1, SASL_AUTHENTICATE: 2}


def kind(result: Gate | Decision) -> object:
    return result if isinstance(result, Gate) else (result.error_code, result.closing)


@pytest.mark.parametrize("state", TABLE, ids=lambda state: state.__name__)
def test_every_api_in_every_state_is_served_answered_or_closed_as_in_the_table(
    state: Callable[[], SaslSession],
) -> None:
    for api_key in APIS:
        version = VERSIONS.get(api_key, 0)
        one = state()
        result = one.gate(api_key, version, 0)
        expected = TABLE[state][COLUMNS.get(api_key, 3)]
        if api_key in BROKER_HANDSHAKE and state in (new, versioned):
            expected = SERVED
        assert kind(result) == expected, (state.__name__, api_key)
        if isinstance(result, Decision) and result.closing is not Closing.NEVER:
            for again in APIS:
                assert kind(one.gate(again, version, 0)) == CLOSED, "a closed connection stays closed"


@pytest.mark.parametrize("version", [-1, 2, 3, 32_767])
def test_an_unknown_version_of_a_sasl_request_closes_the_connection(version: int) -> None:
    assert kind(new().gate(SASL_HANDSHAKE, version, 0)) == CLOSED
    for api_key in (SASL_HANDSHAKE, SASL_AUTHENTICATE):
        if not is_supported(api_key, version):
            assert kind(authenticated().gate(api_key, version, 0)) == CLOSED
            assert kind(endless().gate(api_key, version, 0)) == CLOSED
    one = tokens()
    if 0 <= version <= AUTHENTICATE_VERSION_MAX:
        assert one.gate(SASL_AUTHENTICATE, version, 0) is Gate.AUTHENTICATE
    else:
        assert kind(one.gate(SASL_AUTHENTICATE, version, 0)) == CLOSED


def test_api_versions_can_be_repeated_after_an_unknown_version_only() -> None:
    one = new()
    for _ in range(3):
        assert one.gate(ApiKey.API_VERSIONS, 99, 0) is Gate.SERVE
    assert one.gate(ApiKey.API_VERSIONS, 0, 0) is Gate.SERVE
    assert kind(one.gate(ApiKey.API_VERSIONS, 0, 0)) == ILLEGAL_AND_CLOSED


def test_handshake_0_is_answered_and_refused() -> None:
    one = new()
    assert one.gate(SASL_HANDSHAKE, 0, 0) is Gate.HANDSHAKE
    decision = one.handshake(0, SCRAM, 0)
    assert (decision.error_code, decision.closing) == (UNSUPPORTED, Closing.AFTER_ANSWER)
    assert kind(one.gate(SASL_AUTHENTICATE, 2, 0)) == CLOSED


@pytest.mark.parametrize(
    "mechanism", ["", "PLAIN", "GSSAPI", "scram-sha-256", "SCRAM-SHA-256-PLUS", "x" * 32_767]
)
def test_a_mechanism_that_is_not_offered_is_answered_with_those_that_are(mechanism: str) -> None:
    offered = ("SCRAM-SHA-512", "SCRAM-SHA-256")
    one = session(offered)
    decision = shake(one, mechanism)
    assert decision.error_code == UNSUPPORTED_MECHANISM
    assert decision.mechanisms == offered
    assert decision.closing is Closing.AFTER_ANSWER
    assert len(decision.reason) < 200
    assert kind(one.gate(SASL_AUTHENTICATE, 2, 0)) == CLOSED


def test_plain_is_not_offered_where_others_can_read_the_password() -> None:
    one = SaslSession(SASL_MECHANISMS, USERS, lambda: NONCE, is_confidential=False)
    decision = shake(one, PLAIN)
    assert decision.error_code == UNSUPPORTED_MECHANISM
    assert decision.mechanisms == ("SCRAM-SHA-256", "SCRAM-SHA-512")
    only = SaslSession((PLAIN,), USERS, lambda: NONCE, is_confidential=False)
    assert shake(only, PLAIN).mechanisms == ()


@pytest.mark.parametrize("mechanisms", [(), ("GSSAPI",), ("PLAIN", "plain")])
def test_a_listener_without_a_known_mechanism_is_refused(mechanisms: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="mechanisms"):
        session(mechanisms)


@pytest.mark.parametrize("mechanism", SASL_MECHANISMS)
def test_each_mechanism_authenticates_and_reports_the_lifetime(mechanism: str) -> None:
    one = session()
    assert shake(one, mechanism).mechanisms == SASL_MECHANISMS
    password = "other" if mechanism == "SCRAM-SHA-512" else "new"
    decision = log_in(one, mechanism, "alice", password)
    assert (decision.error_code, decision.closing) == (0, Closing.NEVER)
    assert decision.session_lifetime_ms == SESSION_MS
    assert one.user == AuthenticatedUser("alice", mechanism, 0)
    assert one.is_authenticated


def log_in(one: SaslSession, mechanism: str, user: str, password: str, now_ms: int = 0) -> Decision:
    if mechanism != PLAIN:
        return prove(one, user, password, now_ms, mechanism)
    check = send(one, f"\0{user}\0{password}".encode(), now_ms)
    if isinstance(check, Decision):
        return check
    return one.complete(check.run(now_ms), now_ms)


@pytest.mark.parametrize("mechanism", SASL_MECHANISMS)
def test_every_failure_has_the_same_answer_and_none_has_a_secret(mechanism: str) -> None:
    answers = set()
    for user, password in (
        ("alice", "wrong"),
        ("nobody", PASSWORD),
        ("bob", PASSWORD),
        ("", "p"),
        ("a\0", "p"),
    ):
        one = session()
        shake(one, mechanism)
        decision = log_in(one, mechanism, user, password)
        answers.add(decision._replace(reason="", user=""))
        assert PASSWORD not in reachable_texts(decision)
        assert one.user is None
        assert kind(one.gate(ApiKey.METADATA, 12, 0)) == CLOSED
    text = f"Authentication failed during authentication due to invalid credentials with SASL mechanism {mechanism}"
    assert answers == {Decision(FAILED, text, Closing.DELAYED)}


def test_the_result_of_a_check_counts_once_and_only_for_an_open_connection() -> None:
    one = checking()
    assert one.gate(ApiKey.METADATA, 12, 0) != Gate.SERVE
    late = one.complete(Accepted("alice"), 0)
    assert (late.closing, one.user) == (Closing.NOW, None)
    one = checking()
    assert one.complete(Accepted("alice"), 0).error_code == 0
    again = one.complete(Accepted("bob"), 0)
    assert again.closing is Closing.NOW
    assert one.user is not None
    assert one.user.name == "alice"
    assert checking().complete(Rejected("too many checks"), 0).error_code == FAILED


def test_another_broker_is_authenticated_by_its_own_handshake_and_before_any_other_only() -> None:
    for one in (new(), versioned()):
        assert one.gate(ApiKey.CHALLENGE_BROKER, 0, 0) is Gate.SERVE
        assert kind(one.gate(ApiKey.FETCH, 12, 0)) == ILLEGAL_AND_CLOSED
    one = new()
    assert one.gate(ApiKey.AUTHENTICATE_BROKER, 0, 0) is Gate.SERVE
    one.accept_broker()
    assert one.gate(ApiKey.FETCH, 12, 1 << 50) is Gate.SERVE
    assert kind(one.gate(SASL_HANDSHAKE, 1, 0)) == REFUSED
    assert one.user is None
    assert one.revalidate()


def changing(**users: ScramCredential) -> tuple[dict[str, ScramCredential], CredentialDirectory]:
    """Users of SCRAM-SHA-256 that a test can change, and their directory."""

    def find(user: str, mechanism: ScramMechanism) -> ScramCredential | None:
        return users.get(user) if mechanism is ScramMechanism.SHA_256 else None

    return users, CredentialDirectory(find, SERVER_SECRET)


@pytest.mark.parametrize("mechanism", [SCRAM, PLAIN])
def test_a_session_ends_when_its_credential_changes_or_is_deleted(mechanism: str) -> None:
    first = replace(credential("first"), revision=5)
    users, known = changing(alice=first)
    one = SaslSession(SASL_MECHANISMS, known, lambda: NONCE)
    shake(one, mechanism)
    assert log_in(one, mechanism, "alice", "first").error_code == 0
    assert one.revalidate()
    users["alice"] = replace(first.with_password("second"), revision=6)
    assert not one.revalidate()
    users["alice"] = replace(first, revision=7)
    assert not one.revalidate(), "the same password, set again"
    users["alice"] = first
    assert one.revalidate()
    del users["alice"]
    assert not one.revalidate()


@pytest.mark.parametrize("mechanism", [SCRAM, PLAIN])
def test_a_session_whose_password_stays_valid_for_a_time_ends_with_it(mechanism: str) -> None:
    first = replace(credential("first"), revision=5)
    second = replace(first.with_password("second", 40_000), revision=6)
    users, known = changing(alice=first)
    one = SaslSession(SASL_MECHANISMS, known, lambda: NONCE)
    shake(one, mechanism)
    assert log_in(one, mechanism, "alice", "first").error_code == 0
    users["alice"] = second
    assert one.revalidate()
    assert one.expires_ms == 40_000
    late = SaslSession(SASL_MECHANISMS, known, lambda: NONCE)
    shake(late, mechanism)
    assert log_in(late, mechanism, "alice", "first", 1_000).session_lifetime_ms == 39_000
    users["alice"] = replace(second.with_password("third", 90_000), revision=7)
    assert not one.revalidate(), "the password before the previous one"
    assert not late.revalidate()


@pytest.mark.parametrize("mechanism", [SCRAM, PLAIN])
def test_a_password_that_changes_during_a_log_in_does_not_log_in(mechanism: str) -> None:
    first = replace(credential("first"), revision=5)
    users, known = changing(alice=first)
    one = SaslSession(SASL_MECHANISMS, known, lambda: NONCE)
    shake(one, mechanism)
    if mechanism == PLAIN:
        check = send(one, b"\0alice\0first")
        assert isinstance(check, PasswordCheck)
        users["alice"] = replace(first.with_password("second"), revision=6)
        decision = one.complete(check.run(0), 0)
    else:
        peer = ScramPeer("alice", "first")
        challenge = send(one, peer.first())
        users["alice"] = replace(first.with_password("second"), revision=6)
        assert isinstance(challenge, Decision)
        last = send(one, peer.final(challenge.auth_bytes))
        assert isinstance(last, Decision)
        decision = last
    assert (decision.error_code, one.user, one.expires_ms) == (FAILED, None, None)


def test_requests_end_with_the_session_and_not_before() -> None:
    one = authenticated()
    assert one.gate(ApiKey.PRODUCE, 9, SESSION_MS) is Gate.SERVE
    assert not one.is_expired(SESSION_MS)
    assert one.is_expired(SESSION_MS + 1)
    assert kind(one.gate(ApiKey.PRODUCE, 9, SESSION_MS + 1)) == CLOSED
    assert endless().gate(ApiKey.PRODUCE, 9, 1 << 50) is Gate.SERVE


@pytest.mark.parametrize("session_ms", [0, 100_000])
def test_a_session_with_the_previous_password_ends_with_it(session_ms: int) -> None:
    one = session(session_ms=session_ms)
    shake(one, now_ms=10_000)
    assert prove(one, "alice", PASSWORD, 10_000).session_lifetime_ms == 30_000
    assert one.expires_ms == 40_000
    assert kind(one.gate(ApiKey.PRODUCE, 9, 40_001)) == CLOSED
    one = session(session_ms=5_000)
    shake(one, now_ms=10_000)
    assert prove(one, "alice", PASSWORD, 10_000).session_lifetime_ms == 5_000


@pytest.mark.parametrize("mechanism", SASL_MECHANISMS)
@pytest.mark.parametrize("now_ms", [10_000, SESSION_MS + 10_000])
def test_reauthentication_extends_the_session_of_the_same_user_and_mechanism(
    mechanism: str, now_ms: int
) -> None:
    one = session()
    password = "other" if mechanism == "SCRAM-SHA-512" else "new"
    shake(one, mechanism)
    log_in(one, mechanism, "alice", password)
    user = one.user
    assert shake(one, mechanism, now_ms).error_code == 0
    assert one.user == user, "requests that were accepted before continue"
    assert log_in(one, mechanism, "alice", password, now_ms).session_lifetime_ms == SESSION_MS
    assert one.user == user
    assert one.expires_ms == now_ms + SESSION_MS


@pytest.mark.parametrize("mechanism", [SCRAM, PLAIN])
def test_reauthentication_as_another_user_or_with_a_wrong_password_closes(mechanism: str) -> None:
    for user, password in (("bob", "bobs"), ("alice", "wrong"), ("nobody", "p")):
        one = session()
        shake(one, mechanism)
        log_in(one, mechanism, "alice", "new")
        shake(one, mechanism, 5_000)
        decision = log_in(one, mechanism, user, password, 5_000)
        assert (decision.error_code, decision.closing) == (FAILED, Closing.DELAYED)
        assert "re-authentication" in (decision.error_message or "")
        assert kind(one.gate(ApiKey.METADATA, 12, 5_000)) == CLOSED


def test_reauthentication_with_another_mechanism_closes() -> None:
    for first, second in itertools.permutations(SASL_MECHANISMS, 2):
        one = session()
        password = "other" if first == "SCRAM-SHA-512" else "new"
        shake(one, first)
        log_in(one, first, "alice", password)
        decision = shake(one, second, 5_000)
        assert (decision.error_code, decision.closing) == (UNSUPPORTED_MECHANISM, Closing.AFTER_ANSWER)
        assert kind(one.gate(SASL_AUTHENTICATE, 2, 5_000)) == CLOSED


def test_reauthentications_have_a_minimum_distance() -> None:
    one = authenticated()
    shake(one, now_ms=5_000)
    prove(one, "alice", "new", 5_000)
    early_ms = 5_000 + REAUTHENTICATION_INTERVAL_MS - 1
    assert kind(one.gate(SASL_HANDSHAKE, 1, early_ms)) == REFUSED
    assert one.gate(SASL_HANDSHAKE, 1, early_ms + 1) is Gate.HANDSHAKE
    one.expires_ms = 5_500
    assert kind(one.gate(SASL_HANDSHAKE, 1, early_ms)) == CLOSED


REQUESTS = st.tuples(
    st.sampled_from([ApiKey.API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE, ApiKey.METADATA, ApiKey.FETCH]),
    st.integers(0, 3),
    st.integers(0, 40_000),
    st.integers(0, 2**32),
)


@given(st.lists(REQUESTS, max_size=30))
def test_no_order_of_requests_serves_a_client_that_has_not_proved_a_password(
    requests: list[tuple[int, int, int, int]],
) -> None:
    """Wrong tokens of all kinds, in every order and at every time."""
    one, now_ms, is_closed = session(), 0, False
    for api_key, version, elapsed_ms, seed in requests:
        now_ms += elapsed_ms
        random = Random(seed)
        result = one.gate(api_key, version, now_ms)
        if is_closed:
            assert kind(result) == CLOSED
        if result is Gate.SERVE:
            assert api_key == ApiKey.API_VERSIONS
        elif result is Gate.HANDSHAKE:
            result = one.handshake(version, random.choice(SASL_MECHANISMS), now_ms)
        elif result is Gate.AUTHENTICATE:
            user = random.choice(["alice", "bob", "nobody"])
            token = random.choice(
                [
                    f"\0{user}\0wrong".encode(),
                    f"bob\0alice\0{PASSWORD}".encode(),
                    ScramPeer(user, "wrong").first(),
                    b"c=biws,r=,p=AAAA",
                    random.randbytes(20),
                    b"",
                ]
            )
            answer = one.authenticate(token, now_ms)
            assert not isinstance(answer, Refused)
            result = answer if isinstance(answer, Decision) else one.complete(answer.run(now_ms), now_ms)
        is_closed = is_closed or (isinstance(result, Decision) and result.closing is not Closing.NEVER)
        assert one.user is None
        assert not one.is_authenticated


def test_a_token_split_at_every_byte_does_not_authenticate() -> None:
    """A client that sends a token in two requests has sent two wrong tokens."""
    token = b"\0alice\0new"
    for at in range(1, len(token) - 3):
        one = session()
        shake(one, PLAIN)
        answer = send(one, token[:at])
        if not isinstance(answer, Decision):
            answer = one.complete(answer.run(0), 0)
        assert answer.error_code == FAILED
        assert kind(one.gate(SASL_AUTHENTICATE, 2, 0)) == CLOSED
