"""One share partition's state as its state leader keeps it: what the log says of it so far, and where that begins.

Always true: `folded` is what the records say from `snapshot_offset` on, updates of an older snapshot left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.state.share_partition.snapshot import FoldedState, to_state
from mansio.state.share_partition.state_records import (
    SNAPSHOT,
    UNCHANGED,
    UPDATE,
    StateRecord,
    encode_key,
    encode_snapshot,
)
from mansio.state.share_partition.types import Update

if TYPE_CHECKING:
    from mansio.state.share_partition.types import LoadedState, ShareKey


class WriteToken(NamedTuple):
    """Who may write a state: whoever read it last. `session` is that reading; `number` counts the writes in it from 1,
    so that one that comes late or again is known as such; 0 where nothing comes late or again."""

    session: int
    number: int = 0


class PersistedShareState:
    """See the module. `session`: the reading whose reader may write; `numbers`: the last write of each kind in it, not
    durable and durable. `resolved`: nothing that was leased can be missing from it, however it was loaded."""

    __slots__ = (
        "created_ms",
        "folded",
        "index",
        "key",
        "leader_epoch",
        "numbers",
        "resolved",
        "session",
        "snapshot_epoch",
        "snapshot_key",
        "snapshot_ms",
        "snapshot_offset",
        "state_epoch",
        "update_key",
        "updates",
        "withheld_since_ms",
    )

    def __init__(self, key: ShareKey, index: int) -> None:
        self.key = key
        self.index = index
        self.state_epoch = 0
        self.leader_epoch = UNCHANGED
        self.snapshot_epoch = UNCHANGED
        self.folded = FoldedState()
        self.snapshot_offset = 0
        self.snapshot_ms = 0.0
        self.created_ms = UNCHANGED
        self.updates = 0
        self.session = 0
        self.numbers = [0, 0]
        self.resolved = False
        self.withheld_since_ms: float | None = None
        self.snapshot_key = encode_key(SNAPSHOT, key)
        self.update_key = encode_key(UPDATE, key)

    def apply_snapshot(self, stored: StateRecord, offset: int, now_ms: float) -> None:
        """A snapshot is in the log."""
        self.state_epoch, self.leader_epoch = stored.state_epoch, stored.leader_epoch
        self.snapshot_epoch, self.created_ms = stored.snapshot_epoch, stored.created_ms
        self.folded = FoldedState()
        self.folded.apply(stored.update)
        self.snapshot_offset, self.snapshot_ms = offset, now_ms
        self.updates = 0

    def apply_update(self, stored: StateRecord) -> None:
        """An update is in the log. One that belongs to an older snapshot says nothing any more."""
        if stored.snapshot_epoch == self.snapshot_epoch:
            self.leader_epoch = max(self.leader_epoch, stored.leader_epoch)
            self.folded.apply(stored.update)
            self.updates += 1

    def next_snapshot(self, *, leader_epoch: int, wall_ms: int, update: Update | None = None) -> StateRecord:
        """The whole state as it is now, or as `update` has it, which is a snapshot."""
        folded = self.folded
        if update is not None:
            folded = FoldedState()
            folded.lease_bound, folded.done_count = self.folded.lease_bound, self.folded.done_count
            folded.dead, folded.redrives = self.folded.dead, self.folded.redrives
            folded.producer = self.folded.producer
            folded.apply(update)
        return StateRecord(
            self.snapshot_epoch + 1,
            leader_epoch,
            whole(folded),
            self.state_epoch,
            wall_ms if self.created_ms == UNCHANGED else self.created_ms,
            wall_ms,
        )

    def loaded(self, *, is_complete: bool, withheld_ms: int) -> LoadedState:
        """For who leads the share partition."""
        return to_state(
            self.folded,
            state_epoch=self.state_epoch,
            leader_epoch=self.leader_epoch,
            snapshot_epoch=self.snapshot_epoch,
            is_complete=is_complete,
            withheld_ms=withheld_ms,
        )

    def records(self, stored: StateRecord) -> list[tuple[bytes, bytes | None]]:
        """A snapshot as the records of one batch."""
        keys = {SNAPSHOT: self.snapshot_key, UPDATE: self.update_key}
        return [(keys[kind], value) for kind, value in encode_snapshot(stored)]


def whole(folded: FoldedState) -> Update:
    """All of it, as an update."""
    return Update(
        0,
        durable=False,
        start_offset=folded.start_offset,
        lease_bound=folded.lease_bound,
        done_count=folded.done_count,
        changes=folded.changes,
        snapshot=True,
        dead=folded.dead,
        redrives=folded.redrives,
        producer=folded.producer,
    )
