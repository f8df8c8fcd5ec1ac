"""What opening a log gives: the log as it stands, and what had to go.

Always true: everything in a `Recovered` is durable, and what its `cut` names is not in the log any more.
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
    """What `Log` starts from. Everything in it is durable.

    `checked_bytes` were read and checked; `cut` is what had to go, None when nothing had.
    `indexes_due` are closed segments whose index file has to be written. Of the active segment, `index_saved_bytes` are
    in its index file already.
    """

    segments: list[Segment]
    end_offset: int
    start_offset: int
    epochs: LeaderEpochCache
    checkpoint: Checkpoint
    created: bool = False
    checked_bytes: int = 0
    cut: TruncatedTail | None = None
    indexes_due: list[Segment] = field(default_factory=list)
    index_saved_bytes: int = 0
    timestamps_due: bool = False
    compaction: CompactionState = NOT_COMPACTED

    @property
    def truncated_bytes(self) -> int:
        """Bytes that had to go, 0 when none had. With any, the next records need a leader epoch of their own."""
        return self.cut.size_bytes if self.cut is not None else 0

    @property
    def truncated_segments(self) -> int:
        """Whole files of segments that had to go."""
        return self.cut.segments if self.cut is not None else 0

    @property
    def truncation_reason(self) -> str:
        """What was wrong where the log was cut; "" when it was not."""
        return self.cut.reason if self.cut is not None else ""
