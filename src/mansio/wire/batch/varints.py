"""Signed varints of record batches (zigzag, as in Protocol Buffers). The varints of messages are unsigned: see
`headers`.

Invariant: a decoded number has at most 64 bits, otherwise `InvalidRecord`; bytes that end too early raise `IndexError`,
which the caller converts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from mansio.errors import InvalidRecord

_CACHED_MAX: Final = 1 << 14
_ONE_BYTE: Final = tuple(bytes((number,)) for number in range(0x80))


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """(value, position after it)."""
    byte = data[position]
    position += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), position
    value = byte & 0x7F
    shift = 7
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), position
        shift += 7
        if shift > 63:
            raise InvalidRecord("a number in a record has more than 64 bits")


@lru_cache(maxsize=_CACHED_MAX)
def varint(value: int) -> bytes:
    """Encoded number. Cached, because lengths and deltas are mostly the same small numbers."""
    number = value << 1 if value >= 0 else ~(value << 1)
    if number < 0x80:
        return _ONE_BYTE[number]
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
