"""What an internal topic works with: a partition, the view that is made of it, and the time for which it is here.

Owns no behaviour but that of `CoordinatorContext`, whose `gone` ends all work on behalf of a leadership that is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mansio.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.errors import MansioError
    from mansio.ports import Promise


class PartitionLog(Protocol):
    """What is needed of a partition's log."""

    @property
    def start_offset(self) -> int: ...

    def batches(self, from_offset: int) -> Iterator[Any]: ...


class CoordinatorPartition(Protocol):
    """What is needed of a partition: `mansio.broker.partition.partition.Partition` has it."""

    @property
    def log(self) -> Any: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def high_watermark(self) -> int: ...

    @property
    def is_leadership_uncertain(self) -> bool:
        """May another broker lead the partition by now?"""

    def append(self, batch: Any, *, internal: bool = False, urgent: bool = True) -> Any: ...

    def committed(self, end_offset: int) -> Promise[None]: ...

    def request_flush(self) -> None:
        """Make what has been appended durable without putting it off."""

    def trim(self, start_offset: int) -> None:
        """Give up what is below, which is committed."""


class CoordinatorView(Protocol):
    """The state that an internal topic carries: the newest value of each key, and what follows from those. `snapshot`
    may be slow to consume: what it yields late may be newer than what it yielded first, which a replay from the
    snapshot's start puts right."""

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:
        """A record is in the log: take it over. No value: the key is deleted. A load applies the newest of each key;
        where a topic is kept record by record, all of them."""

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        """Key and value of everything the view knows from partition `index`."""

    def loaded(self, index: int) -> None:
        """All records of partition `index` have been applied."""

    def unload(self, index: int) -> None:
        """Forget everything from partition `index`, loaded or half loaded: others know it from now on."""


class CoordinatorContext:
    """A partition whose view is here: all of a single node's, in a cluster what it leads, for one leadership each."""

    __slots__ = (
        "appended_bytes",
        "attempts",
        "checkpointing",
        "failure",
        "gone",
        "index",
        "leader_epoch",
        "loaded",
        "partition",
        "tail",
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
        """To load it, that failed."""
        self.gone = False
        self.appended_bytes = 0
        self.checkpointing = False
        self.tail = 0
        """Where a replay has to begin after the last checkpoint."""

    def opened(self) -> CoordinatorPartition:
        if isinstance(self.partition, StorageError):  # it could not be opened
            raise StorageError(
                self.partition.message
            )  # a new one: the frames of all who meet it are not kept
        return self.partition
