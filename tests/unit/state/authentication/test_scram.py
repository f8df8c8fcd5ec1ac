"""SCRAM: the right password logs in with independent clients; nothing else does, and nothing reveals who exists."""

from __future__ import annotations

import base64
import hmac

import pytest
import scramp
from hypothesis import example, given
from hypothesis import strategies as st

from mansio.state.authentication.credentials import (
    PASSWORD_BYTES_MAX,
    USER_BYTES_MAX,
    CredentialDirectory,
    FoundCredential,
    ScramMechanism,
)
from mansio.state.authentication.outcomes import Accepted, Challenge, Rejected
from mansio.state.authentication.plain import PasswordCheck
from mansio.state.authentication.scram import MESSAGE_BYTES_MAX, WRONG_NONCE, ScramServer, escape_name
from support.credentials import (
    NONCE,
    SERVER_SECRET,
    SHA_256,
    SHA_512,
    ScramPeer,
    credential,
    directory,
    directory_of,
    exchange,
)

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60).filter(
    lambda name: len(name.encode()) <= USER_BYTES_MAX
)
PASSWORDS = NAMES
ASCII = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=30)
USER, PASSWORD = "alice", "correct horse"
USERS = directory(alice=credential(PASSWORD))


def server(users: CredentialDirectory = USERS, mechanism: ScramMechanism = SHA_256) -> ScramServer:
    return ScramServer(mechanism, users, NONCE)


def begun(peer: ScramPeer) -> tuple[ScramServer, bytes]:
    """A server that expects the last message, and the right one."""
    begun_server = server()
    challenge = begun_server.step(peer.first(), 0)
    assert isinstance(challenge, Challenge)
    return begun_server, peer.final(challenge.token)


def test_the_example_of_rfc_7677_has_its_bytes() -> None:
    stored = credential("pencil", salt=base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="))
    example = server(directory(user=stored))
    example._server_nonce = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    assert example.step(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO", 0) == Challenge(
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    final = (
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    assert example.step(final, 0) == Accepted("user", b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


@pytest.mark.parametrize("mechanism", ScramMechanism)
@given(user=ASCII, password=ASCII)
def test_scramp_logs_in_and_verifies_the_server(mechanism: ScramMechanism, user: str, password: str) -> None:
    client = scramp.ScramClient([mechanism.value], user, password)
    broker = server(directory_of({user: credential(password, mechanism)}), mechanism)
    challenge = broker.step(client.get_client_first().encode(), 0)
    assert isinstance(challenge, Challenge)
    client.set_server_first(challenge.token.decode())
    outcome = broker.step(client.get_client_final().encode(), 0)
    assert isinstance(outcome, Accepted)
    assert outcome.user == user
    client.set_server_final(outcome.token.decode())


@pytest.mark.parametrize("mechanism", ScramMechanism)
@given(user=NAMES, password=PASSWORDS, other=PASSWORDS)
@example(user="=2C,=3D=", password="ª\u00ad\u2168", other="aIX")  # SASLprep makes these passwords equal
def test_any_name_and_password_of_unicode_log_in_unchanged_and_no_other_password(
    mechanism: ScramMechanism, user: str, password: str, other: str
) -> None:
    users = directory_of({user: credential(password, mechanism)})
    peer = ScramPeer(user, password, mechanism)
    outcome = exchange(server(users, mechanism), peer)
    assert isinstance(outcome, Accepted)
    assert outcome.user == user
    peer.verify(outcome.token)
    if other != password:
        wrong = exchange(server(users, mechanism), ScramPeer(user, other, mechanism))
        assert wrong == Rejected("wrong password", user)


def test_a_password_of_one_mechanism_does_not_log_in_with_the_other() -> None:
    outcome = exchange(server(USERS, SHA_512), ScramPeer(USER, PASSWORD, SHA_512))
    assert outcome == Rejected("unknown user", USER)


def test_an_unknown_user_is_treated_as_one_with_a_wrong_password(monkeypatch: pytest.MonkeyPatch) -> None:
    operations: list[int] = []
    digest = hmac.digest
    monkeypatch.setattr(hmac, "digest", lambda *args: operations.append(1) or digest(*args))
    with_previous = credential("old").with_password(PASSWORD, 1)
    users = directory(alice=credential(PASSWORD), carol=with_previous)
    costs, challenges = [], []
    for user in ("alice", "carol", "nobody", "somebody", "nobody"):
        broker, peer = server(users), ScramPeer(user, "wrong")
        operations.clear()
        challenge = broker.step(peer.first(), 0)
        assert isinstance(challenge, Challenge)
        cost = len(operations)
        final = peer.final(challenge.token)
        operations.clear()
        outcome = broker.step(final, 0)
        assert isinstance(outcome, Rejected)
        costs.append((cost, len(operations)))
        nonce, salt, iterations = challenge.token.decode().split(",")
        challenges.append((len(nonce), len(salt), iterations, salt))
    assert len(set(costs)) == 1, costs
    assert len({challenge[:3] for challenge in challenges}) == 1
    salts = [challenge[3] for challenge in challenges[2:]]
    assert salts[0] == salts[2] != salts[1], "an unknown user always gets the salt of its name"


def test_an_unknown_user_fails_even_with_the_password_of_its_substitute() -> None:

    class Substituting(CredentialDirectory):
        def find(self, user: str, mechanism: ScramMechanism) -> FoundCredential:
            return FoundCredential(credential(PASSWORD), is_known=False)

    users = Substituting(lambda *_: None, SERVER_SECRET)
    assert exchange(server(users), ScramPeer("nobody", PASSWORD)) == Rejected("unknown user", "nobody")
    assert PasswordCheck("nobody", PASSWORD.encode(), users).run(0) == Rejected("unknown user", "nobody")


def test_an_unknown_user_has_another_salt_for_the_other_mechanism_and_another_secret() -> None:
    salts = {
        users.find("nobody", mechanism).credential.salt
        for users in (USERS, CredentialDirectory(lambda *_: None, bytes(32)))
        for mechanism in ScramMechanism
    }
    assert len(salts) == 4


@given(st.data())
def test_no_changed_byte_of_a_message_logs_in(data: st.DataObject) -> None:
    peer, broker = ScramPeer(USER, PASSWORD), server()
    changes_first = data.draw(st.booleans())
    first = peer.first()
    challenge = broker.step(changed(data, first) if changes_first else first, 0)
    if isinstance(challenge, Rejected):
        return
    final = peer.final(challenge.token if not changes_first else server_first(peer))
    assert isinstance(broker.step(final if changes_first else changed(data, final), 0), Rejected)


def changed(data: st.DataObject, message: bytes) -> bytes:
    position = data.draw(st.integers(0, len(message) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != message[position]))
    return message[:position] + bytes([byte]) + message[position + 1 :]


def test_a_proof_in_another_spelling_of_base64_is_rejected() -> None:
    broker, final = begun(ScramPeer(USER, PASSWORD))
    alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    last = alphabet.index(final[-2:-1])
    assert final.endswith(b"=")
    assert last % 4 == 0, "the last two bits of 32 bytes are unused"
    respelled = final[:-2] + alphabet[last + 1 : last + 2] + b"="
    assert broker.step(respelled, 0) == Rejected("a malformed proof", USER)


def server_first(peer: ScramPeer) -> bytes:
    """What the server would have sent had nothing been changed."""
    challenge = server().step(peer.first(), 0)
    assert isinstance(challenge, Challenge)
    return challenge.token


def test_no_part_of_a_message_logs_in_and_no_huge_one_is_read() -> None:
    first = ScramPeer(USER, PASSWORD).first()
    for length in range(len(first)):
        assert not isinstance(server().step(first[:length], 0), Accepted)
    _, final = begun(ScramPeer(USER, PASSWORD))
    for length in range(len(final)):
        peer = ScramPeer(USER, PASSWORD)
        broker, whole = begun(peer)
        assert isinstance(broker.step(whole[:length], 0), Rejected)
    for message in (b"n,,n=" + bytes(1 << 20), b"n,,n=" + b"a" * (1 << 20) + b",r=n", b"\xff" * (1 << 20)):
        assert server().step(message, 0) == Rejected(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
    longest = ScramPeer("=" * USER_BYTES_MAX, "ü" * (PASSWORD_BYTES_MAX // 2), header="n,,")
    users = directory_of({"=" * USER_BYTES_MAX: credential("ü" * (PASSWORD_BYTES_MAX // 2))})
    assert isinstance(exchange(server(users), longest), Accepted)
    over = ScramPeer("=" * (USER_BYTES_MAX + 1), "p")
    assert isinstance(server().step(over.first(), 0), Rejected)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_random_bytes_are_rejected_without_an_error(first: bytes, second: bytes) -> None:
    assert isinstance(server().step(first, 0), Rejected)
    broker, _ = begun(ScramPeer(USER, PASSWORD))
    assert isinstance(broker.step(second, 0), Rejected)


def test_a_recorded_exchange_cannot_be_replayed() -> None:
    peer = ScramPeer(USER, PASSWORD)
    broker, final = begun(peer)
    assert isinstance(broker.step(final, 0), Accepted)
    assert isinstance(broker.step(final, 0), Rejected), "the exchange is over"
    assert isinstance(broker.step(peer.first(), 0), Rejected)
    another = ScramServer(SHA_256, USERS, bytes([1]) * len(NONCE))
    another.step(b"n,,n=alice,r=" + final.split(b",r=")[1][:32], 0)
    assert another.step(final, 0) == Rejected(WRONG_NONCE, "alice")


def test_a_failed_exchange_cannot_be_continued() -> None:
    peer = ScramPeer(USER, PASSWORD)
    broker, final = begun(peer)
    assert isinstance(broker.step(b"c=biws", 0), Rejected)
    assert isinstance(broker.step(final, 0), Rejected)
    broker = server()
    assert isinstance(broker.step(b"malformed", 0), Rejected)
    assert isinstance(broker.step(peer.first(), 0), Rejected)


@pytest.mark.parametrize("prefix", ["x", "abc"])
def test_a_nonce_that_only_ends_with_the_right_one_is_rejected(prefix: str) -> None:
    """With a proof that is right for it: CVE-2024-56128."""
    broker, peer = server(), ScramPeer(USER, PASSWORD)
    challenge = broker.step(peer.first(), 0)
    assert isinstance(challenge, Challenge)
    final = forged(peer, challenge.token, lambda text: text.replace("r=", f"r={prefix}"))
    assert broker.step(final, 0) == Rejected(WRONG_NONCE, "alice")


def forged(peer: ScramPeer, challenge: bytes, change: object) -> bytes:
    """A last message that is changed before its proof is computed."""
    client = peer._client
    first = client.auth_message.decode()
    plain = peer.final(challenge).decode().partition(",p=")[0]
    without_proof = change(plain)  # type: ignore[operator]
    auth_message = f"{first},{challenge.decode()},{without_proof}".encode()
    signature = client.hmac(client.hashfunc(client.client_key).digest(), auth_message)
    proof = bytes(a ^ b for a, b in zip(client.client_key, signature, strict=True))
    return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()


def test_a_forged_message_differs_from_a_right_one_in_the_change_only() -> None:
    broker, peer = server(), ScramPeer(USER, PASSWORD)
    challenge = broker.step(peer.first(), 0)
    assert isinstance(challenge, Challenge)
    assert isinstance(broker.step(forged(peer, challenge.token, str), 0), Accepted)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("c=biws", "c=eSws"),  # y,,
        lambda text: text.replace("c=biws", "c=cD10bHMtdW5pcXVlLCw="),  # p=tls-unique,,
        lambda text: text.replace("c=biws", "c=bixhPWJvYiw="),  # n,a=bob,
        lambda text: text + ",tokenauth=true",
        lambda text: "m=x," + text,
    ],
)
def test_another_channel_binding_or_an_extension_in_the_last_message_is_rejected(change: object) -> None:
    broker, peer = server(), ScramPeer(USER, PASSWORD)
    challenge = broker.step(peer.first(), 0)
    assert isinstance(challenge, Challenge)
    assert isinstance(broker.step(forged(peer, challenge.token, change), 0), Rejected)


@pytest.mark.parametrize(
    "first",
    [
        "p=tls-server-end-point,,n=alice,r=abc",
        "n,,m=x,n=alice,r=abc",
        "n,,n=alice,r=abc,tokenauth=yes",
        "n,,n=alice,r=abc,tokenauth=true,tokenauth=true",
        "n,,n=alice,r=abc,tokenauth=true,other=1",
        "n,,n=alice,tokenauth=true,r=abc",
        "n,a=bob,n=alice,r=abc",
        "n,a=,n=alice,r=abc",
        "n,,n=,r=abc",
        "n,,n=alice,r=",
        "n,,n=a=2Dlice,r=abc",
        "n,,n=alice=,r=abc",
        "n,,n=al\0ice,r=abc",
        "n,,n=alice,r=a bc",
        "n,,r=abc,n=alice",
        "n,,n=alice,r=abc\n",
        "",
    ],
)
def test_a_first_message_that_kafka_does_not_know_or_that_asks_for_more_is_rejected(first: str) -> None:
    assert isinstance(server().step(first.encode(), 0), Rejected)


@pytest.mark.parametrize(
    ("user", "header"), [("alice", "n,a=alice,"), ("a,b=c", "n,a=a=2Cb=3Dc,"), ("alice", "y,,")]
)
def test_the_own_name_is_allowed_as_authorization_id_and_a_client_may_know_channel_binding(
    user: str, header: str
) -> None:
    broker = server(directory_of({user: credential(PASSWORD)}))
    peer = ScramPeer(user, PASSWORD, header=header)
    challenge = broker.step(peer.first(), 0)
    assert isinstance(challenge, Challenge)
    binding = base64.b64encode(header.encode()).decode()
    final = forged(peer, challenge.token, lambda text: text.replace("c=biws", f"c={binding}"))
    outcome = broker.step(final, 0)
    assert isinstance(outcome, Accepted)
    assert outcome.user == user


def test_both_passwords_log_in_until_the_end_of_the_previous_one() -> None:
    changed_twice = credential("first").with_password("second").with_password("third", 5_000)
    users = directory(alice=changed_twice)

    def outcome(password: str, now_ms: int) -> Challenge | Accepted | Rejected:
        peer = ScramPeer(USER, password)
        found = exchange(server(users), peer, now_ms)
        if isinstance(found, Accepted):
            peer.verify(found.token)
        return found

    for now_ms in (0, 4_999):
        previous = outcome("second", now_ms)
        assert isinstance(previous, Accepted)
        assert previous.valid_until_ms == 5_000
    for now_ms in (0, 4_999, 5_000, 10_000):
        present = outcome("third", now_ms)
        assert isinstance(present, Accepted)
        assert present.valid_until_ms is None
        assert isinstance(outcome("first", now_ms), Rejected)
    assert outcome("second", 5_000) == Rejected("wrong password", "alice")


def test_a_server_wants_a_whole_nonce() -> None:
    with pytest.raises(ValueError, match="24 bytes"):
        ScramServer(SHA_256, USERS, b"short")


@given(NAMES)
def test_names_are_escaped_as_clients_escape_them(name: str) -> None:
    assert escape_name(name) == name.replace("=", "=3D").replace(",", "=2C")
