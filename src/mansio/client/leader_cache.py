"""Non-blocking look-up of partition leaders for sender and fetcher, with metadata refreshes in the background.

Invariants:
* At most one look-up of a topic is in progress.
* A cached leader is used until it is marked stale; when it is old, it is refreshed without delaying any request.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.client.tasks import Tasks
    from mansio.net.cluster import Cluster

logger = logging.getLogger(__name__)


class LeaderCache:
    """Partition leaders from the cluster's metadata cache. `on_change` is called when a look-up has ended, also if it
    failed."""

    def __init__(
        self, cluster: Cluster, tasks: Tasks, on_change: Callable[[], None], *, refreshes: bool = True
    ) -> None:
        self._cluster = cluster
        self._tasks = tasks
        self._on_change = on_change
        self._refreshes = refreshes
        self._age_s_max = cluster.metadata_age_ms_max / 1000
        self._locating: set[str] = set()
        self._refreshing: set[str] = set()

    def find(self, topic: str, partition: int, now: float) -> int | None:
        """Node id of the cached leader, or None; `now` is the loop's time in seconds."""
        found = self._cluster.cached_leader(topic, partition)
        if found is None or topic in self._locating:
            return None
        leader, fetched = found
        if self._refreshes and now - fetched > self._age_s_max and topic not in self._refreshing:
            self._refreshing.add(topic)
            self._tasks.spawn(self._refresh(topic))
        return leader

    def look_up(self, topic: str, partition: int, on_failure: Callable[[MansioError], None]) -> None:
        """Request the leader of a partition that is not cached; `on_failure` is called with the error if that fails."""
        if topic not in self._locating:
            self._locating.add(topic)
            self._tasks.spawn(self._locate(topic, partition, on_failure))

    def forget(self) -> None:
        """Reset the state after the look-ups in progress were cancelled."""
        self._locating.clear()
        self._refreshing.clear()

    async def _refresh(self, topic: str) -> None:
        """Refresh old metadata (new partitions, new leader) while the cached leader stays in use."""
        try:
            await self._cluster.refresh_metadata((topic,))
        except MansioError as error:
            logger.info("metadata of topic %s: %s", topic, error)
        finally:
            self._refreshing.discard(topic)

    async def _locate(self, topic: str, partition: int, on_failure: Callable[[MansioError], None]) -> None:
        try:
            await self._cluster.refresh_metadata((topic,))
            (await self._cluster.topic(topic, wait_ms=0)).leader(partition)
        except MansioError as error:
            on_failure(error)
        finally:
            self._locating.discard(topic)
            self._on_change()
