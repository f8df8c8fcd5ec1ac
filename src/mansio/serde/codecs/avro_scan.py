"""Scan of an encoded Avro value: whether it is bounded and complete, and where it is not.

fastavro recurses on the C stack, and makes as many elements as the data says, also if they take no bytes. A scan has
limits for depth and number of values, converts nothing and names the path of the first fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn
from uuid import UUID

from mansio.serde.codecs.avro_types import FREE_VALUES_MAX
from mansio.serde.codecs.paths import VALUE_DEPTH_MAX, fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.serde.codecs.avro_types import AvroType
    from mansio.serde.codecs.paths import Path

_VARINT_BYTES_MAX: Final = 10
_YEAR_1_DAYS: Final = -719_162
_YEAR_9999_DAYS: Final = 2_932_896
_DAY_S: Final = 86_400
_SYMBOL_BITS: Final = 3.33
"""Bits of a decimal digit, rounded up."""


def decimal_bytes_max(precision: int) -> int:
    """Return the number of bytes that a decimal of so many digits takes at most. One byte more is for a sign."""
    return int(precision * _SYMBOL_BITS) // 8 + 2


def scan(kind: AvroType, data: bytes) -> None:
    """Read a value to its end. Raises `MalformedValue`."""
    reader = _Scan(data)
    reader.read(kind, None, 0)
    if reader.position != len(data):
        raise fault(None, f"has {len(data) - reader.position} bytes after the end of its Avro encoding")


class _Scan:
    """A scan of one value; `position` is where it is."""

    def __init__(self, data: bytes) -> None:
        self.position = 0
        self._data = data
        self._free_values = 0
        self._readers: dict[str, Callable[[AvroType, Path, int], None]] = {
            "null": _nothing,
            "boolean": self._boolean,
            "int": self._number,
            "long": self._number,
            "float": self._four_bytes,
            "double": self._eight_bytes,
            "bytes": self._bytes,
            "string": self._string,
            "fixed": self._fixed,
            "enum": self._enum,
            "array": self._array,
            "map": self._map,
            "record": self._record,
            "union": self._union,
        }

    def read(self, kind: AvroType, path: Path, depth: int) -> None:
        if depth > VALUE_DEPTH_MAX:
            raise fault(path, f"is nested more than {VALUE_DEPTH_MAX} levels deep")
        begin = self.position
        self._readers[kind.kind](kind, path, depth)
        if self.position == begin:
            self._free_values += 1
            if self._free_values > FREE_VALUES_MAX:
                raise fault(path, f"is one of more than {FREE_VALUES_MAX} values that take no bytes")

    def _ends(self, path: Path) -> NoReturn:
        raise fault(path, "is cut off: the value ends before it")

    def _skip(self, size: int, path: Path) -> bytes:
        begin = self.position
        if not 0 <= size <= len(self._data) - begin:
            if size < 0:
                raise fault(path, f"has a length of {size}")
            self._ends(path)
        self.position += size
        return self._data[begin : self.position]

    def _varint(self, path: Path) -> int:
        number = shift = 0
        for _ in range(_VARINT_BYTES_MAX):
            if self.position >= len(self._data):
                self._ends(path)
            byte = self._data[self.position]
            self.position += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return (number >> 1) ^ -(number & 1)
        raise fault(path, "is no number of 64 bits")

    def _boolean(self, _kind: AvroType, path: Path, _depth: int) -> None:
        if self._skip(1, path) not in (b"\0", b"\1"):
            raise fault(path, "is no boolean")

    def _four_bytes(self, _kind: AvroType, path: Path, _depth: int) -> None:
        self._skip(4, path)

    def _eight_bytes(self, _kind: AvroType, path: Path, _depth: int) -> None:
        self._skip(8, path)

    def _fixed(self, kind: AvroType, path: Path, _depth: int) -> None:
        self._skip(kind.size, path)

    def _number(self, kind: AvroType, path: Path, _depth: int) -> None:
        number = self._varint(path)
        if kind.kind == "int" and not -(1 << 31) <= number < 1 << 31:
            raise fault(path, "is no number of 32 bits")
        unit = {"date": 1, "millis": _DAY_S * 1_000, "micros": _DAY_S * 1_000_000}
        if kind.logical.startswith("time-"):
            if not 0 <= number < unit[kind.logical[5:]]:
                raise fault(path, "is no time of a day")
        elif kind.logical:
            days = number // unit[kind.logical.rpartition("-")[2]]
            if not _YEAR_1_DAYS <= days <= _YEAR_9999_DAYS:
                raise fault(path, "is not between the years 1 and 9999")

    def _bytes(self, kind: AvroType, path: Path, _depth: int) -> None:
        size = self._varint(path)
        if kind.logical == "decimal" and size > decimal_bytes_max(kind.precision):
            raise fault(
                path, f"has {size} bytes, which is more than a decimal of {kind.precision} digits has"
            )
        self._skip(size, path)

    def _string(self, kind: AvroType, path: Path, _depth: int) -> None:
        try:
            text = self._skip(self._varint(path), path).decode()
        except UnicodeDecodeError:
            raise fault(path, "is not UTF-8") from None
        if kind.logical == "uuid":
            try:
                UUID(text)
            except ValueError:
                raise fault(path, "is no UUID") from None

    def _enum(self, kind: AvroType, path: Path, _depth: int) -> None:
        number = self._varint(path)
        if not 0 <= number < len(kind.symbols):
            raise fault(path, f"is symbol {number} of an enum of {len(kind.symbols)}")

    def _union(self, kind: AvroType, path: Path, depth: int) -> None:
        number = self._varint(path)
        if not 0 <= number < len(kind.branches):
            raise fault(path, f"is branch {number} of a union of {len(kind.branches)}")
        self.read(kind.branches[number], path, depth)

    def _record(self, kind: AvroType, path: Path, depth: int) -> None:
        for name, one in kind.fields.items():
            self.read(one.type, (path, name), depth + 1)

    def _blocks(self, path: Path) -> Iterator[int]:
        """Iterate over the numbers of elements of the blocks."""
        while count := self._varint(path):
            if count < 0:
                count = -count
                self._varint(path)
            yield count

    def _array(self, kind: AvroType, path: Path, depth: int) -> None:
        assert kind.items is not None
        index = 0
        for count in self._blocks(path):
            for _ in range(count):
                self.read(kind.items, (path, index), depth + 1)
                index += 1

    def _map(self, kind: AvroType, path: Path, depth: int) -> None:
        assert kind.items is not None
        for count in self._blocks(path):
            for _ in range(count):
                try:
                    key = self._skip(self._varint(path), path).decode()
                except UnicodeDecodeError:
                    raise fault(path, "has a key that is not UTF-8") from None
                self.read(kind.items, (path, key), depth + 1)


def _nothing(_kind: AvroType, _path: Path, _depth: int) -> None:
    """Read null, which takes no bytes."""
