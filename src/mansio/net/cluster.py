"""Client of a cluster: metadata cache, request routing and retries over any number of brokers.

Keeps the list of brokers (bootstrap addresses, then metadata), the metadata cache, the coordinators of groups, and one
connection per broker and *channel*. Channels separate requests that a broker holds on purpose (fetches, joins) from
those that must not be delayed (heartbeats): a broker answers the requests of a connection in order.

Invariants:
* Metadata requested after a failure is newer than the failure.
* At most one metadata request, and one connection attempt per broker and channel, are in progress.
* No background task runs.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, TypeVar

from mansio.errors import (
    ConnectionLost,
    CoordinatorNotAvailable,
    LeaderNotAvailable,
    MansioError,
    NotController,
    NotCoordinator,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from mansio.net.addresses import parse_addresses
from mansio.net.connection import DEFAULT_OPTIONS, Connection, ConnectionOptions
from mansio.net.metadata import Node, TopicView, topic_view
from mansio.net.retry import DEFAULT_BACKOFF, error_for, raise_for, retrying
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from mansio.ports import Backoff
    from mansio.wire.topic_partition import TopicPartition

T = TypeVar("T")

TOPIC_WAIT_MS = 1_000
METADATA_AGE_MS_MAX = 300_000
UNKNOWN_TOPIC_OR_PARTITION = 3
GROUP_KEY = 0
_NEVER = float("-inf")
"""Fetch time of stale metadata: older than any other."""


class Cluster:
    """Client of one cluster. Belongs to one event loop; must be closed with `close()`."""

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str],
        *,
        options: ConnectionOptions = DEFAULT_OPTIONS,
        backoff: Backoff = DEFAULT_BACKOFF,
        retry_timeout_ms: float = 30_000,
        topic_wait_ms: float = TOPIC_WAIT_MS,
        metadata_age_ms_max: float = METADATA_AGE_MS_MAX,
        auto_create_topics: bool = True,
    ) -> None:
        self.bootstrap_servers = parse_addresses(bootstrap_servers)
        self.options = options
        self.backoff = backoff
        self.retry_timeout_ms = retry_timeout_ms
        self.topic_wait_ms = topic_wait_ms
        self.metadata_age_ms_max = metadata_age_ms_max
        self.auto_create_topics = auto_create_topics
        self.nodes: dict[int, Node] = {}
        self.cluster_id: str | None = None
        self.controller_id = -1
        self._topics: dict[str, tuple[float, TopicView]] = {}
        self._failed: dict[str, MansioError] = {}
        self._coordinators: dict[str, Node] = {}
        self._connections: dict[tuple[str, int, str], Connection] = {}
        self._connecting: dict[tuple[str, int, str], asyncio.Lock] = {}
        self._refreshing = asyncio.Lock()
        self._is_closed = False

    # -- connections --------

    async def start(self) -> None:
        """Connect to any broker and fetch the metadata. Raises `ConnectionLost` if none responds in time."""
        # Import the schemas first: that time must not count as broker latency.
        messages.merged_schema(ApiKey.METADATA, "request")
        await retrying(
            lambda: self.refresh(()), timeout_ms=self.options.connect_timeout_ms, backoff=self.backoff
        )

    async def close(self) -> None:
        """Close all connections; pending requests fail with `ConnectionLost`."""
        self._is_closed = True
        connections = list(self._connections.values())
        self._connections.clear()
        await asyncio.gather(*(connection.close() for connection in connections))

    async def connection(self, node_id: int, channel: str = "main") -> Connection:
        """The connection to one broker, opened if necessary."""
        node = self.nodes.get(node_id)
        if node is None:
            await self.refresh(())
            node = self.nodes.get(node_id)
            if node is None:
                raise ConnectionLost(f"broker {node_id} is not in the cluster")
        return await self._connect(node.host, node.port, channel)

    def open_connection(self, node_id: int, channel: str = "main") -> Connection | None:
        """The connection to one broker if it is already open (hot path)."""
        node = self.nodes.get(node_id)
        if node is None:
            return None
        connection = self._connections.get((node.host, node.port, channel))
        return None if connection is None or connection.closed else connection

    async def any_connection(self) -> Connection:
        """A connection to any broker: an open one, else the first broker that accepts."""
        for (_, _, channel), connection in self._connections.items():
            if channel == "main" and not connection.closed:
                return connection
        known = [(node.host, node.port) for node in self.nodes.values()]
        random.shuffle(known)
        last: MansioError = ConnectionLost("no broker to connect to")
        for host, port in dict.fromkeys(
            [*known, *random.sample(self.bootstrap_servers, len(self.bootstrap_servers))]
        ):
            try:
                return await self._connect(host, port, "main")
            except ConnectionLost as error:
                last = error
        raise last

    async def close_channel(self, channel: str) -> None:
        """Close the connections of one channel; their pending requests fail with `ConnectionLost`."""
        for key in [key for key in self._connections if key[2] == channel]:
            await self._connections.pop(key).close()

    async def _connect(self, host: str, port: int, channel: str) -> Connection:
        key = (host, port, channel)
        connection = self._connections.get(key)
        if connection is not None and not connection.closed:
            return connection
        async with self._connecting.setdefault(key, asyncio.Lock()):
            connection = self._connections.get(key)
            if connection is None or connection.closed:
                self._check_open()
                connection = await Connection.open(host, port, self.options)
                try:
                    self._check_open()
                except ConnectionLost:
                    await connection.close()
                    raise
                self._connections[key] = connection
            return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionLost("the client is closed")

    # -- metadata --------

    async def refresh(self, topics: Iterable[str] | None) -> None:
        """Fetch metadata of `topics` (empty: only brokers; None: all topics). Concurrent callers share a response."""
        wanted = None if topics is None else set(topics)
        requested = asyncio.get_running_loop().time()
        async with self._refreshing:
            if wanted and all(self._fetched_since(topic, requested) for topic in wanted):
                return
            await self._fetch_metadata(wanted)

    def _fetched_since(self, topic: str, time: float) -> bool:
        cached = self._topics.get(topic)
        return cached is not None and cached[0] >= time

    async def _fetch_metadata(self, wanted: set[str] | None) -> None:
        connection = await self.any_connection()
        fetched = asyncio.get_running_loop().time()
        fields = {
            "topics": None if wanted is None else [{"name": name} for name in sorted(wanted)],
            "allow_auto_topic_creation": self.auto_create_topics,
        }
        response = await connection.request(ApiKey.METADATA, fields)
        raise_for(response.error_code)
        self.nodes = {
            broker.node_id: Node(broker.node_id, broker.host, broker.port, broker.rack)
            for broker in response.brokers
        }
        self.cluster_id, self.controller_id = response.cluster_id, response.controller_id
        if wanted is None:
            self._topics.clear()
        for topic in response.topics:
            self._failed.pop(topic.name, None)
            self._topics.pop(topic.name, None)
            try:
                raise_for(topic.error_code, f"topic {topic.name}: {_topic_error_text(topic.error_code)}")
                self._topics[topic.name] = (fetched, topic_view(topic))
            except MansioError as error:
                self._failed[topic.name] = error

    def cached_topic(self, name: str) -> TopicView | None:
        """Cached metadata of a topic regardless of its age (hot path)."""
        cached = self._topics.get(name)
        return None if cached is None else cached[1]

    def cached_leader(self, topic: str, partition: int) -> tuple[int, float] | None:
        """(node id of the leader, time of the metadata) of a partition; None if unknown or marked stale (hot path)."""
        cached = self._topics.get(topic)
        if cached is None:
            return None
        fetched, view = cached
        if fetched == _NEVER or partition >= len(view.partitions):
            return None
        leader = view.partitions[partition].leader
        return (leader, fetched) if leader in self.nodes else None

    async def topic(self, name: str, *, wait_ms: float | None = None) -> TopicView:
        """Metadata of a topic, from the cache while it is fresh. An unknown topic is requested again for `wait_ms`,
        because it may just have been created; then `UnknownTopicOrPartition` is raised."""
        newest = asyncio.get_running_loop().time() - self.metadata_age_ms_max / 1000
        if self._fetched_since(name, newest):
            return self._topics[name][1]

        async def ask() -> TopicView:
            await self.refresh((name,))
            view = self.cached_topic(name)
            if view is None:
                raise self._failed.get(name) or UnknownTopicOrPartition(f"there is no topic {name}")
            return view

        loop = asyncio.get_running_loop()
        give_up = loop.time() + (self.topic_wait_ms if wait_ms is None else wait_ms) / 1000

        def worth_retrying(error: MansioError) -> bool:
            if isinstance(error, UnknownTopicOrPartition) and loop.time() >= give_up:
                return False
            return error.retriable and not self._is_closed

        return await retrying(
            ask, timeout_ms=self.retry_timeout_ms, backoff=self.backoff, worth_retrying=worth_retrying
        )

    async def topics(self) -> dict[str, TopicView]:
        """Metadata of all topics, without the cache."""
        await self.retry(lambda: self.refresh(None))
        return {name: view for name, (_, view) in sorted(self._topics.items())}

    def mark_stale(self, topics: Iterable[str]) -> None:
        """Mark cached metadata as wrong; it is fetched again before the next use."""
        for name in topics:
            cached = self._topics.get(name)
            if cached is not None:
                self._topics[name] = (_NEVER, cached[1])

    async def leader(self, topic: str, partition: int) -> int:
        """Node id of the current leader of a partition."""
        view = await self.topic(topic)
        try:
            return view.leader(partition)
        except (UnknownTopicOrPartition, LeaderNotAvailable):
            self.mark_stale((topic,))
            return (await self.topic(topic)).leader(partition)

    async def group_by_leader(self, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
        """Partitions grouped by the node id of their leader."""
        grouped: dict[int, list[TopicPartition]] = {}
        for partition in partitions:
            grouped.setdefault(await self.leader(*partition), []).append(partition)
        return grouped

    # -- requests --------

    async def retry(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        timeout_ms: float | None = None,
        final: tuple[type[MansioError], ...] = (),
    ) -> T:
        """`retrying` with this client's backoff and timeout; errors in `final` are not retried."""
        return await retrying(
            attempt,
            timeout_ms=self.retry_timeout_ms if timeout_ms is None else timeout_ms,
            backoff=self.backoff,
            worth_retrying=lambda e: e.retriable and not self._is_closed and not isinstance(e, final),
        )

    async def request(
        self,
        api_key: int,
        fields: Mapping[str, Any],
        *,
        node_id: int | None = None,
        check: Callable[[Any], None] | None = None,
        timeout_ms: float | None = None,
        retry_unknown: bool = True,
    ) -> Any:
        """Send a request to one broker, or to any. `check(response)` raises the response's errors; retriable ones are
        retried, UnknownTopicOrPartition only with `retry_unknown`."""

        async def attempt() -> Any:
            connection = await (self.any_connection() if node_id is None else self.connection(node_id))
            return _checked(await connection.request(api_key, fields), check)

        return await self.retry(attempt, timeout_ms=timeout_ms, final=_final(retry_unknown=retry_unknown))

    async def request_controller(
        self,
        api_key: int,
        fields: Mapping[str, Any],
        *,
        check: Callable[[Any], None] | None = None,
        retry_unknown: bool = True,
    ) -> Any:
        """Send a request to the current controller."""

        async def attempt() -> Any:
            if self.controller_id not in self.nodes:
                await self.refresh(())
            known = self.controller_id in self.nodes
            try:
                connection = await (self.connection(self.controller_id) if known else self.any_connection())
                return _checked(await connection.request(api_key, fields), check)
            except (NotController, ConnectionLost):
                self.controller_id = -1
                raise

        return await self.retry(attempt, final=_final(retry_unknown=retry_unknown))

    async def coordinator(self, group: str, channel: str = "group") -> Connection:
        """The connection to a group's coordinator. One attempt, without retries."""
        node = self._coordinators.get(group)
        if node is None:
            connection = await self.any_connection()
            response = await connection.request(
                ApiKey.FIND_COORDINATOR, {"key": group, "key_type": GROUP_KEY, "coordinator_keys": [group]}
            )
            found = response.coordinators[0] if response.coordinators else response
            raise_for(found.error_code, found.error_message)
            if not found.host:
                raise CoordinatorNotAvailable(f"group {group} has no coordinator")
            node = self._coordinators[group] = Node(found.node_id, found.host, found.port)
        return await self._connect(node.host, node.port, channel)

    def forget_coordinator(self, group: str) -> None:
        """Drop the cached coordinator of a group."""
        self._coordinators.pop(group, None)

    async def request_coordinator(
        self,
        group: str,
        api_key: int,
        fields: Mapping[str, Any],
        *,
        check: Callable[[Any], None] | None = None,
        channel: str = "group",
        timeout_ms: float | None = None,
        retry_timeout_ms: float | None = None,
        final: tuple[type[MansioError], ...] = (),
    ) -> Any:
        """Send a request to a group's current coordinator, with retries as in `request`."""

        async def attempt() -> Any:
            try:
                connection = await self.coordinator(group, channel)
                return _checked(await connection.request(api_key, fields, timeout_ms=timeout_ms), check)
            except (NotCoordinator, CoordinatorNotAvailable, ConnectionLost, RequestTimedOut):
                self.forget_coordinator(group)  # a coordinator that does not respond may have been replaced
                raise

        return await self.retry(attempt, timeout_ms=retry_timeout_ms, final=final)


def _final(*, retry_unknown: bool) -> tuple[type[MansioError], ...]:
    return () if retry_unknown else (UnknownTopicOrPartition,)


def _checked(response: Any, check: Callable[[Any], None] | None) -> Any:
    if check is not None:
        check(response)
    return response


def _topic_error_text(code: int) -> str:
    """Text of a topic's error code; the response carries none."""
    if code == UNKNOWN_TOPIC_OR_PARTITION:
        return "there is no such topic; create it or correct the name"
    return error_for(code).message if code else ""


def check_top_level(response: Any) -> None:
    """The check for responses with a top-level error code."""
    raise_for(response.error_code, getattr(response, "error_message", None))


def group_by_topic(partitions: Iterable[TopicPartition]) -> dict[str, Sequence[int]]:
    """topic -> partition indexes."""
    grouped: dict[str, list[int]] = {}
    for topic, partition in partitions:
        grouped.setdefault(topic, []).append(partition)
    return dict(grouped)
