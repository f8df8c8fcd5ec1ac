"""Server side of HTTP Basic (RFC 7617), which gRPC uses, too: the value of the header `Authorization`.

The value is `Basic ` and the base64 form of `user:password`, both in UTF-8. The user has no colon.

Invariant: a password is in no `repr`, error or reason of a rejection.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Final

from mansio.state.authentication.outcomes import Rejected
from mansio.state.authentication.plain import TOKEN_BYTES_MAX, read_plain_token

if TYPE_CHECKING:
    from mansio.state.authentication.api_keys import ApiKeyCheck
    from mansio.state.authentication.credentials import CredentialDirectory
    from mansio.state.authentication.plain import PasswordCheck

VALUE_CHARACTERS_MAX: Final = 4 * TOKEN_BYTES_MAX // 3 + 16
"""Maximum length of a value: the base64 form is longer than the token by a third."""

CHALLENGE: Final = 'Basic realm="mansio", charset="UTF-8"'
"""Value of the header `WWW-Authenticate` with which a server asks for user and password."""


def read_basic(value: str, directory: CredentialDirectory) -> PasswordCheck | ApiKeyCheck | Rejected:
    """Decode the value of the header, and look the credential of its user up."""
    if len(value) > VALUE_CHARACTERS_MAX:
        return Rejected(f"credentials of more than {VALUE_CHARACTERS_MAX} characters")
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != "basic":
        return Rejected("the scheme of the credentials is not Basic")
    try:
        decoded = base64.b64decode(encoded.strip(), validate=True)
    except (binascii.Error, ValueError):
        return Rejected("the credentials are not base64")
    user, colon, password = decoded.partition(b":")
    if not colon:
        return Rejected("the credentials have no colon between user and password")
    return read_plain_token(b"\0" + user + b"\0" + password, directory)
