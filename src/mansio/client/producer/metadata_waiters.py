"""Publish calls that wait for the metadata of a topic; they continue in the order of the calls.

Invariants:
* One metadata request per topic serves all waiters.
* Waiters continue in their order; a later caller waits behind them until all have continued.
* A failed metadata request fails all waiters.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mansio.client.tasks import Tasks, client_failed
from mansio.errors import ConnectionLost, MansioError

if TYPE_CHECKING:
    import asyncio

    from mansio.net.cluster import Cluster
    from mansio.net.metadata import TopicView


class _TopicWaiters:
    """Waiters for one topic, and the outcome of its metadata request."""

    __slots__ = ("length", "outcome", "waiters")

    def __init__(self) -> None:
        self.length = 0
        """Number of waiters that have not continued yet, completed or not."""
        self.waiters: deque[asyncio.Future[TopicView]] = deque()
        self.outcome: TopicView | MansioError | None = None

    def notify(self) -> None:
        """Complete all waiters; they continue in the next iteration of the loop."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if waiter.done():
                continue
            if isinstance(self.outcome, MansioError):
                error = type(self.outcome)(
                    str(self.outcome)
                )  # one object per waiter: each is raised separately
                waiter.set_exception(error)
            elif self.outcome is not None:
                waiter.set_result(self.outcome)


class MetadataWaiters:
    """Metadata requests of one producer. All methods run on the event loop's thread."""

    def __init__(self, cluster: Cluster, loop: asyncio.AbstractEventLoop) -> None:
        self._cluster = cluster
        self._loop = loop
        self._tasks = Tasks(loop, lambda error: self._complete_all(client_failed(error)))
        self._by_topic: dict[str, _TopicWaiters] = {}

    def cached(self, topic: str) -> TopicView | None:
        """Cached metadata of a topic; None if there is none or other callers wait for it."""
        if self._by_topic and topic in self._by_topic:
            return None
        return self._cluster.cached_topic(topic)

    async def find(self, topic: str) -> TopicView:
        """Request the metadata of a topic. Raises `UnknownTopicOrPartition` if it does not exist."""
        waiting = self._by_topic.get(topic)
        if waiting is None:
            waiting = self._by_topic[topic] = _TopicWaiters()
            self._tasks.spawn(self._request(topic, waiting))
        elif waiting.outcome is not None:
            self._loop.call_soon(waiting.notify)  # after the earlier waiters have continued
        waiter: asyncio.Future[TopicView] = self._loop.create_future()
        waiting.waiters.append(waiter)
        waiting.length += 1
        try:
            return await waiter
        finally:
            waiting.length -= 1
            if not waiting.length and waiting.outcome is not None and self._by_topic.get(topic) is waiting:
                del self._by_topic[topic]

    async def close(self) -> None:
        """Fail the remaining waiters with `ConnectionLost`."""
        await self._tasks.end()
        self._complete_all(ConnectionLost("the producer is closed"))

    async def _request(self, topic: str, waiting: _TopicWaiters) -> None:
        self._cluster.mark_stale((topic,))
        try:
            waiting.outcome = await self._cluster.topic(topic)
        except MansioError as error:
            waiting.outcome = error
        if not waiting.length and self._by_topic.get(topic) is waiting:
            del self._by_topic[topic]  # all waiters were cancelled
        waiting.notify()

    def _complete_all(self, error: MansioError) -> None:
        by_topic, self._by_topic = self._by_topic, {}
        for waiting in by_topic.values():
            waiting.outcome = waiting.outcome or error
            waiting.notify()
