"""Cluster services: session, controller and replication of this broker, as other services and protocols use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.replication.isr_manager import IsrManager
    from mansio.broker.replication.replica_fetcher import ReplicaFetcherManager
    from mansio.metadata.controller.controller import Controller
    from mansio.metadata.metadata_store import StoreCounts
    from mansio.metadata.session import Session


@dataclass(frozen=True, slots=True)
class ClusterServices:
    """What a broker of a cluster offers in addition to a single node."""

    controller: Controller
    isr_manager: IsrManager
    fetcher_manager: ReplicaFetcherManager
    broker_epoch_of: Callable[[int], int]
    """The epoch of a broker's current session in the metadata; 0 for none."""
    session: Callable[[], Session | None]
    """This broker's session; None while it has none."""
    is_session_valid: Callable[[], bool]
    """Whether this broker's session has certainly not expired."""
    sessions_lost: Callable[[], int]
    """Number of sessions that ended although this broker kept running."""
    store_counts: Callable[[], StoreCounts] | None = None
    """Outcomes of calls to the metadata store, where the store counts them."""
