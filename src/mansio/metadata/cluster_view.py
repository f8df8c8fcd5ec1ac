"""What the controller decides on, and a decision on one partition. Values and pure functions of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.metadata.model import BROKER_ACTIVE, host_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from mansio.metadata.model import BrokerState, PartitionState, Registration, Topic


class ClusterView(NamedTuple):
    """Input of a plan: metadata of `MetadataImage`, and the offline brokers that are not declared dead.

    `expected_back` are the node ids of the latter; see `FailureDetector`.
    """

    brokers: Mapping[int, BrokerState]
    registrations: Mapping[int, Registration]
    topics: Mapping[str, Topic]
    unfinished_topics: Mapping[str, Topic]
    expected_back: frozenset[int] = frozenset()

    def epoch(self, node_id: int) -> int:
        """Return the epoch of a broker's session; 0 without a session."""
        broker = self.brokers.get(node_id)
        return 0 if broker is None else broker.epoch

    def host(self, node_id: int) -> str:
        """Return the label of the host of a broker."""
        return host_of(node_id, self.brokers, self.registrations)

    def is_dead(self, node_id: int) -> bool:
        return node_id not in self.brokers and node_id not in self.expected_back

    def may_lead(self, node_id: int) -> bool:
        registration = self.registrations.get(node_id)
        return node_id in self.brokers and registration is not None and registration.state == BROKER_ACTIVE

    def has_leader(self, partition: PartitionState) -> bool:
        """Whether the partition has a leader that still has the session in which it was elected."""
        broker = self.brokers.get(partition.leader)
        return broker is not None and broker.epoch == partition.leader_broker_epoch


class PartitionChange(NamedTuple):
    """A decision on one partition: `before` is the state on which it is based, `after` the new state."""

    topic_id: UUID
    partition: int
    before: PartitionState
    after: PartitionState
    reason: str
    required_sessions: Mapping[int, int]
    """The broker epoch (0: no session), by node id, of each broker on whose session the decision relies."""


def with_leader(
    view: ClusterView, partition: PartitionState, leader: int, in_sync: tuple[int, ...]
) -> PartitionState:
    """Return the next state of a partition, with this leader and these in-sync replicas. The leader epoch increases if
    the leader, or its session, is another one."""
    epoch = view.epoch(leader)
    moved = not partition.is_led_by(leader, epoch)
    return partition._replace(
        isr=in_sync,
        leader=leader,
        leader_epoch=partition.leader_epoch + moved,
        leader_broker_epoch=epoch,
        partition_epoch=partition.partition_epoch + 1,
    )
