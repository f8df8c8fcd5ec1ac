"""Where records seem to begin, by how the first bytes of one look: a guess for all records of many batches at once.

A record begins with its length; then come attributes, of which there are none yet, so a zero; and before it stands what
the record before it ends with: the number of its headers, a zero where it has none. Two zeros with one or two bytes
between them that can be a record's length: few other bytes look like that, and in text none do.

Always true: these are guesses, and whoever uses one checks that each record ends where the next begins; memory goes by
the number of bytes, whatever they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK_BYTES: Final = 1 << 18
"""So much is looked over at once, to stay in the processor's cache."""
_LENGTH_MIN: Final = np.uint32(12)
"""A record without key, value and headers is of six bytes; the sign is folded into the lowest bit, and is not set."""
_BYTES_PER_CANDIDATE: Final = 8
"""Bytes with zeros in that distance at more places than one in so many hold much that is no mark."""


def find_record_boundaries(data: bytes | memoryview, words: NDArray[np.uint32]) -> NDArray[np.int64] | None:
    """The places in `data` where a record of less than 8 KiB without headers seems to begin, behind one like it.

    `words` is `unaligned_words` of the same bytes. None where too much looks so.
    """
    array = np.frombuffer(data, np.uint8)[: len(words)]
    found: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    remaining = len(array) // _BYTES_PER_CANDIDATE
    for begin in range(0, len(array), _CHUNK_BYTES):
        positions = np.flatnonzero(_zeros(array[begin : begin + _CHUNK_BYTES + 3]))
        remaining -= len(positions)
        if remaining < 0:
            return None
        positions += begin
        found.append(positions)
    positions = np.concatenate(found)
    word = words[positions]  # its last byte is the zero of the attributes
    length = word >> np.uint32(16) & np.uint32(0xFF)
    is_of_one = (word & np.uint32(0x0081FF00) == 0) & (length >= _LENGTH_MIN)
    is_of_two = (word & np.uint32(0x000081FF) == np.uint32(0x00008000)) & (length < 0x80) & (length > 0)
    positions += is_of_one
    positions += 1
    starts: NDArray[np.int64] = positions[is_of_one | is_of_two]
    return starts


def _zeros(array: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Where a byte is zero, or the one behind it is, and the third behind it is too."""
    zero: NDArray[np.bool_] = array == 0
    found = zero[:-3] | zero[1:-2]
    found &= zero[3:]
    return found
