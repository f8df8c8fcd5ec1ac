"""Settings with which a client encrypts connections and logs in. `net.contexts` finds them.

The settings are plain values, so that processes can pass them on; certificates and keys are names of files, which exist
on each machine that connects.

Invariant: no `repr` and no error contains a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mansio.config.security import OAUTHBEARER, PLAIN
from mansio.errors import ConfigError
from mansio.net.sasl import DEFAULT_MECHANISM, SaslCredentials
from mansio.net.tls.contexts import load_client_context
from mansio.net.token_credentials import ClientCredentials, TokenCredentials
from mansio.state.authentication.api_keys import id_of_key

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from mansio.net.sasl import Credentials
    from mansio.net.token_credentials import TokenProvider

VARIABLES: Final = {
    "tls": "MANSIO_TLS",
    "user": "MANSIO_USER",
    "password": "MANSIO_PASSWORD",
    "mechanism": "MANSIO_MECHANISM",
    "token": "MANSIO_TOKEN",
    "token_endpoint": "MANSIO_TOKEN_ENDPOINT",
    "token_scope": "MANSIO_TOKEN_SCOPE",
    "api_key": "MANSIO_API_KEY",
    "certificate": "MANSIO_CERTIFICATE",
    "key": "MANSIO_KEY",
}
"""Setting -> environment variable."""
UNSECURED: Final[Mapping[str, Any]] = {
    "tls": False,
    "user": "",
    "password": "",
    "token": "",
    "api_key": "",
    "certificate": "",
    "key": "",
}
"""Settings of a client of a broker without TLS and users, whatever the environment states."""

IDENTITIES: Final = ("user", "token", "token_provider", "api_key")
"""Settings of which one says who the client is."""

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
    """`SCRAM-SHA-256` (the default), `SCRAM-SHA-512` or `PLAIN`; with `OAUTHBEARER`, user and password are the id and
    the secret for which `token_endpoint` issues tokens."""
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
    delegation_token: bool = False
    """Whether user and password are the id and the secret of a delegation token."""
    token: str = field(default="", repr=False)
    """A token, instead of a user."""
    token_provider: TokenProvider | None = field(default=None, repr=False)
    """A function that returns tokens, instead of a user."""
    token_endpoint: str = ""
    token_scope: str = ""
    """Scope that the endpoint is asked for."""
    api_key: str = field(default="", repr=False)
    """An API key, instead of a user."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for settings that contradict each other."""
        given = [name for name in IDENTITIES if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"there are {' and '.join(given)}: give one of them")
        if bool(self.token_endpoint) != (self.mechanism == OAUTHBEARER and bool(self.user)):
            raise ConfigError(
                "a token endpoint needs mechanism=OAUTHBEARER with user and password, and the other way round"
            )
        if self.user and not self.password:
            raise ConfigError(
                f"user {self.user!r} has no password: give one (password=, {VARIABLES['password']})"
            )
        if self.password and not self.user:
            raise ConfigError(f"there is a password without a user (user=, {VARIABLES['user']})")
        if self.delegation_token and not self.user:
            raise ConfigError("a delegation token has an id (user=) and a secret (password=)")
        if self.key and not self.certificate:
            raise ConfigError("there is a key without a certificate (certificate=)")
        if self.certificate and not self.tls:
            raise ConfigError("a certificate of the client needs TLS (tls=True, or tls='ca.pem')")

    @property
    def protocol(self) -> str:
        """The security protocol, as Kafka names it."""
        transport = "SSL" if self.tls else "PLAINTEXT"
        return f"SASL_{transport}" if self.has_identity else transport

    @property
    def has_identity(self) -> bool:
        """Whether the client logs in."""
        return any(getattr(self, name) for name in IDENTITIES)

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

    def credentials(self) -> Credentials | None:
        """Return what the client logs in with, None if it does not. Raises `ConfigError`."""
        if self.token_provider is not None:
            return TokenCredentials(self.token_provider)
        if self.token:
            return TokenCredentials.fixed(self.token)
        if self.api_key:
            key_id = id_of_key(self.api_key)
            if key_id is None:
                raise ConfigError("api_key: it is not an API key, mansio_ID_SECRET")
            return SaslCredentials(key_id, self.api_key, PLAIN)
        if not self.user:
            return None
        if self.mechanism == OAUTHBEARER:
            return TokenCredentials(
                ClientCredentials(self.token_endpoint, self.user, self.password, self.token_scope)
            )
        return SaslCredentials(
            self.user,
            self.password,
            self.mechanism or DEFAULT_MECHANISM,
            is_token=self.delegation_token,
        )


def parse_tls(text: str) -> bool | str:
    """Parse `true`, `false`, or the name of a file with authorities."""
    return _FLAGS.get(text.strip().lower(), text)
