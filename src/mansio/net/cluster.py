"""Client of a cluster: metadata cache, request routing and retries.

Keeps the list of brokers (bootstrap addresses, then metadata), the metadata cache, the coordinators of groups, and one
connection per broker and *channel*. A broker answers the requests of one connection in order, so channels separate
requests that a broker holds on purpose (fetches, joins) from those that must not be delayed (heartbeats).

Invariants:
* Metadata requested after a failure is newer than the failure.
* At most one Metadata request is in progress, and at most one connection attempt per broker and channel.
* No background task runs.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, TypeVar

from mansio.errors import (
    ClusterAuthorizationFailed,
    ConnectionLost,
    CoordinatorNotAvailable,
    IllegalSaslState,
    LeaderNotAvailable,
    MansioError,
    NotController,
    NotCoordinator,
    RequestTimedOut,
    TlsFailed,
    TopicAuthorizationFailed,
    UnknownTopicOrPartition,
)
from mansio.net.addresses import parse_addresses
from mansio.net.connection import DEFAULT_OPTIONS, Connection, ConnectionOptions
from mansio.net.metadata import Node, TopicMetadata, topic_metadata
from mansio.net.retry import DEFAULT_BACKOFF, call_with_retries, client_error_for_code, raise_for_code
from mansio.tracebacks import copied, without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from mansio.net.connection import BrokerConnection
    from mansio.ports import Backoff
    from mansio.wire.topic_partition import TopicPartition

    Connect = Callable[[Node, str, ConnectionOptions, BrokerConnection | None], Awaitable[BrokerConnection]]
    """Opens a connection to a broker on a channel. The last argument: an open connection to it, if there is one, whose
    API versions the new one takes. Raises `ConnectionLost`."""

T = TypeVar("T")

TOPIC_WAIT_MS = 1_000
"""How long metadata of an unknown topic is requested again, because the topic may just have been created."""
METADATA_AGE_MS_MAX = 300_000
"""Age at which cached metadata is requested again (Kafka's `metadata.max.age.ms`)."""
UNKNOWN_TOPIC_OR_PARTITION = 3
"""Error code of the Kafka protocol."""
NO_BROKER_REMEDY = "start a broker with `mansio serve`, or give the address of one as bootstrap servers"
USER_REMEDY = "give user and password, MANSIO_USER and MANSIO_PASSWORD, or a context (mansio context add)"
GROUP_KEY_TYPE = 0
"""`key_type` of a FindCoordinator request for a group."""
COORDINATORS_MAX = 1_000
"""Number of known coordinators at which all of them are forgotten."""
TRANSACTION_KEY_TYPE = 1
"""`key_type` of a FindCoordinator request for a transactional id."""
SCHEMAS_KEY_TYPE = 100
"""`key_type` of a FindCoordinator request for the schema registry, an addition of Mansio."""
_KEY_TYPES = {GROUP_KEY_TYPE: "group", TRANSACTION_KEY_TYPE: "transactional id", SCHEMAS_KEY_TYPE: "topic"}
UNKNOWN_NODE = -1
"""Node id of a broker of which only the address is known."""
_NEVER = float("-inf")
"""Fetch time of metadata that is marked stale; earlier than any time of the loop's clock."""


class Cluster:
    """Client of one cluster: metadata, connections, routing and retries of requests.

    An object belongs to the event loop on which it was created, and must be closed with `close()`.
    """

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
        connect: Connect | None = None,
    ) -> None:
        """`connect`: opens a connection to a broker, by default one over a socket."""
        self._open: Connect = connect or _connect_socket
        self.bootstrap_servers: list[tuple[str, int]] = parse_addresses(bootstrap_servers)
        self.options = options
        self.backoff = backoff
        self.retry_timeout_ms = retry_timeout_ms
        self.topic_wait_ms = topic_wait_ms
        self.metadata_age_ms_max = metadata_age_ms_max
        self.auto_create_topics = auto_create_topics
        self.nodes: dict[int, Node] = {}
        self.cluster_id: str | None = None
        self.controller_id: int = -1
        self._topics: dict[str, tuple[float, TopicMetadata]] = {}
        self._failed: dict[str, MansioError] = {}
        self._coordinators: dict[tuple[int, str], Node] = {}
        """(key type, group or transactional id) -> coordinator."""
        self._connections: dict[tuple[str, int, str], BrokerConnection] = {}
        self._connecting: dict[tuple[str, int, str], asyncio.Lock] = {}
        self._refreshing = asyncio.Lock()
        self._is_closed = False

    # -- connections --------

    async def start(self) -> None:
        """Connect to any broker and fetch the metadata. Raises `ConnectionLost` if none responds in time."""
        # Import the message schemas first, so that the import does not count towards the timeout.
        messages.merged_schema(ApiKey.METADATA, "request")
        try:
            await call_with_retries(
                lambda: self.refresh_metadata(()),
                timeout_ms=self.options.connect_timeout_ms,
                backoff=self.backoff,
            )
        except ConnectionLost as error:
            raise ConnectionLost(f"{error.message}; {NO_BROKER_REMEDY}") from error.__cause__

    async def close(self) -> None:
        """Close all connections; pending requests fail with `ConnectionLost`."""
        self._is_closed = True
        connections = list(self._connections.values())
        self._connections.clear()
        await asyncio.gather(*(connection.close() for connection in connections))

    async def connection(self, node_id: int, channel: str = "main") -> BrokerConnection:
        """Return the connection to one broker on a channel; opens it if necessary. Raises `ConnectionLost` if that
        fails or the broker is not in the cluster."""
        node = self.nodes.get(node_id)
        if node is None:
            await self.refresh_metadata(())
            node = self.nodes.get(node_id)
            if node is None:
                raise ConnectionLost(f"broker {node_id} is not in the cluster")
        return await self._connect(node, channel)

    def existing_connection(self, node_id: int, channel: str = "main") -> BrokerConnection | None:
        """Return the open connection to one broker on a channel, or None. Does no I/O; used on hot paths."""
        node = self.nodes.get(node_id)
        if node is None:
            return None
        connection = self._connections.get((node.host, node.port, channel))
        return None if connection is None or connection.closed else connection

    async def any_connection(self) -> BrokerConnection:
        """Return a connection to any broker: an open connection if there is one, else a new connection to the first
        broker that accepts, in random order. Raises `ConnectionLost` if none does, or `TlsFailed` if the reason is the
        TLS of one of them, for example an expired certificate."""
        for (_, _, channel), connection in self._connections.items():
            if channel == "main" and not connection.closed:
                return connection
        known = {(node.host, node.port): node for node in self.nodes.values()}
        addresses = [*known]
        random.shuffle(addresses)
        lost: MansioError = ConnectionLost("no broker to connect to")
        failed: MansioError | None = None
        for address in dict.fromkeys(
            [*addresses, *random.sample(self.bootstrap_servers, len(self.bootstrap_servers))]
        ):
            try:
                return await self._connect(known.get(address, Node(UNKNOWN_NODE, *address)), "main")
            except ConnectionLost as error:
                lost = without_traceback(error)
            except TlsFailed as error:
                failed = without_traceback(error)
        raise copied(failed or lost)

    async def close_channel(self, channel: str) -> None:
        """Close the connections of one channel; their pending requests fail with `ConnectionLost`."""
        for key in [key for key in self._connections if key[2] == channel]:
            await self._connections.pop(key).close()

    async def _connect(self, node: Node, channel: str) -> BrokerConnection:
        key = (node.host, node.port, channel)
        connection = self._connections.get(key)
        if connection is not None and not connection.closed:
            return connection
        async with self._connecting.setdefault(key, asyncio.Lock()):
            connection = self._connections.get(key)
            if connection is None or connection.closed:
                self._check_open()
                main = self._connections.get((node.host, node.port, "main"))
                connection = await self._open(node, channel, self.options, main)
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

    async def refresh_metadata(self, topics: Iterable[str] | None, *, may_create: bool = True) -> None:
        """Fetch the list of brokers and the metadata of `topics` (None: of all topics).

        With `may_create` and `auto_create_topics` the broker may create missing topics, if it is configured so.
        Concurrent callers that name the same topics share one response.
        """
        wanted = None if topics is None else set(topics)
        requested = asyncio.get_running_loop().time()
        async with self._refreshing:
            if wanted and all(self._fetched_since(topic, requested) for topic in wanted):
                return
            await self._fetch_metadata(wanted, may_create=may_create)

    def _fetched_since(self, topic: str, time: float) -> bool:
        cached = self._topics.get(topic)
        return cached is not None and cached[0] >= time

    async def _fetch_metadata(self, wanted: set[str] | None, *, may_create: bool) -> None:
        connection = await self.any_connection()
        fetched = asyncio.get_running_loop().time()
        fields = {
            "topics": None if wanted is None else [{"name": name} for name in sorted(wanted)],
            "allow_auto_topic_creation": may_create and self.auto_create_topics,
        }
        response = await connection.request(ApiKey.METADATA, fields)
        if response.error_code == IllegalSaslState.kafka_code and self.options.sasl is None:
            host, port = connection.address
            raise IllegalSaslState(f"{host}:{port} requires a user and a password: {USER_REMEDY}")
        raise_for_code(response.error_code)
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
                raise_for_code(topic.error_code, f"topic {topic.name}: {_topic_error_text(topic.error_code)}")
                self._topics[topic.name] = (fetched, topic_metadata(topic))
            except MansioError as error:
                self._failed[topic.name] = without_traceback(error)

    def cached_topic(self, name: str) -> TopicMetadata | None:
        """Return the cached metadata of a topic, however old; None if there is none. Does no I/O; used on hot paths."""
        cached = self._topics.get(name)
        return None if cached is None else cached[1]

    def cached_leader(self, topic: str, partition: int) -> tuple[int, float] | None:
        """(node id of a partition's leader, time at which the metadata was fetched) from the cache; None if the leader
        is unknown or the metadata is marked stale. Does no I/O; used on hot paths."""
        cached = self._topics.get(topic)
        if cached is None:
            return None
        fetched, view = cached
        if fetched == _NEVER or partition >= len(view.partitions):
            return None
        leader = view.partitions[partition].leader
        return (leader, fetched) if leader in self.nodes else None

    async def topic(
        self, name: str, *, wait_ms: float | None = None, may_create: bool = True
    ) -> TopicMetadata:
        """Metadata of a topic, from the cache if it is no older than `metadata_age_ms_max`.

        Metadata of an unknown topic is requested again for `wait_ms` (default: `topic_wait_ms`), because the topic may
        just have been created. Then `UnknownTopicOrPartition` is raised. `may_create`: see `refresh_metadata`.
        """
        newest = asyncio.get_running_loop().time() - self.metadata_age_ms_max / 1000
        if self._fetched_since(name, newest):
            return self._topics[name][1]

        async def request_topic() -> TopicMetadata:
            await self.refresh_metadata((name,), may_create=may_create)
            metadata = self.cached_topic(name)
            if metadata is None:
                raise self._failed.pop(name, None) or UnknownTopicOrPartition(f"there is no topic {name}")
            return metadata

        loop = asyncio.get_running_loop()
        give_up = loop.time() + (self.topic_wait_ms if wait_ms is None else wait_ms) / 1000

        def should_retry(error: MansioError) -> bool:
            if isinstance(error, UnknownTopicOrPartition) and loop.time() >= give_up:
                return False
            return error.retriable and not self._is_closed

        return await call_with_retries(
            request_topic, timeout_ms=self.retry_timeout_ms, backoff=self.backoff, should_retry=should_retry
        )

    async def topics(self) -> dict[str, TopicMetadata]:
        """Metadata of all topics by name, requested from a broker and not taken from the cache."""
        await self.retry(lambda: self.refresh_metadata(None))
        return {name: view for name, (_, view) in sorted(self._topics.items())}

    def mark_stale(self, topics: Iterable[str]) -> None:
        """Mark the cached metadata of topics as stale, so that `topic` and `leader` fetch it again."""
        for name in topics:
            cached = self._topics.get(name)
            if cached is not None:
                self._topics[name] = (_NEVER, cached[1])

    async def leader(self, topic: str, partition: int) -> int:
        """Node id of a partition's leader, from the cache if possible. Raises `UnknownTopicOrPartition`, or
        `LeaderNotAvailable` if the partition has no leader."""
        view = await self.topic(topic, may_create=False)
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
        not_retried: tuple[type[MansioError], ...] = (),
    ) -> T:
        """Call `attempt` until it succeeds, with this client's backoff and retry timeout; see `call_with_retries`.

        Errors of the classes in `not_retried` are raised immediately.
        """
        return await call_with_retries(
            attempt,
            timeout_ms=self.retry_timeout_ms if timeout_ms is None else timeout_ms,
            backoff=self.backoff,
            should_retry=lambda e: e.retriable and not self._is_closed and not isinstance(e, not_retried),
        )

    async def request(
        self,
        api_key: int,
        fields: Mapping[str, Any],
        *,
        node_id: int | None = None,
        check: Callable[[Any], None] | None = None,
        timeout_ms: float | None = None,
        retry_unknown_topic: bool = True,
    ) -> Any:
        """Send a request to broker `node_id` (None: to any broker), and return the response.

        `check(response)` raises the errors that the response contains. Retriable errors are retried for `timeout_ms`;
        `UnknownTopicOrPartition` is retried only with `retry_unknown_topic`.
        """

        async def attempt() -> Any:
            connection = await (self.any_connection() if node_id is None else self.connection(node_id))
            return _check_response(await connection.request(api_key, fields), check)

        return await self.retry(
            attempt,
            timeout_ms=timeout_ms,
            not_retried=_errors_not_retried(retry_unknown_topic=retry_unknown_topic),
        )

    async def request_controller(
        self,
        api_key: int,
        fields: Mapping[str, Any],
        *,
        check: Callable[[Any], None] | None = None,
        retry_unknown_topic: bool = True,
    ) -> Any:
        """Send a request to the current controller, and return the response. `check` and retries: see `request`."""

        async def attempt() -> Any:
            if self.controller_id not in self.nodes:
                await self.refresh_metadata(())
            known = self.controller_id in self.nodes
            try:
                connection = await (self.connection(self.controller_id) if known else self.any_connection())
                return _check_response(await connection.request(api_key, fields), check)
            except (NotController, ConnectionLost):
                self.controller_id = -1
                raise

        return await self.retry(
            attempt, not_retried=_errors_not_retried(retry_unknown_topic=retry_unknown_topic)
        )

    async def coordinator(
        self, key: str, channel: str = "group", *, key_type: int = GROUP_KEY_TYPE
    ) -> BrokerConnection:
        """Return the connection to the coordinator of a group, or with `TRANSACTION_KEY_TYPE` of a transactional id, on
        a channel. Looks up the coordinator and opens the connection if necessary, without retries."""
        node = await self.coordinator_node(key, key_type=key_type)
        return await self._connect(node, channel)

    async def coordinator_node(self, key: str, *, key_type: int = GROUP_KEY_TYPE) -> Node:
        """Return the coordinator of a group or transactional id; looks it up if necessary, without retries."""
        node = self._coordinators.get((key_type, key))
        if node is None:
            connection = await self.any_connection()
            response = await connection.request(
                ApiKey.FIND_COORDINATOR,
                {"key": key, "key_type": key_type, "coordinator_keys": [key]},
            )
            found = response.coordinators[0] if response.coordinators else response
            raise_for_code(found.error_code, found.error_message)
            if not found.host:
                raise CoordinatorNotAvailable(f"{_KEY_TYPES.get(key_type, '')} {key} has no coordinator")
            if len(self._coordinators) >= COORDINATORS_MAX:
                self._coordinators.clear()
            node = self._coordinators[key_type, key] = Node(found.node_id, found.host, found.port)
        return node

    def forget_coordinator(self, key: str, *, key_type: int = GROUP_KEY_TYPE) -> None:
        """Remove the coordinator of a group or transactional id from the cache, so that the next request looks it up
        again."""
        self._coordinators.pop((key_type, key), None)

    async def request_coordinator(
        self,
        key: str,
        api_key: int,
        fields: Mapping[str, Any],
        *,
        key_type: int = GROUP_KEY_TYPE,
        check: Callable[[Any], None] | None = None,
        channel: str = "group",
        timeout_ms: float | None = None,
        retry_timeout_ms: float | None = None,
        not_retried: tuple[type[MansioError], ...] = (),
    ) -> Any:
        """Send a request to the current coordinator of a group, or of another key of `key_type`, and return the
        response.

        `timeout_ms` bounds one attempt, `retry_timeout_ms` all attempts. `check`: see `request`; `not_retried`: see
        `retry`.
        """

        async def attempt() -> Any:
            try:
                connection = await self.coordinator(key, channel, key_type=key_type)
                return _check_response(
                    await connection.request(api_key, fields, timeout_ms=timeout_ms), check
                )
            except (NotCoordinator, CoordinatorNotAvailable, ConnectionLost, RequestTimedOut):
                self.forget_coordinator(
                    key, key_type=key_type
                )  # a coordinator that does not respond may have been replaced
                raise

        return await self.retry(attempt, timeout_ms=retry_timeout_ms, not_retried=not_retried)


async def _connect_socket(
    node: Node, _channel: str, options: ConnectionOptions, negotiated: BrokerConnection | None
) -> BrokerConnection:
    return await Connection.open(node.host, node.port, options, negotiated=negotiated)


def _errors_not_retried(*, retry_unknown_topic: bool) -> tuple[type[MansioError], ...]:
    return () if retry_unknown_topic else (UnknownTopicOrPartition,)


def _check_response(response: Any, check: Callable[[Any], None] | None) -> Any:
    if check is not None:
        check(response)
    return response


def _topic_error_text(code: int) -> str:
    """Message for a topic's error code; a Metadata response has codes without messages."""
    if code == UNKNOWN_TOPIC_OR_PARTITION:
        return "there is no such topic; create it or correct the name"
    if code == TopicAuthorizationFailed.kafka_code:
        return "the user is not allowed to DESCRIBE it, or to CREATE it if it does not exist"
    return client_error_for_code(code).message if code else ""


def check_top_level_error(response: Any) -> None:
    """Raise the error of a response's top-level error code, if there is one. Used as `check` of `Cluster.request`."""
    raise_for_code(response.error_code, getattr(response, "error_message", None))


def check_new_producer_id(response: Any) -> None:
    """Raise the error of an InitProducerId response without a transactional id. Used as `check` of `Cluster.request`.
    The response has no message, and its code for a user who may write nothing is that of the cluster (KIP-679)."""
    if response.error_code == ClusterAuthorizationFailed.kafka_code:
        raise ClusterAuthorizationFailed("the user is not allowed to WRITE any topic")
    raise_for_code(response.error_code)


def group_by_topic(partitions: Iterable[TopicPartition]) -> dict[str, Sequence[int]]:
    """Partition indexes by topic name."""
    grouped: dict[str, list[int]] = {}
    for topic, partition in partitions:
        grouped.setdefault(topic, []).append(partition)
    return dict(grouped)
