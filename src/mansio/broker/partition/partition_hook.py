"""What a feature sees and steers of one partition (`PartitionHook`), and what an append did (`AppendResult`).

Always true: every method of a hook runs on the broker's loop and does not block, but for `on_truncate`, which is rare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from mansio.wire.batch.record_batch import BatchHeader


class AppendResult(NamedTuple):
    """What an append did. `append_time_ms` is -1 unless the topic stamps log-append time."""

    base_offset: int
    end_offset: int
    append_time_ms: int
    duplicate: bool


class PartitionHook(Protocol):
    """A feature's view into one partition."""

    def before_append(self, header: BatchHeader) -> AppendResult | None:
        """Refuse the batch by raising, answer it without an append (a duplicate), or let it pass with None."""

    def on_append(self, header: BatchHeader, base_offset: int) -> None:
        """The batch is in the log (not yet durable), here or, on a follower, as its leader appended it."""

    def on_committed(self, high_watermark: int) -> None:
        """Everything below is durable and readable."""

    def on_trim(self, start_offset: int) -> None:
        """Records below are gone."""

    def on_truncate(self, end_offset: int) -> None:
        """This replica has taken back what it had from `end_offset` on; the log may begin later than before, too."""

    def readable_end(self, isolation_level: int) -> int | None:
        """A bound on what a reader may see, below the high watermark; None for no bound."""

    def retention_floor(self) -> int | None:
        """Records from here on must be kept, whatever retention says; None for no wish."""

    def close(self) -> None:
        """The partition closes cleanly: save what saves time later."""
