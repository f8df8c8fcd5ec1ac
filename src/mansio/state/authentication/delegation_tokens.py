"""Delegation tokens (KIP-48): a user's client gets one, and gives it to other programs, which log in with it as the
user.

A program logs in with SCRAM and the extension `tokenauth=true` (RFC 5802, section 5.1): the id of the token is the
name, its HMAC in Base64 the password. A token expires, earlier than its maximum lifetime unless it is renewed.

Source: DelegationToken and TokenInformation of Kafka.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mansio.state.authentication.credentials import (
    ITERATIONS_MIN,
    ScramCredential,
    ScramMechanism,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

PURPOSE: Final = b"mansio delegation tokens"
"""Of the key, derived from a secrets key, with which HMACs are computed."""


@dataclass(frozen=True, slots=True)
class DelegationToken:
    """A token as the metadata store has it. Principals are `User:NAME`; times are Unix times in milliseconds.

    `requester`: who asked for it, the owner or somebody on its behalf. `renewers`: may renew and expire it, too.
    `expires_ms`: when it ends unless it is renewed; `max_ms`: when it ends in any case. `digest`: SHA-256 of the HMAC
    in hexadecimal, by which requests find the token. `secrets_key_id`: of the secrets key with which the HMAC is made.
    `is_of_stored_user`: the owner had a password when the token was made, and the token ends with that user; an owner
    with a certificate has none.
    """

    token_id: str
    owner: str
    requester: str
    renewers: tuple[str, ...]
    issued_ms: int
    expires_ms: int
    max_ms: int
    digest: str = field(repr=False)
    secrets_key_id: str
    credentials: Mapping[str, ScramCredential] = field(repr=False)
    """By name of the mechanism."""
    revision: int = 0
    is_of_stored_user: bool = False

    @property
    def user(self) -> str:
        """Name of the owner."""
        return self.owner.partition(":")[2]

    def may_be_changed_by(self, principal: str) -> bool:
        """Whether a principal may renew, expire and describe the token without further rights."""
        return principal in (self.owner, self.requester, *self.renewers)

    def may_be_changed_by_any(self, principals: frozenset[str]) -> bool:
        """Whether one of the principals may (`may_be_changed_by`)."""
        return not principals.isdisjoint((self.owner, self.requester, *self.renewers))

    def is_expired(self, now_ms: int) -> bool:
        """Whether the token has expired."""
        return now_ms >= self.expires_ms


def token_hmac(key: bytes, token_id: str) -> bytes:
    """Return the HMAC of a token, which is its secret. `key`: derived from a secrets key for `PURPOSE`."""
    return hmac.digest(key, token_id.encode(), "sha512")


def token_digest(token_hmac: bytes) -> str:
    """Return `DelegationToken.digest` of an HMAC."""
    return hashlib.sha256(token_hmac).hexdigest()


def token_password(token_hmac: bytes) -> str:
    """Return the password with which a program logs in."""
    return base64.b64encode(token_hmac).decode()


def token_credentials(token_hmac: bytes, salts: Mapping[ScramMechanism, bytes]) -> dict[str, ScramCredential]:
    """Return the credentials of a token by name of the mechanism; takes milliseconds."""
    password = token_password(token_hmac)
    return {
        mechanism.value: ScramCredential.from_password(mechanism, password, salt, ITERATIONS_MIN)
        for mechanism, salt in salts.items()
    }
