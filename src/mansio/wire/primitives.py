"""The small pieces Produce and Fetch are read and written with: counts, texts, topics.

Readers are `(frame, position, ...) -> (value, position after it)` over memoryviews. They raise `WireError`,
or let `IndexError`, `struct.error` and `UnicodeDecodeError` through where a message ends too early or is not
text: the callers turn those into `WireError` once for the whole message, which keeps the hot path free of
checks.

Always true: a count that is accepted is not larger than the caller's bound, nor than the bytes that are left.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Final

from mansio.errors import WireError
from mansio.wire.headers import read_unsigned_varint, unsigned_varint

DECODE_ERRORS: Final = (struct.error, IndexError, UnicodeDecodeError)
"""What the readers let through when the bytes are not the message."""
MAX_ENTRIES: Final = 100_000
"""Topics and partitions in one message, in all."""

_INT: Final = Struct(">i")
_SHORT: Final = Struct(">h")


def read_compact_count(frame: memoryview, position: int, most: int) -> tuple[int, int]:
    """A count of items, written as one more than it is (KIP-482); null is refused."""
    count = frame[position]
    if count < 0x80:
        position += 1
    else:
        count, position = read_unsigned_varint(frame, position)
    count -= 1
    if not 0 <= count <= most or count > len(frame) - position:
        raise WireError(f"a count of {count} with {len(frame) - position} bytes left")
    return count, position


def read_count(frame: memoryview, position: int, most: int) -> tuple[int, int]:
    """A count of items as an int32; null is refused."""
    (count,) = _INT.unpack_from(frame, position)
    position += 4
    if not 0 <= count <= most or count > len(frame) - position:
        raise WireError(f"a count of {count} with {len(frame) - position} bytes left")
    return count, position


def read_compact_string(frame: memoryview, position: int) -> tuple[str | None, int]:
    """A text behind its length plus one; 0 is None."""
    length = frame[position]
    if length < 0x80:
        position += 1
    else:
        length, position = read_unsigned_varint(frame, position)
    if not length:
        return None, position
    end = position + length - 1
    if end > len(frame):
        raise WireError("a text is longer than the message")
    return str(frame[position:end], "utf-8"), end


def read_string(frame: memoryview, position: int) -> tuple[str | None, int]:
    """A text behind its length as an int16; -1 is None."""
    (length,) = _SHORT.unpack_from(frame, position)
    position += 2
    if length < 0:
        if length != -1:
            raise WireError(f"a text of {length} bytes")
        return None, position
    end = position + length
    if end > len(frame):
        raise WireError("a text is longer than the message")
    return str(frame[position:end], "utf-8"), end


def read_topic(
    frame: memoryview, position: int, *, by_id: bool, flexible: bool
) -> tuple[str | None, bytes | None, int]:
    """(name, None, position after it) or (None, 16 bytes, position after it)."""
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
    """A count or a length as KIP-482 writes it; -1 is null."""
    return unsigned_varint(count + 1)


def pack_count(count: int) -> bytes:
    """A count or a length as an int32; -1 is null."""
    return _INT.pack(count)


def pack_compact_string(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    raw = text.encode()
    return unsigned_varint(len(raw) + 1) + raw


def pack_string(text: str | None) -> bytes:
    if text is None:
        return b"\xff\xff"
    raw = text.encode()
    return _SHORT.pack(len(raw)) + raw


def pack_topic(name: str | None, topic_id: bytes | None, *, by_id: bool, flexible: bool) -> bytes:
    """The topic's id (zeros for None) or its name."""
    if by_id:
        return topic_id or bytes(16)
    return pack_compact_string(name or "") if flexible else pack_string(name or "")
