"""Server side of SCRAM-SHA-256 and SCRAM-SHA-512, one exchange (RFC 5802, RFC 7677, KIP-84).

    client                                                              server
       | -- n,,n=USER,r=CLIENT -------------------------------------------> |
       | <------------------- r=CLIENT SERVER,s=SALT,i=ITERATIONS ---------- |
       | -- c=BASE64(n,,),r=CLIENT SERVER,p=PROOF ------------------------> |   the proof is verified
       | <------------------------------------------ v=SIGNATURE ----------- |

The bytes are those of Kafka's `ScramFormatter` and `ScramMessages`: UTF-8 without SASLprep, `=2C` and `=3D` for comma
and equals sign in names. More strictly than Kafka, the nonce of the last message must be the one that was sent, not end
with it (CVE-2024-56128), its channel binding must repeat the header of the first one, and extensions are refused but
`tokenauth=true`: then the name is the id of a delegation token (KIP-48), and the client becomes the owner of the token.
Kafka's broker accepts names of ASCII only, this one all of UTF-8. The authorization id is empty or equals the name
(CVE-2017-12610).

An unknown user, or token, is treated as a known one with a wrong password, up to the same answer at the end with the
same number of operations. Users with and without a previous password cost the same, too.

Invariants: an exchange takes two messages; after a rejection it takes none. Keys are compared in constant time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.state.authentication.credentials import USER_BYTES_MAX
from mansio.state.authentication.outcomes import Accepted, Challenge, Rejected

if TYPE_CHECKING:
    from mansio.state.authentication.credentials import (
        CredentialDirectory,
        FoundCredential,
        FoundToken,
        KeyPair,
        ScramCredential,
        ScramMechanism,
    )

MESSAGE_BYTES_MAX: Final = 4_096
"""Maximum size of a client's message: twice a name of `USER_BYTES_MAX` escaped bytes, a nonce and a proof."""
NONCE_BYTES: Final = 24
"""Random bytes of a server's nonce."""

WRONG_NONCE: Final = "the nonce is not the one that was sent, as with librdkafka before 2.6.1"

_NAME: Final = r"(?:[^\0=,]|=2C|=3D)+"
_NONCE: Final = r"[!-+\--~]{1,256}"
_BASE64: Final = r"[A-Za-z0-9/+]+={0,2}"
_CLIENT_FIRST: Final = re.compile(
    rf"(?P<header>[ny],(?:a=(?P<authorization_id>{_NAME}))?,)"
    rf"(?P<bare>n=(?P<user>{_NAME}),r=(?P<nonce>{_NONCE})(?:,tokenauth=(?P<tokenauth>true|false))?)"
)
_CLIENT_FINAL: Final = re.compile(
    rf"(?P<without_proof>c=(?P<binding>{_BASE64}),r=(?P<nonce>{_NONCE})),p=(?P<proof>{_BASE64})"
)


class _Exchange(NamedTuple):
    """What the second step needs of the first one."""

    user: str
    """Name that the client stated: the id of a token if it logs in with one."""
    found: FoundCredential
    token: FoundToken | None
    header: str
    nonce: str
    auth_message_start: str


class ScramServer:
    """The server's state machine of one exchange."""

    __slots__ = ("_directory", "_exchange", "_is_over", "_mechanism", "_server_nonce")

    def __init__(self, mechanism: ScramMechanism, directory: CredentialDirectory, nonce: bytes) -> None:
        """`nonce`: `NONCE_BYTES` unpredictable bytes that are used once. Raises `ValueError` for another length."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
        self._mechanism = mechanism
        self._directory = directory
        self._server_nonce = base64.b64encode(nonce).decode()
        self._exchange: _Exchange | None = None
        self._is_over = False

    def step(self, message: bytes, now_ms: int) -> Challenge | Accepted | Rejected:
        """Process a message of the client. `now_ms`: Unix time, for the end of a previous password."""
        if self._is_over:
            return Rejected("a message after the end of the exchange")
        exchange, self._exchange = self._exchange, None
        outcome = self._first(message) if exchange is None else self._final(exchange, message, now_ms)
        self._is_over = not isinstance(outcome, Challenge)
        return outcome

    def _first(self, message: bytes) -> Challenge | Rejected:
        found = _match(_CLIENT_FIRST, message)
        if isinstance(found, Rejected):
            return found
        user = _unescape(found["user"])
        if len(user.encode()) > USER_BYTES_MAX:
            return Rejected(f"a user name of more than {USER_BYTES_MAX} bytes")
        authorization_id = found["authorization_id"]
        if authorization_id is not None and _unescape(authorization_id) != user:
            return Rejected("the authorization id differs from the user", user)
        token = None
        if found["tokenauth"] == "true":
            token = self._directory.find_token(user, self._mechanism)
        credential = self._directory.find(user, self._mechanism) if token is None else token.found
        nonce = found["nonce"] + self._server_nonce
        salt = base64.b64encode(credential.credential.salt).decode()
        challenge = f"r={nonce},s={salt},i={credential.credential.iterations}"
        self._exchange = _Exchange(
            user, credential, token, found["header"], nonce, f"{found['bare']},{challenge},"
        )
        return Challenge(challenge.encode())

    def _final(self, exchange: _Exchange, message: bytes, now_ms: int) -> Accepted | Rejected:
        found = _match(_CLIENT_FINAL, message)
        if isinstance(found, Rejected):
            return found
        if found["nonce"] != exchange.nonce:
            return Rejected(WRONG_NONCE, exchange.user)
        if _decode_base64(found["binding"]) != exchange.header.encode():
            return Rejected("the channel binding differs from the header of the first message", exchange.user)
        proof = _decode_base64(found["proof"])
        if proof is None or len(proof) != self._mechanism.key_bytes:
            return Rejected("a malformed proof", exchange.user)
        credential, is_known = exchange.found
        auth_message = (exchange.auth_message_start + found["without_proof"]).encode()
        keys = _proven_keys(credential, auth_message, proof, now_ms)
        if keys is None or not is_known:
            return Rejected("wrong password" if is_known else "unknown user", exchange.user)
        used = exchange.token
        if used is not None and now_ms >= used.expires_ms:
            return Rejected("the delegation token has expired", exchange.user)
        signature = hmac.digest(keys.server_key, auth_message, self._mechanism.hash_name)
        token = b"v=" + base64.b64encode(signature)
        if used is not None:
            return Accepted(used.user, token, used.revision, used.expires_ms, credential_id=exchange.user)
        previous = credential.previous
        if previous is not None and keys is previous.keys:
            return Accepted(exchange.user, token, previous.revision, previous.valid_until_ms)
        return Accepted(exchange.user, token, credential.revision)


def _proven_keys(
    credential: ScramCredential, auth_message: bytes, proof: bytes, now_ms: int
) -> KeyPair | None:
    """Return the keys, present or previous, whose client key the proof contains. Two are always tried."""
    previous = credential.previous
    is_valid = previous is not None and now_ms < previous.valid_until_ms
    second = previous.keys if is_valid and previous is not None else credential.keys
    name = credential.mechanism.hash_name
    proven: KeyPair | None = None
    for keys in (second, credential.keys):
        client_key = _xor(hmac.digest(keys.stored_key, auth_message, name), proof)
        if hmac.compare_digest(hashlib.new(name, client_key).digest(), keys.stored_key):
            proven = keys
    return proven


def escape_name(name: str) -> str:
    """Return a name as SCRAM messages contain it."""
    return name.replace("=", "=3D").replace(",", "=2C")


def _unescape(name: str) -> str:
    return name.replace("=2C", ",").replace("=3D", "=")


def _match(pattern: re.Pattern[str], message: bytes) -> re.Match[str] | Rejected:
    if len(message) > MESSAGE_BYTES_MAX:
        return Rejected(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
    try:
        text = message.decode()
    except UnicodeDecodeError:
        return Rejected("a message that is not UTF-8")
    found = pattern.fullmatch(text)
    return (
        Rejected("a malformed message, or one with extensions or channel binding") if found is None else found
    )


def _decode_base64(text: str) -> bytes | None:
    """Return the bytes of a text; None unless it is the only one that stands for them."""
    try:
        decoded = base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
    return decoded if base64.b64encode(decoded) == text.encode() else None


def _xor(first: bytes, second: bytes) -> bytes:
    return (int.from_bytes(first) ^ int.from_bytes(second)).to_bytes(len(first))
