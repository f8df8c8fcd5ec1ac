"""Bearer credentials in HTTP requests and the metadata of gRPC calls (RFC 6750): the value of `Authorization` is
`Bearer ` and a token, which is an API key or a JSON Web Token.

Invariant: no reason of a rejection contains a token.
"""

from __future__ import annotations

from typing import Final

from mansio.state.authentication.bearer_tokens import TOKEN_CHARACTERS_MAX

CHALLENGE: Final = 'Bearer realm="mansio"'
"""Value of the header `WWW-Authenticate` with which a server asks for a token."""
INVALID_TOKEN: Final = f'{CHALLENGE}, error="invalid_token"'
"""The same, for a client whose token is not valid."""

_SCHEME: Final = "bearer "


def is_bearer(value: str) -> bool:
    """Whether a value of `Authorization` has this scheme."""
    return value[: len(_SCHEME)].lower() == _SCHEME


def read_bearer(value: str) -> str:
    """Return the token of a value for which `is_bearer` holds; "" if it is too long."""
    token = value[len(_SCHEME) :].strip(" ")
    return token if len(token) <= TOKEN_CHARACTERS_MAX else ""
