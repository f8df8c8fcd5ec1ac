"""Server side of OAUTHBEARER (RFC 7628, KIP-255): a bearer token in one message of SASL.

    client                                              server
       | -- n,,^Aauth=Bearer TOKEN^A^A --------------------> |
       | <------------------- (empty) ---------------------- |   accepted
       | <------------------- {"status":"invalid_token"} --- |   or refused; the client answers
       | -- ^A --------------------------------------------> |   and gets the error

The authorization id is empty or equals the user. Extensions (KIP-342) are permitted and have no effect.

Invariants: an exchange takes two messages; after a rejection it takes none. No reason contains a token.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from mansio.state.authentication.bearer_tokens import TOKEN_CHARACTERS_MAX
from mansio.state.authentication.outcomes import Accepted, Challenge, Refused, Rejected

if TYPE_CHECKING:
    from collections.abc import Callable

    VerifyToken = Callable[[str, int], Accepted | Rejected | Refused]
    """Verifies a token at a Unix time in ms."""

MESSAGE_BYTES_MAX: Final = TOKEN_CHARACTERS_MAX + 4_096
INVALID_TOKEN: Final = b'{"status":"invalid_token"}'

_MESSAGE: Final = re.compile(
    r"n,(?:a=(?P<authorization_id>[^\x00,\x01]{1,255}))?,"
    r"\x01(?P<pairs>(?:[A-Za-z]+=[\x21-\x7e \t\r\n]*\x01)+)\x01"
)
_BEARER: Final = re.compile(r"bearer +([A-Za-z0-9._~+/=-]+)", re.IGNORECASE)


class OAuthBearerServer:
    """The server's state machine of one exchange."""

    __slots__ = ("_failure", "_is_over", "_verify")

    def __init__(self, verify: VerifyToken) -> None:
        self._verify = verify
        self._failure: Rejected | None = None
        self._is_over = False

    def step(self, message: bytes, now_ms: int) -> Challenge | Accepted | Rejected | Refused:
        """Process a message of the client. `now_ms`: Unix time."""
        if self._is_over:
            return Rejected("a message after the end of the exchange")
        if self._failure is not None:
            self._is_over = True
            return self._failure
        outcome = self._first(message, now_ms)
        if isinstance(outcome, Rejected):
            self._failure = outcome
            return Challenge(INVALID_TOKEN)
        self._is_over = True
        return outcome

    def _first(self, message: bytes, now_ms: int) -> Accepted | Rejected | Refused:
        if len(message) > MESSAGE_BYTES_MAX:
            return Rejected(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
        try:
            found = _MESSAGE.fullmatch(message.decode())
        except UnicodeDecodeError:
            found = None
        if found is None:
            return Rejected("a malformed message")
        pairs = [pair.partition("=") for pair in found["pairs"].split("\x01") if pair]
        stated = [value for name, _, value in pairs if name == "auth"]
        bearer = _BEARER.fullmatch(stated[0]) if len(stated) == 1 else None
        if bearer is None:
            return Rejected("the message has no bearer token")
        outcome = self._verify(bearer[1], now_ms)
        user = found["authorization_id"]
        if isinstance(outcome, Accepted) and user is not None and user != outcome.user:
            return Rejected("the authorization id differs from the user of the token", outcome.user)
        return outcome


def bearer_message(token: str) -> bytes:
    """Return the first message of a client."""
    return f"n,,\x01auth=Bearer {token}\x01\x01".encode()


FAILURE_ANSWER: Final = b"\x01"
"""Message of a client that answers the server's refusal, after which the server reports the error."""
