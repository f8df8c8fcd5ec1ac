"""Cluster member: composition of the session, controller and replication of a broker in a cluster.

This module does not depend on etcd, sockets and threads, so that the simulator runs it, too: the constructor gets the
connections to other brokers and the keep-alive of the session.

Invariant: this broker leads no partition before it is registered or after its session has ended. A stopping broker
transfers its leaderships, then ends its session, then stops replication.

A broker whose metadata image has failed ends its session immediately and does not register again until it is restarted,
because it would not learn of new leaders, and as controller it would not learn of failed brokers. It does not wait for
the transfer of its leaderships, because its image would not show the end of the transfer. The process keeps running, so
that `/health/ready` and the log show the key that could not be decoded; a restart would fail with the same error. (In
Kafka a broker counts such an error and continues, KIP-859, and a controller exits; in Mansio every broker may be the
controller.) A single node continues with the metadata that it has, and is not ready.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Protocol

from mansio.broker.maintenance.data_dir_mode import CLUSTER_FILE_NAME
from mansio.broker.replication.isr_manager import IsrManager
from mansio.broker.replication.leadership_applier import LeadershipApplier
from mansio.broker.replication.log_repairer import LogRepairer, RepairCounts
from mansio.broker.replication.replica_fetcher import ReplicaFetcherManager, ReplicaFetcherSettings
from mansio.broker.replication.replica_manager import ReplicaManager
from mansio.broker.services.cluster import ClusterServices
from mansio.broker.services.follower_reads import FollowerReads
from mansio.errors import ConfigError, CorruptLog, Unavailable
from mansio.host.atomic_file import write_file_atomically
from mansio.logs import fields
from mansio.metadata.broker_lifecycle import BrokerLifecycle
from mansio.metadata.controller.controller import Controller
from mansio.metadata.hand_over.hand_over import HandOver
from mansio.ports import RequestClass

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from uuid import UUID

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import Leases, MetadataStore, StoreCounts
    from mansio.metadata.model import BrokerEndpoint, PartitionState, Topic
    from mansio.metadata.session import Session
    from mansio.ports import ForwardingPeers, PeerLinks

logger = logging.getLogger(__name__)

IDENTITY_FILE_NAME = CLUSTER_FILE_NAME
OTHER_SESSION_S_MIN = 30.0
OTHER_SESSION_TIMEOUTS = 5
"""An existing session under this broker's node id may be its own from before a restart, which can last for twice the
session timeout. A session that lasts longer than this number of session timeouts, and at least `OTHER_SESSION_S_MIN`
seconds, belongs to another running broker."""


class SessionKeepAlive(Protocol):
    """Renews the lease of a broker's current session, and reports its end. See `LeaseKeepAlive`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class ClusterMember:
    """A broker as member of a cluster.

    The methods are called in this order: `new_partition_check`, `attach_partitions`, `join`; to stop the broker,
    `transfer_leaderships`, `leave`.
    """

    def __init__(
        self,
        settings: Settings,
        host_ports: HostPorts,
        *,
        store: MetadataStore,
        leases: Leases,
        state: MetadataImage,
        peers: Callable[[RequestClass], ForwardingPeers],
        links: PeerLinks,
        keep_alive: Callable[[BrokerLifecycle], SessionKeepAlive],
        store_counts: Callable[[], StoreCounts] | None = None,
    ) -> None:
        """`peers` returns the connections to other brokers for a class of requests, `links` observes those of all
        classes. `keep_alive` creates the keep-alive of the session. `store_counts` returns the numbers of calls to the
        metadata store."""
        self.peers = peers
        self._settings = settings
        self._host_ports = host_ports
        self._store = store
        self._leases = leases
        self._state = state
        self._keep_alive = keep_alive
        self._lease_keep_alive: SessionKeepAlive | None = None
        self._lifecycle: BrokerLifecycle | None = None
        self._replica_manager: ReplicaManager | None = None
        self._log_repairer: LogRepairer | None = None
        self._partitions: PartitionSet | None = None
        self._store_counts = store_counts
        """Returns the numbers of calls to the metadata store; None if the store does not count them."""
        fetcher_manager = ReplicaFetcherManager(
            settings.node_id,
            peers(RequestClass.REPLICATION),
            peers(RequestClass.CATCH_UP),
            scheduler=host_ports.scheduler,
            clock=host_ports.clock,
            random=host_ports.random,
            broker_epoch=self.broker_epoch,
            settings=ReplicaFetcherSettings(
                fetch_wait_ms=settings.replica_fetch_wait_max_ms,
                partition_bytes_max=settings.replica_fetch_max_bytes,
                response_bytes_max=settings.replica_fetch_response_max_bytes,
                catch_up_bytes_per_second=settings.replica_throttle_bytes_per_second,
            ),
        )
        isr_manager = IsrManager(
            store,
            state.keys,
            node_id=settings.node_id,
            scheduler=host_ports.scheduler,
            random=host_ports.random,
            broker_epoch_of=self.broker_epoch_of,
            can_join_isr=state.may_lead,
            is_session_valid=self.is_session_valid,
            lag_ms_max=settings.replica_lag_time_max_ms,
        )
        self.replication = LeadershipApplier(
            settings.node_id,
            fetcher_manager=fetcher_manager,
            isr_manager=isr_manager,
            broker_epoch=self.broker_epoch,
            is_session_valid=self.is_session_valid,
            ended_sessions=state.ended_sessions,
        )
        self.controller = Controller(
            store=store,
            state=state,
            scheduler=host_ports.scheduler,
            clock=host_ports.clock,
            random=host_ports.random,
            node_id=settings.node_id,
            session=lambda: self.session,
            ttl_s=settings.broker_session_timeout_ms / 1000,
        )

        self._hand_over = HandOver(
            store=store,
            state=state,
            random=host_ports.random,
            links=links,
            peers=peers(RequestClass.HAND_OVER),
            scheduler=host_ports.scheduler,
            clock=host_ports.clock,
            node_id=settings.node_id,
            session=lambda: self.session,
            ttl_s=settings.broker_session_timeout_ms / 1000,
        )

    def throttle_replication(self, bytes_per_second: int) -> None:
        """Change the maximum rate at which followers that are far behind fetch; 0: unlimited."""
        self.replication.fetcher_manager.set_catch_up_rate(bytes_per_second)

    # Session

    def services(self) -> ClusterServices:
        return ClusterServices(
            controller=self.controller,
            isr_manager=self.replication.isr_manager,
            fetcher_manager=self.replication.fetcher_manager,
            session=lambda: self.session,
            is_session_valid=self.is_session_valid,
            sessions_lost=lambda: self.sessions_lost,
            store_counts=self._store_counts,
            repair_counts=self._repair_counts,
            hand_over=self._hand_over,
        )

    def follower_reads(self) -> FollowerReads:
        """Return what lets clients read from followers."""
        settings = self._settings
        return FollowerReads(
            self._state,
            settings.node_id,
            settings.broker_rack,
            self.is_session_valid,
            names_followers=settings.replica_selector == "rack",
        )

    def _repair_counts(self) -> RepairCounts:
        return RepairCounts() if self._log_repairer is None else self._log_repairer.counts

    @property
    def session(self) -> Session | None:
        return None if self._lifecycle is None else self._lifecycle.session

    def broker_epoch(self) -> int:
        """Return the epoch of this broker's session; 0 while it has none."""
        return 0 if self._lifecycle is None else self._lifecycle.epoch

    def is_session_valid(self) -> bool:
        """Whether this broker has a session that has certainly not expired."""
        return self._lifecycle is not None and self._lifecycle.is_session_valid()

    @property
    def sessions_lost(self) -> int:
        """Number of sessions that ended although this broker kept running."""
        return 0 if self._lifecycle is None else self._lifecycle.sessions_lost

    def broker_epoch_of(self, node_id: int) -> int:
        """Return the epoch of the session of broker `node_id` in the metadata image; 0 if it has no session."""
        broker = self._state.brokers.get(node_id)
        return 0 if broker is None else broker.epoch

    # Partitions of this broker

    async def new_partition_check(self) -> Callable[[PartitionState], bool]:
        """Return a predicate that is true for partitions that may have no directory on this broker because they are
        new.

        It is used when the broker has no list of the partitions that it hosts. With the data directory with which this
        broker has registered, a partition may be new if this broker is not in sync, or if the partition's state is
        unchanged since its creation. Any other missing directory means that the log is lost: also that of a replica
        that is not in sync, because a late fetch request of an earlier process can still put it back into the set.
        """
        trusted = await self._is_own_data_directory()
        node_id = self._settings.node_id

        def is_new(state: PartitionState) -> bool:
            untouched = state.leader_epoch == 0 and state.partition_epoch == 0
            return trusted and (node_id not in state.isr or untouched)

        return is_new

    async def _is_own_data_directory(self) -> bool:
        """Whether this broker has always used this data directory.

        True if the directory has the identity file, or if the broker has never registered. False if a registered broker
        starts with a directory without that file.
        """
        disk, path = self._host_ports.disk, self._identity_path
        if disk.exists(path):
            _check_identity(path, disk.read_file(path), self._identity)
            return True
        if await self._store.get(self._state.keys.registration(self._settings.node_id)) is None:
            self._write_identity()
            return True
        logger.warning("data_directory_changed", extra=fields(path=path))
        return False

    @property
    def _identity_path(self) -> str:
        return f"{self._settings.data_dir}/{IDENTITY_FILE_NAME}"

    @property
    def _identity(self) -> dict[str, str | int]:
        return {"cluster_id": self._state.cluster_id, "node_id": self._settings.node_id}

    def _write_identity(self) -> None:
        """Write the identity file, unless it exists.

        In a directory that replaces a lost one it must be written only after the broker has left all in-sync sets,
        because the next start then treats missing partitions as new ones.
        """
        if not self._host_ports.disk.exists(self._identity_path):
            write_file_atomically(
                self._host_ports.disk, self._identity_path, json.dumps(self._identity).encode()
            )

    def attach_partitions(
        self,
        partitions: PartitionSet,
        *,
        remove: Callable[[Topic], Awaitable[None]],
        remove_replica: Callable[[Topic, int], Awaitable[None]],
        on_role: Callable[[Partition], None],
        on_topics_created: Callable[[int], Awaitable[None]],
    ) -> None:
        """Set the partitions whose roles and logs are managed; see `ReplicaManager` for the callbacks."""
        self._partitions = partitions
        self._replica_manager = ReplicaManager(
            self._settings.node_id,
            partitions=partitions,
            replication=self.replication,
            state=self._state,
            scheduler=self._host_ports.scheduler,
            remove=remove,
            remove_replica=remove_replica,
            give_up=self._resign,
            has_session=lambda: self.session is not None,
            on_role_applied=on_role,
            on_topics_created=on_topics_created,
        )
        host_ports = self._host_ports
        self._log_repairer = LogRepairer(
            self._settings.node_id,
            partitions=partitions,
            sources=self._repair_sources,
            peers=self.peers(RequestClass.REPAIR),
            disk=host_ports.disk,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            background=host_ports.verification_thread,
            broker_epoch=self.broker_epoch,
        )

    def _repair_sources(self, partition: Partition) -> list[int]:
        """Return the other in-sync replicas of a partition that have a session, its leader first."""
        topic = self._state.topics_by_id.get(partition.topic_id)
        if topic is None or partition.index >= len(topic.partitions):
            return []
        state = topic.partitions[partition.index]
        others = [node for node in state.isr if node != self._settings.node_id and self.broker_epoch_of(node)]
        return sorted(others, key=lambda node: node != state.leader)

    async def _resign(self, partitions: list[tuple[UUID, int]]) -> int:
        return 0 if self._lifecycle is None else await self._lifecycle.resign(partitions)

    # Join and leave

    async def join(self, endpoints: Mapping[str, BrokerEndpoint]) -> None:
        """Start replication and controller, and register this broker under addresses that others can reach, by name of
        the listener.

        Returns when the broker is registered; waits for the metadata store, and for the end of an earlier session of
        this broker. Raises `ConfigError` if another broker runs with its node id.
        """
        settings, host_ports = self._settings, self._host_ports
        replica_manager, partitions = self._replica_manager, self._partitions
        assert replica_manager is not None, "attach_partitions comes first"
        assert partitions is not None
        self._lifecycle = BrokerLifecycle(
            store=self._store,
            leases=self._leases,
            state=self._state,
            scheduler=host_ports.scheduler,
            clock=host_ports.clock,
            random=host_ports.random,
            node_id=settings.node_id,
            ttl_s=settings.broker_session_timeout_ms / 1000,
            endpoints=endpoints,
            rack=settings.broker_rack or None,
            host_label=settings.broker_host_label,
            lost_logs=replica_manager.lost_logs,
        )
        self._lifecycle.on_session(lambda _: replica_manager.apply_all())
        self._state.on_broker_change(self.replication.handle_broker_change)
        self._state.on_failure(self._on_image_failure)
        self._lease_keep_alive = self._keep_alive(self._lifecycle)
        self._lease_keep_alive.start()
        self.replication.start()
        replica_manager.start()
        if self._log_repairer is not None:
            self._log_repairer.start()
        self.controller.start()
        if settings.broker_hand_over_enable:
            self._hand_over.start()
        await self._lifecycle.register(
            max(OTHER_SESSION_S_MIN, OTHER_SESSION_TIMEOUTS * settings.broker_session_timeout_ms / 1000)
        )
        await partitions.create_hosted_partitions_file()
        self._write_identity()

    async def transfer_leaderships(self, within_ms: float) -> None:
        """Transfer leaderships to other brokers, at most `within_ms`, while this broker still serves requests."""
        if self._lifecycle is not None:
            await self._lifecycle.transfer_leaderships(within_ms)

    def _on_image_failure(self, error: Exception) -> None:
        known = fields(node=self._settings.node_id, reason=error)
        logger.error("metadata_image_failed", extra=known)
        self.controller.stop()
        self._hand_over.stop()
        self._host_ports.scheduler.spawn(self._leave_after_image_failure(), name="leave the cluster")

    async def _leave_after_image_failure(self) -> None:
        if self._lifecycle is not None:
            await self._lifecycle.announce_shutdown()
        self._state.exclude_broker(self._settings.node_id)
        await self.leave()

    async def leave(self) -> None:
        """Stop controller and replication, and end the session. Further calls have no effect."""
        lifecycle = self._lifecycle
        if lifecycle is None:
            return
        self.controller.stop()
        self._hand_over.stop()
        if self._replica_manager is not None:
            self._replica_manager.stop()
        if self._log_repairer is not None:
            await self._log_repairer.stop()
        try:
            await lifecycle.leave()
        except Unavailable as error:
            logger.warning("session_not_released", extra=fields(reason=error.message))
        if self._lease_keep_alive is not None:
            self._lease_keep_alive.stop()
        self.replication.stop()


def _check_identity(path: str, data: bytes, identity: dict[str, str | int]) -> None:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise CorruptLog(f"{path} is damaged") from error
    if found != identity:
        raise ConfigError(
            f"data_dir: it belongs to broker {found.get('node_id')} of cluster {found.get('cluster_id')}, not to "
            f"broker {identity['node_id']} of {identity['cluster_id']}: start that broker with it, or use another "
            f"directory"
        )
