"""Settings with which a client encrypts connections and logs in. `net.contexts` finds them.

The settings are plain values, so that processes can pass them on; certificates and keys are names of files, which exist
on each machine that connects.

Invariant: no `repr` and no error contains a password.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Final

from mansio.errors import ConfigError
from mansio.net.sasl import DEFAULT_MECHANISM, SaslCredentials

VARIABLES: Final = {
    "tls": "MANSIO_TLS",
    "user": "MANSIO_USER",
    "password": "MANSIO_PASSWORD",
    "mechanism": "MANSIO_MECHANISM",
    "certificate": "MANSIO_CERTIFICATE",
    "key": "MANSIO_KEY",
}
"""Setting -> environment variable."""
_FLAGS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "": False}


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """How a client connects. Without `tls` it does not encrypt, without `user` it does not log in."""

    tls: bool | str = False
    """True: the broker's certificate is verified with the authorities of the system; a text: with those in this file
    (PEM)."""
    user: str = ""
    password: str = field(default="", repr=False)
    mechanism: str = ""
    """`SCRAM-SHA-256` (the default), `SCRAM-SHA-512` or `PLAIN`."""
    certificate: str = ""
    """File with the certificate of the client and its chain (PEM)."""
    key: str = ""
    """File with its key, if that is not in the file of the certificate."""
    key_password: str = field(default="", repr=False)
    """Of an encrypted key."""
    authorities: str = field(default="", repr=False)
    """Certificates of authorities themselves, in PEM, instead of a file."""
    checks_name: bool = True
    """Whether the name in the broker's certificate has to be its address."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for settings that contradict each other."""
        if self.user and not self.password:
            raise ConfigError(
                f"user {self.user!r} has no password: give one (password=, {VARIABLES['password']})"
            )
        if self.password and not self.user:
            raise ConfigError(f"there is a password without a user (user=, {VARIABLES['user']})")
        if self.key and not self.certificate:
            raise ConfigError("there is a key without a certificate (certificate=)")
        if self.certificate and not self.tls:
            raise ConfigError("a certificate of the client needs TLS (tls=True, or tls='ca.pem')")

    @property
    def protocol(self) -> str:
        """The security protocol, as Kafka names it."""
        transport = "SSL" if self.tls else "PLAINTEXT"
        return f"SASL_{transport}" if self.user else transport

    def tls_context(self) -> ssl.SSLContext | None:
        """Return a context with these files, None without TLS. Raises `ConfigError` with the file that is wrong."""
        if not self.tls:
            return None
        context = _context_with_authorities(self.tls, self.authorities)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.checks_name
        if self.certificate:
            self._load_certificate(context)
        return context

    def credentials(self) -> SaslCredentials | None:
        """Return user and password, None without a user. Raises `ConfigError`."""
        if not self.user:
            return None
        return SaslCredentials(self.user, self.password, self.mechanism or DEFAULT_MECHANISM)

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        _check_readable("certificate", self.certificate)
        if self.key:
            _check_readable("key", self.key)
        key = self.key or self.certificate

        def key_password() -> str:
            if not self.key_password:
                raise ConfigError(f"key: {key} is encrypted: give a key without a password")
            return self.key_password

        try:
            context.load_cert_chain(self.certificate, self.key or None, password=key_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"key: {key} does not belong to the certificate in {self.certificate}"
                ) from None
            if self.key_password:
                raise ConfigError(f"key: {key} is no key in PEM, or its password is wrong") from None
            raise ConfigError(
                f"certificate: {self.certificate} and {key} are no certificate and key in PEM"
            ) from None


def _context_with_authorities(tls: bool | str, authorities: str) -> ssl.SSLContext:
    if authorities:
        try:
            return ssl.create_default_context(cadata=authorities)
        except (ssl.SSLError, ValueError):
            raise ConfigError("tls: the certificates of authorities are not in PEM") from None
    if not isinstance(tls, str):
        return ssl.create_default_context()
    _check_readable("tls", tls)
    try:
        return ssl.create_default_context(cafile=tls)
    except ssl.SSLError:
        raise ConfigError(f"tls: {tls} has no certificates in PEM") from None


def _check_readable(name: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a name of a file"
        raise ConfigError(f"{name}: cannot read {path}: {reason}") from None


def parse_tls(text: str) -> bool | str:
    """Parse `true`, `false`, or the name of a file with authorities."""
    return _FLAGS.get(text.strip().lower(), text)
