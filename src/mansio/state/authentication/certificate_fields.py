"""Fields that certificates and revocation lists have in common, in DER (RFC 5280)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from mansio.state.authentication.der import (
    GENERALIZED_TIME,
    SEQUENCE,
    UTC_TIME,
    InvalidDer,
    elements,
    expect,
    only,
)

if TYPE_CHECKING:
    from mansio.state.authentication.der import Element

_VERSION: Final = 0xA0
_VALIDITY: Final = 3
"""Index of the validity in the fields of a certificate: after the serial number, the algorithm and the issuer."""
_CENTURY_YEAR: Final = 50
"""Years of two digits below it are of this century (RFC 5280, 4.1.2.5.1)."""


def read_expiry_s(certificate: bytes) -> float:
    """Return the Unix time at which a certificate in DER expires. Raises `InvalidDer`."""
    fields = signed_fields(certificate)
    times = list(elements(expect(fields[_VALIDITY], SEQUENCE))) if len(fields) > _VALIDITY else []
    if len(times) != 2:
        raise InvalidDer("an unknown structure")
    return read_time(times[1])


def signed_fields(signed: bytes) -> list[Element]:
    """Return the fields of what is signed in a certificate or a list, without the version of a certificate."""
    body = next(elements(expect(only(signed), SEQUENCE)), None)
    fields = [] if body is None else list(elements(expect(body, SEQUENCE)))
    if fields and fields[0].tag == _VERSION:
        del fields[0]
    if len(fields) < 3:
        raise InvalidDer("an unknown structure")
    return fields


def read_time(element: Element) -> float:
    """Return a time as Unix time (RFC 5280, 4.1.2.5). Raises `InvalidDer`."""
    digits = element.content.decode("ascii", "replace")
    if element.tag == UTC_TIME and digits[:2].isdigit():
        digits = ("20" if int(digits[:2]) < _CENTURY_YEAR else "19") + digits
    elif element.tag != GENERALIZED_TIME:
        raise InvalidDer("an unknown structure")
    try:
        return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise InvalidDer("a time that is not valid") from None
