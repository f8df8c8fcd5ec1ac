"""Blocking client of a cluster, for Spark's readers and writers, which run without an event loop.

Each client has an event loop of its own, without a thread: the loop runs only while a caller waits. Between two calls a
request stays in flight, and its response waits in the socket's receive buffer. A client lives as long as its process.
Spark reuses its processes, so the next task finds open connections.

Invariants:
* A client is used only by the thread that opened it.
* A forked process opens its own clients and does not touch the sockets of its parent.
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
from mansio.net.contexts import resolve_security
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from mansio.net.metadata import TopicMetadata
    from mansio.net.security_settings import SecuritySettings

T = TypeVar("T")

SPARK_CLIENT_ID = "mansio-spark"
CONNECT_TIMEOUT_MS = 10_000
"""Time after which connecting to an unreachable cluster fails."""
SPARK_TIMEOUT_MS = 30_000


class SyncClient:
    """Blocking client of one cluster."""

    def __init__(self, bootstrap_servers: str, security: SecuritySettings | None = None) -> None:
        """Connect. `security` None: as environment and contexts state. Raises `ConnectionLost` if no broker answers,
        `AuthenticationFailed`, `ConfigError` for an invalid address or setting."""
        self._loop = _new_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.cluster: Cluster = self.run(
            open_cluster(bootstrap_servers, security or resolve_security(bootstrap_servers))
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to completion and return its result."""
        return self._loop.run_until_complete(work)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine and run it to its first suspension; `wait` returns its result."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.run(_run_ready_callbacks())
        return task

    def wait(self, task: asyncio.Task[T]) -> T:
        """Return the result of a task started by `begin`."""
        return self._loop.run_until_complete(task)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task started by `begin`; its response is discarded when it arrives."""
        task.cancel()
        if not self._loop.is_running() and not self._loop.is_closed():
            self.run(_run_ready_callbacks())

    def close(self) -> None:
        """Close all connections. Not required before the process exits."""
        if not self._loop.is_closed():
            for task in self._tasks:
                task.cancel()
            self.run(self.cluster.close())
            self.run(_run_ready_callbacks())
            self._loop.close()


class _ThreadClients(threading.local):
    """The clients of one thread, and the process that opened them."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.opened: dict[tuple[str, SecuritySettings | None], SyncClient] = {}


_thread_clients = _ThreadClients()
_inherited_clients: list[dict[tuple[str, SecuritySettings | None], SyncClient]] = []
"""Clients that a forked process has inherited. They are kept, because deleting one would close its parent's sockets."""


def sync_client(bootstrap_servers: str, security: SecuritySettings | None = None) -> SyncClient:
    """Return the client of this thread for the cluster at these addresses; the first call connects it. `security`: see
    `SyncClient`; a client that connects in another way is another one."""
    if _thread_clients.process != os.getpid():
        _inherited_clients.append(_thread_clients.opened)
        _thread_clients.process, _thread_clients.opened = os.getpid(), {}
    key = bootstrap_servers, security
    found = _thread_clients.opened.get(key)
    if found is None:
        found = _thread_clients.opened[key] = SyncClient(bootstrap_servers, security)
    return found


def close_sync_clients() -> None:
    """Close all clients of this thread. A later call of `sync_client` opens a new one."""
    opened, _thread_clients.opened = _thread_clients.opened, {}
    for one in opened.values():
        one.close()


async def open_cluster(bootstrap_servers: str, security: SecuritySettings) -> Cluster:
    """Connect on the running event loop. Raises the errors of `SyncClient`."""
    cluster = Cluster(
        bootstrap_servers,
        options=ConnectionOptions(
            SPARK_CLIENT_ID,
            CONNECT_TIMEOUT_MS,
            SPARK_TIMEOUT_MS,
            tls=security.tls_context(),
            sasl=security.credentials(),
            detaches_large_frames=True,
        ),
        auto_create_topics=False,
    )
    try:
        await cluster.start()
    except BaseException:
        await cluster.close()
        raise
    return cluster


async def _run_ready_callbacks() -> None:
    """Run the loop for two iterations, in which a task sends its request over an open connection."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop loop, or asyncio's own if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# -- topics --------


CREATE_TOPIC_TIMEOUT_MS: Final = 30_000
UNLIMITED_RETENTION_CONFIG: Final = {"retention.ms": "-1", "retention.bytes": "-1"}
"""Topic settings that disable retention, for records with old timestamps, which retention would delete soon."""


def find_topic(client: SyncClient, topic: str) -> TopicMetadata:
    """Return the current metadata of a topic. Raises `UnknownTopicOrPartition` if the topic does not exist."""
    client.cluster.mark_stale((topic,))
    return client.run(client.cluster.topic(topic))


def ensure_topic(
    client: SyncClient, topic: str, partitions: int, settings: Mapping[str, str] | None = None
) -> TopicMetadata:
    """Metadata of a topic. A missing topic is created with `partitions` partitions and these settings. Raises the
    broker's error.
    """
    client.cluster.mark_stale((topic,))
    try:
        return client.run(client.cluster.topic(topic, wait_ms=0))
    except UnknownTopicOrPartition:
        configs = [{"name": name, "value": value} for name, value in (settings or {}).items()]
        wanted = {"name": topic, "num_partitions": partitions, "replication_factor": -1, "configs": configs}
        request = {"topics": [wanted], "timeout_ms": CREATE_TOPIC_TIMEOUT_MS, "validate_only": False}
        with suppress(TopicAlreadyExists):  # created concurrently; used like any existing topic
            client.run(
                client.cluster.request_controller(ApiKey.CREATE_TOPICS, request, check=_raise_create_error)
            )
        return find_topic(client, topic)


def _raise_create_error(answer: Any) -> None:
    for topic in answer.topics:
        raise_for_code(topic.error_code, topic.error_message)
