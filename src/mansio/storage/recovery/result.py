"""Result of recovering a log: its state, and what was truncated.

Invariants: everything in a `Recovered` is durable; what its `truncated_tail` names is not in the log any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mansio.storage.cleaner.compaction_state import NOT_COMPACTED, CompactionState

if TYPE_CHECKING:
    from mansio.storage.checkpoint import Checkpoint
    from mansio.storage.leader_epochs import LeaderEpochCache
    from mansio.storage.recovery.quarantine import TruncatedTail
    from mansio.storage.segment import Segment


@dataclass(slots=True)
class Recovered:
    """Initial state of a `Log`. Everything in it is durable.

    `checked_bytes` were read and checked; `truncated_tail` is what was removed, None if nothing was.
    `indexes_due` are closed segments whose index file has to be written. `index_saved_bytes` of the active segment are
    covered by its index file already.
    """

    segments: list[Segment]
    end_offset: int
    start_offset: int
    epochs: LeaderEpochCache
    checkpoint: Checkpoint
    created: bool = False
    checked_bytes: int = 0
    truncated_tail: TruncatedTail | None = None
    indexes_due: list[Segment] = field(default_factory=list)
    index_saved_bytes: int = 0
    timestamps_due: bool = False
    compaction: CompactionState = NOT_COMPACTED

    @property
    def truncated_bytes(self) -> int:
        """Bytes that were removed. If any were, the next records need a leader epoch of their own."""
        return self.truncated_tail.size_bytes if self.truncated_tail is not None else 0

    @property
    def truncated_segments(self) -> int:
        """Number of segment files that were removed."""
        return self.truncated_tail.segments if self.truncated_tail is not None else 0

    @property
    def truncation_reason(self) -> str:
        """The problem at the position where the log was truncated; "" if it was not."""
        return self.truncated_tail.reason if self.truncated_tail is not None else ""
