"""Reader of DER (X.690), as far as certificates and revocation lists need it: elements with lengths below 16 MiB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Iterator

INTEGER: Final = 0x02
OBJECT_IDENTIFIER: Final = 0x06
SEQUENCE: Final = 0x30
SET: Final = 0x31
UTC_TIME: Final = 0x17
GENERALIZED_TIME: Final = 0x18


class InvalidDer(MansioError):
    """What was read is not DER, or has another structure."""


class Element(NamedTuple):
    """An element of DER: its tag, its content, and all of its bytes."""

    tag: int
    content: bytes
    encoded: bytes


def elements(content: bytes) -> Iterator[Element]:
    """Yield the elements of DER that follow each other. Raises `InvalidDer`."""
    position = 0
    while position < len(content):
        start = position + 2
        length = content[position + 1] if start <= len(content) else 0x80
        if length >= 0x80:
            start += length - 0x80
            if not 0x81 <= length <= 0x83 or start > len(content):
                raise InvalidDer("invalid DER")
            length = int.from_bytes(content[position + 2 : start])
        end = start + length
        if end > len(content):
            raise InvalidDer("invalid DER")
        yield Element(content[position], content[start:end], content[position:end])
        position = end


def only(content: bytes) -> Element:
    """Return the element that makes up all of the content. Raises `InvalidDer`."""
    found = list(elements(content))
    if len(found) != 1:
        raise InvalidDer("invalid DER")
    return found[0]


def expect(element: Element, tag: int) -> bytes:
    """Return the content of an element that has this tag. Raises `InvalidDer`."""
    if element.tag != tag:
        raise InvalidDer("an unknown structure")
    return element.content
