"""Clients of the broker itself, for the protocols whose clients may ask any broker: each acts for one caller.

A publisher acts for all requests of one identity, so that their batches are one sequence of one producer. Without an
authorizer, one publisher serves all callers.

As every Mansio client, such a client finds leaders and coordinators, and retries after they have moved. A request to
this broker is a function call, and one to another broker is forwarded, both with the identity of the caller. A broker
of version 0.1 does not support forwarded requests: it gets plain ones, without the identity of the caller.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.api.routing.routed_connections import ForwardedConnection, LocalConnection, Throttle
from mansio.broker.routing.caller import Caller
from mansio.client.client import Client
from mansio.client.producer.produce_request import PRODUCE_CHANNEL
from mansio.config.addresses import Address
from mansio.errors import ConnectionLost
from mansio.net.cluster import UNKNOWN_NODE, Cluster
from mansio.net.connection import ConnectionOptions
from mansio.ports import ForwardedClient, RequestClass
from mansio.wire.api_versions import UNADVERTISED_SINCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.api.kafka.server.listener import KafkaServer
    from mansio.net.broker_dialler import BrokerDialler
    from mansio.net.connection import BrokerConnection, Connection
    from mansio.net.metadata import Node
    from mansio.net.peer_connections import PeerConnectionClasses

ROUTED_TIMEOUT_MS: Final = 30_000
"""Time after which the outcome of a request is unknown."""

PUBLISHER_CLIENT_ID: Final = "mansio-publisher"

PUBLISHERS_MAX: Final = 64
"""Number of publishers that are kept. With more identities at the same time there are more of them; the one that was
idle for longest is closed first, and its identity gets a new producer id when it publishes again."""

SMALL_CHANNELS: Final = frozenset({"main", "group", PRODUCE_CHANNEL})
"""Channels of `Cluster` whose responses are small; the others are those of consumers."""


class _Identity(NamedTuple):
    """The client in whose name a publisher asks the leaders."""

    client: ForwardedClient
    groups: tuple[str, ...]


class _Publisher:
    """A client that publishes, and the number of calls that use it."""

    __slots__ = ("client", "use_count")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.use_count = 0

    @contextmanager
    def use(self) -> Iterator[Client]:
        """Keep the client open meanwhile."""
        self.use_count += 1
        try:
            yield self.client
        finally:
            self.use_count -= 1


class RoutedClients:
    """Clients of one broker. All methods run on its event loop."""

    def __init__(self, server: KafkaServer, peers: PeerConnectionClasses | None) -> None:
        """`peers`: the connections to other brokers; None on a single node."""
        self._server = server
        self._peers = peers
        self._is_closed = False
        self._publishers: OrderedDict[_Identity | None, _Publisher] = OrderedDict()
        """Publishers by identity, the last used one last."""
        self._closing: set[asyncio.Task[None]] = set()
        self._negotiated: dict[tuple[int, str, int], Connection] = {}
        """A connection to each other broker, by id and address."""
        self._negotiating: dict[int, asyncio.Lock] = {}

    def new_throttle(self) -> Throttle:
        """Return the throttle of a client that reads."""
        return Throttle(self._server.service.clock, self._server.service.scheduler)

    def client(self, caller: Caller, throttle: Throttle | None = None) -> Client:
        """Return a client that acts for `caller`. It holds no resources of its own; consumers and producers that it
        creates have to be closed. `throttle`: receives the throttle times of its reads."""
        return self._new_client(caller, caller.client_id, throttle or self.new_throttle())

    @contextmanager
    def publisher(self, caller: Caller) -> Iterator[Client]:
        """Return the client that publishes for the identity of a caller, with one producer id. The leaders ask whether
        the caller may write; its quota is applied before."""
        identity = None
        if self._server.service.authorization.is_enabled:
            identity = _Identity(caller.forwarded, caller.session.groups)
        found = self._publishers.get(identity)
        if found is None:
            client = self._new_client(
                None if identity is None else Caller(caller.session, PUBLISHER_CLIENT_ID, caller.address),
                PUBLISHER_CLIENT_ID,
                self.new_throttle(),
                is_own=True,
            )
            found = self._publishers[identity] = _Publisher(client)
        self._publishers.move_to_end(identity)
        try:
            with found.use() as client:
                yield client
        finally:
            if len(self._publishers) > PUBLISHERS_MAX:
                self._close_idle()

    def _close_idle(self) -> None:
        """Close the publishers that were idle for longest, as many as are too many."""
        idle = [identity for identity, each in self._publishers.items() if not each.use_count]
        for identity in idle[: len(self._publishers) - PUBLISHERS_MAX]:
            closing = asyncio.ensure_future(self._publishers.pop(identity).client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close the publishers and the connections."""
        self._is_closed = True
        publishers, self._publishers = self._publishers, OrderedDict()
        for each in publishers.values():
            await each.client.close(flush=False)
        closing = tuple(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        negotiated, self._negotiated = self._negotiated, {}
        for connection in negotiated.values():
            await connection.close()

    def _new_client(
        self, caller: Caller | None, client_id: str, throttle: Throttle, *, is_own: bool = False
    ) -> Client:
        """`is_own`: the requests are those of this broker, for `caller` or, if it is None, for several ones. They
        create no topic, because Metadata is not asked for with the rights of the caller then."""

        async def connect(
            node: Node, channel: str, options: ConnectionOptions, _main: BrokerConnection | None
        ) -> BrokerConnection:
            if node.node_id in (UNKNOWN_NODE, self._server.service.settings.node_id):
                return LocalConnection(self._server, caller, options, throttle, is_own=is_own)
            return await self._connect(node, channel, caller, options, throttle, is_own=is_own)

        own = self._server.inter_broker_listener.endpoint
        own_address = str(Address("", 0) if own is None else Address(own.host, own.port))
        options = ConnectionOptions(client_id=client_id, request_timeout_ms=ROUTED_TIMEOUT_MS)
        return Client(Cluster(own_address, options=options, connect=connect, auto_create_topics=not is_own))

    async def _connect(
        self,
        node: Node,
        channel: str,
        caller: Caller | None,
        options: ConnectionOptions,
        throttle: Throttle,
        *,
        is_own: bool,
    ) -> BrokerConnection:
        if self._peers is None:
            raise ConnectionLost(f"broker {node.node_id} is not part of a cluster")
        negotiated = await self._negotiate(node, self._peers.dialler)
        if UNADVERTISED_SINCE in negotiated.versions:
            is_small = channel in SMALL_CHANNELS
            peers = self._peers.peers(RequestClass.CLIENT_REQUESTS if is_small else RequestClass.CLIENT_READS)
            return ForwardedConnection(
                node, self._server, peers, caller, options, negotiated, throttle, is_own=is_own
            )
        if channel in SMALL_CHANNELS:
            return negotiated
        address = node.host, node.port
        return await self._peers.dialler.connect(node.node_id, address, options, negotiated=negotiated)

    async def _negotiate(self, node: Node, dialler: BrokerDialler) -> Connection:
        """Return a connection to another broker as it runs now: a restarted one may have another version."""
        key = node.node_id, node.host, node.port
        async with self._negotiating.setdefault(node.node_id, asyncio.Lock()):
            known = self._negotiated.get(key)
            if known is not None and not known.closed:
                return known
            opened = await dialler.connect(node.node_id, (node.host, node.port))
            if (
                UNADVERTISED_SINCE in opened.versions
            ):  # a listener may close connections without authentication
                await dialler.authenticate(opened, node.node_id)
            if self._is_closed:
                await opened.close()
                raise ConnectionLost("the broker is stopping")
            for other in [each for each in self._negotiated if each[0] == node.node_id]:
                await self._negotiated.pop(other).close()
            self._negotiated[key] = opened
            return opened
