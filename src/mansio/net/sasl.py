"""SASL on the side of the client: a user's password, and the exchange of messages on a new or open connection, with a
password or a token.

SCRAM salts the password, which takes milliseconds of a processor. That runs on a thread, one at a time for each user,
and the result is kept for the connections that follow, since all brokers of a cluster have the same salt for a user.

Invariant: passwords and salted passwords are in no `repr` and no error.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from mansio.config.security import PLAIN, SASL_MECHANISMS
from mansio.errors import AuthenticationFailed, ConfigError, UnsupportedSaslMechanism, UnsupportedVersion
from mansio.net.retry import client_error_for_code
from mansio.net.token_credentials import TokenCredentials
from mansio.state.authentication.credentials import ScramMechanism, salt_password
from mansio.state.authentication.oauth_bearer import FAILURE_ANSWER, bearer_message
from mansio.state.authentication.sasl_session import (
    HANDSHAKE_VERSION,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
)
from mansio.state.authentication.scram import NONCE_BYTES
from mansio.state.authentication.scram_client import ScramClient, plain_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Request = Callable[[int, Mapping[str, Any], int], Awaitable[Any]]
    """Sends a request (API key, fields, version) and returns the decoded response."""

AUTHENTICATE_VERSION_MAX: Final = 1
"""Version 2 of SaslAuthenticate has the same fields in another encoding."""
DEFAULT_MECHANISM: Final = ScramMechanism.SHA_256.value
USER_BYTES_MAX: Final = 1_024
PASSWORD_BYTES_MAX: Final = 64 << 10
"""Limits in bytes of UTF-8. Some brokers take tokens of kilobytes as passwords."""
SALTED_PASSWORDS_MAX: Final = 8
"""Number of salts and iterations for which a salted password is kept."""
SHOWN_MECHANISMS_MAX: Final = 10
SHOWN_CHARACTERS_MAX: Final = 300
"""Limits on what a broker sent and an error shows."""


class SaslCredentials:
    """User, password and mechanism with which a client logs in. `repr` hides the password. Belongs to one event loop
    while a connection is opened."""

    __slots__ = ("_lock", "_password", "_salted", "is_token", "mechanism", "user")

    def __init__(
        self, user: str, password: str, mechanism: str = DEFAULT_MECHANISM, *, is_token: bool = False
    ) -> None:
        """`is_token`: whether they are the id and the secret of a delegation token. Raise `ConfigError` for an unknown
        mechanism, PLAIN with a token, or a name or password that cannot be sent."""
        if mechanism not in SASL_MECHANISMS:
            raise ConfigError(f"mechanism: {mechanism!r} is none of {', '.join(SASL_MECHANISMS)}")
        if is_token and mechanism == PLAIN:
            raise ConfigError("mechanism: a delegation token needs SCRAM, not PLAIN")
        self.is_token: bool = is_token
        _check_text("user", user, USER_BYTES_MAX)
        self.user: str = user
        self.mechanism: str = mechanism
        self._password = _check_text("password", password, PASSWORD_BYTES_MAX)
        self._salted: dict[tuple[ScramMechanism, bytes, int], bytes] = {}
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"SaslCredentials({self.user!r}, {self.mechanism}, hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a password is not serialized")

    is_renewable: Final = True
    """A client authenticates again with the same password."""

    @property
    def subject(self) -> str:
        """Who is refused, in errors."""
        return f"delegation token {self.user!r}" if self.is_token else f"user {self.user!r}"

    async def new_token(self) -> str:
        """Return "": passwords need no token."""
        return ""

    @property
    def sends_password(self) -> bool:
        """Whether the mechanism sends the password itself, so that the connection has to be confidential."""
        return self.mechanism == PLAIN

    def plain_token(self) -> bytes:
        """Return the message of PLAIN, which contains the password."""
        return plain_token(self.user, self._password)

    async def salted_password(self, mechanism: ScramMechanism, salt: bytes, iterations: int) -> bytes:
        """Return the salted password, computed on a thread unless it is known."""
        key = (mechanism, salt, iterations)
        async with self._lock:
            found = self._salted.get(key)
            if found is None:
                found = await asyncio.to_thread(salt_password, mechanism, self._password, salt, iterations)
                if len(self._salted) >= SALTED_PASSWORDS_MAX:
                    self._salted.clear()
                self._salted[key] = found
            return found


Credentials: TypeAlias = SaslCredentials | TokenCredentials
"""What a client logs in with."""


def _check_text(name: str, text: str, bytes_max: int) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        encoded = b""
    if not 1 <= len(encoded) <= bytes_max or b"\0" in encoded:
        raise ConfigError(f"{name}: it has 1 to {bytes_max} bytes of UTF-8, none of them NUL")
    return encoded


async def authenticate(
    request: Request,
    credentials: Credentials,
    versions: Mapping[int, tuple[int, int]],
    broker: str,
    bearer_token: str = "",
) -> int:
    """Log in. Returns the time in milliseconds after which the broker expects it again (KIP-368); 0: never.

    `bearer_token`: what `credentials.new_token` has returned. `broker`: its address, for errors. Raises
    `AuthenticationFailed`, which is final, and errors of the connection.
    """
    handshake, messages = versions.get(SASL_HANDSHAKE), versions.get(SASL_AUTHENTICATE)
    if handshake is None or messages is None or handshake[1] < HANDSHAKE_VERSION:
        raise UnsupportedVersion(f"{broker} has no authentication with users and passwords")
    answer = await request(SASL_HANDSHAKE, {"mechanism": credentials.mechanism}, HANDSHAKE_VERSION)
    if answer.error_code == UnsupportedSaslMechanism.kafka_code:
        offered = _one_line(", ".join(_mechanisms(answer)))
        raise UnsupportedSaslMechanism(
            f"{broker} does not offer the mechanism {credentials.mechanism}, but {offered or 'none'}"
        )
    _check(answer.error_code, f"{broker} does not authenticate users on this listener")
    version = min(messages[1], AUTHENTICATE_VERSION_MAX)

    async def exchange(token: bytes) -> Any:
        response = await request(SASL_AUTHENTICATE, {"auth_bytes": token}, version)
        message = _one_line(response.error_message) or "the credential is wrong"
        _check(response.error_code, f"{broker} refused {credentials.subject}: {message}")
        return response

    try:
        if isinstance(credentials, TokenCredentials):
            answer = await exchange(bearer_message(bearer_token))
            if answer.auth_bytes:  # what is wrong, which the client answers before it gets the error
                await exchange(FAILURE_ANSWER)
                raise AuthenticationFailed(f"{broker} refused the token and did not say so")
        elif credentials.mechanism == PLAIN:
            answer = await exchange(credentials.plain_token())
        else:
            answer = await _exchange_scram(exchange, credentials)
    except AuthenticationFailed as error:
        message = error.message if error.message.startswith(broker) else f"{broker}: {error.message}"
        raise type(error)(message) from None
    return max(int(answer.session_lifetime_ms), 0)


async def offered_mechanisms(request: Request) -> list[str]:
    """Return the mechanisms of the listener; none if it does not authenticate users. It closes the connection."""
    answer = await request(SASL_HANDSHAKE, {"mechanism": ""}, HANDSHAKE_VERSION)
    is_sasl = answer.error_code == UnsupportedSaslMechanism.kafka_code
    return _mechanisms(answer) if is_sasl else []


async def _exchange_scram(exchange: Callable[[bytes], Awaitable[Any]], credentials: SaslCredentials) -> Any:
    mechanism = ScramMechanism(credentials.mechanism)
    client = ScramClient(
        mechanism, credentials.user, secrets.token_bytes(NONCE_BYTES), is_token=credentials.is_token
    )
    challenge = await exchange(client.first())
    salting = client.read_challenge(bytes(challenge.auth_bytes))
    salted_password = await credentials.salted_password(mechanism, salting.salt, salting.iterations)
    answer = await exchange(client.final(salted_password))
    client.verify(bytes(answer.auth_bytes))
    return answer


def _mechanisms(answer: Any) -> list[str]:
    return [_one_line(name) for name in (answer.mechanisms or ())[:SHOWN_MECHANISMS_MAX]]


def _one_line(text: str | None) -> str:
    """Return what a broker sent as one line that a terminal can show."""
    shown = " ".join((text or "")[:SHOWN_CHARACTERS_MAX].split())
    return "".join(character if character.isprintable() else "?" for character in shown)


def _check(code: int, message: str) -> None:
    if code:
        raise client_error_for_code(code, message)
