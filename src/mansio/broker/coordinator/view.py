"""Interfaces of the coordinator runtime: partition, view, and the context of one leadership."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mansio.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.errors import MansioError
    from mansio.ports import Promise


class PartitionLog(Protocol):
    """The log of a partition."""

    @property
    def start_offset(self) -> int: ...

    def batches(self, from_offset: int) -> Iterator[Any]: ...


class CoordinatorPartition(Protocol):
    """A partition of an internal topic; implemented by `mansio.broker.partition.partition.Partition`."""

    @property
    def log(self) -> Any: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def high_watermark(self) -> int: ...

    @property
    def is_leadership_uncertain(self) -> bool:
        """Whether another broker may lead the partition now."""

    def append(self, batch: Any, *, internal: bool = False, urgent: bool = True) -> Any: ...

    def committed(self, end_offset: int) -> Promise[None]: ...

    def request_flush(self) -> None:
        """Flush appended records without delay."""

    def report_damage(self, offset: int, error: MansioError) -> None:
        """Report what a read of the log raised, if the batch at this offset, or the next one, is damaged on disk."""

    def trim(self, start_offset: int) -> None:
        """Delete the committed records below this offset."""


class CoordinatorView(Protocol):
    """State that is derived from an internal topic: the latest value of each key.

    `snapshot` may be consumed slowly: later items may be newer than earlier ones, which a replay from the offset at
    which the snapshot started corrects.
    """

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:
        """Apply a record of the log. No value: the key is deleted. A load applies the latest record of each key, or all
        records of a topic with `replays_every_record`."""

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        """Key and value of all state from partition `index`."""

    def loaded(self, index: int) -> None:
        """Handle the end of a load: all records of partition `index` were applied."""

    def unload(self, index: int) -> None:
        """Remove all state from partition `index`, whether or not its load has finished."""


class CoordinatorContext:
    """One leadership of a partition: on a single node of every partition, in a cluster of those that it leads."""

    __slots__ = (
        "appended_bytes",
        "attempts",
        "checkpointing",
        "failure",
        "has_ended",
        "index",
        "leader_epoch",
        "loaded",
        "partition",
        "replay_start_offset",
    )

    def __init__(
        self, index: int, partition: CoordinatorPartition | StorageError, leader_epoch: int = 0
    ) -> None:
        self.index = index
        self.partition = partition
        self.leader_epoch = leader_epoch
        self.loaded = False
        self.failure: MansioError | None = None
        self.attempts = 0
        """Number of failed loads."""
        self.has_ended = False
        """Ends all work on behalf of this leadership."""
        self.appended_bytes = 0
        self.checkpointing = False
        self.replay_start_offset = 0
        """Offset at which a replay starts after the last checkpoint."""

    def opened(self) -> CoordinatorPartition:
        """The partition. Raises `StorageError` if it could not be opened."""
        if isinstance(self.partition, StorageError):
            raise StorageError(self.partition.message)  # a new one: tracebacks of callers must not accumulate
        return self.partition
