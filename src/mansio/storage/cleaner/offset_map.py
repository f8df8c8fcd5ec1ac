"""Offset map of a compaction: the newest offset of every key, in a fixed amount of memory (Kafka: SkimpyOffsetMap).

The map stores a digest of 16 bytes instead of each key, because keys may be long. Such digests are unique in practice.
An entry takes 24 bytes of one buffer, whose size is fixed when the map is created; there is no Python object per key.

Invariants: at most `ENTRY_BYTES * capacity` bytes are used; at most nine of ten slots are occupied, which bounds the
search for a key; an offset in the map only increases.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRY_BYTES = 24
DIGEST_BYTES = 16
CAPACITY_MIN = 64
STEP_BYTES = 1 << 20
_NUMBERS = Struct(">QQ")
_OFFSET = Struct(">q")


def digest_of(key: bytes) -> bytes:
    """Return the digest (blake2b, 16 bytes) under which a key is stored in the map."""
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


class OffsetMap:
    """Hash table from key digest to offset: open addressing with double hashing; both hashes are parts of the digest.

    The number of slots is a power of two and the step is odd, so a search reaches every slot. The stored number is the
    offset plus one; 0 means a free slot. `entries_max` is the maximum number of keys.
    """

    __slots__ = ("_entries", "_mask", "_table", "entries_max", "size_bytes")

    def __init__(self, bytes_max: int, *, entries_wanted: int | None = None) -> None:
        """Create a map with as many slots as fit into `bytes_max`, at least 64. The caller calls `prepare` next.

        `entries_wanted`: expected number of keys; the map gets no more slots than these need.
        """
        slots = CAPACITY_MIN
        while 2 * slots * ENTRY_BYTES <= bytes_max and (
            entries_wanted is None or slots * 9 // 10 < entries_wanted
        ):
            slots *= 2
        self._table = bytearray()
        self.size_bytes = slots * ENTRY_BYTES
        self._mask = slots - 1
        self._entries = 0
        self.entries_max = slots * 9 // 10

    def __len__(self) -> int:
        return self._entries

    def prepare(self) -> Iterator[int]:
        """Allocate the memory in steps and yield the bytes of each; a single step would block the interpreter."""
        while (missing := self.size_bytes - len(self._table)) > 0:
            step = min(missing, STEP_BYTES)
            self._table.extend(bytes(step))
            yield step

    def put(self, digest: bytes, offset: int) -> bool:
        """Record that a key was written at `offset`. Returns False if the key is new and the map is full."""
        table, mask = self._table, self._mask
        first, step = _NUMBERS.unpack(digest)
        step |= 1
        slot = first & mask
        while True:
            at = slot * ENTRY_BYTES
            known = _OFFSET.unpack_from(table, at + DIGEST_BYTES)[0]
            if not known:
                if self._entries >= self.entries_max:
                    return False
                self._entries += 1
                table[at : at + DIGEST_BYTES] = digest
                _OFFSET.pack_into(table, at + DIGEST_BYTES, offset + 1)
                return True
            if table[at : at + DIGEST_BYTES] == digest:
                if offset >= known:
                    _OFFSET.pack_into(table, at + DIGEST_BYTES, offset + 1)
                return True
            slot = (slot + step) & mask

    def get(self, digest: bytes) -> int:
        """Return the newest offset of a key; -1 if the key is not in the map."""
        table, mask = self._table, self._mask
        first, step = _NUMBERS.unpack(digest)
        step |= 1
        slot = first & mask
        while True:
            at = slot * ENTRY_BYTES
            known: int = _OFFSET.unpack_from(table, at + DIGEST_BYTES)[0]
            if not known:
                return -1
            if table[at : at + DIGEST_BYTES] == digest:
                return known - 1
            slot = (slot + step) & mask
