"""Server side of PLAIN (RFC 4616), and the check of a password against a SCRAM credential.

A token is `[authorization id] NUL user NUL password`. The authorization id is empty or equals the user
(CVE-2017-12610).

The check computes what a client of SCRAM would: 1 to 9 ms for each password. `PasswordCheck.run` is therefore for a
worker thread, with a bounded queue before it; HTTP Basic and gRPC check their passwords in the same way.

Invariant: a password is in no `repr`, error or reason of a rejection.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Final

from mansio.state.authentication.api_keys import ApiKeyCheck, id_of_key
from mansio.state.authentication.credentials import (
    PASSWORD_BYTES_MAX,
    USER_BYTES_MAX,
    derive_keys,
    salt_password,
)
from mansio.state.authentication.outcomes import Accepted, Rejected

if TYPE_CHECKING:
    from mansio.state.authentication.credentials import CredentialDirectory

TOKEN_BYTES_MAX: Final = 2 * USER_BYTES_MAX + PASSWORD_BYTES_MAX + 2


class PasswordCheck:
    """The check of one password of one user, prepared with the user's credential. `repr` hides all but the user."""

    __slots__ = ("_found", "_password", "user")

    def __init__(self, user: str, password: bytes, directory: CredentialDirectory) -> None:
        """Look the credential up. `password`: bytes of UTF-8."""
        self.user = user
        self._password = password
        self._found = directory.find_any(user)

    def __repr__(self) -> str:
        return f"PasswordCheck({self.user!r}, hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a password is not serialized")

    def run(self, now_ms: int) -> Accepted | Rejected:
        """Check the password; takes milliseconds, without the interpreter's lock, for unknown users too. `now_ms`: Unix
        time, for the end of a previous password."""
        credential, is_known = self._found
        salted = salt_password(credential.mechanism, self._password, credential.salt, credential.iterations)
        stored_key = derive_keys(credential.mechanism, salted).stored_key
        previous = credential.previous
        is_present = hmac.compare_digest(stored_key, credential.keys.stored_key)
        is_previous = (
            previous is not None
            and now_ms < previous.valid_until_ms
            and hmac.compare_digest(stored_key, previous.keys.stored_key)
        )
        if not is_known or not (is_present or is_previous):
            return Rejected("wrong password" if is_known else "unknown user", self.user)
        if is_present or previous is None:
            return Accepted(self.user, revision=credential.revision)
        return Accepted(self.user, revision=previous.revision, valid_until_ms=previous.valid_until_ms)

    def cache_key(self, process_key: bytes) -> bytes:
        """Return a key for a cache of accepted passwords: HMAC of user, password and the revision of the credential.
        `process_key`: random bytes of this process, so that the cache reveals no password."""
        user = self.user.encode()
        revision = self._found.credential.revision
        start = len(user).to_bytes(2) + revision.to_bytes(8)
        return hmac.digest(process_key, start + user + self._password, hashlib.sha256)


def read_plain_token(token: bytes, directory: CredentialDirectory) -> PasswordCheck | ApiKeyCheck | Rejected:
    """Decode the token of a client, and look the credential of its user up. A password that has the form of an API key
    is one."""
    if len(token) > TOKEN_BYTES_MAX:
        return Rejected(f"a token of more than {TOKEN_BYTES_MAX} bytes")
    parts = token.split(b"\0")
    if len(parts) != 3:
        return Rejected(f"a token of {len(parts)} parts, not 3")
    authorization_id, name, password = parts
    if authorization_id not in (b"", name):
        return Rejected("the authorization id differs from the user")
    if not 1 <= len(name) <= USER_BYTES_MAX:
        return Rejected(f"a user name of less than 1 or more than {USER_BYTES_MAX} bytes")
    if not 1 <= len(password) <= PASSWORD_BYTES_MAX:
        return Rejected(f"a password of less than 1 or more than {PASSWORD_BYTES_MAX} bytes")
    if not _is_utf_8(name) or not _is_utf_8(password):
        return Rejected("a token that is not UTF-8")
    user, text = name.decode(), password.decode()
    if id_of_key(text) is not None:
        return ApiKeyCheck(text, directory.find_api_key, user)
    return PasswordCheck(user, password, directory)


def _is_utf_8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
