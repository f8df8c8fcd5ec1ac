"""Certificates of clients whose connection outlives their check in the handshake: each request is checked again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import SaslAuthenticationFailed
from mansio.state.authentication.certificate_fields import read_expiry_s
from mansio.state.authentication.der import InvalidDer

if TYPE_CHECKING:
    from mansio.state.authentication.revocation import RevocationLists


def checked_expiry_ms(certificate: bytes, revocations: RevocationLists | None, now_ms: float) -> int:
    """Return the Unix time at which a certificate in DER expires. `revocations`: the lists in use now, if any.

    Raises `SaslAuthenticationFailed` if it has expired, or was revoked."""
    try:
        expires_ms = int(read_expiry_s(certificate) * 1000)
        if revocations is not None and revocations.is_revoked(certificate):
            raise SaslAuthenticationFailed("the certificate was revoked")
    except InvalidDer as error:
        raise SaslAuthenticationFailed(f"the certificate has {error.message}") from error
    if expires_ms <= now_ms:
        raise SaslAuthenticationFailed("the certificate has expired")
    return expires_ms
