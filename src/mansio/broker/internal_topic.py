"""The one mechanism of every internal topic: append, then apply; load; checkpoint.

A coordinator keeps what it knows as a view of an internal topic. It never changes the view itself: it appends
records here, and each is applied to the view in the order of the log. After a start `load` applies the log
again, so the view after a crash is the view before it, less what was never durable.

Always true:
* A record is applied right after its append, so the view's order is the log's order; it is *answered* only
  when committed. Who reads the view for somebody else waits for `committed` first, so nobody is told of a
  state that a power loss could take back.
* A checkpoint saves time, never data: it holds what the view holds, up to an offset that is committed. If it
  is missing, torn, or beyond the log's end, the log is read from its start.
* An unreadable record stops the load of its partition, and requests for it are refused: nothing is skipped.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

from mansio.broker.view_checkpoint import (
    CheckpointRoom,
    ViewCheckpoints,
    decode_checkpoint,
    encode_checkpoint,
)
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    CorruptLog,
    MansioError,
    StorageError,
)
from mansio.logs import fields
from mansio.wire.records import build_batch, check_stored_batch, read_records

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from mansio.ports import Clock, Promise, Scheduler

logger = logging.getLogger(__name__)

BATCH_OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest batch of an internal topic, opened. We wrote it, so this only guards against damage."""

RECORDS_PER_TURN: Final = 2000
"""Loading and checkpointing give the loop back after so many records."""

RECORDS_PER_BATCH: Final = 1000

KeyValue = tuple[bytes, bytes | None]


class PartitionLog(Protocol):
    """What is needed of a partition's log."""

    @property
    def start_offset(self) -> int: ...

    def batches(self, from_offset: int) -> Iterator[Any]: ...


class InternalPartition(Protocol):
    """What is needed of a partition: `mansio.broker.partition.Partition` has it."""

    @property
    def log(self) -> Any: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def high_watermark(self) -> int: ...

    def append(self, batch: Any, *, internal: bool = False) -> Any: ...

    def committed(self, end_offset: int) -> Promise[None]: ...


class View(Protocol):
    """The state that an internal topic carries. `snapshot` may be slow to consume: what it yields late may be
    newer than what it yielded first, which a replay from the snapshot's start puts right."""

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:
        """A record is in the log: take it over. No value: the key is deleted."""

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        """Key and value of everything the view knows from partition `index`."""

    def loaded(self, index: int) -> None:
        """All records of partition `index` have been applied."""


class InternalTopic:
    """One internal topic and its view. All methods belong to the broker's loop.

    `create` makes the topic if need be and returns its open partitions; it is called at most once at a time,
    on the first write.
    """

    def __init__(
        self,
        name: str,
        *,
        view: View,
        create: Callable[[], Awaitable[Sequence[InternalPartition | StorageError]]],
        scheduler: Scheduler,
        clock: Clock,
        checkpoints: CheckpointRoom | None = None,
    ) -> None:
        self.name = name
        self._view = view
        self._create = create
        self._scheduler = scheduler
        self._clock = clock
        self._files = None if checkpoints is None else ViewCheckpoints(checkpoints, name, scheduler)
        self._partitions: list[InternalPartition | StorageError] = []
        self._started = False
        self._loaded: set[int] = set()
        self._failures: dict[int, MansioError] = {}
        self._creating: Promise[None] | None = None
        self._appended_bytes: list[int] = []
        self._checkpointing: set[int] = set()
        self._tails: dict[int, int] = {}  # partition -> where a replay has to begin after the last checkpoint

    # ------------------------------------------------------------------ opening and loading

    @property
    def partition_count(self) -> int:
        """0 while the topic does not exist."""
        return len(self._partitions)

    async def start(self, partitions: Sequence[InternalPartition | StorageError]) -> None:
        """Load what is there; none if the topic has not been created yet."""
        await self._adopt(partitions)
        self._started = True

    async def ready(self) -> None:
        """Before a write: the topic exists. Creates it the first time."""
        if not self._started:
            raise CoordinatorLoadInProgress(f"{self.name} is being loaded")
        while not self._partitions:
            if self._creating is not None:
                await self._creating
                continue
            self._creating = self._scheduler.promise()
            try:
                await self._adopt(await self._create())
            finally:
                creating, self._creating = self._creating, None
                if not creating.done():
                    creating.set_result(None)

    def _partition(self, index: int) -> InternalPartition:
        partition = self._partitions[index]
        if isinstance(partition, StorageError):  # it could not be opened
            raise StorageError(partition.message)  # a new one: the frames of all who meet it are not kept
        return partition

    def check_loaded(self, index: int) -> None:
        """Raise `CoordinatorLoadInProgress` or `CoordinatorNotAvailable` unless the view of `index` is
        whole.
        """
        if index in self._loaded:
            return
        if (failure := self._failures.get(index)) is not None:
            message = f"{self.name}-{index} could not be loaded: {failure}"
            raise CoordinatorNotAvailable(message) from failure
        raise CoordinatorLoadInProgress(f"{self.name}-{index} is being loaded")

    @property
    def is_started(self) -> bool:
        return self._started

    @property
    def is_loaded(self) -> bool:
        """Whether the view is whole: every partition of the topic has been loaded, or there is none."""
        return self._started and len(self._loaded) == len(self._partitions)

    async def _adopt(self, partitions: Sequence[InternalPartition | StorageError]) -> None:
        self._partitions = list(partitions)
        self._appended_bytes = [0] * len(self._partitions)
        for index in range(len(self._partitions)):
            try:
                await self._load(index)
            except (MansioError, OSError) as error:
                failure = error if isinstance(error, MansioError) else StorageError(str(error))
                self._failures[index] = failure
                logger.error("view not loaded", extra=fields(topic=self.name, partition=index, reason=error))
            else:
                self._loaded.add(index)
                self._view.loaded(index)

    async def _load(self, index: int) -> None:
        partition = self._partition(index)
        position = partition.log.start_offset
        if self._files is not None and (found := self._read_checkpoint(index)) is not None:
            position, pairs = found
            for count, (key, value) in enumerate(pairs, start=1):
                self._view.apply(index, key, value, position - 1)
                if count % RECORDS_PER_TURN == 0:
                    await self._breathe()
        self._tails[index] = position
        if position >= partition.end_offset:
            return
        since_breath = 0
        for batch in partition.log.batches(position):
            check_stored_batch(batch)  # a flipped bit must not become somebody's offset
            for record in read_records(batch, max_output_bytes=BATCH_OUTPUT_BYTES_MAX):
                if record.offset >= position and record.key is not None:
                    self._view.apply(index, record.key, record.value, record.offset)
                since_breath += 1
            self._appended_bytes[index] += len(batch)
            if since_breath >= RECORDS_PER_TURN:
                since_breath = 0
                await self._breathe()

    def replay_start(self, index: int) -> int:
        """From which offset on the next start reads, over a checkpoint that knows what was deleted since as alive:
        tombstones from here on must stay.
        """
        return self._tails.get(index, 0)

    def _read_checkpoint(self, index: int) -> tuple[int, list[tuple[bytes, bytes]]] | None:
        assert self._files is not None
        partition = self._partition(index)
        data = self._files.read(index)
        if data is None:
            return None
        try:
            end_offset, pairs = decode_checkpoint(data)
        except CorruptLog as error:
            logger.warning(
                "view checkpoint not read; reading the log instead",
                extra=fields(topic=self.name, partition=index, reason=error),
            )
            return None
        if not partition.log.start_offset <= end_offset <= partition.end_offset:
            logger.warning(
                "view checkpoint is not of this log; reading the log instead",
                extra=fields(topic=self.name, partition=index),
            )
            self._files.remove(index)  # the log must not grow up to it
            return None
        return end_offset, pairs

    async def _breathe(self) -> None:
        turn = self._scheduler.promise()
        self._scheduler.call_soon(_settle, turn)
        await turn

    # ------------------------------------------------------------------ writing and reading

    def append(self, index: int, records: Sequence[KeyValue]) -> Promise[None]:
        """Append, then apply; the promise is kept when the records are committed. Raises what the partition
        raises; then nothing was applied of that batch (of 1,000 records) or those after it. The topic must be
        `ready` and the partition loaded."""
        self.check_loaded(index)
        partition = self._partition(index)
        now_ms = self._clock.wall_ms()
        for first in range(0, len(records), RECORDS_PER_BATCH):
            part = records[first : first + RECORDS_PER_BATCH]
            batch = build_batch([(now_ms, key, value, ()) for key, value in part])
            base_offset = partition.append(batch, internal=True).base_offset
            for delta, (key, value) in enumerate(part):
                self._view.apply(index, key, value, base_offset + delta)
            self._appended_bytes[index] += len(batch)
        if self._files is not None and self._appended_bytes[index] >= self._files.due_after_bytes(index):
            self._begin_checkpoint(index)
        return partition.committed(partition.end_offset)

    def is_committed(self, index: int) -> bool:
        """Whether everything the view of `index` holds is committed."""
        partition = self._partition(index)
        return partition.high_watermark >= partition.end_offset

    async def committed(self, index: int) -> None:
        """Wait until everything the view of `index` holds now is committed; raise if it never will be."""
        partition = self._partition(index)
        if partition.high_watermark < partition.end_offset:
            await partition.committed(partition.end_offset)

    # ------------------------------------------------------------------ checkpoints

    async def close(self) -> None:
        """Write the checkpoints that are not up to date, so that the next start reads little."""
        for index in sorted(self._loaded):
            if self._files is not None and self._tails.get(index) != self._partition(index).end_offset:
                try:
                    await self._checkpoint(index)
                except (MansioError, OSError) as error:
                    logger.warning(
                        "view checkpoint not written",
                        extra=fields(topic=self.name, partition=index, reason=error),
                    )
        self._loaded.clear()

    def _begin_checkpoint(self, index: int) -> None:
        if index not in self._checkpointing:
            self._scheduler.spawn(self._checkpoint(index), name=f"checkpoint of {self.name}-{index}")

    async def _checkpoint(self, index: int) -> None:
        """The snapshot is taken in slices while writes go on. It is labelled with the offset it began at:
        what
        came later is either in it or replayed over it, with the same result."""
        if self._files is None or index in self._checkpointing:
            return
        self._checkpointing.add(index)
        try:
            partition = self._partition(index)
            self._appended_bytes[index] = 0
            end_offset = partition.end_offset
            pairs: list[tuple[bytes, bytes]] = []
            snapshot = self._view.snapshot(index)
            while piece := list(islice(snapshot, RECORDS_PER_TURN)):
                pairs += piece
                await self._breathe()
            await partition.committed(partition.end_offset)
            await self._files.write(index, encode_checkpoint(end_offset, pairs))
            self._tails[index] = end_offset
        finally:
            self._checkpointing.discard(index)


def _settle(promise: Promise[None]) -> None:
    if not promise.done():
        promise.set_result(None)
