"""What a consumer knows of a partition it reads, and the raw batches that came of it.

Always true: `consumed` is never beyond what was fetched; a state that was taken out of its fetcher is not active again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.wire.topic_partition import TopicPartition


class PartitionState:
    """One partition that is being read."""

    __slots__ = (
        "blocked_until",
        "buffered_bytes",
        "consumed",
        "failures",
        "fetch_offset",
        "high_watermark",
        "is_active",
        "is_ending",
        "is_fetching",
        "is_paused",
        "partition",
        "stop_offset",
        "unknown_since",
    )

    def __init__(self, partition: TopicPartition, offset: int, stop_offset: int | None = None) -> None:
        self.partition = partition
        self.fetch_offset = offset
        self.consumed = offset
        """Everything below was handed out and is done with."""
        self.stop_offset = stop_offset
        """Read up to here, not including it; None: for ever."""
        self.high_watermark = -1
        self.buffered_bytes = 0
        self.is_active = True
        self.is_ending = False
        """Nothing more of it is handed out; its position is still asked for."""
        self.is_fetching = False
        self.is_paused = False
        self.failures = 0
        self.blocked_until = 0.0
        self.unknown_since: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether everything up to the stop offset was handed out."""
        return self.stop_offset is not None and self.consumed >= self.stop_offset


class CompletedFetch(NamedTuple):
    """Raw batches of one partition: a buffer of batches, the last of which may be cut off."""

    state: PartitionState
    offset: int
    """The offset that was asked for: the first batch may begin before it."""
    batches: memoryview
    aborted: Sequence[tuple[int, int]]
    """(producer id, first offset) of aborted transactions in it."""
