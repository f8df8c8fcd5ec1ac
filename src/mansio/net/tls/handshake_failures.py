"""Reasons for which TLS handshakes of a listener fail, as one word for metrics and one line for people.

Under TLS 1.3 a client that was refused may see no more than the end of the connection, so the log of the listener is
the place where the reason is found.
"""

from __future__ import annotations

import ssl
from enum import StrEnum
from typing import Final, NamedTuple

from mansio.net.tls.contexts import ResumedSessionExpired


class FailureReason(StrEnum):
    """Why a handshake failed."""

    PLAINTEXT = "plaintext"
    PROTOCOL_VERSION = "protocol_version"
    NO_SHARED_CIPHER = "no_shared_cipher"
    NO_CERTIFICATE = "no_certificate"
    UNKNOWN_CA = "unknown_ca"
    EXPIRED = "expired"
    REVOKED = "revoked"
    REVOCATION_LIST = "revocation_list"
    """No valid list of the authority that issued the certificate."""
    INVALID_CERTIFICATE = "invalid_certificate"
    REFUSED_BY_CLIENT = "refused_by_client"
    TIMEOUT = "timeout"
    OVERLOADED = "overloaded"
    DISCONNECTED = "disconnected"
    OTHER = "other"


class Failure(NamedTuple):
    """A failed handshake: its reason, and a line for people."""

    reason: FailureReason
    detail: str


TIMED_OUT: Final = Failure(
    FailureReason.TIMEOUT, "the handshake was not complete in time, counted from the connection's arrival"
)
OVERLOADED: Final = Failure(FailureReason.OVERLOADED, "too many connections wait for their handshake")
TOO_SLOW: Final = Failure(
    FailureReason.OVERLOADED, "the handshake took longer than other connections could wait"
)
DISCONNECTED: Final = Failure(FailureReason.DISCONNECTED, "the client closed the connection")

_PLAINTEXT: Final = "the client does not use TLS"
_REASONS: Final = {
    "HTTP_REQUEST": Failure(FailureReason.PLAINTEXT, _PLAINTEXT),
    "HTTPS_PROXY_REQUEST": Failure(FailureReason.PLAINTEXT, _PLAINTEXT),
    "WRONG_VERSION_NUMBER": Failure(FailureReason.PLAINTEXT, _PLAINTEXT),
    "RECORD_LAYER_FAILURE": Failure(FailureReason.PLAINTEXT, _PLAINTEXT),  # OpenSSL 3.2 and later
    "UNSUPPORTED_PROTOCOL": Failure(
        FailureReason.PROTOCOL_VERSION, "the client offers no version of TLS above 1.1"
    ),
    "NO_SHARED_CIPHER": Failure(FailureReason.NO_SHARED_CIPHER, "the client offers no accepted cipher suite"),
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": Failure(
        FailureReason.NO_CERTIFICATE, "the client has no certificate, and this listener requires one"
    ),
}
"""Reason of OpenSSL -> failure. OpenSSL takes the first bytes of another protocol for a wrong version of TLS."""

_VERIFICATIONS: Final = {
    **dict.fromkeys((2, 18, 19, 20, 21), FailureReason.UNKNOWN_CA),
    10: FailureReason.EXPIRED,
    23: FailureReason.REVOKED,
    **dict.fromkeys((3, 8, 11, 12), FailureReason.REVOCATION_LIST),
}
"""Result of OpenSSL's verification (X509_V_ERR_*) -> reason."""


def failure_of(error: BaseException) -> Failure:
    """Return why a handshake failed with `error`, as an event loop raises it."""
    if isinstance(error, ResumedSessionExpired):
        return Failure(FailureReason.EXPIRED, "the certificate of the client's earlier session has expired")
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = _VERIFICATIONS.get(error.verify_code, FailureReason.INVALID_CERTIFICATE)
        return Failure(reason, f"the client's certificate was refused: {error.verify_message}")
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return DISCONNECTED
    if isinstance(error, ssl.SSLError):
        reason_text = error.reason or ""
        words = reason_text.replace("_", " ").lower()
        if "_ALERT_" in reason_text:
            return Failure(
                FailureReason.REFUSED_BY_CLIENT,
                f"the client ended the handshake: {words.partition('alert ')[2]}",
            )
        return _REASONS.get(reason_text) or Failure(FailureReason.OTHER, words or "the handshake failed")
    if isinstance(
        error, TimeoutError | ConnectionAbortedError
    ):  # what event loops raise after the handshake's time
        return TIMED_OUT
    if isinstance(error, OSError):
        return DISCONNECTED
    return Failure(FailureReason.OTHER, repr(error))
