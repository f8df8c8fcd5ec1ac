"""TLS contexts of listeners and clients, made from PEM files that are checked first.

A context is not changed after it was made: renewed files make a new one. OpenSSL checks the files itself, with a
handshake in memory between the new context and a peer that trusts what clients will trust. It shows that the key fits
the certificate, that the dates are valid, that the certificate may be used for its purpose, and that its chain is
complete and leads to the authority. So no library is needed that reads certificates.

Invariants:
* No error and no log line has a byte of a file's content.
* A context trusts the certificates of its CA file, or those of the system, and no others.
* Nothing asks for a passphrase: a key with one that is not given is refused.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
import ssl
import stat
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import IO, Final, NamedTuple

from mansio.errors import ConfigError
from mansio.logs import fields
from mansio.state.authentication.certificate_names import InvalidSubject, read_subject
from mansio.state.authentication.der import InvalidDer
from mansio.state.authentication.revocation import RevocationLists, read_revocation_list

logger = logging.getLogger(__name__)

FILE_BYTES_MAX: Final = 4 << 20
EXPIRES_SOON_S: Final = 14 * 24 * 60 * 60
"""Maximum size of a file; the certificates of all public authorities take 220 KB."""

TLS_1_2_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20:!aNULL:!PSK:!SRP"
"""Cipher suites of TLS 1.2: forward secrecy and authenticated encryption (RFC 9325). Those of TLS 1.3 are OpenSSL's."""

_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----")
_ANY_CERTIFICATE: Final = re.compile(r"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----")
"""Also with the labels `X509` and `TRUSTED`, which OpenSSL reads in a file."""
_REVOCATION_LIST: Final = re.compile(r"-----BEGIN X509 CRL-----([^-]+)-----END X509 CRL-----")
_PRIVATE_KEY: Final = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")

_HANDSHAKE_STEPS_MAX: Final = 8
"""Steps of a handshake in memory; TLS 1.3 needs three."""

_ISSUER_UNKNOWN: Final = frozenset({2, 18, 19, 20, 21})
"""Results of OpenSSL's verification (X509_V_ERR_*) that mean: the chain ends before a certificate that is trusted."""

_OTHERS_MAY_READ: Final = stat.S_IRWXO
_HAS_MEMFD: Final = hasattr(os, "memfd_create")


class ClientAuthentication(StrEnum):
    """Whether a listener asks its clients for certificates (`ssl.client.auth` of Kafka)."""

    NONE = "none"
    REQUESTED = "requested"
    """A client without a certificate is accepted; one with a certificate that is not valid is not."""
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a listener. An empty path stands for no file."""

    certificate: str
    """The certificate, followed by those of the authorities between it and the root."""
    key: str
    ca: str = ""
    """Certificates of the authorities whose certificates clients and brokers accept, and clients present."""
    client_authentication: ClientAuthentication = ClientAuthentication.NONE
    crl: str = ""
    """Revocation lists of the authorities in `ca` that issue certificates of clients and brokers."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the files that there are."""
        return tuple(path for path in (self.certificate, self.key, self.ca, self.crl) if path)


class ServerContext(NamedTuple):
    """Context of a listener, and what others need to know of its certificate."""

    context: ssl.SSLContext
    context_for_log_ins: ssl.SSLContext
    """The same without a question for certificates, for listeners whose clients log in (KIP-684)."""
    begins_s: int
    expires_s: int
    """Seconds since the epoch at which the certificate begins to be valid, and at which it expires."""
    certificate_sha256: bytes
    revocations: RevocationLists | None
    """The revocation lists; None if there are none."""

    def expires_soon(self, now_s: float) -> bool:
        """Whether the certificate should have been renewed: it expires within `EXPIRES_SOON_S`, or within a quarter of
        its validity, if that is less. `now_s`: seconds since the epoch."""
        return self.expires_s - now_s < min(EXPIRES_SOON_S, (self.expires_s - self.begins_s) / 4)


class ResumedSessionExpired(ssl.SSLError):
    """A client has resumed a session whose certificate has expired since."""


class _CheckedSession(ssl.SSLObject):
    """Connection of a listener that asks for certificates.

    OpenSSL does not verify a certificate again when a session is resumed. A session ends with its context, so that
    renewed files are respected; the date is checked here.
    """

    def do_handshake(self) -> None:
        super().do_handshake()
        if self.session_reused and (certificate := self.getpeercert()):
            # A session is at most two hours old: its certificate was valid then, and may have expired.
            expires = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
            if expires < time.time():
                raise ResumedSessionExpired("the certificate of the resumed session has expired")


def load_server_context(files: TlsFiles) -> ServerContext:
    """Make the context of a listener: TLS 1.2 and 1.3, no renegotiation, and no session tickets of TLS 1.3 where
    clients are asked for certificates.

    Raises `ConfigError`, which names the file, if one cannot be read, the key does not fit, the certificate is not
    valid now or not for servers, or its chain leads neither to `files.ca` nor, where that is given, to an authority of
    the system. Reads files and computes for some milliseconds; call it on a thread.
    """
    if files.client_authentication is not ClientAuthentication.NONE and not files.ca:
        raise ConfigError(f"client certificates are {files.client_authentication}, but no CA file is given")
    authorities = _read_certificates(files.ca) if files.ca else []
    revocations = _read_revocation_lists(files, authorities) if files.crl else None
    context = _new_context(ssl.PROTOCOL_TLS_SERVER)
    own = _load_own_certificate(context, files.certificate, files.key)
    peer = _check_as_server(context, files, own, authorities)
    context_for_log_ins = context
    if files.client_authentication is not ClientAuthentication.NONE:
        context_for_log_ins = _new_context(ssl.PROTOCOL_TLS_SERVER)
        _load_own_certificate(context_for_log_ins, files.certificate, files.key)
        _trust(context, authorities, files.ca)
        if revocations is not None:
            _check_revocations(context, revocations)
        context.num_tickets = 0
        context.sslobject_class = _CheckedSession
        is_required = files.client_authentication is ClientAuthentication.REQUIRED
        context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
    certificate, fields_of_it = peer.getpeercert(binary_form=True), peer.getpeercert()
    assert certificate is not None
    assert fields_of_it is not None
    begins_s, expires_s = (
        ssl.cert_time_to_seconds(str(fields_of_it[name])) for name in ("notBefore", "notAfter")
    )
    return ServerContext(
        context,
        context_for_log_ins,
        begins_s,
        expires_s,
        sha256(certificate).digest(),
        None if revocations is None else revocations.lists,
    )


def load_client_context(
    ca: str = "",
    certificate: str = "",
    key: str = "",
    *,
    authorities: str = "",
    key_password: str = "",
    checks_name: bool = True,
) -> ssl.SSLContext:
    """Make the context of a client, or of a broker that connects to others: TLS 1.2 and 1.3, with a certificate of its
    own where `certificate` is given.

    `ca`: file of the authorities that are trusted, by default those of the system; `authorities`: their certificates in
    PEM instead of a file. `key`: by default in the file of the certificate; `key_password`: of an encrypted key.
    `checks_name`: whether the certificate of the server has to name its address. Raises `ConfigError`, which names the
    file. Reads files and computes for some milliseconds.
    """
    context = _new_context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = checks_name
    if authorities:
        found = _CERTIFICATE.findall(authorities)
        if not found:
            raise ConfigError("the certificates of authorities are not in PEM format")
        _trust(context, found, "the text with authorities")
    elif ca:
        _trust(context, _read_certificates(ca), ca)
    else:
        context.load_default_certs()
    if certificate:
        own = _load_own_certificate(context, certificate, key or certificate, key_password)
        _check_as_client(certificate, key or certificate, own, key_password)
    return context


def load_dialler_context(files: TlsFiles, *, logs_in: bool = False) -> ssl.SSLContext:
    """Make the context with which a broker connects to listeners that have the settings of its own: it trusts
    `files.ca`, by default the authorities of the system, and has the certificate of its listener where those ask for
    one. `logs_in`: whether clients of these listeners log in, so that they ask for none.

    Raises `ConfigError` as `load_client_context` does, also for a certificate that is not for clients.
    """
    if logs_in or files.client_authentication is ClientAuthentication.NONE:
        context = load_client_context(files.ca)
    else:
        context = load_client_context(files.ca, files.certificate, files.key)
    if files.crl:
        authorities = _read_certificates(files.ca) if files.ca else []
        _check_revocations(context, _read_revocation_lists(files, authorities))
    return context


def _new_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_ciphers(TLS_1_2_CIPHERS)
    return context


def _read(path: str) -> str:
    """Read a PEM file. What is not ASCII, as in comments, is replaced."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for its writer
            raise ConfigError(f"{path} is not a regular file")
        if status.st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB")
        with open(path, "rb") as file:
            return file.read(FILE_BYTES_MAX).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _read_certificates(path: str) -> list[str]:
    certificates = _CERTIFICATE.findall(_read(path))
    if not certificates:
        raise ConfigError(f"{path} contains no certificate in PEM format")
    return certificates


class _RevocationFile(NamedTuple):
    """What a file of revocation lists contains. `encoded`: the lists in DER."""

    path: str
    lists: RevocationLists
    encoded: list[bytes]


def _read_revocation_lists(files: TlsFiles, authorities: list[str]) -> _RevocationFile:
    """Read the lists in `files.crl`, which `authorities` in PEM have issued.

    Raises `ConfigError`, also for a list with which OpenSSL would refuse every certificate: one that has expired or
    begins later, or whose issuer is not an authority. OpenSSL verifies signatures when it uses a list.
    """
    path = files.crl
    text = _read(path)
    if _ANY_CERTIFICATE.search(text):
        raise ConfigError(f"{path} contains a certificate; it may contain revocation lists only")
    subjects = _subjects_of(authorities, files.ca)
    now_s = time.time()
    lists, every_encoded = [], []
    for block in _REVOCATION_LIST.findall(text):
        try:
            encoded = binascii.a2b_base64(block)
            found = read_revocation_list(encoded)
        except (InvalidDer, binascii.Error) as error:
            raise ConfigError(f"{path} contains a revocation list that cannot be read: {error}") from None
        if found.issuer not in subjects:
            raise ConfigError(f"the issuer of a revocation list in {path} has no certificate in {files.ca}")
        if found.begins_s > now_s:
            raise ConfigError(f"a revocation list in {path} is not valid yet")
        lists.append(found)
        every_encoded.append(encoded)
    if not lists:
        raise ConfigError(f"{path} contains no revocation list in PEM format")
    revocations = RevocationLists(lists)
    if revocations.expires_s is not None and revocations.expires_s < now_s:
        raise ConfigError(f"a revocation list in {path} has expired")
    return _RevocationFile(path, revocations, every_encoded)


def _subjects_of(certificates: list[str], path: str) -> set[bytes]:
    """Return the subjects of certificates in PEM, in DER. Raises `ConfigError`."""
    try:
        return {read_subject(ssl.PEM_cert_to_DER_cert(each)) for each in certificates}
    except (InvalidSubject, ValueError) as error:
        raise ConfigError(f"{path} contains a certificate that cannot be read: {error}") from None


def _check_revocations(context: ssl.SSLContext, revocations: _RevocationFile) -> None:
    """Let a context refuse certificates that the lists name, and those of authorities without a list.

    OpenSSL reads lists from files only, and trusts the certificates in them. So it gets a file of its own, which has
    what was checked and nothing else.
    """
    path = revocations.path
    try:
        with _unnamed_file() as file:
            for each in revocations.encoded:
                content = base64.encodebytes(each)
                file.write(b"-----BEGIN X509 CRL-----\n%b-----END X509 CRL-----\n" % content)
            file.seek(0)
            context.load_verify_locations(cafile=f"/dev/fd/{file.fileno()}")
    except ssl.SSLError as error:
        raise ConfigError(
            f"{path} contains a revocation list that cannot be read: {_reason_of(error)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot copy the revocation lists in {path}: {error.strerror}") from error
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _unnamed_file() -> IO[bytes]:
    """Open a file without a name, in memory where the system can: there may be no directory to write to."""
    if _HAS_MEMFD:
        return os.fdopen(os.memfd_create("revocation-lists"), "w+b")
    return tempfile.TemporaryFile()


def _trust(context: ssl.SSLContext, certificates: list[str], path: str) -> None:
    try:
        context.load_verify_locations(cadata="\n".join(certificates))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{path} contains a certificate that cannot be read: {_reason_of(error)}") from None


def _load_own_certificate(context: ssl.SSLContext, certificate: str, key: str, key_password: str = "") -> str:
    """Load a certificate and its key into `context`; return the certificate. Raises `ConfigError`."""
    own = _read_certificates(certificate)[0]
    if not _PRIVATE_KEY.search(_read(key)):
        raise ConfigError(f"{key} contains no private key in PEM format")

    def passphrase() -> str:
        if not key_password:
            raise ConfigError(f"the private key in {key} has a passphrase; store it without one")
        return key_password

    try:
        context.load_cert_chain(certificate, key, passphrase)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise ConfigError(
                f"the private key in {key} does not fit the certificate in {certificate}"
            ) from None
        if key_password:
            raise ConfigError(f"the passphrase of the private key in {key} is wrong") from None
        raise ConfigError(f"cannot use {certificate} with {key}: {_reason_of(error)}") from None
    except OSError as error:  # removed meanwhile
        raise ConfigError(f"cannot read {certificate} or {key}: {error.strerror}") from error
    _warn_if_others_may_read(key)
    return own


def _warn_if_others_may_read(path: str) -> None:
    """Warn of a private key that every user may read.

    Not an error: Kubernetes mounts secrets so by default, into a container with one user.
    """
    mode = os.stat(path).st_mode
    if mode & _OTHERS_MAY_READ:
        logger.warning(
            "tls_key_readable_by_others",
            extra=fields(file=path, mode=f"{stat.S_IMODE(mode):04o}", remedy=f"chmod 0640 {path}"),
        )


def _check_as_server(
    context: ssl.SSLContext, files: TlsFiles, own: str, authorities: list[str]
) -> ssl.SSLObject:
    """Check the certificate of a listener as its clients will; return the client's side of the connection."""
    path = files.certificate
    peer = _verified(context, _client_that_trusts([own], is_root=False), path)
    if authorities:
        client = _client_that_trusts(authorities, is_root=True)
        try:
            _handshake(context, client)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code not in _ISSUER_UNKNOWN:
                raise ConfigError(
                    f"an authority of the certificate in {path} is not valid: {error.verify_message}"
                ) from None
            client.load_default_certs()
            try:
                _handshake(context, client)
            except ssl.SSLCertVerificationError:
                raise ConfigError(
                    f"the chain of the certificate in {path} does not lead to an authority in {files.ca}: "
                    f"{error.verify_message}"
                ) from None
    return peer


def _check_as_client(path: str, key: str, own: str, key_password: str) -> None:
    """Check the dates and the purpose of a client's certificate as a server will."""
    client, server = _new_context(ssl.PROTOCOL_TLS_CLIENT), _new_context(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for context in (client, server):
        context.load_cert_chain(path, key, key_password)
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    server.load_verify_locations(cadata=own)
    _verified(server, client, path)


def _client_that_trusts(certificates: list[str], *, is_root: bool) -> ssl.SSLContext:
    client = _new_context(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    if not is_root:
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata="\n".join(certificates))
    return client


def _verified(server: ssl.SSLContext, client: ssl.SSLContext, path: str) -> ssl.SSLObject:
    """Connect two contexts, one of which verifies the certificates of the other in the file `path`."""
    try:
        return _handshake(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"a certificate in {path} is not valid: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ConfigError(f"the certificate in {path} cannot be used: {_reason_of(error)}") from None


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """Connect two contexts in memory; return the client's side. Raises the `SSLError` of either side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = client.wrap_bio(to_client, to_server)
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    is_complete = [False, False]
    for _ in range(_HANDSHAKE_STEPS_MAX):
        for number, side in enumerate((theirs, ours)):
            if not is_complete[number]:
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                is_complete[number] = True
        if all(is_complete):
            return theirs
    raise ssl.SSLError("the handshake does not end")


def _reason_of(error: Exception) -> str:
    """Reason of an error of OpenSSL as text, without the place in its source."""
    reason = getattr(error, "reason", None)
    return reason.replace("_", " ").lower() if reason else str(error).partition("(_ssl")[0].strip()
