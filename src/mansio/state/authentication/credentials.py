"""Credentials of users: what a server stores in order to verify passwords (RFC 5802, RFC 7677, KIP-554).

    salted password = PBKDF2(password, salt, iterations)
    client key      = HMAC(salted password, "Client Key")     stored key = H(client key)
    server key      = HMAC(salted password, "Server Key")

A salted password is enough to log in, so neither it nor the password is stored. With a stored key, passwords can be
guessed without the server, and with a server key its answers can be forged, so `repr` hides both.

As in Kafka, passwords are used as their UTF-8 bytes, without the normalization of SASLprep.

Invariants: the functions use no clock and no random numbers; callers pass times and salts. No error contains a password
or a key.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mansio.errors import UnacceptableCredential

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mansio.state.authentication.api_keys import StoredApiKey

ITERATIONS_MIN: Final = 4_096
ITERATIONS_MAX: Final = 16_384
"""As in Kafka. PLAIN computes them for each password that it checks."""

SALT_BYTES: Final = 32
"""Length of the salts that this project makes, and of those that unknown users get."""
SALT_BYTES_MAX: Final = 256
PASSWORD_BYTES_MAX: Final = 1_024
USER_BYTES_MAX: Final = 255
"""Limits in bytes of UTF-8. RFC 4616 requires 255 for names and passwords."""
SECRET_BYTES_MIN: Final = 32


class ScramMechanism(Enum):
    """A mechanism of SCRAM. The value is its name in SASL."""

    SHA_256 = "SCRAM-SHA-256"
    SHA_512 = "SCRAM-SHA-512"

    @property
    def hash_name(self) -> str:
        """Name of the hash function in `hashlib`."""
        return _HASHES[self][0]

    @property
    def key_bytes(self) -> int:
        """Length of keys, proofs and salted passwords."""
        return _HASHES[self][1]

    @property
    def kafka_type(self) -> int:
        """Number of the mechanism in DescribeUserScramCredentials and AlterUserScramCredentials (KIP-554)."""
        return _HASHES[self][2]


_HASHES: Final = {ScramMechanism.SHA_256: ("sha256", 32, 1), ScramMechanism.SHA_512: ("sha512", 64, 2)}


class KeyPair(NamedTuple):
    """Stored key and server key of one password. `repr` hides them."""

    stored_key: bytes
    server_key: bytes

    def __repr__(self) -> str:
        return "KeyPair(hidden)"


@dataclass(frozen=True, slots=True)
class PreviousKeys:
    """Keys of the password that a user had before, which stay valid until `valid_until_ms` (Unix time)."""

    keys: KeyPair
    valid_until_ms: int
    revision: int = 0
    """Revision of the credential that had them."""


@dataclass(frozen=True, slots=True)
class ScramCredential:
    """The credential of a user for one mechanism.

    Salt and iterations are the same for the previous password: a server sends them before it knows with which of the
    two passwords the client will answer.
    """

    mechanism: ScramMechanism
    iterations: int
    salt: bytes = field(repr=False)
    keys: KeyPair
    previous: PreviousKeys | None = None
    revision: int = 0
    """Revision of the metadata store in which it was written; 0 for one that is not stored."""

    def __post_init__(self) -> None:
        """Raise `UnacceptableCredential` unless iterations, salt and keys have permitted sizes."""
        _check_iterations(self.iterations)
        if not 1 <= len(self.salt) <= SALT_BYTES_MAX:
            raise UnacceptableCredential(f"a salt has 1 to {SALT_BYTES_MAX} bytes, not {len(self.salt)}")
        pairs = [self.keys] if self.previous is None else [self.keys, self.previous.keys]
        if any(len(key) != self.mechanism.key_bytes for pair in pairs for key in pair):
            raise UnacceptableCredential(f"a key of {self.mechanism.value} has another length")

    @classmethod
    def from_password(
        cls,
        mechanism: ScramMechanism,
        password: str,
        salt: bytes,
        iterations: int,
    ) -> ScramCredential:
        """Return the credential of a password; takes milliseconds. Raises `UnacceptableCredential`."""
        _check_iterations(iterations)
        salted = salt_password(mechanism, encode_password(password), salt, iterations)
        return cls(mechanism, iterations, salt, derive_keys(mechanism, salted))

    @classmethod
    def from_salted_password(
        cls, mechanism: ScramMechanism, salted_password: bytes, salt: bytes, iterations: int
    ) -> ScramCredential:
        """Return the credential of a password that the client has salted, as KIP-554 sends it. Raises
        `UnacceptableCredential`."""
        if len(salted_password) != mechanism.key_bytes:
            raise UnacceptableCredential(f"a salted password of {mechanism.value} has another length")
        return cls(mechanism, iterations, salt, derive_keys(mechanism, salted_password))

    def with_password(self, password: str, previous_valid_until_ms: int | None = None) -> ScramCredential:
        """Return the credential of a new password with the salt and iterations of this one; takes milliseconds.

        With `previous_valid_until_ms` (Unix time) the present password stays valid until then; a previous one does not.
        If the password is the present one, a client repeats a request whose answer was lost: the credential is returned
        as it is, and a previous password stays valid; without `previous_valid_until_ms` it does not. Raises
        `UnacceptableCredential`.
        """
        changed = self.from_password(self.mechanism, password, self.salt, self.iterations)
        if changed.keys == self.keys:
            return self if self.previous is None or previous_valid_until_ms is not None else changed
        if previous_valid_until_ms is None:
            return changed
        return replace(changed, previous=PreviousKeys(self.keys, previous_valid_until_ms, self.revision))


def _check_iterations(iterations: int) -> None:
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise UnacceptableCredential(
            f"a credential has {ITERATIONS_MIN} to {ITERATIONS_MAX} iterations, not {iterations}"
        )


def encode_password(password: str) -> bytes:
    """Return the bytes of a password. Raises `UnacceptableCredential`, without the password, for one that is empty, too
    long, or not Unicode."""
    encoded = _utf_8(password)
    if not encoded or len(encoded) > PASSWORD_BYTES_MAX or b"\0" in encoded:
        raise UnacceptableCredential(
            f"a password has 1 to {PASSWORD_BYTES_MAX} bytes of UTF-8, none of them NUL"
        )
    return encoded


def _utf_8(text: str) -> bytes | None:
    """Return the bytes of a text; None if it has surrogates. Python's error would keep the text."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None


def salt_password(mechanism: ScramMechanism, password: bytes, salt: bytes, iterations: int) -> bytes:
    """Return the salted password: `Hi` of RFC 5802. Takes 1 to 9 ms, without the interpreter's lock."""
    return hashlib.pbkdf2_hmac(mechanism.hash_name, password, salt, iterations)


def derive_keys(mechanism: ScramMechanism, salted_password: bytes) -> KeyPair:
    """Return stored key and server key of a salted password."""
    name = mechanism.hash_name
    client_key = hmac.digest(salted_password, b"Client Key", name)
    return KeyPair(hashlib.new(name, client_key).digest(), hmac.digest(salted_password, b"Server Key", name))


class FoundCredential(NamedTuple):
    """The credential with which a log-in of a user is verified. `repr` hides whether the user exists."""

    credential: ScramCredential
    is_known: bool
    """False: the user has no credential for the mechanism, and the log-in fails, whatever the client proves."""

    def __repr__(self) -> str:
        return "FoundCredential(hidden)"


class StoredToken(Protocol):
    """What a log-in needs of a delegation token (`delegation_tokens.DelegationToken`)."""

    @property
    def user(self) -> str: ...
    @property
    def expires_ms(self) -> int: ...
    @property
    def credentials(self) -> Mapping[str, ScramCredential]: ...
    @property
    def revision(self) -> int: ...


class FoundToken(NamedTuple):
    """The credential with which a log-in with a delegation token is verified, the user that the client becomes, and the
    Unix time in milliseconds at which the token expires. `revision`: of the token."""

    found: FoundCredential
    user: str
    expires_ms: int
    revision: int


class CredentialDirectory:
    """Credentials by user and mechanism, and those of delegation tokens, with a substitute for users and tokens that
    have none.

    A substitute has a salt that depends on the name and the server secret only. So clients cannot find out which users
    exist: an unknown user gets the same challenge again and again, and fails at the end like a wrong password. The
    secret must be the same on all brokers, and after a restart.

    What a substitute cannot imitate: credentials whose salt has another length, or which have other iterations, than
    those that this project makes. KIP-554 leaves both to the client.
    """

    __slots__ = ("_find", "_find_api_key", "_find_token", "_iterations", "_secret")

    def __init__(
        self,
        find: Callable[[str, ScramMechanism], ScramCredential | None],
        secret: bytes,
        iterations: int = ITERATIONS_MIN,
        find_token: Callable[[str], StoredToken | None] = lambda _: None,
        find_api_key: Callable[[str], StoredApiKey | None] = lambda _: None,
    ) -> None:
        """Take the look-up of a user's credential for a mechanism, the server secret, the iterations of substitutes,
        and the look-ups of delegation tokens and API keys. Raises `ValueError` for a secret of less than
        `SECRET_BYTES_MIN` bytes."""
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"a server secret has at least {SECRET_BYTES_MIN} bytes")
        self._find = find
        self._find_token = find_token
        self._secret = secret
        self._iterations = iterations
        self._find_api_key = find_api_key

    def __repr__(self) -> str:
        return "CredentialDirectory(hidden)"

    def find(self, user: str, mechanism: ScramMechanism) -> FoundCredential:
        """Return the credential of a user for a mechanism, or a substitute. The substitute is always computed, so that
        the time does not depend on the user."""
        substitute = self._substitute(f"{mechanism.value},{user}", mechanism)
        found = self._find(user, mechanism)
        return FoundCredential(substitute if found is None else found, found is not None)

    def find_token(self, token_id: str, mechanism: ScramMechanism) -> FoundToken:
        """Return the credential of a delegation token for a mechanism, or a substitute, as `find` does."""
        substitute = self._substitute(f"{mechanism.value},token,{token_id}", mechanism)
        token = self._find_token(token_id)
        credential = None if token is None else token.credentials.get(mechanism.value)
        if token is None or credential is None:
            return FoundToken(FoundCredential(substitute, is_known=False), token_id, 0, 0)
        return FoundToken(
            FoundCredential(credential, is_known=True), token.user, token.expires_ms, token.revision
        )

    def _substitute(self, name: str, mechanism: ScramMechanism) -> ScramCredential:
        digest = hmac.digest(self._secret, name.encode(), "sha512")
        return ScramCredential(
            mechanism,
            self._iterations,
            digest[:SALT_BYTES],
            KeyPair(digest[-mechanism.key_bytes :], digest[-mechanism.key_bytes :]),
        )

    def find_api_key(self, key_id: str) -> StoredApiKey | None:
        """Return the API key with this id; None if there is none."""
        return self._find_api_key(key_id)

    def find_any(self, user: str) -> FoundCredential:
        """Return the credential with which a password is checked: that for SCRAM-SHA-256 if the user has one, else that
        for SCRAM-SHA-512, else a substitute for SCRAM-SHA-256."""
        preferred = self.find(user, ScramMechanism.SHA_256)
        other = self.find(user, ScramMechanism.SHA_512)
        return other if other.is_known and not preferred.is_known else preferred
