"""Leadership applier: applies the leaders in the metadata to the partitions of this broker.

Calls `Partition.become_leader` and `become_follower`, and reports the roles to the `ReplicaFetcherManager` and the
`IsrManager`.

Invariants:
* A state of a leader epoch that has ended changes nothing.
* A broker leads only what it was elected for in its current session. If it may not lead a partition (its log failed, or
  contains the epoch from before a restart) it logs this and does not lead it until the next epoch.
"""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import TYPE_CHECKING

from mansio.errors import MansioError
from mansio.logs import fields
from mansio.state.broker_handshake import BrokerIdentity
from mansio.state.replica import NO_LEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mansio.broker.partition.partition import Partition
    from mansio.broker.replication.isr_manager import IsrManager
    from mansio.broker.replication.replica_fetcher import ReplicaFetcherManager
    from mansio.metadata.model import BrokerChange, PartitionState

logger = logging.getLogger(__name__)


class LeadershipApplier:
    """Applies leader changes to the partitions of this broker. All methods run on the broker's event loop."""

    def __init__(
        self,
        node_id: int,
        *,
        fetcher_manager: ReplicaFetcherManager,
        isr_manager: IsrManager,
        broker_epoch: Callable[[], int],
        is_session_valid: Callable[[], bool],
        ended_sessions: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`broker_epoch` returns the epoch of this broker's current session; `is_session_valid` whether that session
        has certainly not expired. `ended_sessions`: see `MetadataImage`."""
        self._node_id = node_id
        self.fetcher_manager = fetcher_manager
        self.isr_manager = isr_manager
        self._broker_epoch = broker_epoch
        self._is_session_valid = is_session_valid
        self._ended_sessions = ended_sessions
        self._leader_elected: Callable[[], None] = _ignore
        self._session_ended: Callable[[BrokerIdentity], None] = _ignore

    def on_leader_elected(self, listener: Callable[[], None]) -> None:
        """Call `listener` when this broker becomes leader of a partition in a new epoch."""
        self._leader_elected = listener

    def on_session_end(self, listener: Callable[[BrokerIdentity], None]) -> None:
        """Call `listener` when the session of another broker has ended."""
        self._session_ended = listener

    def start(self) -> None:
        """Start the ISR manager."""
        self.isr_manager.start()

    def stop(self) -> None:
        """Stop all replica fetchers and the ISR manager."""
        self.fetcher_manager.stop()
        self.isr_manager.stop()

    def apply(self, partition: Partition, state: PartitionState) -> None:
        """Apply a partition state of the metadata to an open partition of this broker."""
        if state.leader_epoch < partition.leader_epoch or partition.closed:
            return
        is_leader = state.is_led_by(self._node_id, self._broker_epoch())
        try:
            if is_leader:
                before = partition.replica
                partition.become_leader(
                    state.leader_epoch,
                    in_sync=state.isr,
                    replicas=state.replicas,
                    is_session_valid=self._is_session_valid,
                    has_earlier_leader=self._earlier_leader_check(),
                )
                if partition.replica is not before:
                    self._leader_elected()
                self.fetcher_manager.remove(partition)
                self.isr_manager.become_leader(partition, state)
                return
            is_follower = self._node_id in state.replicas and state.leader != self._node_id
            self.isr_manager.remove(partition)
            partition.become_follower(state.leader if is_follower else NO_LEADER, state.leader_epoch)
        except MansioError as error:
            known = fields(topic=partition.topic, partition=partition.index, reason=error.message)
            logger.error("partition_role_rejected", extra=known)
            self.isr_manager.remove(partition)
            if is_leader:
                partition.become_follower(NO_LEADER, state.leader_epoch)
        self.fetcher_manager.become_follower(partition)

    def _earlier_leader_check(self) -> Callable[[], bool] | None:
        """Return a check whether a broker whose session was ended early may still act as an earlier leader; None if
        there is no such broker."""
        ended = self._ended_sessions
        if not ended:
            return None
        earlier = tuple(ended.items())
        return lambda: any(ended.get(node_id) == revision for node_id, revision in earlier)

    def remove(self, partition: Partition) -> None:
        """Stop replicating a partition and managing its in-sync set, because it will be closed."""
        self.fetcher_manager.remove(partition)
        self.isr_manager.remove(partition)

    def handle_broker_change(self, change: BrokerChange) -> None:
        """Remove a broker from the in-sync sets of the partitions led here, and end its fetch sessions, if `change`
        shows that its session has ended. Other changes of brokers have no effect."""
        if change.before is not None and (change.after is None or change.after.epoch != change.before.epoch):
            self._session_ended(BrokerIdentity(change.node_id, change.before.epoch))
            self.isr_manager.handle_session_end(change.node_id)


def _ignore(*_: object) -> None:
    """Do nothing; the default of the listeners."""
