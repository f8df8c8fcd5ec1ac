"""Credentials: what is stored verifies the password, has permitted sizes, and shows neither passwords nor keys."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import UnacceptableCredential
from mansio.state.authentication.credentials import (
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    PASSWORD_BYTES_MAX,
    SALT_BYTES_MAX,
    CredentialDirectory,
    KeyPair,
    ScramCredential,
    ScramMechanism,
)
from support.credentials import SALT, SERVER_SECRET, SHA_256, credential, reachable_texts

SECRET = "correct horse"


@pytest.mark.parametrize("mechanism", ScramMechanism)
@given(password=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20))
def test_a_salted_password_of_a_client_gives_the_credential_of_the_password(
    mechanism: ScramMechanism, password: str
) -> None:
    name = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}[mechanism.value]
    salted = hashlib.pbkdf2_hmac(name, password.encode(), SALT, 4_096)
    from_client = ScramCredential.from_salted_password(mechanism, salted, SALT, 4_096)
    assert from_client == credential(password, mechanism)
    assert from_client.keys.server_key == hmac.new(salted, b"Server Key", name).digest()


def test_the_numbers_of_the_mechanisms_are_those_of_kip_554() -> None:
    assert [mechanism.kafka_type for mechanism in ScramMechanism] == [1, 2]


@pytest.mark.parametrize("iterations", [-1, 0, 1, ITERATIONS_MIN - 1, ITERATIONS_MAX + 1, 2**31 - 1])
def test_too_few_and_too_many_iterations_are_refused_before_they_are_computed(iterations: int) -> None:
    with pytest.raises(UnacceptableCredential, match="4096 to 16384 iterations"):
        credential(SECRET, iterations=iterations)
    with pytest.raises(UnacceptableCredential, match="4096 to 16384 iterations"):
        ScramCredential.from_salted_password(SHA_256, bytes(32), SALT, iterations)


@pytest.mark.parametrize("iterations", [ITERATIONS_MIN, ITERATIONS_MAX])
@pytest.mark.parametrize("length", [1, SALT_BYTES_MAX])
def test_the_bounds_themselves_are_accepted(iterations: int, length: int) -> None:
    assert credential(SECRET, iterations=iterations, salt=bytes(length)).iterations == iterations


@pytest.mark.parametrize("length", [0, SALT_BYTES_MAX + 1])
def test_an_empty_or_a_long_salt_is_refused(length: int) -> None:
    with pytest.raises(UnacceptableCredential, match="salt"):
        credential(SECRET, salt=bytes(length))


def test_a_salted_password_or_a_stored_key_of_another_length_is_refused() -> None:
    for mechanism in ScramMechanism:
        for length in (0, 31, 33, 63, 65, 96 - mechanism.key_bytes):
            with pytest.raises(UnacceptableCredential, match="another length"):
                ScramCredential.from_salted_password(mechanism, bytes(length), SALT, 4_096)
            with pytest.raises(UnacceptableCredential, match="another length"):
                ScramCredential(mechanism, 4_096, SALT, KeyPair(bytes(mechanism.key_bytes), bytes(length)))


@pytest.mark.parametrize(
    "password", ["", "\ud800" + SECRET, f"{SECRET}\0", SECRET * (PASSWORD_BYTES_MAX // len(SECRET) + 1)]
)
def test_a_password_that_is_refused_is_in_no_error(password: str) -> None:
    with pytest.raises(UnacceptableCredential) as caught:
        credential(password)
    assert SECRET not in reachable_texts(caught.value)


def test_nothing_shows_a_key_a_salt_or_a_password() -> None:
    stored = credential("old").with_password(SECRET, 5_000)
    assert stored.previous is not None
    directory = CredentialDirectory(lambda *_: stored, SERVER_SECRET)
    secrets = [*stored.keys, *stored.previous.keys, stored.salt, SERVER_SECRET, SECRET.encode()]
    for value in (stored, stored.keys, stored.previous, directory, directory.find("alice", SHA_256)):
        shown = reachable_texts(value) + f"{value}"
        for secret in secrets:
            for form in (repr(secret), repr(secret)[2:-1], secret.hex()):
                assert form not in shown


def test_a_new_password_keeps_salt_and_iterations_and_only_the_last_previous_one() -> None:
    first = credential("first", iterations=8_192)
    second = first.with_password("second", 1_000)
    third = second.with_password("third", 2_000)
    assert (third.salt, third.iterations) == (first.salt, first.iterations)
    assert third.previous is not None
    assert third.previous.keys == second.keys
    assert third.with_password("fourth").previous is None


def test_a_repeated_change_keeps_the_previous_password_valid() -> None:
    second = credential("first").with_password("second", 1_000)
    assert second.with_password("second", 2_000) is second
    ended = second.with_password("second")
    assert (ended.keys, ended.previous) == (second.keys, None)
    assert ended.with_password("second") is ended


def test_a_short_server_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        CredentialDirectory(lambda *_: None, b"short")
