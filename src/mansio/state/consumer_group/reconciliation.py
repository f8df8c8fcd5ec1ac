"""Reconciliation of one member: the next step from its current assignment to its target.

    assigned: sent to the member, which reads these partitions          target: computed by the assignor
    pending: the member has to revoke these partitions and has not confirmed it yet

            ┌──────────── has to revoke partitions that it still owns ──────┐
            │                                                               ▼
          STABLE ◄──── has revoked, all of the target is unowned ─────  UNREVOKED     (epoch unchanged)
            ▲  ▲                                                            │
            │  └──────────── all of the target is unowned ──┐               │ has revoked, but others own
            │                                               │               │ some of the target
            └──── nothing left to wait for ────────────  UNRELEASED ◄───────┘          (epoch = assignment epoch)

Invariants of a step:
* An assigned partition was assigned before, or was unowned.
* A revoked partition remains owned, as pending, until the member confirms the revocation. So a partition is never
  assigned to two members.

Source: KIP-848, "reconciliation"; CurrentAssignmentBuilder of Apache Kafka.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.consumer_group.types import MemberState
from mansio.wire.internal_records.consumer_group_records import CurrentAssignment

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.wire.topic_partition import TopicIdPartition


def next_assignment(
    current: CurrentAssignment,
    target: frozenset[TopicIdPartition],
    assignment_epoch: int,
    topics: frozenset[bytes],
    owned: frozenset[TopicIdPartition] | None,
    is_owned: Callable[[TopicIdPartition], bool],
) -> CurrentAssignment:
    """Return the next current assignment of a member; `current` itself if nothing changes.

    `target`: its target assignment, computed in `assignment_epoch`. `topics`: ids of its subscribed topics. `owned`:
    partitions that the member owns according to its request, None if it sent none. `is_owned`: whether any member,
    including this one, has a partition assigned or pending revocation.
    """
    if current.state == MemberState.STABLE and current.epoch == assignment_epoch:
        return current
    if current.state == MemberState.UNREVOKED and _owns_any(owned, current.pending):
        return _revoke_unsubscribed(current, topics)
    kept = current.assigned & target
    revoked = current.assigned - kept
    if revoked and _owns_any(owned, revoked):
        return CurrentAssignment(current.epoch, current.epoch, MemberState.UNREVOKED, kept, revoked)
    released = current.pending | revoked  # the member has just confirmed their revocation
    wanted = target - kept
    unowned = frozenset(each for each in wanted if each in released or not is_owned(each))
    state = MemberState.STABLE if len(unowned) == len(wanted) else MemberState.UNRELEASED
    if (assignment_epoch, state, kept | unowned) == (
        current.epoch,
        current.state,
        current.assigned,
    ) and not released:
        return current
    return CurrentAssignment(assignment_epoch, current.epoch, state, kept | unowned)


def _owns_any(owned: frozenset[TopicIdPartition] | None, partitions: frozenset[TopicIdPartition]) -> bool:
    """Whether the member may still own one of these partitions. A member that does not send its owned partitions may
    own all."""
    return bool(partitions) if owned is None else not owned.isdisjoint(partitions)


def _revoke_unsubscribed(current: CurrentAssignment, topics: frozenset[bytes]) -> CurrentAssignment:
    """Return the next assignment of a member that still revokes other partitions: it also has to revoke those of topics
    to which it no longer subscribes."""
    unwanted = frozenset(each for each in current.assigned if each[0] not in topics)
    if not unwanted:
        return current
    pending = current.pending | unwanted
    return CurrentAssignment(
        current.epoch, current.epoch, MemberState.UNREVOKED, current.assigned - unwanted, pending
    )
