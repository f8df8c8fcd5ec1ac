"""Reads of clients from followers in their own rack (KIP-392).

    consumer with client.rack -> leader: names a follower, no records -> follower: records below its high watermark

With `replica_selector=rack`, the leader names an in-sync follower of the client's rack that has the requested offset,
the one with the largest end offset if there are several; none if it is itself in that rack. Followers serve clients
whatever their setting is, as Kafka's do, so the setting may be changed broker by broker. Those of version 0.1 do not,
and are not named. The client then reads from this follower until an
error, and asks the leader again after its own metadata.max.age.ms.

A follower serves clients only while it is in sync by the metadata and its session is valid. So a follower that is cut
off from the others does not return old ends of partitions for longer than the in-sync set and the session last; it
answers NOT_LEADER_OR_FOLLOWER, with which clients return to the leader.

Invariants:
* A follower returns no record at or above its own high watermark, which is never above the leader's.
* A client that sends no rack is served by leaders only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import NotLeaderOrFollower
from mansio.metadata.feature_level import CURRENT_LEVEL
from mansio.state.replica import NO_LEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.partition.partition import Partition
    from mansio.metadata.image import MetadataImage

READ_HERE: Final = -1
"""Preferred read replica of a client that reads from the broker that it asked."""


class FollowerReads:
    """Chooses the replicas from which clients read, on the leader, and admits them, on the follower."""

    def __init__(
        self,
        state: MetadataImage,
        node_id: int,
        rack: str,
        is_session_valid: Callable[[], bool],
        *,
        names_followers: bool = True,
    ) -> None:
        """`rack`: that of this broker; empty if it has none. `is_session_valid` returns whether the session of this
        broker has certainly not expired. `names_followers`: whether clients are sent to followers."""
        self._state = state
        self._node_id = node_id
        self._rack = rack
        self._is_session_valid = is_session_valid
        self._names_followers = names_followers

    def check(self, partition: Partition, rack: str, leader_epoch: int, offset: int) -> int:
        """Check a client's read of a partition, and return the broker from which the client reads instead, `READ_HERE`
        for this one. `rack`: that of the client. `leader_epoch`: that of the request, -1 if the client knows none.

        Raises `FencedLeaderEpoch`, `UnknownLeaderEpoch`, `NotLeaderOrFollower`."""
        is_leader = partition.is_leader
        partition.check_leader_epoch(leader_epoch, may_follow=True)
        if is_leader:
            return self._preferred_replica(partition, rack, offset)
        self._check_follower(partition)
        return READ_HERE

    def _preferred_replica(self, partition: Partition, rack: str, offset: int) -> int:
        progress = partition.leader_progress
        if (
            not self._names_followers
            or rack == self._rack
            or progress is None
            or not progress.waits_for_followers
        ):
            return READ_HERE
        chosen, largest_end = READ_HERE, -1
        brokers, registrations = self._state.brokers, self._state.registrations
        for node_id, follower in progress.followers().items():
            end = follower.durable_end
            if (
                end > largest_end
                and follower.durable_start <= offset <= end
                and node_id in progress.in_sync
                and (broker := brokers.get(node_id)) is not None
                and broker.rack == rack
                and (registration := registrations.get(node_id)) is not None
                and registration.levels.supports(CURRENT_LEVEL)
            ):
                chosen, largest_end = node_id, end
        if chosen != READ_HERE:
            progress.has_follower_readers = True
        return chosen

    def _check_follower(self, partition: Partition) -> None:
        topic = self._state.topics.get(partition.topic)
        state = None if topic is None else topic.partitions[partition.index]
        if (
            state is None
            or partition.closed
            or state.leader == NO_LEADER
            or state.leader_epoch != partition.leader_epoch
            or self._node_id not in state.isr
            or not self._is_session_valid()
        ):
            raise NotLeaderOrFollower(
                f"{partition.name}: this broker is no in-sync follower of the partition"
            )
