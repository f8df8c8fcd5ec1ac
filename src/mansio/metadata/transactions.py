"""Guarded transactions that write partition changes: all changes of a batch, or none.

The conditions of a transaction are that the key of each partition is unchanged, and that each broker on which a
decision relies still has the same session, or still has none. The caller adds a condition of its own: that the writer
is still the controller, or still has its session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.metadata import metadata_store
from mansio.metadata.metadata_store import Compare, Put, new_writer_id
from mansio.metadata.model import partition_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.metadata.cluster_view import PartitionChange
    from mansio.metadata.metadata_store import Keys, MetadataStore, TransactionResult
    from mansio.ports import Random

BATCH_CHANGES_MAX: Final = 50


def split_into_transactions(
    changes: Sequence[PartitionChange], operations_max: int, size: int
) -> Iterator[list[PartitionChange]]:
    """Yield `changes` in batches of at most `size`, each with no more conditions than `operations_max`.

    One condition is reserved for the caller.
    """
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


async def commit_changes(
    store: MetadataStore,
    keys: Keys,
    changes: Sequence[PartitionChange],
    guard: Compare | None,
    random: Random,
) -> TransactionResult:
    """Write one batch of changes in one transaction, with the caller's condition `guard`.

    If the result is not successful, the metadata have changed, and the caller has to decide again. Raises
    `ConcurrentChange`, `AmbiguousOutcome`, `Unavailable`.
    """
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
