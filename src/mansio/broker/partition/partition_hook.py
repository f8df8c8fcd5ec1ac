"""Interface of features that observe or control one partition (`PartitionHook`), and the result of an append
(`AppendResult`).

Invariant: every method of a hook runs on the broker's event loop and does not block, except `on_truncate`, which is
rare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from mansio.wire.batch.record_batch import BatchHeader


class AppendResult(NamedTuple):
    """Result of an append. `append_time_ms` is -1 unless the topic uses log-append time."""

    base_offset: int
    end_offset: int
    append_time_ms: int
    duplicate: bool


class PartitionHook(Protocol):
    """A feature attached to one partition."""

    def before_append(self, header: BatchHeader) -> AppendResult | None:
        """Reject the batch by raising, return the result of an earlier append (a duplicate), or accept it with None."""

    def on_append(self, header: BatchHeader, base_offset: int) -> None:
        """The batch is in the log (not flushed yet), on this leader or, on a follower, as its leader appended it."""

    def on_committed(self, high_watermark: int) -> None:
        """Everything below is flushed on all in-sync replicas and readable."""

    def on_trim(self, start_offset: int) -> None:
        """Records below were deleted."""

    def on_truncate(self, end_offset: int) -> None:
        """This replica has truncated its log at `end_offset`; the log start may have moved up, too."""

    def readable_end(self, isolation_level: int) -> int | None:
        """An upper bound for readers, below the high watermark; None for no bound."""

    def retention_floor(self) -> int | None:
        """Records from this offset on must be kept by retention; None for no requirement."""

    def close(self) -> None:
        """The partition closes cleanly: save what shortens the next start."""
