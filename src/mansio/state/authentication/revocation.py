"""Certificate revocation lists (RFC 5280, section 5): which certificates their authority has revoked.

OpenSSL checks the certificate of a new connection against the lists, and the signatures of these. This module reads
them for two other purposes: the connections that are open when a certificate is revoked, and the time at which a list
expires. A certificate is named by its issuer and its serial number; names are compared as bytes, which are the same
for the certificates and the lists of one authority.

A list may revoke certificates and hold them (`certificateHold`); one that removes entries is a delta list, which
OpenSSL does not read here. Indirect lists, whose entries have issuers of their own, are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.state.authentication.certificate_fields import read_time, signed_fields
from mansio.state.authentication.der import (
    GENERALIZED_TIME,
    INTEGER,
    SEQUENCE,
    UTC_TIME,
    InvalidDer,
    elements,
    expect,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


_CERTIFICATE_ISSUER: Final = bytes.fromhex("0603551d1d")
"""Extension of an entry that belongs to another issuer (2.5.29.29)."""


class RevocationList(NamedTuple):
    """A list of one authority. `issuer`: its name in DER. `begins_s`: Unix time from which the list is valid.
    `expires_s`: Unix time at which the next list is due; None if the list does not state it. `serials`: serial numbers
    of the revoked certificates, as the content of INTEGER."""

    issuer: bytes
    begins_s: float
    expires_s: float | None
    serials: frozenset[bytes]


class RevocationLists:
    """The lists of all authorities."""

    __slots__ = ("_revoked", "expires_s")

    def __init__(self, lists: Iterable[RevocationList]) -> None:
        self._revoked: dict[bytes, frozenset[bytes]] = {}
        expiries = []
        for each in lists:
            self._revoked[each.issuer] = self._revoked.get(each.issuer, frozenset()) | each.serials
            if each.expires_s is not None:
                expiries.append(each.expires_s)
        self.expires_s = min(expiries, default=None)
        """Unix time at which the first of the lists expires; None if none states it."""

    def __len__(self) -> int:
        """Return the number of revoked certificates."""
        return sum(map(len, self._revoked.values()))

    def is_revoked(self, certificate: bytes) -> bool:
        """Whether a certificate in DER is revoked. Raises `InvalidDer`."""
        fields = signed_fields(certificate)
        serial, issuer = fields[0], fields[2]
        return expect(serial, INTEGER) in self._revoked.get(issuer.encoded, ())


def read_revocation_list(encoded: bytes) -> RevocationList:
    """Read a revocation list in DER. Raises `InvalidDer`."""
    fields = signed_fields(encoded)
    if fields[0].tag == INTEGER:  # version, which is optional
        del fields[0]
    if len(fields) < 3:
        raise InvalidDer("an unknown structure")
    issuer, rest = fields[1], fields[3:]  # after the algorithm, the issuer, and the time of the list
    expect(issuer, SEQUENCE)
    begins_s = read_time(fields[2])
    expires_s = None
    if rest and rest[0].tag in (UTC_TIME, GENERALIZED_TIME):
        expires_s = read_time(rest.pop(0))
    serials: list[bytes] = []
    if rest and rest[0].tag == SEQUENCE:
        for entry in elements(rest[0].content):
            parts = list(elements(expect(entry, SEQUENCE)))
            if len(parts) < 2:
                raise InvalidDer("an unknown structure")
            if len(parts) > 2 and _CERTIFICATE_ISSUER in parts[2].content:
                raise InvalidDer("an indirect list, which is not supported")
            serials.append(expect(parts[0], INTEGER))
    return RevocationList(issuer.encoded, begins_s, expires_s, frozenset(serials))
