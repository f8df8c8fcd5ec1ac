"""Transactions for partition changes: all changes of a batch, or none.

The conditions are that the key of each partition is unchanged, and that each broker on which a decision relies has
exactly the session, or no session, as when the decision was made. Further conditions (the writer is still the
controller, or still has its session) are added by the caller.
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
    """Split `changes` into transactions of at most `size`, with no more conditions than the store accepts (one is
    reserved for the caller)."""
    batch: list[PartitionChange] = []
    brokers: set[int] = set()
    for change in changes:
        all_brokers = brokers | change.required_sessions.keys()
        if batch and (len(batch) == size or len(batch) + 1 + len(all_brokers) + 1 > operations_max):
            yield batch
            batch, all_brokers = [], set(change.required_sessions)
        batch.append(change)
        brokers = all_brokers
    if batch:
        yield batch


async def commit(
    store: MetadataStore,
    keys: Keys,
    changes: Sequence[PartitionChange],
    guard: Compare | None,
    random: Random,
) -> TransactionResult:
    """Commit one transaction. If it does not succeed, the metadata have changed: decide again on the new state."""
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
