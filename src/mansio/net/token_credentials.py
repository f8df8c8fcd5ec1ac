"""Tokens with which a client logs in (OAUTHBEARER): a fixed one, those of a function of the program, or those that a
token endpoint issues for an id and a secret (client credentials, RFC 6749 section 4.4, KIP-768).

A token of an endpoint is used until `FRESH_FRACTION` of its time has passed. A function is called for each log-in, and
may keep its tokens itself.

Invariant: no token and no secret is in a `repr` or an error.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import quote_plus, urlencode

from mansio.config.security import OAUTHBEARER
from mansio.config.tokens import check_url
from mansio.errors import AuthenticationFailed, ConfigError, ConnectionLost, MansioError, RequestTimedOut
from mansio.net import https

TokenProvider = Callable[[], str] | Callable[[], Awaitable[str]]
"""Returns a token that is valid now. One that blocks runs on a thread."""

PROVIDER_TIMEOUT_S: Final = 30.0
ENDPOINT_TIMEOUT_MS: Final = 10_000
ANSWER_BYTES_MAX: Final = 64 << 10
FRESH_FRACTION: Final = 0.8
TOKEN_CHARACTERS_MAX: Final = 64 << 10

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+")


class TokenCredentials:
    """Source of the tokens of a client. `repr` hides them. Belongs to one event loop."""

    mechanism: Final = OAUTHBEARER
    sends_password: Final = True
    """A token has to be kept secret as a password has."""

    __slots__ = ("_provider", "is_renewable")

    def __init__(self, provider: TokenProvider, *, is_renewable: bool = True) -> None:
        """`is_renewable`: whether the provider returns a newer token later."""
        self._provider = provider
        self.is_renewable: bool = is_renewable

    @classmethod
    def fixed(cls, token: str) -> TokenCredentials:
        """Return the source of one token. Raises `ConfigError` unless it can be sent."""
        if not _is_token(token):
            raise ConfigError("token: it is not a bearer token")
        return cls(lambda: token, is_renewable=False)

    def __repr__(self) -> str:
        return "TokenCredentials(hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a token is not serialized")

    @property
    def subject(self) -> str:
        """What is refused, in errors."""
        return "the token"

    async def new_token(self) -> str:
        """Return a token. Raises `AuthenticationFailed` if the provider fails or returns something else,
        `RequestTimedOut`, and the errors of the project that the provider raises."""
        try:
            async with asyncio.timeout(PROVIDER_TIMEOUT_S):
                token = await self._call()
        except TimeoutError:
            raise RequestTimedOut("the token provider did not return in time") from None
        except MansioError:
            raise
        except Exception as error:
            raise AuthenticationFailed(f"the token provider failed: {type(error).__name__}") from error
        if not isinstance(token, str) or not _is_token(token):
            raise AuthenticationFailed("the token provider did not return a bearer token")
        return token

    async def _call(self) -> Any:
        provider: Any = self._provider
        if inspect.iscoroutinefunction(provider) or inspect.iscoroutinefunction(type(provider).__call__):
            return await provider()
        found = await asyncio.to_thread(provider)
        return await found if inspect.isawaitable(found) else found


class ClientCredentials:
    """Provider of the tokens that an endpoint issues for an id and a secret. `repr` hides the secret."""

    __slots__ = ("_endpoint", "_id", "_lock", "_scope", "_secret", "_token", "_until_s")

    def __init__(self, endpoint: str, client_id: str, client_secret: str, scope: str = "") -> None:
        """`scope`: "" for that of the endpoint. Raises `ConfigError` if the endpoint is not a URL of https, or of http
        on loopback."""
        check_url("token_endpoint", endpoint)
        self._endpoint = endpoint
        self._id = client_id
        self._secret = client_secret
        self._scope = scope
        self._token = ""
        self._until_s = 0.0
        """Monotonic time until which the token is used."""
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"ClientCredentials({self._endpoint!r}, {self._id!r}, hidden)"

    async def __call__(self) -> str:
        """Return a token. Raises `AuthenticationFailed`, `ConnectionLost`, `RequestTimedOut`."""
        async with self._lock:
            if time.monotonic() >= self._until_s:
                began_s = time.monotonic()
                self._token, valid_s = await self._fetch()
                self._until_s = began_s + FRESH_FRACTION * valid_s
            return self._token

    async def _fetch(self) -> tuple[str, float]:
        form = {"grant_type": "client_credentials", **({"scope": self._scope} if self._scope else {})}
        basic = f"{quote_plus(self._id)}:{quote_plus(self._secret)}".encode()
        answer = await https.request(
            self._endpoint,
            method="POST",
            headers={
                "Authorization": f"Basic {base64.b64encode(basic).decode()}",
                "Content-Type": "application/x-www-form-urlencoded",
            },
            body=urlencode(form).encode(),
            bytes_max=ANSWER_BYTES_MAX,
            timeout_ms=ENDPOINT_TIMEOUT_MS,
        )
        if answer.status in (400, 401, 403):
            raise AuthenticationFailed(
                f"the token endpoint refused client {self._id!r}: status {answer.status}"
            )
        if answer.status != 200:
            raise ConnectionLost(f"the token endpoint answered with the status {answer.status}")
        try:
            document = json.loads(answer.body)
            token, valid_s = document["access_token"], float(document.get("expires_in", 0))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ConnectionLost("the token endpoint did not answer with a token") from None
        return token, valid_s


def _is_token(text: str) -> bool:
    return len(text) <= TOKEN_CHARACTERS_MAX and _TOKEN.fullmatch(text) is not None
