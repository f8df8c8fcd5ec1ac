"""Publish calls that wait for the metadata of a topic; they continue in the order of the calls.

Invariants:
* All calls that wait for one topic share one metadata request.
* A call that arrives while earlier calls still wait for the same topic continues after all of them.
* If the metadata request fails, all calls that wait for it fail.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mansio.client.tasks import BackgroundTasks, log_client_failure
from mansio.errors import ConnectionLost, MansioError
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    import asyncio

    from mansio.net.cluster import Cluster
    from mansio.net.metadata import TopicMetadata


class _TopicWaiters:
    """Calls that wait for the metadata of one topic, and the outcome of the metadata request."""

    __slots__ = ("outcome", "waiter_count", "waiters")

    def __init__(self) -> None:
        self.waiter_count = 0
        """Number of calls that have not continued yet, whether or not their future is completed."""
        self.waiters: deque[asyncio.Future[TopicMetadata]] = deque()
        self.outcome: TopicMetadata | MansioError | None = None

    def notify(self) -> None:
        """Complete the futures of all waiting calls, which then continue in the next iteration of the event loop."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if waiter.done():
                continue
            if isinstance(self.outcome, MansioError):
                # Each call raises its own error object.
                waiter.set_exception(type(self.outcome)(str(self.outcome)))
            elif self.outcome is not None:
                waiter.set_result(self.outcome)


class MetadataWaiters:
    """Calls of one producer that wait for metadata. All methods run on the event loop's thread."""

    def __init__(self, cluster: Cluster, loop: asyncio.AbstractEventLoop) -> None:
        self._cluster = cluster
        self._loop = loop
        self._tasks = BackgroundTasks(loop, lambda error: self._complete_all(log_client_failure(error)))
        self._by_topic: dict[str, _TopicWaiters] = {}

    def cached_topic(self, topic: str) -> TopicMetadata | None:
        """Return the cached metadata of a topic; None if none is cached or if earlier calls still wait for it."""
        if self._by_topic and topic in self._by_topic:
            return None
        return self._cluster.cached_topic(topic)

    async def request_topic(self, topic: str) -> TopicMetadata:
        """Request the metadata of a topic, or wait for a request in progress. Raises `UnknownTopicOrPartition` if the
        topic does not exist."""
        waiting = self._by_topic.get(topic)
        if waiting is None:
            waiting = self._by_topic[topic] = _TopicWaiters()
            self._tasks.spawn(self._request(topic, waiting))
        elif waiting.outcome is not None:
            self._loop.call_soon(waiting.notify)  # this call continues after the earlier ones
        waiter: asyncio.Future[TopicMetadata] = self._loop.create_future()
        waiting.waiters.append(waiter)
        waiting.waiter_count += 1
        try:
            return await waiter
        finally:
            waiting.waiter_count -= 1
            if (
                not waiting.waiter_count
                and waiting.outcome is not None
                and self._by_topic.get(topic) is waiting
            ):
                del self._by_topic[topic]

    async def close(self) -> None:
        """Fail all waiting calls with `ConnectionLost`."""
        await self._tasks.close()
        self._complete_all(ConnectionLost("the producer is closed"))

    async def _request(self, topic: str, waiting: _TopicWaiters) -> None:
        self._cluster.mark_stale((topic,))
        try:
            waiting.outcome = await self._cluster.topic(topic)
        except MansioError as error:
            waiting.outcome = without_traceback(error)
        if not waiting.waiter_count and self._by_topic.get(topic) is waiting:
            del self._by_topic[topic]  # all waiters were cancelled
        waiting.notify()

    def _complete_all(self, error: MansioError) -> None:
        by_topic, self._by_topic = self._by_topic, {}
        for waiting in by_topic.values():
            waiting.outcome = waiting.outcome or without_traceback(error)
            waiting.notify()
