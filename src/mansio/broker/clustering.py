"""What a broker of a cluster has beside that of a single node: a session, the controller's work, replicas of others.

Puts these parts together and keeps their order. Knows no etcd, no socket and no thread: what reaches other brokers and
what keeps the session alive are handed in, so that a simulator runs this very code.

Always true: nothing leads here before this broker is registered, nor after its session ended; leaving hands over what
others can lead, then ends the session, then stops copying.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Protocol

from mansio.broker.follower import Follower, FollowerSettings
from mansio.broker.in_sync import InSyncKeeper
from mansio.broker.replication import Replication
from mansio.broker.residence import Residence
from mansio.cluster.controller import Controller
from mansio.cluster.membership import Membership
from mansio.errors import ConfigError, CorruptLog, Unavailable
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from uuid import UUID

    from mansio.broker.machine import Machine
    from mansio.broker.partition import Partition
    from mansio.broker.partitions import PartitionSet
    from mansio.cluster.metadata import Leases, MetadataStore
    from mansio.cluster.session import Session
    from mansio.cluster.state import ClusterState, PartitionState, Topic
    from mansio.config import Settings
    from mansio.ports import Disk, Peers

logger = logging.getLogger(__name__)

IDENTITY_NAME = "broker.json"


class KeepsAlive(Protocol):
    """Something that renews the lease of whatever session a membership has to keep, and tells it of one that ended."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Clustering:
    """See the module. In order: `may_be_new`, `live_with`, `join`; at the end `hand_off`, `leave`."""

    def __init__(
        self,
        settings: Settings,
        machine: Machine,
        *,
        store: MetadataStore,
        leases: Leases,
        state: ClusterState,
        peers: Peers,
        keep_alive: Callable[[Membership], KeepsAlive],
    ) -> None:
        self._settings = settings
        self._machine = machine
        self._store = store
        self._leases = leases
        self._state = state
        self._keep_alive = keep_alive
        self._keeping: KeepsAlive | None = None
        self._membership: Membership | None = None
        self._residence: Residence | None = None
        follower = Follower(
            settings.node_id,
            peers,
            scheduler=machine.scheduler,
            clock=machine.clock,
            random=machine.random,
            broker_epoch=self.broker_epoch,
            settings=FollowerSettings(
                fetch_wait_ms=settings.replica_fetch_wait_ms_max,
                partition_bytes_max=settings.replica_fetch_bytes_max,
                response_bytes_max=settings.replica_fetch_response_bytes_max,
                catch_up_bytes_per_second=settings.replica_throttle_bytes_per_second,
            ),
        )
        keeper = InSyncKeeper(
            store,
            state.keys,
            node_id=settings.node_id,
            scheduler=machine.scheduler,
            random=machine.random,
            broker_epoch_of=self.broker_epoch_of,
            may_join=state.may_lead,
            gate=self.holds,
            lag_ms_max=settings.replica_lag_time_max_ms,
        )
        self.replication = Replication(
            settings.node_id,
            follower=follower,
            keeper=keeper,
            broker_epoch=self.broker_epoch,
            gate=self.holds,
        )
        self.controller = Controller(
            store=store,
            state=state,
            scheduler=machine.scheduler,
            clock=machine.clock,
            random=machine.random,
            node_id=settings.node_id,
            session=lambda: self.session,
            ttl_s=settings.broker_session_timeout_ms / 1000,
        )

    # The session

    @property
    def session(self) -> Session | None:
        return None if self._membership is None else self._membership.session

    def broker_epoch(self) -> int:
        """Of this broker's session; 0 while it has none."""
        return 0 if self._membership is None else self._membership.epoch

    def holds(self) -> bool:
        """Is this broker's session sure to live?"""
        return self._membership is not None and self._membership.holds()

    def broker_epoch_of(self, node_id: int) -> int:
        """Of a broker's session, as the view has it; 0 for none."""
        broker = self._state.brokers.get(node_id)
        return 0 if broker is None else broker.epoch

    # The partitions that live here

    async def may_be_new(self) -> Callable[[PartitionState], bool]:
        """Which partitions this broker may never have had a directory of: those it is not in sync with, and those that
        nobody has changed since they were made, as long as its data directory is the one it registered with."""
        trusted = await self._is_at_home()
        node_id = self._settings.node_id

        def is_new(state: PartitionState) -> bool:
            untouched = state.leader_epoch == 0 and state.partition_epoch == 0
            return node_id not in state.isr or (trusted and untouched)

        return is_new

    async def _is_at_home(self) -> bool:
        """Is the data directory this broker's? One that it never had is, one that lost its mark is not."""
        disk, path = self._machine.disk, f"{self._settings.data_dir}/{IDENTITY_NAME}"
        identity: dict[str, str | int] = {
            "cluster_id": self._state.cluster_id,
            "node_id": self._settings.node_id,
        }
        if disk.exists(path):
            _check_identity(path, disk.read_file(path), identity)
            return True
        known = await self._store.get(self._state.keys.registration(self._settings.node_id)) is not None
        if known:
            logger.warning("data directory is not the one this broker had", extra=fields(path=path))
        _write(disk, path, json.dumps(identity).encode())
        return not known

    def live_with(
        self,
        partitions: PartitionSet,
        *,
        remove: Callable[[Topic], Awaitable[None]],
        on_role: Callable[[Partition], None],
    ) -> None:
        """The partitions whose roles are to follow the metadata; see `Residence`."""
        self._residence = Residence(
            self._settings.node_id,
            partitions=partitions,
            replication=self.replication,
            state=self._state,
            scheduler=self._machine.scheduler,
            remove=remove,
            give_up=self._give_up,
            on_role=on_role,
        )

    async def _give_up(self, places: list[tuple[UUID, int]]) -> int:
        return 0 if self._membership is None else await self._membership.give_up(places)

    # Coming and going

    async def join(self, host: str, port: int) -> None:
        """Register under an address that others can reach, and take part. Returns when that is done, however long the
        metadata store, or another session under this node's number, makes it wait."""
        settings, machine = self._settings, self._machine
        residence = self._residence
        assert residence is not None, "live_with comes first"
        self._membership = Membership(
            store=self._store,
            leases=self._leases,
            state=self._state,
            scheduler=machine.scheduler,
            clock=machine.clock,
            random=machine.random,
            node_id=settings.node_id,
            ttl_s=settings.broker_session_timeout_ms / 1000,
            host=host,
            port=port,
            rack=settings.rack or None,
            lost_logs=residence.lost_logs,
        )
        self._membership.on_session(lambda _: residence.apply_all())
        self._state.on_broker_change(self.replication.broker_changed)
        self._keeping = self._keep_alive(self._membership)
        self._keeping.start()
        self.replication.start()
        residence.start()
        self.controller.start()
        await self._membership.register()

    async def hand_off(self, within_ms: float) -> None:
        """Let others lead what they can, while this broker still serves."""
        if self._membership is not None:
            await self._membership.hand_off(within_ms)

    async def leave(self) -> None:
        """End the session and stop taking part. Does nothing the second time."""
        membership, self._membership = self._membership, None
        if membership is None:
            return
        self.controller.stop()
        if self._residence is not None:
            self._residence.stop()
        try:
            await membership.leave()
        except Unavailable as error:
            logger.warning("session left to end by itself", extra=fields(reason=error.message))
        if self._keeping is not None:
            self._keeping.stop()
        self.replication.stop()


def _check_identity(path: str, data: bytes, identity: dict[str, str | int]) -> None:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise CorruptLog(f"{path} is damaged") from error
    if found != identity:
        raise ConfigError(
            f"data_dir: it belongs to broker {found.get('node_id')} of cluster {found.get('cluster_id')}, not to "
            f"broker {identity['node_id']} of {identity['cluster_id']}"
        )


def _write(disk: Disk, path: str, data: bytes) -> None:
    """Whole or not at all, and durable."""
    partial = f"{path}.new"
    file = disk.open(partial, create=True)
    try:
        file.truncate(0)
        file.write_at([data], 0)
        file.sync()
    finally:
        file.close()
    disk.rename(partial, path)
    disk.sync_directory(path.rpartition("/")[0])
