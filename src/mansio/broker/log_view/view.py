"""Interface of a view of a partition's log (`LogView`): state that is derived from the log's batches, in their order.

A view has state only. `ViewReplay` gives it the batches, once each, on leaders and on followers, and `ViewSnapshots`
writes its snapshots. A batch is *decoded* first, which may fail, and then *applied*, which cannot. What the leader
appends it has decoded already, so it gives the content with the batch.

Invariants:
* A view changes only with `apply`, `skip_to`, `truncate` and `restore`, and with what was removed from it to be
  appended again. It never appends.
* The same batches give the same state, whichever replica applies them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from mansio.wire.batch.record_batch import BatchHeader

Content = TypeVar("Content")


class DecodedBatch(NamedTuple):
    """The content of a batch for a view: None if it has none. `items`: number of records or ids in it."""

    content: Any
    items: int = 0


class SnapshotSource(ABC):
    """State of which snapshots are written. `kind` is the name of the snapshots in log lines."""

    __slots__ = ()

    kind: ClassVar[str]
    suffix: ClassVar[str]
    """Suffix of the file names, with the dot."""
    outlives_log_start: ClassVar[bool] = False
    """Whether a snapshot of an offset below the start of the log is of use."""

    @abstractmethod
    def freeze(self, end_offset: int) -> Any:
        """Return the state at an offset, which later changes do not affect."""

    @abstractmethod
    def encode_snapshot(self, end_offset: int, state: Any) -> bytes:
        """Encode what `freeze` returned. Runs on any thread."""

    @abstractmethod
    def decode_snapshot(self, data: bytes) -> tuple[int, Any]:
        """Return the offset below which a snapshot contains the log, and the state. Raises `CorruptLog`."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Replace the state by one of `decode_snapshot`."""

    def needs_newer_format(self, data: bytes) -> bool:
        """Return whether the first release cannot read this snapshot."""
        del data
        return True


class LogView(SnapshotSource, Generic[Content]):
    """State that is derived from a log. All methods run on the broker's event loop, unless they state otherwise."""

    __slots__ = ()

    reads_records: ClassVar[bool] = False
    """Whether the view needs the content of batches with records; otherwise of control batches."""
    damage_retries: ClassVar[int] = 6
    """How often a damaged batch is read again. After that it is left out of the view."""

    @abstractmethod
    def decode(self, batch: bytes) -> DecodedBatch:
        """Decode a stored batch that the view needs (`reads_records`), whose CRC is valid. Raises `MansioError`."""

    @abstractmethod
    def apply(self, header: BatchHeader, base_offset: int, content: Content | None) -> None:
        """Apply the next batch of the log. `content`: None if the batch has nothing for this view."""

    @abstractmethod
    def skip_to(self, offset: int) -> None:
        """Leave out the batches below an offset that are not applied: they are damaged or were deleted."""

    @abstractmethod
    def truncate(self, end_offset: int, start_offset: int) -> bool:
        """Remove what was applied from `end_offset` on; the log starts at `start_offset`. Return False if the state is
        now empty instead, so that it must be loaded again."""

    @abstractmethod
    def begin(self) -> tuple[int, bool]:
        """Return, for an empty state without a snapshot that can be used, the offset from which the log has to be read,
        and whether a snapshot of this offset must be durable before the view is used. Raises `OSError`."""

    @property
    def is_whole(self) -> bool:
        """Whether a snapshot may be taken: the next batch does not belong to the last one."""
        return True

    @property
    def keeps_log(self) -> bool:
        """Whether retention must keep the batches that the view needs, and those that it has not applied yet."""
        return True

    def lowest_location(self) -> int | None:
        """Return the lowest offset of a batch that the view needs; None if it needs none."""
        return None

    @property
    def kept_bytes(self) -> int:
        """Size of what the view needs from the log; it does not count for retention.bytes."""
        return 0

    def on_trim(self, start_offset: int) -> None:
        """Handle the deletion of the records below `start_offset`."""
        del start_offset

    def on_complete(self) -> None:
        """Handle that the view contains the whole log after a part of it was read."""
