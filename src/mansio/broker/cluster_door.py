"""A broker's way into a cluster on a real machine: etcd, connections to other brokers, the keep-alive's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.clustering import Clustering
from mansio.broker.etcd_settings import etcd_config
from mansio.broker.keep_alive import KeepAlive
from mansio.broker.peers import LinkPeers
from mansio.cluster.etcd.lease import ThreadKeepAlive
from mansio.cluster.etcd_store import EtcdStore
from mansio.cluster.state import ClusterState
from mansio.link.connection import DEFAULT_OPTIONS, ConnectionOptions

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from mansio.broker.machine import Machine
    from mansio.cluster.membership import Membership
    from mansio.config import Settings

FOLLOWING = ConnectionOptions(borrowed=True)
"""A follower has one request under way to a leader, and what it got is written when it sends the next."""


async def open_cluster(
    settings: Settings, machine: Machine, stack: AsyncExitStack
) -> tuple[EtcdStore, ClusterState, Clustering]:
    """The metadata store, its view (not followed yet), and what makes this broker one of a cluster.

    Raises `ConfigError`, `Unavailable` when etcd does not answer.
    """
    config = etcd_config(settings)
    store = await EtcdStore.open(config, machine.random)
    stack.push_async_callback(store.close)
    state = await ClusterState.load(store, settings.cluster_id, machine.random)

    def address_of(node_id: int) -> tuple[str, int] | None:
        broker = state.brokers.get(node_id)
        return None if broker is None else (broker.host, broker.port)

    def keep_alive(membership: Membership) -> KeepAlive:
        return KeepAlive(
            keep_alive_once=ThreadKeepAlive(config).keep_alive_once,
            current=lambda: membership.kept,
            on_ended=membership.lost,
            clock=machine.clock,
            scheduler=machine.scheduler,
            ttl_s=settings.broker_session_timeout_ms / 1000,
        )

    def more_peers(options: ConnectionOptions = DEFAULT_OPTIONS) -> LinkPeers:
        peers = LinkPeers(address_of, options)
        stack.push_async_callback(peers.close)
        return peers

    clustering = Clustering(
        settings,
        machine,
        store=store,
        leases=store.leases,
        state=state,
        peers=more_peers(FOLLOWING),
        keep_alive=keep_alive,
        more_peers=more_peers,
    )
    clustering.store_counts = lambda: store.client.counts
    return store, state, clustering
