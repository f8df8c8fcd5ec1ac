"""Client side of SCRAM-SHA-256 and SCRAM-SHA-512, one exchange, and of PLAIN (RFC 5802, RFC 7677, RFC 4616).

    client                                                              server
       | -- n,,n=USER,r=CLIENT -------------------------------------------> |   first
       | <------------------- r=CLIENT SERVER,s=SALT,i=ITERATIONS ---------- |   read_challenge
       | -- c=biws,r=CLIENT SERVER,p=PROOF -------------------------------> |   final
       | <------------------------------------------ v=SIGNATURE ----------- |   verify

The bytes are those of Kafka: UTF-8 without SASLprep, no channel binding, an empty authorization id. Extensions of the
server's messages are ignored, as RFC 5802 requires, unless they are mandatory (`m=`).

The server is not trusted. Its nonce has to continue the client's, and add to it. Iterations are bounded below, because
fewer make the password easier to guess from the proof, and above, because the client computes them. The signature of
the last message proves that the server knows the server key of this password; without it the exchange has failed.

`final` takes the salted password, which `credentials.salt_password` computes in milliseconds: callers do that on a
thread, and may keep the result for the same salt and iterations.

Invariants: the four steps are called in this order, once each. No error and no `repr` contains the password, the salted
password or a key. What the server sent is shown in errors only as far as it is printable and short.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import AuthenticationFailed
from mansio.state.authentication.scram import MESSAGE_BYTES_MAX, NONCE_BYTES, escape_name

if TYPE_CHECKING:
    from mansio.state.authentication.credentials import ScramMechanism

ITERATIONS_MIN: Final = 4_096
"""As RFC 7677 and Kafka require."""
ITERATIONS_MAX: Final = 1_000_000
"""Some tenths of a second of a thread. Kafka stores at most 16,384; other brokers more."""
SALT_BYTES_MAX: Final = 256
SHOWN_CHARACTERS_MAX: Final = 80

_HEADER: Final = "n,,"
_EXTENSIONS: Final = r"(?:,[A-Za-z]=[^\0,]+)*"
_NONCE: Final = r"[!-+\--~]{1,512}"
_BASE64: Final = r"[A-Za-z0-9/+]+={0,2}"
_SERVER_FIRST: Final = re.compile(
    rf"r=(?P<nonce>{_NONCE}),s=(?P<salt>{_BASE64}),i=(?P<iterations>[1-9][0-9]{{0,9}}){_EXTENSIONS}"
)
_SERVER_FINAL: Final = re.compile(rf"(?:v=(?P<signature>{_BASE64})|e=(?P<error>[^\0,]+)){_EXTENSIONS}")


class Salting(NamedTuple):
    """How the server salts the password of the user."""

    salt: bytes
    iterations: int


class ScramClient:
    """The client's state machine of one exchange."""

    __slots__ = (
        "_auth_message",
        "_challenge",
        "_extensions",
        "_mechanism",
        "_nonce",
        "_salted_password",
        "_server_nonce",
        "_user",
    )

    def __init__(self, mechanism: ScramMechanism, user: str, nonce: bytes, *, is_token: bool = False) -> None:
        """`user`: without NUL. `nonce`: `NONCE_BYTES` unpredictable bytes that are used once. `is_token`: whether the
        user is the id of a delegation token (KIP-48). Raises `ValueError` for another length of the nonce."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
        self._mechanism = mechanism
        self._user = escape_name(user)
        self._nonce = base64.b64encode(nonce).decode()
        self._extensions = ",tokenauth=true" if is_token else ""
        self._challenge = ""
        self._server_nonce = ""
        self._auth_message = b""
        self._salted_password = b""

    def __repr__(self) -> str:
        return f"ScramClient({self._mechanism.value}, hidden)"

    def first(self) -> bytes:
        """Return the first message of the client."""
        return (_HEADER + self._first_bare()).encode()

    def read_challenge(self, message: bytes) -> Salting:
        """Process the server's first message. Raises `AuthenticationFailed`."""
        found = _match(_SERVER_FIRST, message)
        nonce = found["nonce"]
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise AuthenticationFailed("the broker's nonce does not continue the client's")
        salt = _decode_base64(found["salt"])
        if salt is None or len(salt) > SALT_BYTES_MAX:
            raise AuthenticationFailed(f"the broker's salt does not have 1 to {SALT_BYTES_MAX} bytes")
        iterations = int(found["iterations"])
        if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
            raise AuthenticationFailed(
                f"the broker asks for {iterations} iterations; {ITERATIONS_MIN} to {ITERATIONS_MAX} are accepted"
            )
        self._server_nonce = nonce
        self._challenge = message.decode()
        return Salting(salt, iterations)

    def final(self, salted_password: bytes) -> bytes:
        """Return the last message of the client, which proves that it knows the password."""
        assert self._challenge, "read_challenge comes first"
        name = self._mechanism.hash_name
        binding = base64.b64encode(_HEADER.encode()).decode()
        without_proof = f"c={binding},r={self._server_nonce}"
        self._auth_message = f"{self._first_bare()},{self._challenge},{without_proof}".encode()
        self._salted_password = salted_password
        client_key = hmac.digest(salted_password, b"Client Key", name)
        stored_key = hashlib.new(name, client_key).digest()
        proof = _xor(client_key, hmac.digest(stored_key, self._auth_message, name))
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def verify(self, message: bytes) -> None:
        """Process the server's last message. Raises `AuthenticationFailed` unless the server has proved that it knows
        the password's server key."""
        assert self._auth_message, "final comes first"
        found = _match(_SERVER_FINAL, message)
        if found["error"] is not None:
            raise AuthenticationFailed(f"the broker refused the log-in: {_shown(found['error'])}")
        name = self._mechanism.hash_name
        server_key = hmac.digest(self._salted_password, b"Server Key", name)
        expected = hmac.digest(server_key, self._auth_message, name)
        if not hmac.compare_digest(expected, _decode_base64(found["signature"]) or b""):
            raise AuthenticationFailed(
                "the broker did not prove that it knows the user's password: it may be another one than it claims"
            )

    def _first_bare(self) -> str:
        return f"n={self._user},r={self._nonce}{self._extensions}"


def plain_token(user: str, password: bytes) -> bytes:
    """Return the only message of PLAIN. It contains the password, `password` in UTF-8."""
    return b"\0" + user.encode() + b"\0" + password


def _match(pattern: re.Pattern[str], message: bytes) -> re.Match[str]:
    found = None
    if len(message) <= MESSAGE_BYTES_MAX:
        try:
            found = pattern.fullmatch(message.decode())
        except UnicodeDecodeError:
            found = None
    if found is None:
        raise AuthenticationFailed("the broker sent a malformed message of SCRAM")
    return found


def _shown(text: str) -> str:
    """Return what the server sent as one short line."""
    return "".join(character if character.isprintable() else "?" for character in text[:SHOWN_CHARACTERS_MAX])


def _decode_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None


def _xor(first: bytes, second: bytes) -> bytes:
    return (int.from_bytes(first) ^ int.from_bytes(second)).to_bytes(len(first))
