"""Codec of the primitive types in Kafka messages, for the hand-written codecs: counts, strings, topics.

Readers are `(frame, position, ...) -> (value, position after it)` over memoryviews. They raise `WireError`, or let
the exceptions of `DECODE_ERRORS` pass, for a message that ends too early or a string that is not UTF-8. Callers convert
these to `WireError` once per message, which saves a check per field.

Invariant: an accepted count is at most the caller's limit and the number of remaining bytes.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Final

from mansio.errors import WireError
from mansio.wire.headers import read_unsigned_varint, unsigned_varint

DECODE_ERRORS: Final = (struct.error, IndexError, UnicodeDecodeError)
"""Exceptions besides `WireError` that readers raise for malformed bytes."""
ENTRIES_MAX: Final = 100_000
"""Limit on the number of topics and partitions in one message, in total."""

_INT: Final = Struct(">i")
_SHORT: Final = Struct(">h")


def read_compact_count(frame: memoryview, position: int, count_max: int) -> tuple[int, int]:
    """(count, position after it) of a compact array (KIP-482). Raises `WireError` for null and for more than
    `count_max`."""
    count = frame[position]
    if count < 0x80:
        position += 1
    else:
        count, position = read_unsigned_varint(frame, position)
    count -= 1
    if not 0 <= count <= count_max or count > len(frame) - position:
        raise WireError(f"a count of {count} with {len(frame) - position} bytes left")
    return count, position


def read_count(frame: memoryview, position: int, count_max: int) -> tuple[int, int]:
    """(count, position after it) of an array with an int32 count. Raises `WireError` for null and for more than
    `count_max`."""
    (count,) = _INT.unpack_from(frame, position)
    position += 4
    if not 0 <= count <= count_max or count > len(frame) - position:
        raise WireError(f"a count of {count} with {len(frame) - position} bytes left")
    return count, position


def read_compact_string(frame: memoryview, position: int) -> tuple[str | None, int]:
    """(text, position after it) of a compact string (KIP-482); None for null."""
    length = frame[position]
    if length < 0x80:
        position += 1
    else:
        length, position = read_unsigned_varint(frame, position)
    if not length:
        return None, position
    end = position + length - 1
    if end > len(frame):
        raise WireError("a string is longer than the message")
    return str(frame[position:end], "utf-8"), end


def read_string(frame: memoryview, position: int) -> tuple[str | None, int]:
    """(text, position after it) of a string with an int16 length; None for null, which has length -1."""
    (length,) = _SHORT.unpack_from(frame, position)
    position += 2
    if length < 0:
        if length != -1:
            raise WireError(f"a string of {length} bytes")
        return None, position
    end = position + length
    if end > len(frame):
        raise WireError("a string is longer than the message")
    return str(frame[position:end], "utf-8"), end


def read_topic(
    frame: memoryview, position: int, *, by_id: bool, flexible: bool
) -> tuple[str | None, bytes | None, int]:
    """(name or None, topic id or None, position after it) of a topic, which is identified by its 16-byte id if `by_id`,
    else by its name."""
    if by_id:
        end = position + 16
        topic_id = bytes(frame[position:end])
        if len(topic_id) != 16:
            raise WireError("the message ends within a topic id")
        return None, topic_id, end
    name, position = read_compact_string(frame, position) if flexible else read_string(frame, position)
    if name is None:
        raise WireError("a topic without a name")
    return name, None, position


def pack_compact_count(count: int) -> bytes:
    """Encode a count or length in the compact format (KIP-482); -1 means null."""
    return unsigned_varint(count + 1)


def pack_count(count: int) -> bytes:
    """Encode a count or length as an int32; -1 means null."""
    return _INT.pack(count)


def pack_compact_string(text: str | None) -> bytes:
    """Encode a string with a compact length (KIP-482); None as null."""
    if text is None:
        return b"\x00"
    raw = text.encode()
    return unsigned_varint(len(raw) + 1) + raw


def pack_string(text: str | None) -> bytes:
    """Encode a string with an int16 length; None as null."""
    if text is None:
        return b"\xff\xff"
    raw = text.encode()
    return _SHORT.pack(len(raw)) + raw


def pack_topic(name: str | None, topic_id: bytes | None, *, by_id: bool, flexible: bool) -> bytes:
    """Encode the topic id if `by_id` (16 zero bytes for None), else the name."""
    if by_id:
        return topic_id or bytes(16)
    return pack_compact_string(name or "") if flexible else pack_string(name or "")
