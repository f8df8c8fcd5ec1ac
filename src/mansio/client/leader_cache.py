"""Look-up of partition leaders without waiting, for sender and fetcher; metadata is refreshed in background tasks.

Invariants:
* At most one look-up of a topic is in progress.
* A cached leader is used until its metadata is marked stale. Old metadata is refreshed without delaying a request.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.client.tasks import BackgroundTasks
    from mansio.net.cluster import Cluster

logger = logging.getLogger(__name__)


class LeaderCache:
    """Partition leaders from the cluster's metadata cache.

    Calls `on_change` when a look-up has succeeded or failed. With `refreshes_old_metadata`, metadata older than
    `metadata_age_ms_max` is requested again.
    """

    def __init__(
        self,
        cluster: Cluster,
        tasks: BackgroundTasks,
        on_change: Callable[[], None],
        *,
        refreshes_old_metadata: bool = True,
    ) -> None:
        self._cluster = cluster
        self._tasks = tasks
        self._on_change = on_change
        self._refreshes = refreshes_old_metadata
        self._age_s_max = cluster.metadata_age_ms_max / 1000
        self._locating: set[str] = set()
        self._refreshing: set[str] = set()

    def find(self, topic: str, partition: int, now: float) -> int | None:
        """Node id of a partition's leader from the cache; None if the leader is unknown or being looked up. `now` is
        the time of the loop's clock, in seconds."""
        found = self._cluster.cached_leader(topic, partition)
        if found is None or topic in self._locating:
            return None
        leader, fetched = found
        if self._refreshes and now - fetched > self._age_s_max and topic not in self._refreshing:
            self._refreshing.add(topic)
            self._tasks.spawn(self._refresh(topic))
        return leader

    def look_up(self, topic: str, partition: int, on_failure: Callable[[MansioError], None]) -> None:
        """Request the metadata of a topic in a task, unless a request is in progress. Calls `on_failure` with the error
        if the leader of the partition is still unknown."""
        if topic not in self._locating:
            self._locating.add(topic)
            self._tasks.spawn(self._locate(topic, partition, on_failure))

    def reset(self) -> None:
        """Mark all look-ups as ended, after the caller has cancelled their tasks."""
        self._locating.clear()
        self._refreshing.clear()

    async def _refresh(self, topic: str) -> None:
        """Request the metadata of a topic again, while the cached leader stays in use."""
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
