"""Names that a user may have, chosen by an administrator or by the issuer of a token."""

from __future__ import annotations

import unicodedata
from typing import Final

from mansio.state.authentication.credentials import USER_BYTES_MAX

RESERVED_NAMES: Final = ("ANONYMOUS", "*")
"""Names that a user cannot have: the user without authentication, and the one that means all users in ACLs."""


def find_name_fault(name: str) -> str:
    """Return why a user cannot have this name; "" if it can.

    Clients that prepare names with SASLprep (RFC 4013) and clients that do not send the same bytes for a permitted
    name, and it looks the same as no other one in logs and ACLs.
    """
    if not 1 <= len(name.encode("utf-8", "replace")) <= USER_BYTES_MAX:
        return f"the name of a user has 1 to {USER_BYTES_MAX} bytes"
    if name != name.strip() or not name.isprintable() or unicodedata.normalize("NFKC", name) != name:
        return "the name of a user is printable, in the form NFKC of Unicode, and has no spaces at its ends"
    if name in RESERVED_NAMES:
        return f"the name {name} is reserved"
    return ""
