"""The newest offset of every key, in a fixed amount of memory.

Compaction must know, of millions of keys, where each was written last. Keys may be long, so their digests stand for
them: 16 bytes, which no two keys share in practice (a collision of 128 bits would be the first ever seen). One entry is
24 bytes in one buffer of a size that is fixed beforehand; there is no Python object per key.

Always true: at most `ENTRY_BYTES * capacity` bytes are used, and at most nine slots of ten are taken, so that looking
for a key ends soon and always; an offset in the map only goes up.
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
    """What stands for a key."""
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


class OffsetMap:
    """Key digest -> offset, open addressing with two numbers out of the digest: where to look first, and how far on.

    The number of slots is a power of two and the step odd, so a search comes to every slot. An offset is kept plus one;
    zero is a free slot.
    """

    __slots__ = ("_entries", "_mask", "_table", "entries_max", "size_bytes")

    def __init__(self, bytes_max: int, *, entries_wanted: int | None = None) -> None:
        """As many slots as `bytes_max` has room for (64 at least), or as `entries_wanted` needs. `prepare` it."""
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
        """Take the memory, before anything else: the bytes of each step. At once it would hold up the interpreter."""
        while (missing := self.size_bytes - len(self._table)) > 0:
            step = min(missing, STEP_BYTES)
            self._table.extend(bytes(step))
            yield step

    def put(self, digest: bytes, offset: int) -> bool:
        """Note that a key was written at `offset`. False when it is a new key and the map is full."""
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
        """The newest offset of a key; -1 when it is not in the map."""
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
