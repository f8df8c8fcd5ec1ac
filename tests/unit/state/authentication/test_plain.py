"""PLAIN: the right password logs in, checked against either credential; no token breaks the decoder or is shown."""

from __future__ import annotations

import hashlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.state.authentication.api_keys import ApiKeyCheck
from mansio.state.authentication.credentials import PASSWORD_BYTES_MAX, USER_BYTES_MAX
from mansio.state.authentication.outcomes import Accepted, Rejected
from mansio.state.authentication.plain import TOKEN_BYTES_MAX, PasswordCheck, read_plain_token
from support.credentials import SHA_512, credential, directory, directory_of, reachable_texts

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60)
SECRET = "correct horse"
USERS = directory(alice=credential(SECRET), bob=credential("p", SHA_512))


def outcome(token: bytes, now_ms: int = 0, users: object = USERS) -> Accepted | Rejected:
    found = read_plain_token(token, users)  # type: ignore[arg-type]
    return found.run(now_ms) if isinstance(found, PasswordCheck | ApiKeyCheck) else found


@given(user=TEXTS, password=TEXTS, other=TEXTS, is_named=st.booleans())
def test_the_right_password_logs_in_and_no_other(
    user: str, password: str, other: str, is_named: bool
) -> None:
    users = directory_of({user: credential(password)})
    name = user.encode()
    start = (name if is_named else b"") + b"\0" + name + b"\0"
    assert outcome(start + password.encode(), users=users) == Accepted(user)
    if other != password:
        assert outcome(start + other.encode(), users=users) == Rejected("wrong password", user)
    if other != user:
        assert outcome(b"\0" + other.encode() + b"\0" + password.encode(), users=users) == Rejected(
            "unknown user", other
        )
        stranger = other.encode() + b"\0" + name + b"\0" + password.encode()
        assert outcome(stranger, users=users) == Rejected("the authorization id differs from the user")


@given(st.binary(max_size=100))
def test_random_bytes_are_rejected_without_an_error(token: bytes) -> None:
    assert isinstance(outcome(token), Rejected)


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"alice",
        b"\0alice",
        b"\0alice\0",
        b"\0\0" + SECRET.encode(),
        b"alice\0" + SECRET.encode(),
        b"\0alice\0" + SECRET.encode() + b"\0",
        b"\0alice\0" + SECRET.encode() + b"\0x",
        b"\0alice\0" + b"\xff" + SECRET.encode(),
        b"\0" + b"\xff" + b"\0" + SECRET.encode(),
        b"Alice\0alice\0" + SECRET.encode(),
        b"\0" + b"a" * (USER_BYTES_MAX + 1) + b"\0" + SECRET.encode(),
        b"\0alice\0" + b"p" * (PASSWORD_BYTES_MAX + 1),
        b"\0alice\0" + SECRET.encode() * (1 << 16),
        bytes(1 << 20),
    ],
)
def test_a_malformed_token_is_rejected_before_its_password_is_computed(token: bytes) -> None:
    rejected = read_plain_token(token, USERS)
    assert isinstance(rejected, Rejected)
    assert SECRET not in reachable_texts(rejected)


def test_the_longest_name_and_password_fit_into_a_token() -> None:
    name, password = b"n" * USER_BYTES_MAX, b"p" * PASSWORD_BYTES_MAX
    token = b"\0".join((name, name, password))
    assert len(token) == TOKEN_BYTES_MAX
    users = directory_of({name.decode(): credential(password.decode())})
    assert outcome(token, users=users) == Accepted(name.decode())


def test_the_credential_for_sha_256_is_preferred_and_that_for_sha_512_used_where_it_is_the_only_one() -> None:
    both = directory(alice=(credential("a", SHA_512), credential("b")))
    assert outcome(b"\0alice\0b", users=both) == Accepted("alice")
    assert outcome(b"\0alice\0a", users=both) == Rejected("wrong password", "alice")
    assert outcome(b"\0bob\0p") == Accepted("bob")


def test_a_password_of_an_unknown_user_costs_as_much_as_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[str, int, int]] = []
    compute = hashlib.pbkdf2_hmac

    def counted(name: str, password: bytes, salt: bytes, iterations: int) -> bytes:
        computed.append((name, len(salt), iterations))
        return compute(name, password, salt, iterations)

    monkeypatch.setattr(hashlib, "pbkdf2_hmac", counted)
    assert isinstance(outcome(b"\0alice\0wrong"), Rejected)
    assert isinstance(outcome(b"\0nobody\0wrong"), Rejected)
    assert len(computed) == 2
    assert computed[0] == computed[1]


def test_the_previous_password_logs_in_until_its_end() -> None:
    users = directory(alice=credential("old").with_password("new", 5_000))
    assert outcome(b"\0alice\0old", 4_999, users) == Accepted("alice", valid_until_ms=5_000)
    assert outcome(b"\0alice\0old", 5_000, users) == Rejected("wrong password", "alice")
    assert outcome(b"\0alice\0new", 4_999, users) == Accepted("alice")
    assert outcome(b"\0alice\0new", 5_000, users) == Accepted("alice")


def test_a_check_shows_no_password_and_cannot_be_serialized() -> None:
    check = PasswordCheck("alice", SECRET.encode(), USERS)
    assert SECRET not in reachable_texts(check)
    with pytest.raises(TypeError) as caught:
        pickle.dumps(check)
    assert SECRET not in reachable_texts(caught.value)


def test_cached_passwords_differ_by_process_user_password_and_revision() -> None:
    stored = credential(SECRET)
    newer = type(stored)(stored.mechanism, stored.iterations, stored.salt, stored.keys, revision=2)
    users, changed_users = directory(a=stored, ab=stored), directory(a=newer)
    keys = {
        PasswordCheck(user, password, known).cache_key(process_key)
        for user, password, known, process_key in (
            ("a", b"bc", users, bytes(32)),
            ("ab", b"c", users, bytes(32)),
            ("a", b"bd", users, bytes(32)),
            ("a", b"bc", changed_users, bytes(32)),
            ("a", b"bc", users, bytes(31) + b"1"),
        )
    }
    assert len(keys) == 5
