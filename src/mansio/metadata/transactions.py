"""Decisions on partitions, made into transactions: all of a batch, or none of it.

Owns the conditions: each partition's key is as it was seen, and each broker that a decision relied on has the very
session, or the very absence of one, that it was made on. What else must hold (the writer is still the controller, or
still has its session) the caller adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.metadata import metadata_store
from mansio.metadata.metadata_store import Compare, Put, new_writer_id
from mansio.metadata.model import partition_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.metadata.controller.controller_plan import PartitionChange
    from mansio.metadata.metadata_store import Keys, MetadataStore, TransactionResult
    from mansio.ports import Random

BATCH_CHANGES_MAX: Final = 50


def batches(
    changes: Sequence[PartitionChange], operations_max: int, size: int
) -> Iterator[list[PartitionChange]]:
    """`changes` in transactions of at most `size`, with no more conditions than the store takes (one is left for the
    caller's own)."""
    batch: list[PartitionChange] = []
    brokers: set[int] = set()
    for change in changes:
        together = brokers | change.required_sessions.keys()
        if batch and (len(batch) == size or len(batch) + 1 + len(together) + 1 > operations_max):
            yield batch
            batch, together = [], set(change.required_sessions)
        batch.append(change)
        brokers = together
    if batch:
        yield batch


async def commit(
    store: MetadataStore,
    keys: Keys,
    changes: Sequence[PartitionChange],
    guard: Compare | None,
    random: Random,
) -> TransactionResult:
    """One transaction. Not succeeded: something is not as it was seen; look again and decide anew."""
    writer = new_writer_id(random)
    compares = [] if guard is None else [guard]
    required_sessions = {
        node_id: epoch for change in changes for node_id, epoch in change.required_sessions.items()
    }
    compares += [
        Compare(keys.session(node_id), create_revision=epoch) for node_id, epoch in required_sessions.items()
    ]
    puts = []
    for change in changes:
        key = keys.partition(change.topic_id, change.partition)
        compares.append(Compare(key, mod_revision=change.before.mod_revision))
        puts.append(Put(key, metadata_store.encode(partition_document(change.after), writer)))
    return await metadata_store.transact_resolving_ambiguity(store, compares, puts, writer)
