"""Where the state of share partitions is kept, as who leads them sees it: near or far, one protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mansio.state.share_partition.types import LoadedState, ShareKey, ShareSummary, Update


class SharePersister(Protocol):
    """All of it raises `NotCoordinator`, `CoordinatorNotAvailable` or `CoordinatorLoadInProgress` when the state cannot
    be reached now, and then nobody knows whether it was stored; `FencedLeaderEpoch` and `FencedStateEpoch` when another
    has it."""

    async def read(self, key: ShareKey, leader_epoch: int) -> LoadedState | None:
        """The state, from now on written only by who leads in this epoch or a later one; None when there is none."""

    async def write(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        """Store a change; returns when it is committed, or appended if `update.durable` is False."""

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """Begin the state anew, with nothing in it; whoever leads with an older state epoch is fenced."""

    async def delete(self, key: ShareKey) -> None:
        """Forget the state."""

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        """What a lag is reckoned from; None when there is no state."""
