"""The way to the brokers of a process that has no event loop: a private loop without a thread.

Spark's readers and writers are plain blocking code in processes that Spark keeps and uses again. A door lives as long
as its process, so the next task finds its connections open; its loop turns only while somebody waits for an answer. A
request that was sent before stays on the wire meanwhile, and its answer waits in the socket.

Always true: a door is used by the thread that opened it and by no other; a process that was forked opens its own, and
leaves its parent's alone, whose sockets it must not touch.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mansio.errors import TopicAlreadyExists, UnknownTopicOrPartition
from mansio.net.cluster import Cluster
from mansio.net.connection import ConnectionOptions
from mansio.net.retry import raise_for
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from mansio.net.metadata import TopicView

T = TypeVar("T")

CLIENT_ID = "mansio-spark"
CONNECT_TIMEOUT_MS = 10_000
"""How long a cluster may be out of reach before that is an error."""
REQUEST_TIMEOUT_MS = 30_000


class SyncClient:
    """One cluster, reached from blocking code."""

    def __init__(self, bootstrap_servers: str) -> None:
        """Connect. Raises `ConnectionLost` when no broker answers, `ConfigError` for what is no address."""
        self._loop = _new_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.cluster: Cluster = self.run(_open(bootstrap_servers))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self._loop.run_until_complete(work)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine and let it come as far as its first wait; `wait` for the rest."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.run(_run_ready_callbacks())
        return task

    def wait(self, task: asyncio.Task[T]) -> T:
        """The outcome of what `begin` started."""
        return self._loop.run_until_complete(task)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """End what `begin` started; its answer is thrown away when it comes."""
        task.cancel()
        if not self._loop.is_running() and not self._loop.is_closed():
            self.run(_run_ready_callbacks())

    def close(self) -> None:
        """End all connections. The door of a process that only ends need not be closed."""
        if not self._loop.is_closed():
            for task in self._tasks:
                task.cancel()
            self.run(self.cluster.close())
            self.run(_run_ready_callbacks())
            self._loop.close()


class _ThreadClients(threading.local):
    """The doors of one thread, and of which process they are."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.opened: dict[str, SyncClient] = {}


_thread_clients = _ThreadClients()
_inherited_clients: list[dict[str, SyncClient]] = []
"""Doors of the process this one was forked from: kept, because to let go of one would close its sockets."""


def sync_client(bootstrap_servers: str) -> SyncClient:
    """The door of this thread to the cluster at these addresses, opened on first use."""
    if _thread_clients.process != os.getpid():
        _inherited_clients.append(_thread_clients.opened)
        _thread_clients.process, _thread_clients.opened = os.getpid(), {}
    found = _thread_clients.opened.get(bootstrap_servers)
    if found is None:
        found = _thread_clients.opened[bootstrap_servers] = SyncClient(bootstrap_servers)
    return found


def close_sync_clients() -> None:
    """Close all doors of this thread; the next use opens new ones."""
    opened, _thread_clients.opened = _thread_clients.opened, {}
    for one in opened.values():
        one.close()


async def _open(bootstrap_servers: str) -> Cluster:
    cluster = Cluster(
        bootstrap_servers,
        options=ConnectionOptions(CLIENT_ID, CONNECT_TIMEOUT_MS, REQUEST_TIMEOUT_MS),
        auto_create_topics=False,
    )
    try:
        await cluster.start()
    except BaseException:
        await cluster.close()
        raise
    return cluster


async def _run_ready_callbacks() -> None:
    """Two turns of the loop: enough for a task to send what it has to send over an open connection."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def _new_loop() -> asyncio.AbstractEventLoop:
    """A uvloop loop, or asyncio's own where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# -- topics --------


CREATE_TIMEOUT_MS: Final = 30_000
KEEP_FOR_EVER: Final = {"retention.ms": "-1", "retention.bytes": "-1"}
"""For records that come with old timestamps: an ordinary retention time would delete them minutes later."""


def find_topic(client: SyncClient, topic: str) -> TopicView:
    """Asked anew: what this process knows may be of a topic that was deleted since. `UnknownTopicOrPartition`."""
    client.cluster.mark_stale((topic,))
    return client.run(client.cluster.topic(topic))


def ensure_topic(
    client: SyncClient, topic: str, partitions: int, settings: Mapping[str, str] | None = None
) -> TopicView:
    """A topic as it is, or made with so many partitions and these settings. Raises what the broker says against it."""
    client.cluster.mark_stale((topic,))
    try:
        return client.run(client.cluster.topic(topic, wait_ms=0))
    except UnknownTopicOrPartition:
        configs = [{"name": name, "value": value} for name, value in (settings or {}).items()]
        wanted = {"name": topic, "num_partitions": partitions, "replication_factor": -1, "configs": configs}
        request = {"topics": [wanted], "timeout_ms": CREATE_TIMEOUT_MS, "validate_only": False}
        with suppress(
            TopicAlreadyExists
        ):  # somebody else made it just now; it is used as any other that is there
            client.run(
                client.cluster.request_controller(ApiKey.CREATE_TOPICS, request, check=_raise_create_error)
            )
        return find_topic(client, topic)


def _raise_create_error(answer: Any) -> None:
    for topic in answer.topics:
        raise_for(topic.error_code, topic.error_message)
