"""The primitives of Kafka's flexible records (KIP-482): lengths as unsigned varints, plus one; tagged fields.

Owns nothing but the bytes of strings, arrays, ids and tags. A field that this version does not know is skipped; a read
past the end, a bad length, bytes left over raise `CorruptLog`: what is read here comes from our own log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from mansio.errors import CorruptLog
from mansio.wire.headers import unsigned_varint as varint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")

NO_TAGS = b"\x00"
OFFSETS_TOPIC: Final = "__consumer_offsets"


def integer(value: int, width: int) -> bytes:
    return value.to_bytes(width, "big", signed=True)


def text(value: str | None) -> bytes:
    return NO_TAGS if value is None else data(value.encode())


def data(value: bytes) -> bytes:
    return varint(len(value) + 1) + value


def array(items: Iterable[bytes]) -> bytes:
    """An array of encoded items."""
    pieces = list(items)
    return varint(len(pieces) + 1) + b"".join(pieces)


def tags(fields: Mapping[int, bytes]) -> bytes:
    """Tagged fields, ordered by tag."""
    pieces = [varint(len(fields))]
    for tag in sorted(fields):
        pieces += (varint(tag), varint(len(fields[tag])), fields[tag])
    return b"".join(pieces)


class Reader:
    """Reader of the bytes of one record."""

    __slots__ = ("_data", "_position", "_topic")

    def __init__(self, data: bytes, topic: str = OFFSETS_TOPIC) -> None:
        """`topic`: the internal topic, for errors."""
        self._data = data
        self._position = 0
        self._topic = topic

    def inside(self, data: bytes) -> Reader:
        """A reader of a nested part."""
        return Reader(data, self._topic)

    def fail(self, what: str) -> NoReturn:
        fail(what, self._topic)

    def take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            self.fail("a record ends too early")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def integer(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big", signed=True)

    def varint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        return self.fail("a length does not end")

    def nullable_text(self) -> str | None:
        length = self.varint()
        return None if length == 0 else self._decoded(self.take(length - 1))

    def text(self) -> str:
        value = self.nullable_text()
        return self.fail("a string is missing") if value is None else value

    def short_text(self) -> str:
        """A string with a 16-bit length, as in keys, which are not flexible."""
        return self._decoded(self.take(self.integer(2)))

    def data(self) -> bytes:
        return self.take(self.varint() - 1)

    def array(self, item: Callable[[], T]) -> tuple[T, ...]:
        """An array whose items are read by `item`."""
        count = self.varint() - 1
        if not 0 <= count <= len(self._data):
            self.fail("a count is impossible")
        return tuple([item() for _ in range(count)])

    def tags(self) -> dict[int, bytes]:
        """Tagged fields by tag."""
        if self._data[self._position : self._position + 1] == NO_TAGS:
            self._position += 1
            return {}
        found: dict[int, bytes] = {}
        for _ in range(self.varint()):
            tag = self.varint()
            if tag in found:
                self.fail("a tagged field comes twice")
            found[tag] = self.take(self.varint())
        return found

    def end(self) -> None:
        if self._position != len(self._data):
            self.fail("a record has bytes left over")

    def _decoded(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CorruptLog(f"{self._topic}: a string is not UTF-8") from error


def fail(what: str, topic: str = OFFSETS_TOPIC) -> NoReturn:
    raise CorruptLog(f"{topic}: {what}")
