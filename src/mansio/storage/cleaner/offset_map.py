"""Offset map of a compaction: the newest offset of every key, in a fixed amount of memory (Kafka: SkimpyOffsetMap).

Compaction needs the last offset of each of millions of keys. Keys may be long, so the map stores digests of 16 bytes,
which are unique in practice (no collision of 128 bits is known). One entry is 24 bytes in one buffer of a size that is
fixed in advance; there is no Python object per key.

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
    """Digest under which a key is stored."""
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


class OffsetMap:
    """Hash table from key digest to offset: open addressing with double hashing; both hashes are parts of the digest.

    The number of slots is a power of two and the step odd, so a search reaches every slot. Offsets are stored plus one;
    zero is a free slot.
    """

    __slots__ = ("_entries", "_mask", "_table", "entries_max", "size_bytes")

    def __init__(self, bytes_max: int, *, entries_wanted: int | None = None) -> None:
        """As many slots as fit into `bytes_max` (at least 64), or as `entries_wanted` needs. Call `prepare` next."""
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
        """Allocate the memory, before anything else; yields the bytes of each step. A single step would block the
        interpreter.
        """
        while (missing := self.size_bytes - len(self._table)) > 0:
            step = min(missing, STEP_BYTES)
            self._table.extend(bytes(step))
            yield step

    def put(self, digest: bytes, offset: int) -> bool:
        """Record that a key was written at `offset`. False if it is a new key and the map is full."""
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
        """The newest offset of a key; -1 if it is not in the map."""
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
