"""Frames of schema registries: how the key or the value of a record names its schema, and how a batch of them is read.

A key or value is framed if it begins with a zero byte and the four bytes of a schema's id, or with a byte 1 and the 16
bytes of its GUID; or if a header of the record has these bytes, and the key or value has none. The header decides if
there are both, the last one if there are several, as in the deserializers of newer clients.

Format: https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from mansio.errors import InvalidRecord, MessageTooLarge
from mansio.tracebacks import copied
from mansio.wire.batch.inspection import REPORTED_RECORDS_MAX
from mansio.wire.batch.record_batch import read_varint, varint
from mansio.wire.batch.record_reader import header_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.wire.batch.inspection import InspectedBatch

KEY_SCHEMA_ID_NAME: Final = b"__key_schema_id"
VALUE_SCHEMA_ID_NAME: Final = b"__value_schema_id"

ID_MAGIC: Final = 0
GUID_MAGIC: Final = 1
ID_FRAME_BYTES: Final = 5
GUID_FRAME_BYTES: Final = 17

FRAMES_MAX: Final = 256
"""Maximum number of different schemas of the keys, or of the values, in a batch whose schemas are checked."""

_NO_FRAME: Final = -1
"""Number of the frame of a record whose key or value is null."""
_UNKNOWN_BYTES: Final = 1 << 62
"""Size of the last frame if there is none: no key or value is so large."""

_LONG_RUN: Final = 8
"""Number of records of one layout from which on they are read at once."""
_WALKED_RECORDS: Final = 32
"""Number of records that are read one by one before the next search for such a run."""
_WINDOW_RECORDS: Final = 4_096
"""Maximum number of records of a run."""


class FramedPart(StrEnum):
    """The part of a record that has a schema."""

    KEY = "key"
    VALUE = "value"


_HEADER_NAMES: Final = {FramedPart.KEY: KEY_SCHEMA_ID_NAME, FramedPart.VALUE: VALUE_SCHEMA_ID_NAME}


class SchemaFrames(NamedTuple):
    """The frames of the keys, or of the values, in one batch. `frames`: each that occurs, once. The others are columns,
    so that no record needs an object: `numbers` is the index in `frames` for the records from one index in `firsts` to
    before the next one, -1 for those without key or value."""

    frames: tuple[bytes, ...]
    firsts: array[int]
    numbers: array[int]
    record_count: int

    def indexes(self, number: int) -> Iterator[int]:
        """Yield the indexes of the records with one of the frames."""
        ends = [*self.firsts[1:], self.record_count]
        for first, end, found in zip(self.firsts, ends, self.numbers, strict=True):
            if found == number:
                yield from range(first, end)


def schema_of(frame: bytes) -> int | UUID:
    """Return the id or the GUID in a frame."""
    return int.from_bytes(frame[1:]) if frame[0] == ID_MAGIC else UUID(bytes=frame[1:])


def read_schema_frames(inspected: InspectedBatch, part: FramedPart, name: str) -> SchemaFrames | None:
    """Return the frames of a producer's batch; None if all keys or values are null. `name`: that of the partition, for
    errors.

    Raises `InvalidRecord` with the indexes of the records that are not framed, `MessageTooLarge` for more than
    `FRAMES_MAX` frames."""
    header_name = _HEADER_NAMES[part]
    if header_name not in inspected.data:
        header_name = b""
    count = inspected.header.record_count
    walk = _Walk(inspected.data, header_name, name, is_key=part is FramedPart.KEY)
    walk.read(count)
    if walk.unframed:
        reason = f"the {part} has no schema id, neither at its begin nor in the header __{part}_schema_id"
        raise rejection(name, reason, walk.unframed)
    return SchemaFrames(tuple(walk.frames), walk.firsts, walk.numbers, count) if walk.frames else None


def rejection(name: str, reason: str, indexes: list[int]) -> InvalidRecord:
    """Return the error for a batch with records that are rejected for one reason. `name`: that of the partition."""
    error = InvalidRecord(f"{name}: {reason} (record {indexes[0]} of the batch)")
    error.record_errors = tuple((index, reason) for index in indexes[:REPORTED_RECORDS_MAX])
    return copied(error)


class _Walk:
    """The frames that were read so far in the encoded records `data`. `header_name`: of the header that may have them,
    empty if no record has it."""

    __slots__ = ("data", "firsts", "frames", "header_name", "is_key", "last", "name", "numbers", "unframed")

    def __init__(self, data: bytes, header_name: bytes, name: str, *, is_key: bool) -> None:
        self.data = data
        self.header_name = header_name
        self.name = name
        self.is_key = is_key
        self.frames: dict[bytes, int] = {}
        self.firsts = array("i")
        self.numbers = array("i")
        self.unframed: list[int] = []
        """Indexes of the records that are not framed, of the first ones if there are many."""
        self.last: bytes | None = None
        """The frame of the last record; None if it has none."""

    def read(self, count: int) -> None:
        """Read all `count` records. Raises `InvalidRecord`, `MessageTooLarge`."""
        data, position, index = self.data, 0, 0
        try:
            if self.header_name:
                position = self._read_with_headers(count)
                index = count
            while index < count:
                left = count - index
                if (
                    left >= _LONG_RUN
                    and (run := _find_run(data, position, left, is_key=self.is_key)) is not None
                ):
                    self._add(index, _frame_at(data, run.begin, run.size), run.record_count)
                    position, index = run.end, index + run.record_count
                    continue
                walked = min(left, _WALKED_RECORDS)
                position = self._read_each(index, walked, position)
                index += walked
        except IndexError as error:
            raise InvalidRecord("a record is longer than its batch") from error
        if position != len(data):
            raise InvalidRecord(f"{len(data) - position} bytes after the last record")

    def _read_each(self, first: int, count: int, position: int) -> int:
        """Read `count` records, from index `first` on, one by one; return the position after them. A record with the
        same frame as the one before takes a comparison."""
        # As in `read_keys`, a record is five numbers, which are read where they are needed.
        data, is_key = self.data, self.is_key
        total, startswith = len(data), data.startswith
        last = self.last or b""
        last_bytes = len(last) or _UNKNOWN_BYTES
        for index in range(first, first + count):
            number = data[position]
            if number < 0x80:
                position += 1
            elif (second := data[position + 1]) < 0x80:
                number = number & 0x7F | second << 7
                position += 2
            else:
                length, position = read_varint(data, position)
                number = length << 1
            end = position + (number >> 1)
            if number & 1 or not position < end <= total:
                raise InvalidRecord("a record is longer than its batch")
            position += 2  # one byte of attributes, unused, and the first one of the timestamp delta
            while data[position - 1] >= 0x80:
                position += 1
            while data[position] >= 0x80:  # the offset delta
                position += 1
            number = data[position + 1]
            position += 2
            if number >= 0x80:
                size, position = read_varint(data, position - 1)
            else:
                size = (number >> 1) ^ -(number & 1)
            if not is_key:
                if size > 0:
                    position += size
                number = data[position]
                if number < 0x80:
                    position += 1
                    size = (number >> 1) ^ -(number & 1)
                elif not number & 1 and (second := data[position + 1]) < 0x80:
                    size = (number & 0x7F | second << 7) >> 1
                    position += 2
                else:
                    size, position = read_varint(data, position)
            if position > end or position + size > end:
                raise InvalidRecord("a key, value or header is longer than its record")
            if size < last_bytes or not startswith(last, position):
                self._add(index, _frame_at(data, position, size), 1)
                last = self.last or b""
                last_bytes = len(last) or _UNKNOWN_BYTES
            position = end
        return position

    def _read_with_headers(self, count: int) -> int:
        """Read all `count` records, some of which have their frames in headers; return the position after them. Headers
        that equal those of the record before are decoded once."""
        data, is_key = self.data, self.is_key
        total, startswith = len(data), data.startswith
        encoded_headers, headers_bytes = b"", _UNKNOWN_BYTES
        by_header: bytes | None = None
        position = 0
        for index in range(count):
            begin = position
            number = data[position]
            if number < 0x80:
                position += 1
            elif (second := data[position + 1]) < 0x80:
                number = number & 0x7F | second << 7
                position += 2
            else:
                length, position = read_varint(data, position)
                number = length << 1
            end = position + (number >> 1)
            if number & 1 or not position < end <= total:
                raise InvalidRecord("a record is longer than its batch")
            position += 2  # as in `_read_each`
            while data[position - 1] >= 0x80:
                position += 1
            while data[position] >= 0x80:
                position += 1
            number = data[position + 1]
            position += 2
            if number >= 0x80:
                key_bytes, position = read_varint(data, position - 1)
            else:
                key_bytes = (number >> 1) ^ -(number & 1)
            key_begin = position
            if key_bytes > 0:
                position += key_bytes
            number = data[position]
            if number < 0x80:
                position += 1
                size = (number >> 1) ^ -(number & 1)
            elif not number & 1 and (second := data[position + 1]) < 0x80:
                size = (number & 0x7F | second << 7) >> 1
                position += 2
            else:
                size, position = read_varint(data, position)
            after_value = position + size if size > 0 else position
            if after_value >= end:
                raise InvalidRecord("a key, value or header is longer than its record")
            if end - after_value != headers_bytes or not startswith(encoded_headers, after_value):
                encoded_headers, headers_bytes = data[after_value:end], end - after_value
                by_header = self._last_header(begin, end)
            if is_key:
                position, size = key_begin, key_bytes
            if size < 0:
                self._add(index, None, 1)
            elif by_header is None:
                self._add(index, _frame_at(data, position, size), 1)
            elif by_header != self.last:
                self._add(index, _frame(by_header), 1)
            position = end
        return position

    def _last_header(self, begin: int, end: int) -> bytes | None:
        """Return the value of the last header with the name in the record `data[begin:end]`; None if it has none."""
        data, name, value = self.data, self.header_name, None
        encoded = varint(len(name)) + name
        for name_begin, value_begin, value_end in header_bounds(data, begin, end):
            if data.startswith(encoded, name_begin):
                value = b"" if value_begin < 0 else data[value_begin:value_end]
        return value

    def _add(self, index: int, frame: bytes | None, count: int) -> None:
        """Add `count` records from an index on, which have this frame; None: their keys or values are null, b"": they
        are not framed. Raises `MessageTooLarge`."""
        if frame == b"":
            room = REPORTED_RECORDS_MAX - len(self.unframed)
            self.unframed += range(index, index + min(count, room))
            return
        number = _NO_FRAME if frame is None else self.frames.setdefault(frame, len(self.frames))
        if number >= FRAMES_MAX:
            raise MessageTooLarge(
                f"{self.name}: a batch with more than {FRAMES_MAX} schemas; publish fewer records at a time"
            )
        self.last = frame
        if not self.numbers or self.numbers[-1] != number:
            self.firsts.append(index)
            self.numbers.append(number)


class _Run(NamedTuple):
    """Consecutive records of the same layout and with the same frame, up to position `end`. The key or value of the
    first one has `size` bytes from `begin` on."""

    record_count: int
    end: int
    begin: int
    size: int


def _find_run(data: bytes, position: int, left: int, *, is_key: bool) -> _Run | None:
    """Return at least `_LONG_RUN` and at most `left` records from a position on that have the same layout and frame;
    None if there are fewer. Raises `IndexError` if the first record is too long.

    A field that is the same in records of one length is a column of equal bytes, as in `read_uniform_records`."""
    length, after_length = read_varint(data, position)
    stride = after_length - position + length
    if length <= 0 or len(_equal(data, position, stride, _LONG_RUN)) < _LONG_RUN:
        return None
    timestamp = after_length + 1
    offset = read_varint(data, timestamp)[1]
    key_length = read_varint(data, offset)[1]
    size, begin = read_varint(data, key_length)
    fixed = [*range(position, after_length), *range(key_length, begin)]
    if not is_key:
        value_length = begin + max(size, 0)
        size, begin = read_varint(data, value_length)
        fixed += range(value_length, begin)
    if begin + size > position + stride:
        return None  # the walk of single records raises the error
    if size > 0:
        content = data[begin : begin + min(size, GUID_FRAME_BYTES)]
        fixed += range(begin, begin + (len(_frame(content)) or 1))
    count = min(left, (len(data) - position) // stride, _WINDOW_RECORDS)
    for column in fixed:
        found = data[column : column + count * stride : stride]
        if found.count(found[:1]) != count:
            count = len(_equal(data, column, stride, count))
    if count < _LONG_RUN:
        return None
    end = position + count * stride
    for number_begin, number_end in ((timestamp, offset), (offset, key_length)):
        if not data[number_end - 1 : end : stride].isascii():
            return None
        for column in range(number_begin, number_end - 1):
            if min(data[column:end:stride]) < 0x80:
                return None
    return _Run(count, end, begin, size)


def _equal(data: bytes, begin: int, stride: int, count: int) -> bytes:
    """Return the bytes at `begin`, and at so many distances of `stride` from it, that are equal to the first one."""
    found = data[begin : begin + count * stride : stride]
    return found[: len(found) - len(found.lstrip(found[:1]))]


def _frame_at(data: bytes, begin: int, size: int) -> bytes | None:
    """Return the frame of a key or value of `size` bytes in `data`: None for null, b"" if it is not framed."""
    return None if size < 0 else _frame(data[begin : begin + min(size, GUID_FRAME_BYTES)])


def _frame(begin: bytes) -> bytes:
    """Return the frame with which some bytes begin; b"" if they have none."""
    if begin[:1] == b"\0":
        return begin[:ID_FRAME_BYTES] if len(begin) >= ID_FRAME_BYTES else b""
    if begin[:1] == b"\1":
        return begin[:GUID_FRAME_BYTES] if len(begin) >= GUID_FRAME_BYTES else b""
    return b""
