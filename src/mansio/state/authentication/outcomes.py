"""Results of one step of an authentication."""

from __future__ import annotations

from typing import Final, NamedTuple


class Challenge(NamedTuple):
    """The server's bytes for the client, which has to answer them."""

    token: bytes


class Accepted(NamedTuple):
    """The client is authenticated as `user`."""

    user: str
    token: bytes = b""
    """The server's last bytes for the client."""
    revision: int = 0
    """Revision of the credential that had the keys that were used."""
    valid_until_ms: int | None = None
    """Unix time at which the credential that was used becomes invalid: the end of a previous password, of a token, or
    of an API key."""
    groups: tuple[str, ...] = ()
    """Groups of the user, as a token names them."""
    credential_id: str = ""
    """Id of the API key or delegation token that was used, "" for another credential."""
    is_by_token: bool = False
    """Whether a token of an identity provider was used."""


class Rejected(NamedTuple):
    """The client is not authenticated. `reason` is for the log only: it may reveal whether a user exists."""

    reason: str
    user: str = ""
    """Name that the client stated, for the log; "" if there is none."""


class Refused(NamedTuple):
    """The credential was not checked, so that the client may try again. `reason` is one short name."""

    reason: str


NO_KEYS: Final = "no_keys"
"""Reason of a `Refused`: this broker has not got the keys of the issuer of tokens yet."""
