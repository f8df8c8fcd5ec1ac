"""Cluster bootstrap of a broker on a real host: opens etcd and composes the cluster member."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.broker.maintenance.data_dir_mode import CLUSTER_FILE_NAME, cluster_of, read_moved_to
from mansio.errors import ConfigError
from mansio.logs import fields
from mansio.metadata.etcd.lease import ThreadKeepAlive
from mansio.metadata.etcd.store import EtcdStore
from mansio.metadata.feature_level import CURRENT_LEVEL, check_operations, newer_topic_setting, not_finalized
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import Keys
from mansio.metadata.model import InterBrokerListener
from mansio.net.broker_dialler import BrokerDialler
from mansio.net.broker_handshake import BrokerCredentials
from mansio.net.peer_connections import PeerConnectionClasses
from mansio.node.cluster_member import ClusterMember
from mansio.node.etcd_settings import etcd_config
from mansio.node.lease_keep_alive import LeaseKeepAlive

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from contextlib import AsyncExitStack

    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts
    from mansio.metadata.broker_lifecycle import BrokerLifecycle
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Disk

logger = logging.getLogger(__name__)


async def open_cluster(
    settings: Settings,
    host_ports: HostPorts,
    stack: AsyncExitStack,
    dialler_context: Callable[[], ssl.SSLContext] | None,
) -> tuple[EtcdStore, MetadataImage, ClusterMember, PeerConnectionClasses]:
    """Open the metadata store, load its image (which is not started yet), and create the cluster member and the
    connections to other brokers. `dialler_context`: see `BrokerDialler`.

    Raises `ConfigError`, `FeatureNotFinalized` if the settings need a higher feature level than the cluster has, and
    `Unavailable` if etcd does not respond.
    """
    config = etcd_config(settings)
    store = await EtcdStore.open(config, host_ports.random)
    stack.push_async_callback(store.close)
    await check_cluster(host_ports.disk, settings.data_dir, settings.node_id, settings.cluster_id, store)
    listener = settings.kafka_listeners.inter_broker
    state = await MetadataImage.load(
        store,
        settings.cluster_id,
        host_ports.random,
        InterBrokerListener(listener.name, listener.security_protocol),
        has_feature_level=True,
    )
    check_feature_level(settings, state.feature_level)
    if state.feature_level < CURRENT_LEVEL:
        known = fields(level=state.feature_level, level_of_this_version=CURRENT_LEVEL)
        logger.warning("upgrade_not_finalized", extra=known)
    store.check_before_commit(lambda operations: check_operations(state.feature_level, operations))

    def broker_address(node_id: int) -> tuple[str, int] | None:
        broker = state.brokers.get(node_id)
        return (broker.host, broker.port) if broker is not None and broker.host else None

    credentials = BrokerCredentials(
        settings.node_id,
        state.cluster_id,
        secret=lambda: state.cluster_secret,
        broker_epoch=lambda: cluster_member.broker_epoch(),
        random=host_ports.random,
    )

    def keep_alive(lifecycle: BrokerLifecycle) -> LeaseKeepAlive:
        return LeaseKeepAlive(
            keep_alive_once=ThreadKeepAlive(config).keep_alive_once,
            current_session=lambda: lifecycle.session_to_renew,
            on_session_end=lifecycle.end_session,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            ttl_s=settings.broker_session_timeout_ms / 1000,
        )

    connections = PeerConnectionClasses(broker_address, BrokerDialler(credentials, dialler_context))
    stack.push_async_callback(connections.close)
    cluster_member = ClusterMember(
        settings,
        host_ports,
        store=store,
        leases=store.leases,
        state=state,
        peers=connections.peers,
        links=connections,
        keep_alive=keep_alive,
        store_counts=lambda: store.client.counts,
    )
    return store, state, cluster_member, connections


async def check_cluster(disk: Disk, data_dir: str, node_id: int, wanted: str, store: MetadataStore) -> None:
    """Raise `ConfigError` if the store has not the cluster of the data directory, before another one is created in it,
    or the directory was moved to the cluster as that of another broker than `node_id`. With its id as `wanted` (setting
    `cluster_id`) the cluster may be created again, unless the directory has never been used in it."""
    known, has_registered = cluster_of(disk, data_dir), disk.exists(f"{data_dir}/{CLUSTER_FILE_NAME}")
    if known is None or (known == wanted and has_registered):
        return
    moved_to = None if has_registered else read_moved_to(disk, data_dir)
    if moved_to is not None and moved_to.node_id != node_id:
        raise ConfigError(
            f"node_id: {data_dir} is that of broker {moved_to.node_id}: start with --node-id {moved_to.node_id}"
        )
    if await store.get(Keys(known).format) is None:
        raise ConfigError(
            f"etcd_endpoints: {data_dir} belongs to the cluster {known}, which is not in this etcd: name the etcd of "
            "that cluster, or use another directory"
        )


def check_feature_level(settings: Settings, level: int) -> None:
    """Raise `FeatureNotFinalized` if `settings` cannot be used in a cluster with this feature level: beside a broker
    that authenticates its clients, one of an older version would serve everybody."""
    if level >= CURRENT_LEVEL:
        return
    for listener in settings.served_listeners:
        if listener.is_authenticated:
            raise not_finalized(f"{listener.setting}: {listener.name} authenticates its clients", level)
    if settings.authorizer != "none":
        raise not_finalized(f"authorizer: {settings.authorizer}", level)
    if (setting := newer_topic_setting(settings.topic_defaults)) is not None:
        raise not_finalized(f"topic_defaults: {setting}", level)
