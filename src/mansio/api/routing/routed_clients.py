"""Clients of the broker itself, for the protocols whose clients may ask any broker: each acts for one caller.

As every Mansio client, such a client finds leaders and coordinators, and retries after they have moved. A request to
this broker is a function call, and one to another broker is forwarded, both with the identity of the caller. A broker
of version 0.1 does not support forwarded requests: it gets plain ones, without the identity of the caller.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from mansio.api.routing.routed_connections import ForwardedConnection, LocalConnection, Throttle
from mansio.client.client import Client
from mansio.client.producer.produce_request import PRODUCE_CHANNEL
from mansio.config.addresses import Address
from mansio.errors import ConnectionLost
from mansio.net.cluster import UNKNOWN_NODE, Cluster
from mansio.net.connection import ConnectionOptions
from mansio.ports import RequestClass
from mansio.wire.api_versions import UNADVERTISED_SINCE

if TYPE_CHECKING:
    from mansio.api.kafka.server.listener import KafkaServer
    from mansio.broker.routing.caller import Caller
    from mansio.net.broker_dialler import BrokerDialler
    from mansio.net.connection import BrokerConnection, Connection
    from mansio.net.metadata import Node
    from mansio.net.peer_connections import PeerConnectionClasses

ROUTED_TIMEOUT_MS: Final = 30_000
"""Time after which the outcome of a request is unknown."""

PUBLISHER_CLIENT_ID: Final = "mansio-publisher"

SMALL_CHANNELS: Final = frozenset({"main", "group", PRODUCE_CHANNEL})
"""Channels of `Cluster` whose responses are small; the others are those of consumers."""


class RoutedClients:
    """Clients of one broker. All methods run on its event loop."""

    def __init__(self, server: KafkaServer, peers: PeerConnectionClasses | None) -> None:
        """`peers`: the connections to other brokers; None on a single node."""
        self._server = server
        self._peers = peers
        self._is_closed = False
        self._publisher: Client | None = None
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

    def publisher(self) -> Client:
        """Return the client that publishes for all callers, with one producer id. The quotas of callers are applied
        before."""
        if self._publisher is None:
            self._publisher = self._new_client(None, PUBLISHER_CLIENT_ID, self.new_throttle())
        return self._publisher

    async def close(self) -> None:
        """Close the publisher and the connections."""
        self._is_closed = True
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await publisher.close(flush=False)
        negotiated, self._negotiated = self._negotiated, {}
        for connection in negotiated.values():
            await connection.close()

    def _new_client(self, caller: Caller | None, client_id: str, throttle: Throttle) -> Client:
        async def connect(
            node: Node, channel: str, options: ConnectionOptions, _main: BrokerConnection | None
        ) -> BrokerConnection:
            if node.node_id in (UNKNOWN_NODE, self._server.service.settings.node_id):
                return LocalConnection(self._server, caller, options, throttle)
            return await self._connect(node, channel, caller, options, throttle)

        own = self._server.inter_broker_listener.endpoint
        own_address = str(Address("", 0) if own is None else Address(own.host, own.port))
        options = ConnectionOptions(client_id=client_id, request_timeout_ms=ROUTED_TIMEOUT_MS)
        return Client(Cluster(own_address, options=options, connect=connect))

    async def _connect(
        self,
        node: Node,
        channel: str,
        caller: Caller | None,
        options: ConnectionOptions,
        throttle: Throttle,
    ) -> BrokerConnection:
        if self._peers is None:
            raise ConnectionLost(f"broker {node.node_id} is not part of a cluster")
        negotiated = await self._negotiate(node, self._peers.dialler)
        if UNADVERTISED_SINCE in negotiated.versions:
            is_small = channel in SMALL_CHANNELS
            peers = self._peers.peers(RequestClass.CLIENT_REQUESTS if is_small else RequestClass.CLIENT_READS)
            return ForwardedConnection(node, self._server, peers, caller, options, negotiated, throttle)
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
