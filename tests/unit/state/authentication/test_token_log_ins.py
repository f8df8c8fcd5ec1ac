"""Log-ins with delegation tokens: the token's secret makes a client its owner; nothing else does, nor shows a token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from mansio.config.security import SASL_MECHANISMS
from mansio.state.authentication.credentials import CredentialDirectory, ScramCredential, ScramMechanism
from mansio.state.authentication.delegation_tokens import (
    DelegationToken,
    token_credentials,
    token_digest,
    token_hmac,
    token_password,
)
from mansio.state.authentication.outcomes import Accepted, Challenge, Rejected
from mansio.state.authentication.sasl_session import Decision, SaslSession
from mansio.state.authentication.scram import ScramServer
from support.credentials import NONCE, SALT, SERVER_SECRET, ScramPeer, credential, exchange

if TYPE_CHECKING:
    from collections.abc import Mapping

ID: Final = "token-1"
SECRET: Final = token_hmac(bytes(32), ID)
PASSWORD: Final = token_password(SECRET)
EXPIRES_MS: Final = 1_000
TOKEN: Final = DelegationToken(
    ID,
    "User:alice",
    "User:alice",
    (),
    0,
    EXPIRES_MS,
    EXPIRES_MS,
    token_digest(SECRET),
    "key",
    token_credentials(SECRET, dict.fromkeys(ScramMechanism, SALT)),
    revision=7,
)
AS_TOKEN: Final = ",tokenauth=true"


def directory(tokens: Mapping[str, DelegationToken]) -> CredentialDirectory:
    users: dict[str, ScramCredential] = {"alice": credential("alices"), ID: credential("a user's")}

    def find(user: str, mechanism: ScramMechanism) -> ScramCredential | None:
        found = users.get(user)
        return found if found is not None and found.mechanism is mechanism else None

    return CredentialDirectory(find, SERVER_SECRET, find_token=tokens.get)


def log_in(name: str, password: str, extensions: str = AS_TOKEN, now_ms: int = 0) -> Accepted | Rejected:
    server = ScramServer(ScramMechanism.SHA_256, directory({ID: TOKEN}), NONCE)
    outcome = exchange(server, ScramPeer(name, password, extensions=extensions), now_ms)
    assert not isinstance(outcome, Challenge)
    return outcome


@pytest.mark.parametrize("mechanism", list(ScramMechanism))
def test_the_secret_of_a_token_makes_the_client_its_owner_until_it_expires(mechanism: ScramMechanism) -> None:
    server = ScramServer(mechanism, directory({ID: TOKEN}), NONCE)
    peer = ScramPeer(ID, PASSWORD, mechanism, extensions=AS_TOKEN)
    outcome = exchange(server, peer, EXPIRES_MS - 1)
    assert isinstance(outcome, Accepted)
    assert outcome[:1] + outcome[2:] == ("alice", 7, EXPIRES_MS, (), ID, False)
    peer.verify(outcome.token)


@pytest.mark.parametrize(
    ("name", "password", "extensions", "now_ms"),
    [
        (ID, PASSWORD, AS_TOKEN, EXPIRES_MS),
        (ID, PASSWORD, "", 0),  # as the user of that name
        (ID, PASSWORD, ",tokenauth=false", 0),
        (ID, "a user's", AS_TOKEN, 0),
        ("alice", "alices", AS_TOKEN, 0),
        ("alice", PASSWORD, AS_TOKEN, 0),
        ("token-2", PASSWORD, AS_TOKEN, 0),
    ],
)
def test_nothing_else_logs_in(name: str, password: str, extensions: str, now_ms: int) -> None:
    assert isinstance(log_in(name, password, extensions, now_ms), Rejected)


def test_a_user_and_a_token_of_the_same_name_stay_apart() -> None:
    as_user, as_token = log_in(ID, "a user's", ""), log_in(ID, PASSWORD)
    assert isinstance(as_user, Accepted)
    assert isinstance(as_token, Accepted)
    assert (as_user.user, as_user.credential_id) == (ID, "")
    assert (as_token.user, as_token.credential_id) == ("alice", ID)


def test_the_first_answer_does_not_show_whether_a_token_exists() -> None:
    for known in ({}, {ID: TOKEN}):
        challenges = [
            ScramServer(ScramMechanism.SHA_256, directory(known), NONCE).step(
                ScramPeer(ID, "wrong", extensions=AS_TOKEN).first(), 0
            )
            for _ in range(2)
        ]
        assert challenges[0] == challenges[1]
        assert isinstance(challenges[0], Challenge)
        assert challenges[0].token.endswith(b",i=4096")
        salt = challenges[0].token.split(b",s=")[1].partition(b",")[0]
        assert len(salt) == 44


def session_with_token(tokens: dict[str, DelegationToken], session_ms_max: int = 0) -> SaslSession:
    session = SaslSession(SASL_MECHANISMS, directory(tokens), lambda: NONCE, session_ms_max)
    assert not session.handshake(1, ScramMechanism.SHA_256.value, 0).error_code
    peer = ScramPeer(ID, PASSWORD, extensions=AS_TOKEN)
    challenge = session.authenticate(peer.first(), 0)
    assert isinstance(challenge, Decision)
    last = session.authenticate(peer.final(challenge.auth_bytes), 0)
    assert isinstance(last, Decision)
    assert not last.error_code
    return session


def test_a_session_ends_with_its_token_and_follows_its_renewal() -> None:
    tokens = {ID: TOKEN}
    session = session_with_token(tokens)
    assert session.user is not None
    assert (session.user.name, session.user.credential_id) == ("alice", ID)
    assert session.expires_ms == EXPIRES_MS
    tokens[ID] = replace(TOKEN, expires_ms=3 * EXPIRES_MS, revision=8)
    assert session.revalidate()
    assert session.expires_ms == 3 * EXPIRES_MS
    assert not session.is_expired(2 * EXPIRES_MS)
    tokens[ID] = replace(TOKEN, expires_ms=5)
    assert session.revalidate()
    assert session.is_expired(6)
    del tokens[ID]
    assert not session.revalidate()


def test_a_renewed_token_does_not_delay_the_time_of_re_authentication() -> None:
    tokens = {ID: TOKEN}
    session = session_with_token(tokens, session_ms_max=500)
    assert session.expires_ms == 500
    tokens[ID] = replace(TOKEN, expires_ms=3 * EXPIRES_MS)
    assert session.revalidate()
    assert session.expires_ms == 500
    tokens[ID] = replace(TOKEN, expires_ms=100)
    assert session.revalidate()
    assert session.expires_ms == 100


def test_nothing_shows_the_secret_of_a_token() -> None:
    for text in (repr(TOKEN), repr(log_in(ID, "wrong"))):
        assert PASSWORD not in text
        assert SECRET.hex() not in text
        assert TOKEN.digest not in text
