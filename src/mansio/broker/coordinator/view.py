"""Interfaces of the coordinator runtime: partition, view, and the context of one leadership."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mansio.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.errors import MansioError
    from mansio.ports import Promise
    from mansio.wire.batch.end_marker import EndMarker


class PartitionLog(Protocol):
    """Log of a partition, as the coordinator runtime reads it."""

    @property
    def start_offset(self) -> int: ...

    def batches(self, from_offset: int) -> Iterator[Any]: ...


class CoordinatorPartition(Protocol):
    """Partition of an internal topic, as the coordinator runtime uses it; implemented by
    `mansio.broker.partition.partition.Partition`."""

    @property
    def log(self) -> Any: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def high_watermark(self) -> int: ...

    @property
    def is_leadership_uncertain(self) -> bool:
        """Whether another broker may lead the partition now."""

    def append(
        self, batch: Any, *, internal: bool = False, urgent: bool = True, is_intact: bool = False
    ) -> Any: ...

    def commit_promise(self, end_offset: int) -> Promise[None]: ...

    def report_commit(self, end_offset: int, callback: Callable[[MansioError | None], None]) -> None: ...

    def request_flush(self) -> None:
        """Flush appended records without delay."""

    def report_damage(self, offset: int, error: MansioError) -> None:
        """Report an error that a read of the log raised. The damaged batch contains `offset` or follows it."""

    def trim(self, start_offset: int) -> None:
        """Delete the committed records below `start_offset`."""


class CoordinatorReplica(CoordinatorPartition, Protocol):
    """This broker's replica of a partition of an internal topic, with its role; implemented by
    `mansio.broker.partition.partition.Partition`."""

    @property
    def index(self) -> int: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def closed(self) -> bool: ...

    @property
    def leader_epoch(self) -> int: ...


class CoordinatorView(Protocol):
    """State that is derived from an internal topic.

    The runtime may consume `snapshot` slowly: later items may be newer than earlier ones. A replay of the log from the
    offset at which the snapshot started corrects this.
    """

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:
        """Apply a record of the log; the value None deletes the key. A load applies the latest record of each key, or
        all records of a topic with `replays_every_record`."""

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of all state from partition `index`."""

    def finish_load(self, index: int) -> None:
        """Handle the end of a load: all records of partition `index` are applied."""

    def unload(self, index: int) -> None:
        """Remove all state from partition `index`, whether or not its load has finished."""


class TransactionalView(CoordinatorView, Protocol):
    """View of an internal topic to which producers add records in transactions.

    A load first adds the pending records, then applies the latest value of each key. `apply` of a record at a later
    offset of the same key replaces a pending record (the record's transaction is not ended by that); a deletion removes
    the pending records of its key. A commit makes a producer's pending records the values of their keys, in the order
    of the log.
    """

    def add_pending(
        self, index: int, producer_id: int, producer_epoch: int, key: bytes, value: bytes, offset: int
    ) -> None:
        """Add a record of a transaction that is not ended."""

    def end_transaction(self, index: int, producer_id: int, *, is_commit: bool) -> None:
        """Commit or drop the pending records of a producer; does nothing if it has none."""

    def first_pending_offset(self, index: int) -> int | None:
        """Return an offset at or below the pending records of partition `index`; None if there are none."""


class CoordinatorContext:
    """One leadership of a partition of an internal topic, with the progress of its load. On a single node every
    partition has one context."""

    __slots__ = (
        "appended_bytes",
        "failed_loads",
        "failure",
        "has_ended",
        "index",
        "is_checkpointing",
        "is_loaded",
        "late_markers",
        "leader_epoch",
        "partition",
        "replay_start_offset",
        "unflushed_end",
    )

    def __init__(
        self, index: int, partition: CoordinatorPartition | StorageError, leader_epoch: int = 0
    ) -> None:
        self.index = index
        self.partition = partition
        self.leader_epoch = leader_epoch
        self.is_loaded = False
        self.failure: MansioError | None = None
        self.failed_loads = 0
        self.has_ended = False
        """Whether the leadership has ended; then a load in progress stops."""
        self.late_markers: list[EndMarker] = []
        """Markers that were committed during the load, which may not have read them."""
        self.appended_bytes = 0
        """Bytes appended since the last checkpoint."""
        self.is_checkpointing = False
        self.unflushed_end = 0
        """End offset of the last records that were appended without requesting their flush."""
        self.replay_start_offset = 0
        """Offset from which the next load replays the log, if it uses the last checkpoint."""

    def require_partition(self) -> CoordinatorPartition:
        """Return the opened partition. Raises the `StorageError` with which opening it failed."""
        if isinstance(self.partition, StorageError):
            raise StorageError(self.partition.message)  # a new one: tracebacks of callers must not accumulate
        return self.partition
