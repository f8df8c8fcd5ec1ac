"""The first records of a topic wait until it is known, and leave in the order in which they came.

Owns who waits for which topic. Always true: one look-up per topic serves all that wait; they go on in their order, and
as long as any of them has not, whoever comes later waits behind them; a look-up that fails tells all.
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
    """Those who wait for one topic, and what came of the look-up."""

    __slots__ = ("length", "outcome", "waiters")

    def __init__(self) -> None:
        self.length = 0
        """Who has not gone on yet, told or not."""
        self.waiters: deque[asyncio.Future[TopicView]] = deque()
        self.outcome: TopicView | MansioError | None = None

    def notify(self) -> None:
        """Let all that wait go on, which they do in the loop's next turn."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if waiter.done():
                continue
            if isinstance(self.outcome, MansioError):
                waiter.set_exception(
                    type(self.outcome)(str(self.outcome))
                )  # of its own: each is raised elsewhere
            elif self.outcome is not None:
                waiter.set_result(self.outcome)


class MetadataWaiters:
    """Topics that one producer has to look up. All methods belong to the loop's thread."""

    def __init__(self, cluster: Cluster, loop: asyncio.AbstractEventLoop) -> None:
        self._cluster = cluster
        self._loop = loop
        self._tasks = Tasks(loop, lambda error: self._complete_all(client_failed(error)))
        self._by_topic: dict[str, _TopicWaiters] = {}

    def cached(self, topic: str) -> TopicView | None:
        """What is known of a topic, unless others wait for it already."""
        if self._by_topic and topic in self._by_topic:
            return None
        return self._cluster.cached_topic(topic)

    async def find(self, topic: str) -> TopicView:
        """Ask for a topic that is not known, or has grown perhaps. `UnknownTopicOrPartition` when it is not there."""
        line = self._by_topic.get(topic)
        if line is None:
            line = self._by_topic[topic] = _TopicWaiters()
            self._tasks.spawn(self._ask(topic, line))
        elif line.outcome is not None:
            self._loop.call_soon(line.notify)  # after those before have gone on
        waiter: asyncio.Future[TopicView] = self._loop.create_future()
        line.waiters.append(waiter)
        line.length += 1
        try:
            return await waiter
        finally:
            line.length -= 1
            if not line.length and line.outcome is not None and self._by_topic.get(topic) is line:
                del self._by_topic[topic]

    async def close(self) -> None:
        """Whoever still waits gets `ConnectionLost`."""
        await self._tasks.end()
        self._complete_all(ConnectionLost("the producer is closed"))

    async def _ask(self, topic: str, line: _TopicWaiters) -> None:
        self._cluster.mark_stale((topic,))
        try:
            line.outcome = await self._cluster.topic(topic)
        except MansioError as error:
            line.outcome = error
        if not line.length and self._by_topic.get(topic) is line:
            del self._by_topic[topic]  # all were cancelled
        line.notify()

    def _complete_all(self, error: MansioError) -> None:
        lines, self._by_topic = self._by_topic, {}
        for line in lines.values():
            line.outcome = line.outcome or error
            line.notify()
