"""Interface of features that observe or control one partition (`PartitionHook`), the result of an append
(`AppendResult`), and why a batch has to be rebuilt (`RebuildRequired`) or has to wait (`LookUpRequired`) before it.

Invariant: every method of a hook runs on the broker's event loop and does not block, except `on_truncate`, which is
rare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from mansio.broker.partition.append_validation import RebuiltBatch
    from mansio.wire.batch.record_batch import BatchHeader

    Contents = Mapping[object, Any]
    """What is known of a batch: its content by hook, or by the view of a `ViewReplay`. On a leader it is complete: a
    batch has nothing for a hook that is not in it."""


class AppendResult(NamedTuple):
    """Result of an append.

    `append_time_ms`: -1 unless the topic uses log-append time. `duplicate`: the batch was appended earlier.
    """

    base_offset: int
    end_offset: int
    append_time_ms: int
    duplicate: bool


class RebuildRequired(Exception):
    """Some records of a client's batch are repeats, and the batch is too large to be encoded without them on the event
    loop. Nothing was appended.

    `rebuild` encodes the batch without them, on any thread."""

    def __init__(self, rebuild: Callable[[], RebuiltBatch]) -> None:
        super().__init__("some records of the batch are repeats")
        self.rebuild = rebuild


class LookUpRequired(Exception):
    """A feature has to ask another broker before it can accept or reject a client's batch. Nothing was appended.

    `look_up(began_s)` asks, on the event loop, and returns when the same append no longer raises this error for the
    same reason. `began_s`: the monotonic time since when the batch has been waiting; the look-up ends in bounded time
    after it. Raises the `MansioError` for which the batch is rejected."""

    def __init__(self, look_up: Callable[[float], Awaitable[None]]) -> None:
        super().__init__("another broker has to be asked before the batch is accepted")
        self.look_up = look_up


class PartitionHook(Protocol):
    """A feature that observes or controls one partition."""

    def before_append(self, header: BatchHeader) -> AppendResult | None:
        """Reject a batch by raising, or return the earlier result for a duplicate, or None to accept the batch."""

    def on_append(self, header: BatchHeader, base_offset: int, contents: Contents | None = None) -> None:
        """Apply a batch that was appended to the log, on leaders and on followers; the batch is not flushed yet. A hook
        must not append. `contents`: None if nothing is known of the batch."""

    def on_committed(self, high_watermark: int) -> None:
        """Handle an advance of the high watermark."""

    def on_trim(self, start_offset: int) -> None:
        """Handle the deletion of the records below `start_offset`."""

    def on_truncate(self, end_offset: int) -> None:
        """Handle a truncation of this replica's log to `end_offset`; its start offset may have increased, too."""

    def readable_end(self, isolation_level: int) -> int | None:
        """Return an end offset for readers of this isolation level below the high watermark; None for no such bound."""

    def retention_floor(self) -> int | None:
        """Return the offset from which retention must keep records; None for no requirement."""

    def close(self, *, save: bool) -> None:
        """Prepare for the partition to be closed. With `save`, the hook can write files that shorten the next start."""
