"""Failures of TLS as one line of text, and probes that tell a port with TLS from one without.

OpenSSL reports a failed handshake with words of its own, and a client without TLS at a port with TLS (or the reverse)
sees nothing but the end of the connection. `tls_failure` makes one line of the first, which names what is wrong: the
name, the certificate, the protocol or the port. For the second, `speaks_tls` and `speaks_plaintext` ask the port in
the other protocol; they send no credentials.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Final

from mansio.errors import TlsFailed
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from mansio.errors import MansioError

PROBE_S_MAX: Final = 2.0
PROBE_BYTES: Final = 8
"""Length and correlation id of a response."""
PROBE_FRAME_BYTES_MAX: Final = 1 << 20
PROBE_CORRELATION_ID: Final = 0x6D616E73
TLS_REMEDY: Final = "connect with TLS (tls=True, or tls='ca.pem' for a private authority)"

_EXPIRED, _NOT_YET_VALID, _REVOKED = 10, 9, 23
_SELF_SIGNED: Final = frozenset({18})
_UNKNOWN_AUTHORITY: Final = frozenset({2, 19, 20, 21, 27})
_OTHER_NAME: Final = frozenset({62, 64})
"""Codes of X509_verify_cert."""
_REMEDIES: Final = {
    **dict.fromkeys(_SELF_SIGNED, "give it, or its authority, as tls='ca.pem'"),
    **dict.fromkeys(_UNKNOWN_AUTHORITY, "give the authority's certificate as tls='ca.pem'"),
}
"""Code -> what a client may do about it."""

_NO_TLS: Final = frozenset(
    {
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
        "PACKET_LENGTH_TOO_LONG",
        "RECORD_LAYER_FAILURE",
        "UNKNOWN_PROTOCOL",
    }
)
_OTHER_PROTOCOL: Final = frozenset(
    {
        "UNSUPPORTED_PROTOCOL",
        "TLSV1_ALERT_PROTOCOL_VERSION",
        "NO_PROTOCOLS_AVAILABLE",
        "NO_SHARED_CIPHER",
        "SSLV3_ALERT_HANDSHAKE_FAILURE",
        "TLSV1_ALERT_INSUFFICIENT_SECURITY",
    }
)
_CLIENT_CERTIFICATE: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a certificate of the client (certificate=, key=)",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know the authority of the client's certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refused the client's certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it refused the client's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client's certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "the client's certificate is revoked",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refused the client's certificate",
    "TLSV1_ALERT_ACCESS_DENIED": "it refused the client's certificate",
}
"""Alert of the broker -> what it means."""


def tls_failure(error: ssl.SSLError, broker: str) -> TlsFailed | None:
    """Return the failure that `error` reports; None for the end of a connection, which is no failure of TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        wrong = "name" if error.verify_code in _OTHER_NAME else "certificate"
        return TlsFailed.of(
            wrong,
            f"the certificate of {broker} is not accepted: {_certificate_reason(error)}",
            _REMEDIES.get(error.verify_code, ""),
        )
    reason = error.reason or ""
    if isinstance(error, ssl.SSLEOFError) or reason == "UNEXPECTED_EOF_WHILE_READING":
        return None
    if reason in _NO_TLS:
        return no_tls_failure(broker)
    if reason in _CLIENT_CERTIFICATE:
        return TlsFailed.of(
            "client certificate", f"{broker} ended the TLS connection: {_CLIENT_CERTIFICATE[reason]}"
        )
    if reason in _OTHER_PROTOCOL:
        return TlsFailed.of(
            "protocol",
            f"{broker} and this client have no version of TLS or no cipher in common"
            f" (the broker may also require a certificate of the client): {_plain(reason)}",
        )
    return TlsFailed.of("protocol", f"TLS with {broker} failed: {_plain(reason or str(error))}")


def no_tls_failure(broker: str) -> TlsFailed:
    """Return the failure of a client with TLS at a port without it."""
    remedy = "connect without TLS (tls=False), or to another port"
    return TlsFailed.of("protocol", f"{broker} does not speak TLS", remedy)


def tls_only_failure(broker: str) -> TlsFailed:
    """Return the failure of a client without TLS at a port with it."""
    return TlsFailed.of("protocol", f"{broker} accepts TLS only", TLS_REMEDY)


def unencrypted_password_failure(broker: str) -> TlsFailed:
    """Return the failure of a client that would send its password without TLS to another machine."""
    return TlsFailed.of(
        "protocol",
        f"{broker}: the mechanism PLAIN would send the password unencrypted",
        f"{TLS_REMEDY}, or use SCRAM-SHA-256",
    )


def failure_in(error: BaseException | None, broker: str) -> MansioError | None:
    """Return the failure of TLS with which a connection ended; None for any other end."""
    return tls_failure(error, broker) if isinstance(error, ssl.SSLError) else None


def _certificate_reason(error: ssl.SSLCertVerificationError) -> str:
    code = error.verify_code
    if code in _OTHER_NAME:
        return f"it is for another name ({_plain(error.verify_message)})"
    if code == _EXPIRED:
        return "it has expired, or one of its authorities has"
    if code == _NOT_YET_VALID:
        return "it is not valid yet; compare the clocks"
    if code == _REVOKED:
        return "it is revoked"
    if code in _SELF_SIGNED:
        return "it is signed by itself"
    if code in _UNKNOWN_AUTHORITY:
        return "its authority is unknown"
    return _plain(error.verify_message)


def _plain(text: str) -> str:
    """Return words of OpenSSL as text."""
    words = text.replace("_", " ") if text.isupper() else text
    return " ".join((words.lower() if text.isupper() else words).rstrip(".").split())


async def speaks_tls(host: str, port: int) -> bool:
    """Whether something at this address completes a TLS handshake, whatever its certificate is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(PROBE_S_MAX):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError as error:
        return (error.reason or "") in {*_CLIENT_CERTIFICATE, *_OTHER_PROTOCOL}
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


async def speaks_plaintext(host: str, port: int) -> bool:
    """Whether something at this address answers a request of Kafka's protocol without TLS."""
    request = messages.encode_request(ApiKey.API_VERSIONS, 0, PROBE_CORRELATION_ID, None, {})
    try:
        async with asyncio.timeout(PROBE_S_MAX):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request)
                start = await reader.readexactly(PROBE_BYTES)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    length, correlation_id = int.from_bytes(start[:4]), int.from_bytes(start[4:])
    return correlation_id == PROBE_CORRELATION_ID and length <= PROBE_FRAME_BYTES_MAX
