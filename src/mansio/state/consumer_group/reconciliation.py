"""The step a member takes towards its target: first give up, then take what is free.

    assigned: told to the member, which reads it                        target: computed by the assignor
    pending: the member was told to give it up and has not said yet that it did

            ┌──────────── has to give some up, and still owns it ───────────┐
            │                                                               ▼
          STABLE ◄──── has given up, all of the target is free ───────  UNREVOKED     (epoch stays)
            ▲  ▲                                                            │
            │  └──────────── all of the target is free ─────┐               │ has given up, but some of the target
            │                                               │               │ is held by others
            └──── nothing left to wait for ────────────  UNRELEASED ◄───────┘          (epoch = the assignment's)

Always true of a step: what is assigned comes from what was assigned before, or is free; what is taken away stays held,
as pending, until the member says that it has let go of it. So no two members are ever told the same partition.

Source: KIP-848, "reconciliation"; CurrentAssignmentBuilder of Apache Kafka.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.consumer_group.records import CurrentAssignment
from mansio.state.consumer_group.types import MemberState

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.state.consumer_group.types import TopicPartition


def next_assignment(
    current: CurrentAssignment,
    target: frozenset[TopicPartition],
    assignment_epoch: int,
    topics: frozenset[bytes],
    owned: frozenset[TopicPartition] | None,
    is_owned: Callable[[TopicPartition], bool],
) -> CurrentAssignment:
    """What the member is to have now; `current` itself if nothing changes.

    `owned`: what it says it has, None if it did not say; `topics`: what it subscribes to; `is_owned`: whether some
    member (this one too) has a partition assigned or pending.
    """
    if current.state == MemberState.STABLE and current.epoch == assignment_epoch:
        return current
    if current.state == MemberState.UNREVOKED and _owns_any(owned, current.pending):
        return _without_unsubscribed(current, topics)
    kept = current.assigned & target
    revoked = current.assigned - kept
    if revoked and _owns_any(owned, revoked):
        return CurrentAssignment(current.epoch, current.epoch, MemberState.UNREVOKED, kept, revoked)
    mine = current.pending | revoked  # the member has just said that it let go of these
    wanted = target - kept
    free = frozenset(each for each in wanted if each in mine or not is_owned(each))
    state = MemberState.STABLE if len(free) == len(wanted) else MemberState.UNRELEASED
    if (assignment_epoch, state, kept | free) == (
        current.epoch,
        current.state,
        current.assigned,
    ) and not mine:
        return current
    return CurrentAssignment(assignment_epoch, current.epoch, state, kept | free)


def _owns_any(owned: frozenset[TopicPartition] | None, partitions: frozenset[TopicPartition]) -> bool:
    """A member that does not say what it owns may still own anything it ever had."""
    return bool(partitions) if owned is None else not owned.isdisjoint(partitions)


def _without_unsubscribed(current: CurrentAssignment, topics: frozenset[bytes]) -> CurrentAssignment:
    """While it gives up other partitions: those of topics it wants no more are to go, too."""
    unwanted = frozenset(each for each in current.assigned if each[0] not in topics)
    if not unwanted:
        return current
    pending = current.pending | unwanted
    return CurrentAssignment(
        current.epoch, current.epoch, MemberState.UNREVOKED, current.assigned - unwanted, pending
    )
