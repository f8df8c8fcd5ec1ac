"""Handshake of two brokers of a cluster on a new connection: each proves that it knows the cluster secret.

    dialler                                    listener
       | -- ChallengeBroker(dialler's nonce) ---> |
       | <----------------- listener's nonce ---- |
       | -- AuthenticateBroker(id, epoch, proof)  |   the proof is verified, then the epoch
       | <----------------- listener's proof ---- |

The dialler is the broker that opens the connection, the listener the one that accepts it. A proof is HMAC-SHA256 over
the role of its sender, both nonces, the cluster id, id and registered epoch of the dialler, the id of the listener, and
with TLS the SHA-256 of the listener's certificate. So a proof is valid for one connection (nonces), in one direction
(role), between these two brokers, in the current session of the dialler. The listener sends its proof only after it has
verified the dialler's.

The certificate binds the proof to the TLS connection (compare `tls-server-end-point` of RFC 5929): the dialler takes
the certificate that it was shown, the listener its own one. They differ if something in between ends TLS, whatever
certificate that has, and if one side has TLS and the other has not.

The functions do no I/O; callers pass the nonces, which must be unpredictable and are used once.

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
    """Secret that the brokers of one cluster share. `repr` and pickling do not reveal it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Take the key. Raises `ValueError` for a key that does not have `SECRET_BYTES` bytes."""
        if len(key) != SECRET_BYTES:
            raise ValueError(f"a cluster secret has {SECRET_BYTES} bytes")
        self._key = key

    def __repr__(self) -> str:
        return "ClusterSecret(hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a cluster secret is not serialized")

    def mac(self, message: bytes) -> bytes:
        """Return the HMAC-SHA256 of a message."""
        return hmac.digest(self._key, message, hashlib.sha256)


class BrokerIdentity(NamedTuple):
    """Identity of a broker in one session: its id and the epoch of its registration."""

    node_id: int
    broker_epoch: int


class Handshake(NamedTuple):
    """Data that both sides of a connection know before they exchange proofs."""

    cluster_id: str
    dialler: BrokerIdentity
    listener_id: int
    dialler_nonce: bytes
    listener_nonce: bytes
    certificate_sha256: bytes = b""
    """Of the listener's certificate in DER; empty without TLS."""

    def dialler_proof(self, secret: ClusterSecret) -> bytes:
        """Return the proof that the dialler sends."""
        return secret.mac(self._message(_DIALLER))

    def listener_proof(self, secret: ClusterSecret) -> bytes:
        """Return the proof that the listener sends."""
        return secret.mac(self._message(_LISTENER))

    def is_dialler_proof(self, secret: ClusterSecret, proof: bytes) -> bool:
        """Whether a proof is that of the dialler; compared in constant time."""
        return hmac.compare_digest(self.dialler_proof(secret), proof)

    def is_listener_proof(self, secret: ClusterSecret, proof: bytes) -> bool:
        """Whether a proof is that of the listener; compared in constant time."""
        return hmac.compare_digest(self.listener_proof(secret), proof)

    def _message(self, role: bytes) -> bytes:
        """Return the bytes to authenticate. Each part has a fixed length or is preceded by its length, and the last one
        is there or not, so that different handshakes have different bytes. Without TLS they are those of
        version 0.1."""
        texts = (role, self.dialler_nonce, self.listener_nonce, self.cluster_id.encode())
        parties = _PARTIES.pack(*self.dialler, self.listener_id)
        return b"".join(_LENGTH.pack(len(text)) + text for text in texts) + parties + self.certificate_sha256
