"""One partition on one broker: a log, its replicas' progress, and whoever waits for either.

A bundle with one placement, leader epoch and in-sync set. Features that need to see or steer what happens here
plug in as hooks (`PartitionHook`) kept in files of their own; the partition calls them and knows none of them.

Always true:
* a record is readable only below the high watermark, and that is never above what fdatasync has covered;
* a wait for a commit is answered exactly once: committed, or the error that ended it;
* after the log failed, no append succeeds and no later commit is reported.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from mansio.broker.append_rules import (
    CONTROL_OR_TRANSACTIONAL,
    AppendRules,
    log_failed,
    refuse,
    refuse_timestamps,
    refused_by_disk,
)
from mansio.broker.record_rules import check_keys
from mansio.broker.trouble import UNKNOWN_OFFSET, Trouble
from mansio.cluster import topic_config
from mansio.errors import (
    CorruptLog,
    DiskFull,
    FencedLeaderEpoch,
    LogFailed,
    MansioError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    StorageError,
    UnknownLeaderEpoch,
)
from mansio.wire.records import TimestampType, check_batch, read_header, with_log_append_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from mansio.cluster.topic_config import TopicSettings
    from mansio.log.log import Log, LogSlice
    from mansio.log.sync import Syncer
    from mansio.ports import Buffer, Clock, Promise, Scheduler
    from mansio.state.replica import ReplicaProgress
    from mansio.wire.records import BatchHeader

READ_UNCOMMITTED = 0
READ_COMMITTED = 1
HIGH_WATERMARK = -1  # as an offset in DeleteRecords

H = TypeVar("H")


class Appended(NamedTuple):
    """What an append did. `append_time_ms` is -1 unless the topic stamps log-append time."""

    base_offset: int
    end_offset: int
    append_time_ms: int
    duplicate: bool


class PartitionHook(Protocol):
    """A feature's view into one partition. Every method runs on the broker's loop and must not block."""

    def before_append(self, header: BatchHeader) -> Appended | None:
        """Refuse the batch by raising, answer it without an append (a duplicate), or let it pass with None."""

    def on_append(self, header: BatchHeader, base_offset: int) -> None:
        """The batch is in the log (not yet durable)."""

    def on_committed(self, high_watermark: int) -> None:
        """Everything below is durable and readable."""

    def on_trim(self, start_offset: int) -> None:
        """Records below are gone."""

    def readable_end(self, isolation_level: int) -> int | None:
        """A bound on what a reader may see, below the high watermark; None for no bound."""

    def retention_floor(self) -> int | None:
        """Records from here on must be kept, whatever retention says; None for no wish."""

    def close(self) -> None:
        """The partition closes cleanly: save what saves time later."""


class Partition:
    """See the module. All methods belong to the broker's loop."""

    __slots__ = (
        "_before_append",
        "_broker_id",
        "_clock",
        "_commit_waits",
        "_hooks",
        "_on_append",
        "_parked",
        "_readable_ends",
        "_scheduler",
        "_syncer",
        "_trouble",
        "closed",
        "index",
        "internal",
        "log",
        "replica",
        "rules",
        "settings",
        "topic",
        "topic_id",
    )

    def __init__(
        self,
        *,
        topic: str,
        topic_id: UUID,
        index: int,
        broker_id: int,
        log: Log,
        syncer: Syncer,
        replica: ReplicaProgress,
        rules: AppendRules,
        clock: Clock,
        scheduler: Scheduler,
        settings: TopicSettings | None = None,
        internal: bool = False,
        trouble: Trouble | None = None,
    ) -> None:
        """`settings`: what is in force for the topic; `internal`: the broker's own, which clients may not write;
        `trouble`: who is told of damage and of a full disk.
        """
        self.topic = topic
        self.internal = internal
        self.topic_id = topic_id
        self.index = index
        self.log = log
        self.replica = replica
        self.rules = rules
        self.settings = settings or topic_config.resolve({}, {}, 1)
        self.closed = False
        self._broker_id = broker_id
        self._syncer = syncer
        self._clock = clock
        self._scheduler = scheduler
        self._trouble = trouble or Trouble(clock)
        self._hooks: list[PartitionHook] = []
        self._before_append: list[Callable[[BatchHeader], Appended | None]] = []
        self._on_append: list[Callable[[BatchHeader, int], None]] = []
        self._readable_ends: list[Callable[[int], int | None]] = []
        self._commit_waits: deque[tuple[int, Callable[[MansioError | None], None]]] = deque()
        self._parked: dict[Callable[[], None], None] = {}
        log.on_durable = self._durable
        log.on_failure = self._failed

    def plug_in(self, hook: PartitionHook, *, on_path: bool = True) -> None:
        """Let a feature see and steer this partition. `on_path` False: it has no say in appends and reads, so they do
        not ask it.
        """
        self._hooks.append(hook)
        if on_path:
            self._before_append.append(hook.before_append)
            self._on_append.append(hook.on_append)
            self._readable_ends.append(hook.readable_end)

    def plugged_in(self, kind: type[H]) -> H | None:
        """The hook of this class, if there is one."""
        return next((hook for hook in self._hooks if isinstance(hook, kind)), None)

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.index}"

    @property
    def leader_epoch(self) -> int:
        return self.replica.leader_epoch

    @property
    def start_offset(self) -> int:
        return self.log.start_offset

    @property
    def end_offset(self) -> int:
        return self.log.end_offset

    @property
    def high_watermark(self) -> int:
        return self.replica.high_watermark

    def check_leader_epoch(self, epoch: int) -> None:
        """KIP-320: whoever knows another leader epoch must refresh its metadata first. -1: the client knows none."""
        current = self.replica.leader_epoch
        if epoch in (-1, current):
            return
        if epoch < current:
            raise FencedLeaderEpoch(f"{self.name}: leader epoch {epoch} is older than {current}")
        raise UnknownLeaderEpoch(f"{self.name}: leader epoch {epoch} is newer than {current}")

    # Writing

    def append(self, batch: Buffer, *, internal: bool = False, urgent: bool = True) -> Appended:
        """Append one closed batch, or raise why not. `urgent`: somebody waits for it to be durable.

        `internal` is for the broker's own batches: no size limit of the topic, control batches allowed.
        """
        header = check_batch(batch)
        rules = self.rules
        by_client = rules.timestamp_type is TimestampType.CREATE
        if not internal:
            if self.closed:
                raise NotLeaderOrFollower(f"{self.name} is closed on this broker")
            if len(batch) > rules.message_bytes_max or header.attributes & CONTROL_OR_TRANSACTIONAL:
                refuse(self.name, rules, header)
            if by_client:
                now_ms = self._clock.wall_ms()
                if (
                    header.max_timestamp_ms > now_ms + rules.timestamp_after_max_ms
                    or 0 <= header.base_timestamp_ms < now_ms - rules.timestamp_before_max_ms
                ):
                    refuse_timestamps(self.name, rules, batch, header, now_ms)
        if self.log.failure is not None:
            raise self._log_failed(self.log.failure)  # also for a repeat: what was not durable never will be
        for before in self._before_append:
            if (known := before(header)) is not None:
                return known._replace(append_time_ms=-1) if by_client else known
        if rules.keys_needed and not internal:
            check_keys(self.name, batch, header)
        append_time_ms = -1
        front = None
        if not by_client:
            append_time_ms = self._clock.wall_ms()
            front = with_log_append_time(batch, header, append_time_ms)
        try:
            base_offset = self.log.append(batch, header, self.replica.leader_epoch, front=front)
        except StorageError as error:
            raise self._refused_by_disk(error) from error
        if front is not None:
            header = read_header(front)  # what was written, for whoever remembers it
        for after in self._on_append:
            after(header, base_offset)
        self._syncer.request(self.log, urgent=urgent or bool(self._parked))
        return Appended(base_offset, base_offset + header.last_offset_delta + 1, append_time_ms, False)

    @property
    def failure(self) -> LogFailed | None:
        """Why no write is taken any more, if that is so."""
        return None if self.log.failure is None else self._log_failed(self.log.failure)

    def _log_failed(self, failed: StorageError) -> LogFailed:
        """An error of its own each time: one that is raised again and again would keep the frames of all who met it."""
        return log_failed(self.name, failed)

    def _refused_by_disk(self, error: StorageError) -> StorageError:
        """What the client is told of an append that the log refused: which of the ways of a disk it was."""
        if (failure := self.failure) is not None:
            return failure
        refusal = refused_by_disk(self.name, error)
        if isinstance(refusal, DiskFull):
            self._trouble.no_room(self.topic, self.index, refusal)
            if self._found_room not in self._on_append:
                self._on_append = [*self._on_append, self._found_room]
        return refusal

    def _found_room(self, header: BatchHeader, base_offset: int) -> None:
        """The first append that goes well after one that found no room."""
        del header, base_offset
        self._on_append = [hook for hook in self._on_append if hook != self._found_room]
        self._trouble.room(self.topic, self.index)

    def wait_committed(self, end_offset: int, callback: Callable[[MansioError | None], None]) -> bool:
        """True if everything below `end_offset` is committed now. Otherwise `callback` is called once, later,
        with None or with the error that means it never will be."""
        if end_offset <= self.replica.high_watermark:
            return True
        waits = self._commit_waits
        waits.append((end_offset, callback))
        if (
            len(waits) > 1 and waits[-2][0] > end_offset
        ):  # a duplicate of an older batch that is still in flight
            self._commit_waits = deque(sorted(waits, key=itemgetter(0)))
        return False

    def committed(self, end_offset: int) -> Promise[None]:
        """A promise kept when everything below `end_offset` is durable on every in-sync replica."""
        promise: Promise[None] = self._scheduler.promise()

        def settle(error: MansioError | None) -> None:
            if promise.done():
                return
            if error is None:
                promise.set_result(None)
            else:
                promise.set_exception(error)

        if (failure := self.failure) is not None:
            settle(failure)
        elif self.wait_committed(end_offset, settle):
            settle(None)
        return promise

    def _durable(self, end_offset: int) -> None:
        if not self.replica.durable(self._broker_id, end_offset):
            return
        high_watermark = self.replica.high_watermark
        for hook in self._hooks:
            hook.on_committed(high_watermark)
        waits = self._commit_waits
        while waits and waits[0][0] <= high_watermark:
            waits.popleft()[1](None)
        self._wake()

    def _failed(self, error: StorageError) -> None:
        error = self.failure or error
        self._end_waits(error)
        self._wake()

    def _end_waits(self, error: MansioError) -> None:
        waits, self._commit_waits = self._commit_waits, deque()
        for _, callback in waits:
            callback(error)

    # Reading

    def readable_end(self, isolation_level: int = READ_UNCOMMITTED) -> int:
        """The offset below which a reader of this isolation level may read."""
        end = self.replica.high_watermark
        for readable_end in self._readable_ends:
            bound = readable_end(isolation_level)
            if bound is not None and bound < end:
                end = bound
        return end

    def read(self, offset: int, max_bytes: int, isolation_level: int = READ_UNCOMMITTED) -> LogSlice | None:
        """Whole batches from the one that holds `offset`, below the readable end; None when there are none yet.

        An offset between the readable end and the end of the log is legal and simply has nothing to show.
        """
        limit = self.readable_end(isolation_level)
        if offset >= limit:
            if offset > self.log.end_offset:
                raise OffsetOutOfRange(
                    f"{self.name}: offset {offset} is beyond the end of the log, {self.log.end_offset}"
                )
            return None
        try:
            return self.log.read(offset, max_bytes, limit)
        except CorruptLog as error:
            self._trouble.corrupt(self.topic, self.index, offset, error)
            raise

    def first_at(self, timestamp_ms: int, limit_offset: int) -> tuple[int, int, int] | None:
        """(offset, timestamp in ms, leader epoch) of the first record at or after a moment, below `limit_offset`."""
        try:
            return self.log.offset_for_time(timestamp_ms, limit_offset)
        except CorruptLog as error:
            self._trouble.corrupt(self.topic, self.index, UNKNOWN_OFFSET, error)
            raise

    def latest_timestamp(self, limit_offset: int) -> tuple[int, int, int] | None:
        """The same of the first record with the largest timestamp (KIP-734)."""
        try:
            return self.log.max_timestamp(limit_offset)
        except CorruptLog as error:
            self._trouble.corrupt(self.topic, self.index, UNKNOWN_OFFSET, error)
            raise

    def park(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever more may be readable, until `unpark`.

        What is in the log and not yet synced is made durable now: somebody waits for it.
        """
        self._parked[wake] = None
        if self.log.end_offset > self.replica.high_watermark:
            self._syncer.request(self.log, urgent=True)

    def unpark(self, wake: Callable[[], None]) -> None:
        self._parked.pop(wake, None)

    def _wake(self) -> None:
        for wake in tuple(self._parked):
            wake()

    # Keeping and ending

    def trim(self, start_offset: int) -> None:
        """Give up records below `start_offset` (at most the high watermark); whole segments leave the disk."""
        if not self.log.start_offset <= start_offset <= self.replica.high_watermark:
            raise OffsetOutOfRange(
                f"{self.name}: cannot trim to {start_offset}, outside "
                f"[{self.log.start_offset}, {self.replica.high_watermark}]"
            )
        self.log.trim_to(start_offset)
        for hook in self._hooks:
            hook.on_trim(start_offset)

    def delete_records(self, before_offset: int) -> Promise[int]:
        """Give up the records below an offset (-1: the high watermark) because somebody asked for it (KIP-107).

        Keeps its promise, the new start of the log, when that is durable: what was deleted stays deleted, whatever
        happens then. Nothing a feature still needs (`retention_floor`) is given up. Raises `OffsetOutOfRange`,
        `NotLeaderOrFollower`, `StorageError`.
        """
        if self.closed:
            raise NotLeaderOrFollower(f"{self.name} is closed on this broker")
        if (failure := self.failure) is not None:
            raise failure
        high_watermark = self.replica.high_watermark
        if before_offset == HIGH_WATERMARK:
            before_offset = high_watermark
        if not 0 <= before_offset <= high_watermark:
            raise OffsetOutOfRange(
                f"{self.name}: records can be deleted below {high_watermark}, the high watermark, not {before_offset}"
            )
        promise: Promise[int] = self._scheduler.promise()

        def kept(error: StorageError | None) -> None:
            if promise.done():
                return
            if error is None:
                promise.set_result(self.log.start_offset)
            else:
                promise.set_exception(error)

        start_offset = min(before_offset, *self._floors(), high_watermark)
        if start_offset > self.log.start_offset:
            self.trim(start_offset)
        self._syncer.keep_start(self.log, kept)
        return promise

    def roll(self) -> None:
        """Begin a new segment, so that the one before can be let go as a whole."""
        self.log.roll()
        self._syncer.request(self.log, urgent=False)

    def retention_floor(self) -> int | None:
        """The lowest offset any feature still needs; retention must not pass it."""
        return min(self._floors(), default=None)

    def _floors(self) -> Iterator[int]:
        for hook in self._hooks:
            if (floor := hook.retention_floor()) is not None:
                yield floor

    def close(self, *, save: bool = True) -> None:
        """Take no more; end all waits. With `save`, hooks keep what makes the next start quick."""
        if self.closed:
            return
        self.closed = True
        if save:
            for hook in self._hooks:
                hook.close()
        self._hooks.clear()  # one that knows its partition would keep the files open until the collector comes by
        self._end_waits(NotLeaderOrFollower(f"{self.name} was closed on this broker"))
        self._wake()
        self._parked.clear()
        self._trouble.forget(self.topic, self.index)
