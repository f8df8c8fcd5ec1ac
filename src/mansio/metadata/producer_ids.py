"""Producer-id allocation in blocks from the metadata store.

Invariants:
* A broker reserves a block of ids by compare-and-set before it assigns any of them, so that no id is ever assigned
  twice in a cluster. Ids of a block that are unassigned when the broker stops or crashes are not used.
* A broker reserves one block at a time: callers that need one meanwhile wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import ConcurrentChange, MansioError
from mansio.metadata.metadata_store import Compare, Put, decode, encode, transact_resolving_ambiguity
from mansio.ports import complete_from
from mansio.tracebacks import result_of, without_traceback

if TYPE_CHECKING:
    from mansio.metadata.metadata_store import Keys, MetadataStore
    from mansio.ports import Promise, Random, Scheduler

ATTEMPTS_MAX: Final = 20
"""How often a block is requested if other brokers reserve blocks concurrently."""

IDS_PER_BLOCK: Final = 1000


class ProducerIdAllocator:
    """Assigns producer ids from blocks that are reserved for this broker."""

    __slots__ = ("_block_end", "_key", "_next_id", "_random", "_scheduler", "_store", "_waiters")

    def __init__(self, store: MetadataStore, keys: Keys, random: Random, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiters: list[Promise[None]] | None = None
        """The callers that wait for the reservation that is in progress; None without one."""
        self._store = store
        self._key = keys.producer_ids
        self._random = random
        self._next_id = 0
        self._block_end = 0

    async def new_producer_id(self) -> int:
        """Return a producer id that was never assigned before. Raises `ConcurrentChange`, `StorageError`,
        `Unavailable`."""
        while self._next_id == self._block_end:
            if self._waiters is None:
                await self._reserve()
            else:
                waiter: Promise[None] = self._scheduler.promise()  # its own: a cancelled caller cancels it
                self._waiters.append(waiter)
                await result_of(waiter)
        producer_id = self._next_id
        self._next_id += 1
        return producer_id

    async def _reserve(self) -> None:
        waiters = self._waiters = []
        error: MansioError | None = None
        try:
            first = await self.take_block(IDS_PER_BLOCK)
            self._next_id, self._block_end = first, first + IDS_PER_BLOCK
        except MansioError as failure:
            error = without_traceback(failure)
            raise
        finally:
            self._waiters = None
            for waiter in waiters:
                # No error, but no block either: the caller was cancelled, and one of those that wait reserves the next.
                complete_from(waiter, None, error)

    async def take_block(self, count: int) -> int:
        """Reserve `count` consecutive ids for this broker; return the first. Raises `ConcurrentChange`, `StorageError`,
        `Unavailable`."""
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
        raise ConcurrentChange(f"other brokers reserved producer ids concurrently in {ATTEMPTS_MAX} attempts")
