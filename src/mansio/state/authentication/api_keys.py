"""API keys: credentials of programs, with a name of their own and 256 random bits, which belong to a user.

    mansio_0123456789abcdef_<64 hexadecimal digits>
           `-- id ---------' `-- secret -----------'

The form lets scanners of repositories find keys. The id is no secret. The store has SHA-256 of the key: nobody can
guess 256 random bits, so no slow hash is needed, and a check takes some microseconds.

Clients send a key as a bearer token, or as the password of PLAIN and of HTTP Basic, with the name of the user or the id
of the key in the place of the user.

Invariant: no `repr`, error or reason of a rejection contains a key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mansio.state.authentication.outcomes import Accepted, Rejected

if TYPE_CHECKING:
    from collections.abc import Callable

ID_BYTES: Final = 8
SECRET_BYTES: Final = 32
RANDOM_BYTES: Final = ID_BYTES + SECRET_BYTES
HASH_BYTES: Final = 32

_KEY: Final = re.compile(r"mansio_([0-9a-f]{16})_[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredApiKey:
    """An API key of a user. `expires_ms`: Unix time at which it ends, None if it does not."""

    key_id: str
    user: str
    key_sha256: bytes = field(repr=False)
    created_ms: int
    expires_ms: int | None = None
    description: str = ""

    def is_valid(self, now_ms: int) -> bool:
        """Whether it has not ended at this Unix time."""
        return self.expires_ms is None or now_ms < self.expires_ms


def format_key(random_bytes: bytes) -> str:
    """Return the key of `RANDOM_BYTES` unpredictable bytes. Raises `ValueError` for another length."""
    if len(random_bytes) != RANDOM_BYTES:
        raise ValueError(f"a key has {RANDOM_BYTES} bytes")
    return f"mansio_{random_bytes[:ID_BYTES].hex()}_{random_bytes[ID_BYTES:].hex()}"


def id_of_key(text: str) -> str | None:
    """Return the id of a key; None if the text is not one."""
    found = _KEY.fullmatch(text)
    return None if found is None else found[1]


def hash_key(text: str) -> bytes:
    """Return what is stored of a key."""
    return hashlib.sha256(text.encode()).digest()


class ApiKeyCheck:
    """The check of one key that a client has sent. `repr` hides it."""

    __slots__ = ("_find", "_key_id", "_text", "_user")

    def __init__(
        self, text: str, find: Callable[[str], StoredApiKey | None], user: str | None = None
    ) -> None:
        """`text` has the form of a key (`id_of_key`). `find` looks a key up by its id. `user`: what the client states
        as user, None for nothing."""
        key_id = id_of_key(text)
        assert key_id is not None, "the caller has asked id_of_key"
        self._key_id = key_id
        self._text = text
        self._find = find
        self._user = user

    def __repr__(self) -> str:
        return f"ApiKeyCheck({self._key_id!r}, hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a key is not serialized")

    def run(self, now_ms: int) -> Accepted | Rejected:
        """Check the key at a Unix time."""
        known = self._find(self._key_id)
        digest = hash_key(self._text)
        if known is None or not hmac.compare_digest(digest, known.key_sha256):
            return Rejected("unknown API key")
        if not known.is_valid(now_ms):
            return Rejected("the API key has expired", known.user)
        if self._user is not None and self._user not in (known.user, known.key_id):
            return Rejected("the API key belongs to another user", known.user)
        return Accepted(known.user, valid_until_ms=known.expires_ms, credential_id=known.key_id)
