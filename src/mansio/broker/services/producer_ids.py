"""Blocks of producer ids from the metadata store.

Always true: a block is taken by compare-and-set before any of its ids is used, so no id is handed out twice, whatever
crashes; ids of a block that was taken and not used up are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import ConcurrentChange
from mansio.metadata.metadata_store import Compare, Put, decode, encode, transact_resolving_ambiguity

if TYPE_CHECKING:
    from mansio.metadata.metadata_store import Keys, MetadataStore
    from mansio.ports import Random

ATTEMPTS_MAX = 20


class ProducerIds:
    """Takes blocks of ids."""

    __slots__ = ("_key", "_random", "_store")

    def __init__(self, store: MetadataStore, keys: Keys, random: Random) -> None:
        self._store = store
        self._key = keys.producer_ids
        self._random = random

    async def take(self, count: int) -> int:
        """The first of `count` consecutive ids that are now this broker's."""
        for _ in range(ATTEMPTS_MAX):
            entry = await self._store.get(self._key)
            first = decode(entry.key, entry.value)["next"] if entry else 0
            writer = self._random.bytes(16).hex()
            compares = [Compare(self._key, mod_revision=entry.mod_revision if entry else 0)]
            puts = [Put(self._key, encode({"next": first + count}, writer))]
            try:
                if (await transact_resolving_ambiguity(self._store, compares, puts, writer)).succeeded:
                    return int(first)
            except ConcurrentChange:
                continue
        raise ConcurrentChange(f"other brokers took producer ids {ATTEMPTS_MAX} times before this one could")
