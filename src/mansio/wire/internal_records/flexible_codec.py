"""Codec of the primitive types in flexible records of internal topics (KIP-482): lengths are unsigned varints of the
length plus one, and structs end with tagged fields.

A read past the end, an invalid length, and bytes after the end raise `CorruptLog`, because these bytes come from the
broker's own log. Unknown tagged fields are accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, TypeVar

from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.errors import CorruptLog
from mansio.wire.headers import unsigned_varint as varint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")

NO_TAGGED_FIELDS = b"\x00"


def encode_integer(value: int, width: int) -> bytes:
    return value.to_bytes(width, "big", signed=True)


def encode_string(value: str | None) -> bytes:
    return NO_TAGGED_FIELDS if value is None else encode_bytes(value.encode())


def encode_bytes(value: bytes) -> bytes:
    return varint(len(value) + 1) + value


def encode_array(items: Iterable[bytes]) -> bytes:
    """Encode an array of `items`, which are encoded already."""
    pieces = list(items)
    return varint(len(pieces) + 1) + b"".join(pieces)


def encode_tagged_fields(fields: Mapping[int, bytes]) -> bytes:
    """Encode tagged fields (tag -> encoded value) in ascending order of the tags."""
    pieces = [varint(len(fields))]
    for tag in sorted(fields):
        pieces += (varint(tag), varint(len(fields[tag])), fields[tag])
    return b"".join(pieces)


class Reader:
    """Decoder of the key or value of one record."""

    __slots__ = ("_data", "_position", "_topic")

    def __init__(self, data: bytes, topic: str = OFFSETS_TOPIC) -> None:
        """`topic`: name of the internal topic, for error messages."""
        self._data = data
        self._position = 0
        self._topic = topic

    def nested_reader(self, data: bytes) -> Reader:
        """A decoder of `data`, the value of a tagged field of this record."""
        return Reader(data, self._topic)

    def raise_corrupt_log(self, what: str) -> NoReturn:
        raise_corrupt_log(what, self._topic)

    def take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            self.raise_corrupt_log("a record ends too early")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def read_integer(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big", signed=True)

    def read_varint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        return self.raise_corrupt_log("a length does not end")

    def read_nullable_string(self) -> str | None:
        length = self.read_varint()
        return None if length == 0 else self._decode_text(self.take(length - 1))

    def read_string(self) -> str:
        value = self.read_nullable_string()
        return self.raise_corrupt_log("a string is missing") if value is None else value

    def read_int16_string(self) -> str:
        """Decode a string with a 16-bit length, as in keys, which are not flexible."""
        return self._decode_text(self.take(self.read_integer(2)))

    def read_bytes(self) -> bytes:
        return self.take(self.read_varint() - 1)

    def read_array(self, item: Callable[[], T]) -> tuple[T, ...]:
        """Decode an array; `item` decodes one item."""
        count = self.read_varint() - 1
        if not 0 <= count <= len(self._data):
            self.raise_corrupt_log("a count is impossible")
        return tuple([item() for _ in range(count)])

    def read_tagged_fields(self) -> dict[int, bytes]:
        """Decode tagged fields: tag -> encoded value."""
        if self._data[self._position : self._position + 1] == NO_TAGGED_FIELDS:
            self._position += 1
            return {}
        found: dict[int, bytes] = {}
        for _ in range(self.read_varint()):
            tag = self.read_varint()
            if tag in found:
                self.raise_corrupt_log("a tagged field comes twice")
            found[tag] = self.take(self.read_varint())
        return found

    def check_end(self) -> None:
        if self._position != len(self._data):
            self.raise_corrupt_log("a record has bytes left over")

    def _decode_text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CorruptLog(f"{self._topic}: a string is not UTF-8") from error


def raise_corrupt_log(what: str, topic: str = OFFSETS_TOPIC) -> NoReturn:
    raise CorruptLog(f"{topic}: {what}")
