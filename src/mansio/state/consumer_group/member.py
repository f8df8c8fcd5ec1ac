"""One member of a consumer group: what is stored of it, and the moments by which it has to be heard of.

Only data and what can be said of one member alone. `metadata`, `current` and `target` are its three records, as they
are in the log; everything else is of this broker's memory and begins anew with a load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mansio.state.consumer_group.records import CurrentAssignment
from mansio.state.consumer_group.types import LEAVE_STATIC_EPOCH, NO_PARTITIONS, MemberState

if TYPE_CHECKING:
    from mansio.state.consumer_group.records import MemberMetadata
    from mansio.state.consumer_group.types import ConsumerGroupSettings, TopicPartition

JOINING = CurrentAssignment(0, 0, MemberState.STABLE, NO_PARTITIONS)
"""A member that was told nothing yet."""


@dataclass(slots=True)
class ConsumerMember:
    """One member. Its owner is `StoredGroup`: the three records change through its methods only.

    `session_deadline_ms`: its session ends unless it is heard of before. `revoke_deadline_ms`: until then it has to
    give up what it was asked to; `rejoin_deadline_ms`: until then a classic member has to join again, or, after its
    join (`is_awaiting_sync`), to sync. `reconciled_version`: nothing is to do for it while the group is at that
    version.
    """

    member_id: str
    metadata: MemberMetadata
    current: CurrentAssignment = JOINING
    target: frozenset[TopicPartition] = NO_PARTITIONS
    session_deadline_ms: float = math.inf
    revoke_deadline_ms: float = math.inf
    rejoin_deadline_ms: float = math.inf
    is_awaiting_sync: bool = False
    reconciled_version: int = -1

    @property
    def is_classic(self) -> bool:
        """It speaks the classic protocol."""
        return self.metadata.classic is not None

    @property
    def is_static_offline(self) -> bool:
        """A static member that left and keeps its place; it has nothing in hand."""
        return self.current.epoch == LEAVE_STATIC_EPOCH

    def extend_session(self, settings: ConsumerGroupSettings, now_ms: float) -> None:
        """A sign of life: its session begins anew."""
        classic = self.metadata.classic
        timeout_ms = settings.session_timeout_ms if classic is None else classic.session_timeout_ms
        self.session_deadline_ms = now_ms + timeout_ms

    def deadline_ms(self) -> float:
        """When it is to be removed unless it does something before."""
        return min(self.session_deadline_ms, self.revoke_deadline_ms, self.rejoin_deadline_ms)

    def owned_or_revoking(self) -> frozenset[TopicPartition]:
        """What nobody else may be given: it may read it, or may not have stopped yet."""
        return self.current.assigned | self.current.pending

    def is_reconciled(self, assignment_epoch: int) -> bool:
        """It has its target, and nothing else. A classic member that need not change is not made to join again."""
        current = self.current
        if current.assigned != self.target or current.pending:
            return False
        if self.is_classic:
            return current.state != MemberState.UNREVOKED
        return current.state == MemberState.STABLE and (
            self.is_static_offline or current.epoch == assignment_epoch
        )
