"""Handshake of two brokers of a cluster on a new connection: each proves that it knows the cluster's secret.

    dialler                                    listener
       | -- ChallengeBroker(dialler's nonce) ---> |
       | <----------------- listener's nonce ---- |
       | -- AuthenticateBroker(id, epoch, proof)  |   the proof is verified, then the epoch
       | <----------------- listener's proof ---- |

A proof is HMAC-SHA256 over the role of its sender, both nonces, the cluster id, id and registered epoch of the dialler,
and the id of the listener. So it is valid for one connection (nonces), in one direction (role), between these two
brokers, in this session of the dialler. The listener proves itself only after the dialler has.

Pure: nonces are passed in. They have to be unpredictable and are used once.

Model: SCRAM (RFC 5802), without password and salt: the secret has 256 random bits.
"""

from __future__ import annotations

import hashlib
import hmac
from struct import Struct
from typing import Final, NamedTuple

SECRET_BYTES: Final = 32
NONCE_BYTES: Final = 32

_DIALLER: Final = b"mansio broker handshake 1: dialler"
_LISTENER: Final = b"mansio broker handshake 1: listener"
_LENGTH: Final = Struct(">H")
_PARTIES: Final = Struct(">iqi")  # dialler's id and epoch, listener's id


class ClusterSecret:
    """The secret that the brokers of one cluster share. It is in no representation of this object."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Raises `ValueError` for a key that does not have `SECRET_BYTES`."""
        if len(key) != SECRET_BYTES:
            raise ValueError(f"a cluster secret has {SECRET_BYTES} bytes")
        self._key = key

    def __repr__(self) -> str:
        return "ClusterSecret(hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a cluster secret is not serialized")

    def mac(self, message: bytes) -> bytes:
        """HMAC-SHA256 of a message."""
        return hmac.digest(self._key, message, hashlib.sha256)


class BrokerIdentity(NamedTuple):
    """A broker in one session: its id and the epoch of its registration."""

    node_id: int
    broker_epoch: int


class Handshake(NamedTuple):
    """What both sides of a connection know before they exchange proofs."""

    cluster_id: str
    dialler: BrokerIdentity
    listener_id: int
    dialler_nonce: bytes
    listener_nonce: bytes

    def dialler_proof(self, secret: ClusterSecret) -> bytes:
        """The proof of the broker that connected."""
        return secret.mac(self._message(_DIALLER))

    def listener_proof(self, secret: ClusterSecret) -> bytes:
        """The proof of the broker that accepted the connection."""
        return secret.mac(self._message(_LISTENER))

    def is_dialler_proof(self, secret: ClusterSecret, proof: bytes) -> bool:
        """Whether the dialler sent this proof; in constant time."""
        return hmac.compare_digest(self.dialler_proof(secret), proof)

    def is_listener_proof(self, secret: ClusterSecret, proof: bytes) -> bool:
        """Whether the listener sent this proof; in constant time."""
        return hmac.compare_digest(self.listener_proof(secret), proof)

    def _message(self, role: bytes) -> bytes:
        """Every part has a fixed length or its length in front, so that no two handshakes have one message."""
        texts = (role, self.dialler_nonce, self.listener_nonce, self.cluster_id.encode())
        parties = _PARTIES.pack(*self.dialler, self.listener_id)
        return b"".join(_LENGTH.pack(len(text)) + text for text in texts) + parties
