"""The one mechanism of every internal topic: append, then apply; load; checkpoint.

A coordinator keeps what it knows as a view of an internal topic. It never changes the view itself: it appends
records here, and each is applied to the view in the order of the log. After a start `load` applies the log
again, so the view after a crash is the view before it, less what was never durable.

A single node has all partitions of the topic, from `start` on. In a cluster they come and go one by one, each with its
leadership: `lead` loads what the log of the new leader says, `resign` takes exactly that out of the view again.

Always true:
* A record is applied right after its append, so the view's order is the log's order; it is *answered* only
  when committed. Who reads the view for somebody else waits for `committed` first, so nobody is told of a
  state that a power loss, or the next leader, could take back.
* A checkpoint saves time, never data: it holds what the view holds, up to an offset that is committed. If it
  is missing, torn, or beyond the log's end, the log is read from its start. In a cluster there are none: the next
  leader is another broker, which could only have an old one; to believe one, its log would have to be proved the same
  up to there; and every follower would have to keep all tombstones for whoever might.
* What may be pruned of a log that is kept record by record (`replays_every_record`) is for the view's owner to
  say: whatever is left must make the same view.
* An unreadable record stops the load of its partition, and requests for it are refused: nothing is skipped. In a
  cluster the load is tried again, ever more rarely, for as long as the leadership lasts.
* What is loaded is applied only while this leadership lasts, however late the reading ends.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.checkpoint import CheckpointStorage, CheckpointStore
from mansio.broker.coordinator.loader import (
    BATCH_OUTPUT_BYTES_MAX,
    replay_every_record,
    replay_latest_per_key,
)
from mansio.broker.coordinator.view import CoordinatorContext, CoordinatorPartition, CoordinatorView
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    MansioError,
    MessageTooLarge,
    NotCoordinator,
    StorageError,
)
from mansio.logs import fields
from mansio.wire.batch.record_batch import build_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from mansio.ports import Clock, Promise, Scheduler

logger = logging.getLogger(__name__)

RECORDS_PER_BATCH: Final = 1000

LOAD_ATTEMPTS_MAX: Final = 3
"""In a cluster the log is read while compaction may put other segments into the place of those being read."""

LOAD_RETRY_MS: Final = 200

LOAD_BACKOFF_MS: Final = 1000
"""After those attempts, then twice as long: the disk may come to itself, and nobody else loads what is led here."""
LOAD_BACKOFF_MS_MAX: Final = 60_000

KeyValue = tuple[bytes, bytes | None]


class CoordinatorRuntime:
    """One internal topic and its view. All methods belong to the broker's loop.

    `create` makes the topic if need be and returns its open partitions; it is called at most once at a time,
    on the first write. `partition_count` is given in a cluster only: how many partitions the topic has by the metadata,
    0 while there is none. Then what `create` returns does not count: partitions come by `lead`.
    """

    def __init__(
        self,
        name: str,
        *,
        view: CoordinatorView,
        create: Callable[[], Awaitable[Sequence[CoordinatorPartition | StorageError]]],
        scheduler: Scheduler,
        clock: Clock,
        checkpoints: CheckpointStorage | None = None,
        partition_count: Callable[[], int] | None = None,
        replays_every_record: bool = False,
    ) -> None:
        """`replays_every_record`: a record may change what one before it said, so all are applied in their order,
        in a load too, and the log is kept from where `prune` says. There are no checkpoints of such a view."""
        self.name = name
        self._every_record = replays_every_record
        self._view = view
        self._create = create
        self._scheduler = scheduler
        self._clock = clock
        self._count = partition_count
        self._checkpoints: CheckpointStore | None = None
        if checkpoints is not None and partition_count is None and not replays_every_record:
            self._checkpoints = CheckpointStore(checkpoints, name, scheduler, view, self._yield_to_loop)
        self._contexts: dict[int, CoordinatorContext] = {}
        self._started = False
        self._creating: Promise[None] | None = None
        self._to_load: deque[CoordinatorContext] = deque()
        self._loading = False

    # ------------------------------------------------------------------ opening and loading

    @property
    def partition_count(self) -> int:
        """0 while the topic does not exist."""
        return len(self._contexts) if self._count is None else self._count()

    async def start(self, partitions: Sequence[CoordinatorPartition | StorageError]) -> None:
        """On a single node: load what is there; none if the topic has not been created yet."""
        if self._count is None:
            await self._adopt(partitions)
        self._started = True

    async def ready(self) -> None:
        """Before a write: the topic exists. Creates it the first time. `CoordinatorNotAvailable` where an attempt
        before this one is not undone yet; in a cluster also where it cannot be done now, or somebody else is at it.
        """
        if self._count is not None:
            await self._ready_in_cluster()
            return
        self.check_available()
        while not self._contexts:
            if self._creating is not None:
                await self._creating
                continue
            await self._create_once()
            if not self._contexts:
                raise CoordinatorNotAvailable(f"{self.name} is being made")

    async def _ready_in_cluster(self) -> None:
        if self.partition_count:
            return
        if self._creating is not None:
            await self._creating
        else:
            try:
                await self._create_once()
            except MansioError as error:
                logger.warning("internal topic not made", extra=fields(topic=self.name, reason=error))
                raise CoordinatorNotAvailable(f"{self.name} cannot be made now: {error}") from error
        if not self.partition_count:
            raise CoordinatorNotAvailable(f"{self.name} is being made")

    async def _create_once(self) -> None:
        self._creating = self._scheduler.promise()
        try:
            partitions = await self._create()
            if self._count is None:
                await self._adopt(partitions)
        finally:
            creating, self._creating = self._creating, None
            _complete(creating)

    def lead(self, index: int, partition: CoordinatorPartition, leader_epoch: int) -> None:
        """In a cluster: this broker leads partition `index` in a new epoch. Load its view, after those that were asked
        for before; what there is of an earlier leadership is forgotten."""
        self.resign(index)
        context = self._contexts[index] = CoordinatorContext(index, partition, leader_epoch)
        self._schedule_load(context)

    def resign(self, index: int) -> None:
        """In a cluster: this broker does not lead partition `index` any more, if it did."""
        context = self._contexts.pop(index, None)
        if context is not None:
            context.gone = True
            self._view.unload(index)

    def is_leader(self, index: int, partition: CoordinatorPartition, leader_epoch: int) -> bool:
        """Whether the view of this partition is here, or on its way, for this leadership."""
        context = self._contexts.get(index)
        return context is not None and context.partition is partition and context.leader_epoch == leader_epoch

    def check_available(self) -> None:
        """Raise `CoordinatorLoadInProgress` or `NotCoordinator` while nobody here can know whether the topic exists."""
        if self._count is not None:
            if not self._count():
                raise NotCoordinator(f"this broker knows of no {self.name}")
        elif not self._started:
            raise CoordinatorLoadInProgress(f"{self.name} is being loaded")

    def check_loaded(self, index: int) -> None:
        """Raise `CoordinatorLoadInProgress`, `CoordinatorNotAvailable` or, in a cluster, `NotCoordinator` unless the
        view of `index` is here and whole.
        """
        context = self._contexts.get(index)
        if context is not None and context.loaded:
            partition = context.partition
            if (
                self._count is not None
                and not isinstance(partition, StorageError)
                and partition.is_leadership_uncertain
            ):
                raise NotCoordinator(
                    f"another broker may lead {self.name}-{index} by now, and know more than this one"
                )
            return
        if context is None and self._count is not None:
            raise NotCoordinator(f"this broker does not lead {self.name}-{index}")
        if context is not None and context.failure is not None:
            message = f"{self.name}-{index} could not be loaded: {context.failure}"
            raise CoordinatorNotAvailable(message) from context.failure
        raise CoordinatorLoadInProgress(f"{self.name}-{index} is being loaded")

    def check_all_loaded(self, led: Iterable[int] = ()) -> None:
        """Raise as `check_loaded` unless the view of every partition that belongs here is whole. `led`: in a cluster,
        the partitions that this broker leads by the metadata; the role of one may not be applied yet."""
        if self._count is None:
            self.check_available()
        for index in led:
            if index not in self._contexts:
                raise CoordinatorLoadInProgress(f"{self.name}-{index} is about to be loaded")
        for index in list(self._contexts):
            self.check_loaded(index)

    @property
    def is_loaded(self) -> bool:
        """Whether the view is whole: every partition of the topic has been loaded here, or there is none. In a cluster
        that is so only where this broker leads them all."""
        started = self._started or self._count is not None
        loaded = sum(1 for context in self._contexts.values() if context.loaded)
        return started and loaded == self.partition_count

    async def _adopt(self, partitions: Sequence[CoordinatorPartition | StorageError]) -> None:
        self._contexts = {
            index: CoordinatorContext(index, partition) for index, partition in enumerate(partitions)
        }
        for context in list(self._contexts.values()):
            await self._try_load(context)

    def _schedule_load(self, context: CoordinatorContext) -> None:
        if context.gone:
            return
        self._to_load.append(context)
        if not self._loading:
            self._loading = True
            self._scheduler.spawn(self._load_all(), name=f"load {self.name}")

    async def _load_all(self) -> None:
        """One after the other: the groups of the first are served while the last still wait."""
        try:
            while self._to_load:
                await self._load_one(self._to_load.popleft())
        finally:
            self._loading = False

    async def _load_one(self, context: CoordinatorContext) -> None:
        """Some attempts while the others wait, or, later, one; the next comes when others had their turn."""
        while not context.gone and not await self._try_load(context):
            context.attempts += 1
            if (beyond := context.attempts - LOAD_ATTEMPTS_MAX) >= 0:
                pause_ms = min(LOAD_BACKOFF_MS << min(beyond, 20), LOAD_BACKOFF_MS_MAX)
                self._scheduler.call_later(pause_ms, self._schedule_load, context)
                return
            await self._pause(LOAD_RETRY_MS)

    async def _try_load(self, context: CoordinatorContext) -> bool:
        try:
            await self._load(context)
            if not context.gone:
                context.loaded, context.failure = True, None
                self._view.loaded(context.index)
        except (MansioError, OSError) as error:
            context.loaded = False
            if not context.gone:
                context.failure = error if isinstance(error, MansioError) else StorageError(str(error))
                known = fields(topic=self.name, partition=context.index, reason=error)
                logger.error("view not loaded", extra=known)
                if self._count is not None:
                    self._view.unload(context.index)
            return False
        return True

    async def _load(self, context: CoordinatorContext) -> None:
        """Give up quietly when the leadership ends meanwhile."""
        if self._every_record:
            await replay_every_record(context, self._view, self._yield_to_loop)
            return
        known = None if self._checkpoints is None else self._checkpoints.read(context)
        await replay_latest_per_key(context, self._view, self._yield_to_loop, known)

    def replay_start_offset(self, index: int) -> int | None:
        """From which offset on the next start reads, over a checkpoint that knows what was deleted since as alive:
        tombstones from here on must stay. None where every load reads all there is.
        """
        if self._checkpoints is None:
            return None
        context = self._contexts.get(index)
        return 0 if context is None else context.tail

    async def _yield_to_loop(self) -> None:
        turn = self._scheduler.promise()
        self._scheduler.call_soon(_complete, turn)
        await turn

    async def _pause(self, delay_ms: float) -> None:
        over = self._scheduler.promise()
        self._scheduler.call_later(delay_ms, _complete, over)
        await over

    # ------------------------------------------------------------------ writing and reading

    def append(self, index: int, records: Sequence[KeyValue], *, whole: bool = False) -> Promise[None]:
        """Append, then apply; the promise is kept when the records are committed. Raises what the partition
        raises, and `MessageTooLarge` for a batch that no load would read; then nothing was applied of that batch (of
        1,000 records; of all with `whole`) or those after it. The topic must be `ready` and the partition loaded."""
        partition = self._append(index, records, whole=whole, urgent=True)
        return partition.committed(partition.end_offset)

    def append_without_flush(self, index: int, records: Sequence[KeyValue], *, whole: bool = False) -> None:
        """The same where nobody waits for the commit: what is appended survives the end of this process at once, a loss
        of power or of this broker only by and by."""
        self._append(index, records, whole=whole, urgent=False)

    def _append(
        self, index: int, records: Sequence[KeyValue], *, whole: bool, urgent: bool
    ) -> CoordinatorPartition:
        self.check_loaded(index)
        context = self._contexts[index]
        partition = context.opened()
        now_ms = self._clock.wall_ms()
        per_batch = max(len(records), 1) if whole else RECORDS_PER_BATCH
        for first in range(0, len(records), per_batch):
            part = records[first : first + per_batch]
            batch = build_batch([(now_ms, key, value, ()) for key, value in part])
            if len(batch) > BATCH_OUTPUT_BYTES_MAX:
                raise MessageTooLarge(
                    f"{self.name}: {len(batch)} bytes at once, and {BATCH_OUTPUT_BYTES_MAX} are read"
                )
            base_offset = partition.append(batch, internal=True, urgent=urgent).base_offset
            for delta, (key, value) in enumerate(part):
                self._view.apply(index, key, value, base_offset + delta)
            context.appended_bytes += len(batch)
        if self._checkpoints is not None and self._checkpoints.is_due(context):
            self._scheduler.spawn(self._checkpoints.write(context), name=f"checkpoint of {self.name}-{index}")
        return partition

    def is_committed(self, index: int) -> bool:
        """Whether everything the view of `index` holds is committed."""
        partition = self._contexts[index].opened()
        return partition.high_watermark >= partition.end_offset

    async def committed(self, index: int) -> None:
        """Wait until everything the view of `index` holds now is committed; raise if it never will be, as far as this
        broker can tell."""
        self.check_loaded(index)
        context = self._contexts[index]
        partition = context.opened()
        if partition.high_watermark < partition.end_offset:
            if self._every_record:
                partition.request_flush()  # nobody may have asked for it yet
            await partition.committed(partition.end_offset)
        if context.gone:
            raise NotCoordinator(f"this broker does not lead {self.name}-{index} any more")

    def segments_of(self, index: int) -> list[int]:
        """Where the segments of a loaded partition's log begin; only those before the last can leave the disk."""
        self.check_loaded(index)
        bases: list[int] = self._contexts[index].opened().log.segment_base_offsets()
        return bases

    def end_offset_of(self, index: int) -> int:
        """Where the log of a loaded partition ends."""
        self.check_loaded(index)
        return self._contexts[index].opened().end_offset

    def leader_epoch_of(self, index: int) -> int:
        """In which this broker leads a loaded partition; always the same on a single node."""
        self.check_loaded(index)
        return self._contexts[index].leader_epoch

    def led(self) -> list[int]:
        """The partitions whose views are here and whole."""
        return [index for index, context in self._contexts.items() if context.loaded]

    def prune(self, index: int, below_offset: int) -> None:
        """The view needs nothing below that offset any more: what of it is committed is given up, and segments that
        hold nothing else leave the disk. Raises what the partition raises."""
        self.check_loaded(index)
        partition = self._contexts[index].opened()
        below_offset = min(below_offset, partition.high_watermark)
        if below_offset > partition.log.start_offset:
            partition.trim(below_offset)

    # ------------------------------------------------------------------ closing

    async def close(self) -> None:
        """Write the checkpoints that are not up to date, so that the next start reads little. In a cluster: resign."""
        if self._count is not None:
            for index in list(self._contexts):
                self.resign(index)
            return
        for context in [one for one in self._contexts.values() if one.loaded]:
            if self._checkpoints is not None and context.tail != context.opened().end_offset:
                try:
                    await self._checkpoints.write(context)
                except (MansioError, OSError) as error:
                    logger.warning(
                        "view checkpoint not written",
                        extra=fields(topic=self.name, partition=context.index, reason=error),
                    )
        for context in self._contexts.values():
            context.loaded = False


def _complete(promise: Promise[None]) -> None:
    if not promise.done():
        promise.set_result(None)
