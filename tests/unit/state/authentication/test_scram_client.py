"""The client of SCRAM: logs in where the password is right, at servers independent of it; and trusts no server."""

from __future__ import annotations

import base64

import pytest
import scramp
from hypothesis import example, given
from hypothesis import strategies as st

from mansio.errors import AuthenticationFailed
from mansio.state.authentication.credentials import (
    USER_BYTES_MAX,
    CredentialDirectory,
    ScramMechanism,
    salt_password,
)
from mansio.state.authentication.outcomes import Accepted, Challenge, Rejected
from mansio.state.authentication.plain import read_plain_token
from mansio.state.authentication.scram import MESSAGE_BYTES_MAX, ScramServer
from mansio.state.authentication.scram_client import (
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    SALT_BYTES_MAX,
    Salting,
    ScramClient,
    plain_token,
)
from support.credentials import NONCE, SALT, SHA_256, credential, directory_of, reachable_texts

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60).filter(
    lambda text: len(text.encode()) <= USER_BYTES_MAX
)
ASCII = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=30)
USER, PASSWORD = "alice", "correct horse"
CLIENT_NONCE = bytes(range(24))
NONCE_TEXT = base64.b64encode(CLIENT_NONCE).decode()
SALT_TEXT = base64.b64encode(SALT).decode()


def log_in(
    users: CredentialDirectory, mechanism: ScramMechanism, user: str, password: str
) -> Accepted | Rejected:
    """The outcome of a whole exchange with our server, whose signature was verified if it accepted."""
    client, server = ScramClient(mechanism, user, CLIENT_NONCE), ScramServer(mechanism, users, NONCE)
    challenge = server.step(client.first(), 0)
    assert isinstance(challenge, Challenge)
    outcome = server.step(answer(client, challenge.token, password, mechanism), 0)
    assert not isinstance(outcome, Challenge)
    if isinstance(outcome, Accepted):
        client.verify(outcome.token)
    return outcome


def answer(
    client: ScramClient, challenge: bytes, password: str = PASSWORD, mechanism: ScramMechanism = SHA_256
) -> bytes:
    salting = client.read_challenge(challenge)
    return client.final(salt_password(mechanism, password.encode(), *salting))


def challenge_of(nonce: str = NONCE_TEXT + "server", salt: str = SALT_TEXT, rest: str = "i=4096") -> bytes:
    return f"r={nonce},s={salt},{rest}".encode()


def begun() -> ScramClient:
    client = ScramClient(SHA_256, USER, CLIENT_NONCE)
    client.first()
    return client


def test_the_example_of_rfc_7677_has_its_bytes() -> None:
    client = ScramClient(SHA_256, "user", CLIENT_NONCE)
    client._nonce = "rOprNGfwEbeRWgbNEkqO"
    assert client.first() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    challenge = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    assert answer(client, challenge, "pencil") == (
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    client.verify(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


@pytest.mark.parametrize("mechanism", ScramMechanism)
@given(user=TEXTS, password=TEXTS, other=TEXTS)
@example(user="=2C,=3D=", password="ª\u00ad\u2168", other="aIX")  # SASLprep makes these passwords equal
def test_any_name_and_password_of_unicode_log_in_unchanged_and_no_other_password(
    mechanism: ScramMechanism, user: str, password: str, other: str
) -> None:
    users = directory_of({user: credential(password, mechanism)})
    assert isinstance(log_in(users, mechanism, user, password), Accepted)
    if other != password:
        assert log_in(users, mechanism, user, other) == Rejected("wrong password", user)


@pytest.mark.parametrize("mechanism", ScramMechanism)
@given(user=ASCII, password=ASCII)
def test_it_logs_in_at_scramps_server_and_verifies_it(
    mechanism: ScramMechanism, user: str, password: str
) -> None:
    mechanics = scramp.ScramMechanism(mechanism.value)
    stored = mechanics.make_auth_info(password, iteration_count=ITERATIONS_MIN)
    server = mechanics.make_server(lambda name: stored if name == user else None)
    client = ScramClient(mechanism, user, CLIENT_NONCE)
    server.set_client_first(client.first().decode())
    final = answer(client, server.get_server_first().encode(), password, mechanism)
    server.set_client_final(final.decode())
    client.verify(server.get_server_final().encode())


@given(user=TEXTS, password=TEXTS)
def test_the_token_of_plain_is_read_by_our_server(user: str, password: str) -> None:
    users = directory_of({user: credential(password)})
    check = read_plain_token(plain_token(user, password.encode()), users)
    assert not isinstance(check, Rejected)
    assert isinstance(check.run(0), Accepted)


@pytest.mark.parametrize(
    "nonce",
    ["", "server", NONCE_TEXT, NONCE_TEXT[:-1] + "server", "x" + NONCE_TEXT + "server", NONCE_TEXT + "\0"],
)
def test_a_nonce_that_does_not_continue_the_clients_is_refused(nonce: str) -> None:
    with pytest.raises(AuthenticationFailed):
        begun().read_challenge(challenge_of(nonce))


@pytest.mark.parametrize("iterations", [1, ITERATIONS_MIN - 1, ITERATIONS_MAX + 1, 10**9, 10**30])
def test_iterations_that_are_too_few_or_hold_a_thread_for_long_are_refused(iterations: int) -> None:
    with pytest.raises(AuthenticationFailed):
        begun().read_challenge(challenge_of(rest=f"i={iterations}"))
    assert begun().read_challenge(challenge_of(rest=f"i={ITERATIONS_MAX}")) == Salting(SALT, ITERATIONS_MAX)


@pytest.mark.parametrize("size", [0, SALT_BYTES_MAX + 1])
def test_a_salt_without_bytes_or_with_too_many_is_refused(size: int) -> None:
    with pytest.raises(AuthenticationFailed):
        begun().read_challenge(challenge_of(salt=base64.b64encode(bytes(size)).decode()))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"m=x," + challenge_of(),
        challenge_of(salt="####"),
        challenge_of(salt="A"),
        challenge_of(rest="i=-4096"),
        challenge_of(rest="i=04096"),
        challenge_of(rest="i=4096,"),
        challenge_of(rest="i=4096,x=" + "y" * MESSAGE_BYTES_MAX),
    ],
)
def test_a_malformed_challenge_and_a_mandatory_extension_are_refused(message: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        begun().read_challenge(message)


def test_extensions_that_are_not_mandatory_are_ignored_and_signed() -> None:
    client = begun()
    challenge = challenge_of(rest="i=4096,x=y,z=1")
    answer(client, challenge)
    assert challenge in client._auth_message


@given(message=st.binary(max_size=200) | st.text(max_size=100).map(lambda text: f"v={text}".encode()))
@example(b"v=")
@example(b"v=AAAA")
def test_a_server_that_does_not_know_the_password_is_refused(message: bytes) -> None:
    client = begun()
    answer(client, challenge_of())
    with pytest.raises(AuthenticationFailed):
        client.verify(message)


def test_a_signature_for_another_exchange_is_refused() -> None:
    users = directory_of({USER: credential(PASSWORD)})
    client, server = begun(), ScramServer(SHA_256, users, NONCE)
    challenge = server.step(client.first(), 0)
    assert isinstance(challenge, Challenge)
    accepted = server.step(answer(client, challenge.token), 0)
    assert isinstance(accepted, Accepted)
    other = ScramClient(SHA_256, USER, bytes(24))
    other_challenge = ScramServer(SHA_256, users, NONCE).step(other.first(), 0)
    assert isinstance(other_challenge, Challenge)
    answer(other, other_challenge.token)
    with pytest.raises(AuthenticationFailed):
        other.verify(accepted.token)
    client.verify(accepted.token)


def test_an_error_of_the_server_is_one_short_line() -> None:
    client = begun()
    answer(client, challenge_of())
    with pytest.raises(AuthenticationFailed, match="invalid-proof") as caught:
        client.verify(b"e=invalid-proof\n\x1b[31m" + b"x" * 500)
    assert len(caught.value.message) < 200
    assert caught.value.message.isprintable()


def test_no_repr_and_no_error_contains_the_password_or_what_stands_for_it() -> None:
    client = begun()
    answer(client, challenge_of())
    salted = salt_password(SHA_256, PASSWORD.encode(), SALT, ITERATIONS_MIN)
    with pytest.raises(AuthenticationFailed) as caught:
        client.verify(b"v=AAAA")
    texts = reachable_texts(caught.value) + repr(client)
    for secret in (PASSWORD, salted.hex(), repr(salted), base64.b64encode(salted).decode()):
        assert secret not in texts
