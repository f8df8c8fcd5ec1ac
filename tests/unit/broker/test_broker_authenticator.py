"""Authentication of brokers: only a peer that knows the cluster secret is accepted, only with its own id, and only in
its current session."""

from __future__ import annotations

import hmac
import itertools
import logging
import pickle
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from mansio.broker.services.broker_authenticator import BrokerAuthenticator
from mansio.errors import ClusterAuthorizationFailed, MansioError, StaleBrokerEpoch
from mansio.state.broker_handshake import NONCE_BYTES, BrokerIdentity, ClusterSecret, Handshake

if TYPE_CHECKING:
    from mansio.broker.services.broker_authenticator import BrokerChallenge

SECRET = ClusterSecret(bytes(range(32)))
OTHER_SECRET = ClusterSecret(bytes(32))
CLUSTER_ID = "cluster-a"
EPOCHS = {1: 11, 2: 12, 3: 13}
NONCES = (b"d" * NONCE_BYTES, b"l" * NONCE_BYTES)
HANDSHAKE = Handshake(CLUSTER_ID, BrokerIdentity(2, 12), 1, *NONCES)
HOST = "10.0.0.9"
CERTIFICATE = bytes(range(100, 132))
"""Digest of the listener's certificate."""


class CountingRandom:
    """A new nonce for each call."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def bytes(self, length: int) -> bytes:
        return self._random.randbytes(length)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)


def registry(epochs: dict[int, int] | None = None, secret: ClusterSecret | None = SECRET) -> Any:
    known = EPOCHS if epochs is None else epochs
    return SimpleNamespace(
        cluster_id=CLUSTER_ID, cluster_secret=secret, epoch_of=lambda node_id: known.get(node_id, 0)
    )


def listener(node_id: int = 1, **known: Any) -> BrokerAuthenticator:
    return BrokerAuthenticator(node_id, registry(**known), CountingRandom())


def proof_for(
    challenge: BrokerChallenge, identity: BrokerIdentity, listener_id: int = 1, secret: ClusterSecret = SECRET
) -> bytes:
    handshake = Handshake(
        CLUSTER_ID, identity, listener_id, challenge.dialler_nonce, challenge.listener_nonce
    )
    return handshake.dialler_proof(secret)


# The proof


@pytest.mark.parametrize(
    "other",
    [
        HANDSHAKE._replace(cluster_id="cluster-b"),
        HANDSHAKE._replace(dialler=BrokerIdentity(3, 12)),
        HANDSHAKE._replace(dialler=BrokerIdentity(2, 11)),
        HANDSHAKE._replace(dialler=BrokerIdentity(2, 13)),
        HANDSHAKE._replace(listener_id=3),
        HANDSHAKE._replace(dialler=BrokerIdentity(1, 12), listener_id=2),
        HANDSHAKE._replace(dialler_nonce=NONCES[1]),
        HANDSHAKE._replace(listener_nonce=NONCES[0]),
        HANDSHAKE._replace(dialler_nonce=NONCES[1], listener_nonce=NONCES[0]),
        HANDSHAKE._replace(certificate_sha256=CERTIFICATE),
    ],
    ids=[
        "another cluster",
        "another broker",
        "an older epoch",
        "a newer epoch",
        "another listener",
        "the other direction",
        "another nonce of the dialler",
        "another nonce of the listener",
        "swapped nonces",
        "a connection with TLS",
    ],
)
def test_a_proof_is_of_no_use_in_any_other_handshake(other: Handshake) -> None:
    proof = HANDSHAKE.dialler_proof(SECRET)
    assert HANDSHAKE.is_dialler_proof(SECRET, proof)
    assert not other.is_dialler_proof(SECRET, proof)
    answer = HANDSHAKE.listener_proof(SECRET)
    assert HANDSHAKE.is_listener_proof(SECRET, answer)
    assert not other.is_listener_proof(SECRET, answer)


def test_a_proof_cannot_be_reflected_to_its_sender() -> None:
    assert not HANDSHAKE.is_listener_proof(SECRET, HANDSHAKE.dialler_proof(SECRET))
    assert not HANDSHAKE.is_dialler_proof(SECRET, HANDSHAKE.listener_proof(SECRET))


def test_a_proof_needs_the_secret_and_every_byte_of_it() -> None:
    proof = HANDSHAKE.dialler_proof(SECRET)
    assert not HANDSHAKE.is_dialler_proof(OTHER_SECRET, proof)
    for wrong in (b"", proof[:-1], proof + b"\0", bytes(32), *_flipped(proof)):
        assert not HANDSHAKE.is_dialler_proof(SECRET, wrong)


def _flipped(proof: bytes) -> list[bytes]:
    return [
        proof[:at] + bytes([proof[at] ^ 1 << bit]) + proof[at + 1 :] for at in (0, 15, 31) for bit in (0, 7)
    ]


def test_two_handshakes_never_have_one_message() -> None:
    """The variable part, the cluster id, cannot be shifted into its neighbours."""
    longer = HANDSHAKE._replace(cluster_id=CLUSTER_ID + "\0\0\0\2")
    assert longer.dialler_proof(SECRET) != HANDSHAKE.dialler_proof(SECRET)


def test_without_tls_a_proof_is_that_of_version_0_1() -> None:
    message = bytes.fromhex("0022") + b"mansio broker handshake 1: dialler"
    message += b"".join(bytes.fromhex("0020") + nonce for nonce in NONCES)
    message += bytes.fromhex("0009") + b"cluster-a" + bytes.fromhex("00000002000000000000000c00000001")
    assert HANDSHAKE.dialler_proof(SECRET) == hmac.digest(bytes(range(32)), message, "sha256")


@pytest.mark.parametrize(
    ("shown", "own"),
    [(CERTIFICATE[::-1], CERTIFICATE), (b"", CERTIFICATE), (CERTIFICATE, b"")],
    ids=["the certificate of a relay", "only the listener has TLS", "only the dialler has TLS"],
)
def test_a_proof_is_of_no_use_on_a_connection_with_another_certificate(shown: bytes, own: bytes) -> None:
    authenticator, identity = listener(), BrokerIdentity(2, 12)

    def answer_to(certificate: bytes) -> bytes:
        challenge = authenticator.begin_handshake(NONCES[0], None, HOST, own)
        handshake = HANDSHAKE._replace(
            listener_nonce=challenge.listener_nonce, certificate_sha256=certificate
        )
        return authenticator.authenticate(challenge, identity, handshake.dialler_proof(SECRET), HOST)

    with pytest.raises(ClusterAuthorizationFailed):
        answer_to(shown)
    assert authenticator.failure_counts["proof"] == 1
    assert answer_to(own)


def test_the_secret_is_in_no_representation(caplog: pytest.LogCaptureFixture) -> None:
    key = bytes(range(32))
    caplog.set_level(logging.DEBUG)
    for text in (repr(SECRET), str(SECRET), f"{SECRET}", repr({"secret": SECRET})):
        assert key.hex() not in text
        assert repr(key) not in text
    with pytest.raises(TypeError):
        pickle.dumps(SECRET)
    for length in (0, 31, 33):
        with pytest.raises(ValueError, match="32 bytes"):
            ClusterSecret(bytes(length))


# The listener


def test_a_broker_that_proves_itself_is_that_broker_and_the_listener_proves_itself_too() -> None:
    authenticator = listener()
    challenge = authenticator.begin_handshake(NONCES[0], None, HOST)
    identity = BrokerIdentity(2, 12)
    answer = authenticator.authenticate(challenge, identity, proof_for(challenge, identity), HOST)
    handshake = Handshake(CLUSTER_ID, identity, 1, challenge.dialler_nonce, challenge.listener_nonce)
    assert handshake.is_listener_proof(SECRET, answer)
    assert (authenticator.authenticated_count, sum(authenticator.failure_counts.values())) == (1, 0)
    assert authenticator.require_identity(identity, 2, 12, HOST) == identity


@pytest.mark.parametrize("epoch", [11, 13, 0, -1, 1 << 62])
def test_a_broker_is_accepted_in_its_registered_epoch_only(epoch: int) -> None:
    authenticator = listener()
    challenge = authenticator.begin_handshake(NONCES[0], None, HOST)
    identity = BrokerIdentity(2, epoch)
    with pytest.raises(StaleBrokerEpoch):
        authenticator.authenticate(challenge, identity, proof_for(challenge, identity), HOST)
    assert authenticator.failure_counts["epoch"] == 1


def test_who_does_not_know_the_secret_does_not_learn_which_epoch_is_registered() -> None:
    authenticator = listener()
    for epoch in (11, 12, 13):
        challenge = authenticator.begin_handshake(NONCES[0], None, HOST)
        identity = BrokerIdentity(2, epoch)
        wrong = proof_for(challenge, identity, secret=OTHER_SECRET)
        with pytest.raises(ClusterAuthorizationFailed):
            authenticator.authenticate(challenge, identity, wrong, HOST)
    assert authenticator.failure_counts["proof"] == 3


def test_an_unregistered_broker_and_the_listener_itself_are_refused() -> None:
    authenticator = listener()
    for identity, kind in (
        (BrokerIdentity(9, 0), StaleBrokerEpoch),
        (BrokerIdentity(9, 1), StaleBrokerEpoch),
        (BrokerIdentity(1, 11), ClusterAuthorizationFailed),
    ):
        challenge = authenticator.begin_handshake(NONCES[0], None, HOST)
        with pytest.raises(kind):
            authenticator.authenticate(challenge, identity, proof_for(challenge, identity), HOST)


def test_a_handshake_out_of_order_is_refused() -> None:
    authenticator = listener()
    identity = BrokerIdentity(2, 12)
    with pytest.raises(ClusterAuthorizationFailed):
        authenticator.authenticate(None, identity, HANDSHAKE.dialler_proof(SECRET), HOST)
    with pytest.raises(ClusterAuthorizationFailed):
        authenticator.begin_handshake(NONCES[0], identity, HOST)  # the connection is authenticated
    for nonce in (b"", b"n" * 31, b"n" * 33):
        with pytest.raises(ClusterAuthorizationFailed):
            authenticator.begin_handshake(nonce, None, HOST)
    assert authenticator.failure_counts["order"] == 5


@pytest.mark.parametrize("known", [None, registry(secret=None)], ids=["a single node", "no secret yet"])
def test_without_a_secret_no_broker_is_accepted(known: Any) -> None:
    authenticator = BrokerAuthenticator(1, known, CountingRandom())
    with pytest.raises(ClusterAuthorizationFailed):
        authenticator.begin_handshake(NONCES[0], None, HOST)
    with pytest.raises(ClusterAuthorizationFailed):
        authenticator.require_identity(None, 2, 12, HOST)
    assert authenticator.failure_counts["unclustered"] == 1


# What an identity is good for


@pytest.mark.parametrize("peer", [None, BrokerIdentity(3, 13), BrokerIdentity(2, 11), BrokerIdentity(2, 13)])
def test_a_request_in_another_name_than_the_connections_is_refused(peer: BrokerIdentity | None) -> None:
    authenticator = listener()
    with pytest.raises(ClusterAuthorizationFailed):
        authenticator.require_identity(peer, 2, 12, HOST)
    assert authenticator.refused_request_count == 1


def test_a_broker_that_registered_again_has_to_shake_hands_again() -> None:
    epochs = dict(EPOCHS)
    authenticator = listener(epochs=epochs)
    identity = BrokerIdentity(2, 12)
    assert authenticator.require_identity(identity, 2, 12, HOST) == identity
    epochs[2] = 15
    with pytest.raises(StaleBrokerEpoch):
        authenticator.require_identity(identity, 2, 12, HOST)
    with pytest.raises(ClusterAuthorizationFailed):
        authenticator.require_identity(identity, 2, 15, HOST)
    del epochs[2]
    with pytest.raises(StaleBrokerEpoch):
        authenticator.require_identity(identity, 2, 12, HOST)


# Everything that was ever seen on the network is of no use


class Seen(NamedTuple):
    """What a reader of all connections has of one handshake."""

    listener_id: int
    challenge: BrokerChallenge
    identity: BrokerIdentity
    proof: bytes
    answer: bytes


@pytest.mark.parametrize("seed", range(5))
def test_an_attacker_that_observed_every_handshake_is_never_accepted(seed: int) -> None:
    """Replays of nonces, identities and proofs of either side in any combination, on new connections to any broker."""
    chance = random.Random(seed)
    epochs = dict(EPOCHS)
    brokers = {
        node_id: BrokerAuthenticator(node_id, registry(epochs), CountingRandom(seed)) for node_id in epochs
    }
    numbers = itertools.count(100)
    seen: list[Seen] = []
    for _ in range(300):
        node_id, other = chance.sample(sorted(epochs), 2)
        if chance.random() < 0.1:
            epochs[node_id] = next(numbers)  # it registers again
        nonce = chance.randbytes(NONCE_BYTES)
        if not seen or chance.random() < 0.3:
            challenge = brokers[other].begin_handshake(nonce, None, HOST)
            identity = BrokerIdentity(node_id, epochs[node_id])
            proof = proof_for(challenge, identity, other)
            answer = brokers[other].authenticate(challenge, identity, proof, HOST)
            seen.append(Seen(other, challenge, identity, proof, answer))
            continue
        one, two, three = (chance.choice(seen) for _ in range(3))
        nonces = (nonce, one.challenge.dialler_nonce, one.challenge.listener_nonce)
        challenge = brokers[other].begin_handshake(chance.choice(nonces), None, HOST)
        claimed = chance.choice((two.identity, BrokerIdentity(node_id, epochs[node_id])))
        with pytest.raises(MansioError):
            brokers[other].authenticate(
                challenge, claimed, chance.choice((three.proof, three.answer, b"")), HOST
            )
    assert sum(broker.authenticated_count for broker in brokers.values()) == len(seen)
