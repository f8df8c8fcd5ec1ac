"""Who leads a partition, for those who may not wait: sender and fetcher ask it for every request.

Owns the look-ups that go on beside. Always true: at most one look-up of a topic is under way; what the cache says is
used until it is marked stale, and asked for again, without anybody waiting for that, when it is old.
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
    """Answers from the cluster's cache. `on_change` is called when a look-up has ended, whatever came of it."""

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
        """The node to ask, as far as is known; `now` is the loop's time."""
        found = self._cluster.cached_leader(topic, partition)
        if found is None or topic in self._locating:
            return None
        leader, fetched = found
        if self._refreshes and now - fetched > self._age_s_max and topic not in self._refreshing:
            self._refreshing.add(topic)
            self._tasks.spawn(self._refresh(topic))
        return leader

    def look_up(self, topic: str, partition: int, on_failure: Callable[[MansioError], None]) -> None:
        """Ask who leads a partition that `find` did not; `on_failure` hears of it if that fails."""
        if topic not in self._locating:
            self._locating.add(topic)
            self._tasks.spawn(self._locate(topic, partition, on_failure))

    def forget(self) -> None:
        """The look-ups that were under way were cancelled."""
        self._locating.clear()
        self._refreshing.clear()

    async def _refresh(self, topic: str) -> None:
        """Look, while the old leader goes on being used, whether the topic has grown."""
        try:
            await self._cluster.refresh((topic,))
        except MansioError as error:
            logger.info("metadata of topic %s: %s", topic, error)
        finally:
            self._refreshing.discard(topic)

    async def _locate(self, topic: str, partition: int, on_failure: Callable[[MansioError], None]) -> None:
        try:
            await self._cluster.refresh((topic,))
            (await self._cluster.topic(topic, wait_ms=0)).leader(partition)
        except MansioError as error:
            on_failure(error)
        finally:
            self._locating.discard(topic)
            self._on_change()
