"""Codec of the primitive types in records of internal topics and in embedded protocols.

Most of these structures are flexible (KIP-482): lengths are unsigned varints of the length plus one, and structures end
with tagged fields, of which unknown ones are accepted. `Reader` decodes the others, too.

A read past the end, an invalid length, and bytes after the end of a record raise `CorruptLog`, because these bytes come
from the broker's own log; what a client has encoded is read with another class of errors.
"""

from __future__ import annotations

from struct import Struct, unpack
from struct import error as StructError  # noqa: N812
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.errors import CorruptLog, MansioError
from mansio.wire.headers import unsigned_varint as varint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")

NO_TAGGED_FIELDS = b"\x00"
_INTEGERS: Final = {
    width: Struct(kind).unpack_from for width, kind in ((1, ">b"), (2, ">h"), (4, ">i"), (8, ">q"))
}


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
    """Decoder of one structure: of the key or value of a record, or of an embedded protocol."""

    __slots__ = ("_data", "_error", "_position", "_subject", "is_flexible")

    def __init__(
        self,
        data: bytes,
        subject: str = OFFSETS_TOPIC,
        *,
        is_flexible: bool = True,
        error: type[MansioError] = CorruptLog,
    ) -> None:
        """`subject`: name of the internal topic, or what the bytes are, for error messages. `is_flexible`: whether
        lengths are varints, and structures end with tagged fields; otherwise strings have 16-bit lengths, and arrays
        and byte strings 32-bit lengths. `error`: the class of errors about malformed bytes."""
        self._data = data
        self._position = 0
        self._subject = subject
        self.is_flexible = is_flexible
        self._error = error

    def nested_reader(self, data: bytes) -> Reader:
        """A decoder of `data`, the value of a tagged field of this record."""
        return Reader(data, self._subject, error=self._error)

    def raise_corrupt_log(self, what: str) -> NoReturn:
        """Raise the error about malformed bytes, a `CorruptLog` unless the reader has another class of errors."""
        raise self._error(f"{self._subject}: {what}")

    def take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            self.raise_corrupt_log("a record ends too early")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def read_integer(self, width: int) -> int:
        position = self._position
        try:
            (value,) = _INTEGERS[width](self._data, position)
        except StructError:
            self.raise_corrupt_log("a record ends too early")
        self._position = position + width
        return value  # type: ignore[no-any-return]

    def unpack(self, shape: Struct) -> tuple[Any, ...]:
        """Decode fields of fixed size."""
        return shape.unpack(self.take(shape.size))

    def unpack_field(self, shape: Struct, data: bytes) -> tuple[Any, ...]:
        """Decode `data`, the value of a tagged field of this record, which has fields of fixed size."""
        if len(data) != shape.size:
            self.raise_corrupt_log("a tagged field has a wrong length")
        return shape.unpack(data)

    def read_varint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        return self.raise_corrupt_log("a length does not end")

    def read_length(self, width: int) -> int:
        """Decode the length of a string, byte string or array; -1 for null. `width`: its bytes, if it is no varint."""
        if not self.is_flexible:
            return self.read_integer(width)
        position = self._position
        if position < len(self._data) and (byte := self._data[position]) < 0x80:
            self._position = position + 1
            return byte - 1
        return self.read_varint() - 1

    def read_nullable_string(self) -> str | None:
        length = self.read_length(2)
        return None if length == -1 else self._decode_text(length)

    def read_string(self) -> str:
        value = self.read_nullable_string()
        return self.raise_corrupt_log("a string is missing") if value is None else value

    def read_int16_string(self) -> str:
        """Decode a string with a 16-bit length, as in keys, which are not flexible."""
        return self._decode_text(self.read_integer(2))

    def read_bytes(self) -> bytes:
        return self.take(self.read_length(4))

    def read_nullable_bytes(self) -> bytes | None:
        length = self.read_length(4)
        return None if length == -1 else self.take(length)

    def read_array(self, item: Callable[[], T], item_bytes_min: int = 1) -> tuple[T, ...]:
        """Decode an array; `item` decodes one item, of at least `item_bytes_min` bytes."""
        found = self.read_nullable_array(item, item_bytes_min)
        return self._raise_count(-1) if found is None else found

    def read_nullable_array(self, item: Callable[[], T], item_bytes_min: int = 1) -> tuple[T, ...] | None:
        count = self.read_length(4)
        if count == -1:
            return None
        if not 0 <= count * item_bytes_min <= len(self._data) - self._position:
            self._raise_count(count)
        return tuple([item() for _ in range(count)])

    def read_int32_array(self) -> tuple[int, ...]:
        """Decode an array of 32-bit integers."""
        count = self.read_length(4)
        if not 0 <= count * 4 <= len(self._data) - self._position:
            self._raise_count(count)
        return unpack(f">{count}i", self.take(count * 4))

    def _raise_count(self, count: int) -> NoReturn:
        self.raise_corrupt_log(f"an array announces {count} items, more than there are bytes")

    def read_tagged_fields(self) -> dict[int, bytes]:
        """Decode tagged fields: tag -> encoded value. A structure that is not flexible has none."""
        if not self.is_flexible:
            return {}
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

    def _decode_text(self, length: int) -> str:
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{self._subject}: a string is not UTF-8") from error


def raise_corrupt_log(what: str, topic: str = OFFSETS_TOPIC) -> NoReturn:
    raise CorruptLog(f"{topic}: {what}")
