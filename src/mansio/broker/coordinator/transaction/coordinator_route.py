"""Route from a transactional id to its coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.routing.routes import partition_for
from mansio.errors import CoordinatorNotAvailable

if TYPE_CHECKING:
    from mansio.broker.coordinator.coordinator_lookup import CoordinatorLookup


def coordinator_of(transactional_id: str, node_id: int, lookup: CoordinatorLookup | None) -> int:
    """Return the node id of the coordinator of a transactional id. `node_id`: this broker; `lookup`: metadata of
    `__transaction_state`, None on a single node. Raises `CoordinatorNotAvailable`."""
    if lookup is None:
        return node_id
    count = lookup.partition_count()
    broker = lookup.leader(partition_for(transactional_id, count)) if count else None
    if broker is None:
        raise CoordinatorNotAvailable(f"transactional id {transactional_id!r} has no coordinator now")
    return broker.node_id
