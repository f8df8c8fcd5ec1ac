"""Settings with which a client encrypts connections and logs in. `net.contexts` finds them.

The settings are plain values, so that processes can pass them on; certificates and keys are names of files, which exist
on each machine that connects.

Invariant: no `repr` and no error contains a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConfigError
from mansio.net.sasl import DEFAULT_MECHANISM, SaslCredentials
from mansio.net.tls.contexts import load_client_context

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

VARIABLES: Final = {
    "tls": "MANSIO_TLS",
    "user": "MANSIO_USER",
    "password": "MANSIO_PASSWORD",
    "mechanism": "MANSIO_MECHANISM",
    "certificate": "MANSIO_CERTIFICATE",
    "key": "MANSIO_KEY",
}
"""Setting -> environment variable."""
UNSECURED: Final[Mapping[str, Any]] = {
    "tls": False,
    "user": "",
    "password": "",
    "certificate": "",
    "key": "",
}
"""Settings of a client of a broker without TLS and users, whatever the environment states."""

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
    token: bool = False
    """Whether user and password are the id and the secret of a delegation token."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for settings that contradict each other."""
        if self.user and not self.password:
            raise ConfigError(
                f"user {self.user!r} has no password: give one (password=, {VARIABLES['password']})"
            )
        if self.password and not self.user:
            raise ConfigError(f"there is a password without a user (user=, {VARIABLES['user']})")
        if self.token and not self.user:
            raise ConfigError("a delegation token has an id (user=) and a secret (password=)")
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
        return load_client_context(
            self.tls if isinstance(self.tls, str) else "",
            self.certificate,
            self.key,
            authorities=self.authorities,
            key_password=self.key_password,
            checks_name=self.checks_name,
        )

    def credentials(self) -> SaslCredentials | None:
        """Return user and password, None without a user. Raises `ConfigError`."""
        if not self.user:
            return None
        return SaslCredentials(
            self.user, self.password, self.mechanism or DEFAULT_MECHANISM, is_token=self.token
        )


def parse_tls(text: str) -> bool | str:
    """Parse `true`, `false`, or the name of a file with authorities."""
    return _FLAGS.get(text.strip().lower(), text)
