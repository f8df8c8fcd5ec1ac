"""Who leads a partition: leader, follower, or neither, and what changes when that does.

Functions of `Partition`, which hands itself in. A role lasts for a leader epoch; the metadata decides both, and whoever
follows the metadata calls `Partition.become_leader`, `become_follower` and `resign` here.

Always true:
* an epoch that is over never comes back, and no broker leads in an epoch that its log knew before it was started: what
  it had not synced then is lost, and its offsets would be given out again under the same epoch, unnoticed;
* a leader's epoch begins at the end of its log; nothing is cut off by becoming leader;
* the waits of a role end with it. Whoever waited cannot know what the next leader makes of the batch.

Sources: KIP-101 (epochs), KIP-497 and KIP-966 (in-sync sets), and Kafka's answers: NOT_LEADER_OR_FOLLOWER when the
leader changed, NOT_ENOUGH_REPLICAS before and NOT_ENOUGH_REPLICAS_AFTER_APPEND after the append.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeGuard

from mansio.broker.partition import delete_records
from mansio.errors import (
    FencedLeaderEpoch,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
)
from mansio.logs import fields
from mansio.state.replica import NOBODY, FollowerReplica, ReplicationProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.config.topic_config import TopicSettings
    from mansio.errors import MansioError
    from mansio.wire.batch.record_batch import BatchHeader

__all__ = [
    "NOBODY",
    "become_follower",
    "become_leader",
    "check_session",
    "isr_committed",
    "not_leader_error",
    "reject_append",
]

logger = logging.getLogger(__name__)


def is_leader(replica: ReplicationProgress | FollowerReplica) -> TypeGuard[ReplicationProgress]:
    """Is this what a leader knows?"""
    return isinstance(replica, ReplicationProgress)


def is_under_min_isr(replica: ReplicationProgress | FollowerReplica) -> bool:
    """Has a leader fewer in-sync replicas than min.insync.replicas?"""
    return isinstance(replica, ReplicationProgress) and replica.is_under_min_isr


def now_ms(partition: Partition) -> float:
    """The steady clock that replicas are watched by."""
    return partition.clock.monotonic() * 1000


def not_leader_error(partition: Partition) -> NotLeaderOrFollower:
    """What a client is told that should look for the leader elsewhere."""
    if partition.closed:
        return NotLeaderOrFollower(f"{partition.name} is closed on this broker")
    leader = partition.replica.leader
    where = "nobody that this broker knows leads it" if leader == NOBODY else f"broker {leader} does"
    return NotLeaderOrFollower(f"this broker does not lead {partition.name}; {where}")


def reject_append(partition: Partition, *, internal: bool, urgent: bool) -> None:
    """Say why an append is refused here and now, if it is. `urgent`: acks=all."""
    replica = partition.replica
    if not is_leader(replica):
        raise not_leader_error(partition)
    if partition.closed and not internal:
        raise not_leader_error(partition)
    if urgent and replica.is_under_min_isr:
        raise NotEnoughReplicas(
            f"{partition.name}: {len(replica.in_sync)} replicas are in sync, "
            f"min.insync.replicas={replica.min_insync_replicas}; nothing was written"
        )


def commit_error(partition: Partition) -> MansioError:
    """Why nothing can be committed here now: for whoever is about to wait for it."""
    if is_under_min_isr(partition.replica) and not partition.closed:
        return _not_enough_replicas_error(partition)
    return not_leader_error(partition)


def become_leader(
    partition: Partition,
    leader_epoch: int,
    in_sync: frozenset[int],
    replicas: frozenset[int],
    is_session_valid: Callable[[], bool] | None,
) -> None:
    """See `Partition.become_leader`."""
    before, log = partition.replica, partition.log
    if partition.is_leader and before.leader_epoch == leader_epoch:
        return
    _check_epoch(partition, leader_epoch)
    if leader_epoch <= log.leader_epochs.last:
        raise FencedLeaderEpoch(
            f"{partition.name}: leader epoch {leader_epoch} is not new, its log has {log.leader_epochs.last}"
        )
    if (failure := partition.failure) is not None:
        raise failure
    log.assign_leader_epoch(leader_epoch)
    high_watermark = max(before.high_watermark, log.start_offset)
    replica = ReplicationProgress(
        partition.broker_id,
        leader_epoch,
        in_sync,
        high_watermark,
        durable_end=log.durable_end_offset,
        epoch_start_offset=log.end_offset,
        replicas=replicas,
        min_insync_replicas=_min_insync_replicas(partition.settings, len(replicas)),
        is_session_valid=is_session_valid,
        now_ms=now_ms(partition),
    )
    _change(partition, replica, f"broker {partition.broker_id} leads it in a new epoch, {leader_epoch}")
    if is_session_valid is not None:
        partition.before_append.insert(0, _SessionCheck(partition.name, is_session_valid))
    partition.group_commit.request(log, urgent=True)  # the epoch; and what was not durable has to be
    if replica.high_watermark > high_watermark:
        partition.high_watermark_advanced()


def become_follower(partition: Partition, leader: int, leader_epoch: int) -> None:
    """See `Partition.become_follower`."""
    before, log = partition.replica, partition.log
    if (leader, leader_epoch) == (before.leader, before.leader_epoch) and not partition.is_leader:
        return
    _check_epoch(partition, leader_epoch)
    if leader == partition.broker_id or (
        leader != NOBODY and before.leader != NOBODY and leader_epoch == before.leader_epoch
    ):
        raise FencedLeaderEpoch(
            f"{partition.name}: broker {leader} cannot be followed in leader epoch {leader_epoch}, in which broker "
            f"{before.leader} leads"
        )
    known = max(before.high_watermark, log.start_offset)
    replica = FollowerReplica(leader, leader_epoch, known, log.durable_end_offset)
    gone = "nobody leads it" if leader == NOBODY else f"broker {leader} leads it"
    _change(partition, replica, f"{gone} in epoch {leader_epoch}")
    if log.end_offset > log.durable_end_offset:
        partition.group_commit.request(log, urgent=True)  # a follower tells its durable end


def _check_epoch(partition: Partition, leader_epoch: int) -> None:
    current = partition.replica.leader_epoch
    if leader_epoch < current:
        raise FencedLeaderEpoch(f"{partition.name}: leader epoch {leader_epoch} is older than {current}")


def _change(partition: Partition, replica: ReplicationProgress | FollowerReplica, why: str) -> None:
    partition.before_append = [one for one in partition.before_append if not isinstance(one, _SessionCheck)]
    partition.set_role(replica)
    ended = NotLeaderOrFollower(f"{partition.name}: {why}; whether the batch stays is not known here")
    partition.fail_waits(ended)
    delete_records.fail_waits(partition, ended)
    partition.wake()
    logger.info(
        "partition_role_changed",
        extra=fields(
            topic=partition.topic,
            partition=partition.index,
            leader=replica.leader,
            leader_epoch=replica.leader_epoch,
            end=partition.end_offset,
        ),
    )


class _SessionCheck:
    """Refuses clients' batches while the session of a leader is not sure to live. Stands before the hooks."""

    __slots__ = ("_is_session_valid", "_name")

    def __init__(self, name: str, is_session_valid: Callable[[], bool]) -> None:
        self._name = name
        self._is_session_valid = is_session_valid

    def __call__(self, header: BatchHeader) -> AppendResult | None:  # noqa: ARG002 - stands among hooks
        if not self._is_session_valid():
            raise _session_expired_error(self._name)
        return None


def _session_expired_error(name: str) -> NotLeaderOrFollower:
    return NotLeaderOrFollower(
        f"{name}: this broker has not reached the metadata store in time, so another may lead by now"
    )


def isr_committed(partition: Partition, in_sync: frozenset[int]) -> None:
    """The leader's in-sync set is this one, and no other can be any more: see `ReplicationProgress.committed`."""
    replica = partition.replica
    if not is_leader(replica):
        return
    moved = replica.committed(in_sync, now_ms(partition))
    partition.set_role(replica)
    if moved:
        partition.high_watermark_advanced()
    delete_records.start_offset_confirmed(partition)
    if replica.is_under_min_isr:
        partition.fail_waits(_not_enough_replicas_error(partition))


def _not_enough_replicas_error(partition: Partition) -> NotEnoughReplicasAfterAppend:
    replica = partition.replica
    assert is_leader(replica)
    return NotEnoughReplicasAfterAppend(
        f"{partition.name}: {len(replica.in_sync)} replicas are in sync, "
        f"min.insync.replicas={replica.min_insync_replicas}; "
        f"the batch is written and may be committed later"
    )


def settings_changed(partition: Partition) -> None:
    """min.insync.replicas may be another one now; it counts only as far as there are replicas."""
    replica = partition.replica
    if not is_leader(replica):
        return
    moved = replica.require(_min_insync_replicas(partition.settings, 1 + len(replica.copies())))
    partition.set_role(replica)
    if moved:
        partition.high_watermark_advanced()
    if replica.is_under_min_isr:
        partition.fail_waits(_not_enough_replicas_error(partition))


def check_session(partition: Partition) -> None:
    """Look at the gate: end the waits of a session that is not sure to live, or go on. To be called now and then."""
    replica = partition.replica
    if not is_leader(replica):
        return
    if replica.is_session_uncertain:
        partition.fail_waits(_session_expired_error(partition.name))
    elif replica.advance():
        partition.high_watermark_advanced()


def _min_insync_replicas(settings: TopicSettings, replicas: int) -> int:
    return min(settings.min_insync_replicas, replicas)
