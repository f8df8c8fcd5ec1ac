"""Primitive types of hand-written codecs: counts, strings, topics.

Readers are `(frame, position, ...) -> (value, position after it)` over memoryviews. They raise `WireError`, or let
`IndexError`, `struct.error` and `UnicodeDecodeError` pass for a message that ends too early or is not text; the callers
convert these to `WireError` once per message, which keeps the hot path free of checks.

Invariant: an accepted count is at most the caller's limit and the number of remaining bytes.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Final

from mansio.errors import WireError
from mansio.wire.headers import read_unsigned_varint, unsigned_varint

DECODE_ERRORS: Final = (struct.error, IndexError, UnicodeDecodeError)
"""Exceptions that readers raise for bytes that are not the message, besides `WireError`."""
MAX_ENTRIES: Final = 100_000
"""Limit on the topics and partitions of one message, in total."""

_INT: Final = Struct(">i")
_SHORT: Final = Struct(">h")


def read_compact_count(frame: memoryview, position: int, most: int) -> tuple[int, int]:
    """A compact item count (KIP-482), at most `most`; null is refused."""
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
    """An int32 item count, at most `most`; null is refused."""
    (count,) = _INT.unpack_from(frame, position)
    position += 4
    if not 0 <= count <= most or count > len(frame) - position:
        raise WireError(f"a count of {count} with {len(frame) - position} bytes left")
    return count, position


def read_compact_string(frame: memoryview, position: int) -> tuple[str | None, int]:
    """A compact string; length 0 is None."""
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
    """A string with an int16 length; -1 is None."""
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
    """Encoded compact count or length (KIP-482); -1 is null."""
    return unsigned_varint(count + 1)


def pack_count(count: int) -> bytes:
    """Encoded int32 count or length; -1 is null."""
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
    """Encoded topic id (zeros for None) or name."""
    if by_id:
        return topic_id or bytes(16)
    return pack_compact_string(name or "") if flexible else pack_string(name or "")
