"""Checks of bearer tokens that clients send (OAUTHBEARER, HTTP, gRPC), with the keys of their issuer.

A signature takes 60 to 150 us, so it is verified on the event loop. Clients of HTTP and gRPC send the same token with
each request: accepted ones are remembered by their SHA-256 until they expire, or the issuer has other keys. An address
from which too many wrong tokens came has to wait (`WrongCredentials`); its clients with remembered tokens do not.

A token with an unknown key is rejected, and makes the keys be read again, because the issuer may have replaced them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from mansio.state.authentication.bearer_tokens import UnknownKey, verify_token
from mansio.state.authentication.outcomes import NO_KEYS, Refused, Rejected

if TYPE_CHECKING:
    from mansio.broker.services.wrong_credentials import WrongCredentials
    from mansio.state.authentication.bearer_tokens import KeySet, TokenRules
    from mansio.state.authentication.outcomes import Accepted

CACHE_ENTRIES_MAX: Final = 10_000


class TokenKeys(Protocol):
    """Where the keys of the issuer come from."""

    @property
    def keys(self) -> KeySet | None:
        """The keys; None as long as none were read."""

    @property
    def failure(self) -> str:
        """Why the last attempt to read them failed; "" if it did not."""

    @property
    def source(self) -> str:
        """A URL or the name of a file."""

    def refresh(self) -> None:
        """Read them again soon, unless that was tried just now."""


class TokenChecker:
    """Verifies tokens for one broker. All methods run on its event loop."""

    __slots__ = ("_remembered", "_remembered_keys", "_rules", "_source", "_wrong", "verified_count")

    def __init__(self, rules: TokenRules, source: TokenKeys, wrong: WrongCredentials) -> None:
        """`wrong`: counts wrong tokens."""
        self._rules = rules
        self._source = source
        self._wrong = wrong
        self._remembered: OrderedDict[bytes, Accepted] = OrderedDict()
        self._remembered_keys: KeySet | None = None
        """The keys with which the remembered tokens were verified."""
        self.verified_count = 0
        """Number of tokens that were verified."""

    @property
    def keys_failure(self) -> str:
        """Why the keys of the issuer could not be read at the last attempt; "" if they could."""
        failure = self._source.failure
        return f"{self._source.source}: {failure}" if failure else ""

    def verify(self, token: str, address: str, now_ms: int) -> Accepted | Rejected | Refused:
        """Verify a token from a client at `address`, at a Unix time, unless it is known to be valid. `Refused`: it was
        not verified, because there are no keys, or too many wrong tokens came from the address."""
        keys = self._source.keys
        if keys is not self._remembered_keys:
            self._remembered.clear()
            self._remembered_keys = keys
        if keys is None:
            return Refused(NO_KEYS)
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        known = self._remembered.get(digest)
        if known is not None:
            if known.valid_until_ms is not None and now_ms < known.valid_until_ms:
                return known
            del self._remembered[digest]
        if (refused := self._wrong.refuse(address)) is not None:
            return refused
        self.verified_count += 1
        outcome = verify_token(token, keys, self._rules, now_ms)
        if isinstance(outcome, UnknownKey):
            self._source.refresh()
            outcome = Rejected(outcome.reason)
        if isinstance(outcome, Rejected):
            self._wrong.count(address)
            return outcome
        self._remembered[digest] = outcome
        if len(self._remembered) > CACHE_ENTRIES_MAX:
            self._remembered.popitem(last=False)
        return outcome
