"""Copies the logs of other brokers: one fetcher for each leader, one request under way for each fetcher.

    fetch -> append as it is -> sync -> fetch ...

All partitions that a leader leads go into one request. The offset a partition is fetched from is what this broker has
on stable storage, so the request is at the same time the word on which the leader counts (`replicating`). A fetcher
therefore waits for its syncs before it asks again; the leader syncs meanwhile.

Always true:
* an answer changes a partition only if its role is the one it had when the request left;
* a log is cut by epoch alone: when the leader says where the logs part, or when the leader's log begins later than this
  one ends;
* a partition that fails is set aside for a while and told; the others of its leader go on. A log that has failed is set
  aside for good;
* what is held is bounded: one answer of `response_bytes_max` for each leader. Replicas that are not in sync, the ones
  below their leader's high watermark, are copied at `catch_up_bytes_per_second` together, if that is set.

Runs on ports alone: a simulator runs this very code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.broker.replication.replica_fetcher import (
    FetcherContext,
    ReplicaFetcher,
    ReplicaFetcherSettings,
    ReplicationThrottle,
)
from mansio.state.replica import NO_LEADER, FollowerReplica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.broker.partition.partition import Partition
    from mansio.errors import MansioError
    from mansio.ports import Clock, Peers, Random, Scheduler

__all__ = ["FailedReplica", "ReplicaFetcherManager", "ReplicaFetcherSettings"]


class FailedReplica(NamedTuple):
    """Why a partition is not copied now."""

    partition: Partition
    error: MansioError


class ReplicaFetcherManager:
    """All that this broker copies. All methods belong to the broker's loop."""

    def __init__(
        self,
        node_id: int,
        peers: Peers,
        *,
        scheduler: Scheduler,
        clock: Clock,
        random: Random,
        broker_epoch: Callable[[], int],
        settings: ReplicaFetcherSettings = ReplicaFetcherSettings(),  # noqa: B008 - a value
    ) -> None:
        """`broker_epoch`: that of this broker's session now."""
        throttle = ReplicationThrottle(settings.catch_up_bytes_per_second, clock)
        self._context = FetcherContext(
            node_id, peers, scheduler, clock, random, broker_epoch, settings, throttle
        )
        self._fetchers: dict[int, ReplicaFetcher] = {}
        self._stopped = False

    def become_follower(self, partition: Partition) -> None:
        """The partition's role changed: copy it from the leader it has now, or not at all."""
        replica = partition.replica
        leader = (
            replica.leader if isinstance(replica, FollowerReplica) and not partition.closed else NO_LEADER
        )
        for node_id, fetcher in list(self._fetchers.items()):
            if node_id != leader:
                fetcher.leave(partition)
                if not fetcher.copies:
                    fetcher.stop()
                    del self._fetchers[node_id]
        if leader == NO_LEADER or self._stopped:
            return
        assert isinstance(replica, FollowerReplica)
        found = self._fetchers.get(leader)
        if found is None:
            found = self._fetchers[leader] = ReplicaFetcher(self._context, leader)
        found.copy(partition, replica)

    def leave(self, partition: Partition) -> None:
        """The partition is closed here, or about to be."""
        for node_id, fetcher in list(self._fetchers.items()):
            fetcher.leave(partition)
            if not fetcher.copies:
                fetcher.stop()
                del self._fetchers[node_id]

    def troubles(self) -> Iterator[FailedReplica]:
        """Every partition that is set aside now, and why."""
        for fetcher in self._fetchers.values():
            for copied in fetcher.copies.values():
                if copied.error is not None:
                    yield FailedReplica(copied.partition, copied.error)

    def stop(self) -> None:
        """Copy nothing more."""
        self._stopped = True
        for fetcher in self._fetchers.values():
            fetcher.stop()
        self._fetchers.clear()
