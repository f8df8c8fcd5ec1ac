"""One partition on one broker: a log, its replicas' progress, and whoever waits for either.

A bundle with one placement, leader epoch and in-sync set. Features that need to see or steer what happens here
plug in as hooks (`PartitionHook`) kept in files of their own; the partition calls them and knows none of them.

Here is what happens all the time: appends, commits, reads. The rest, by subject: `roles` (who leads), `replicating`
(what leader and follower ask of each other), `trimming` (where the log begins). On a single node the partition leads
from the start and nothing of the first two is ever called.

Always true:
* a record is readable only below the high watermark, and that is never above what fdatasync has covered;
* a wait for a commit is answered exactly once: committed, or the error that ended it;
* only a leader takes records from clients; no wait outlives the leader epoch it began in;
* after the log failed, no append succeeds and no later commit is reported.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from mansio.broker.partition import delete_records, follower_fetch, leadership
from mansio.broker.partition.append_validation import (
    CONTROL_OR_TRANSACTIONAL,
    AppendRules,
    append_error,
    log_failed,
    refuse,
    reject_timestamps,
)
from mansio.broker.partition.partition_hook import AppendResult
from mansio.broker.partition.readable_partition import ReadablePartition
from mansio.broker.partition.record_validation import check_keys
from mansio.broker.partition.storage_health import StorageHealth
from mansio.config import topic_config
from mansio.errors import (
    DiskFull,
    FencedLeaderEpoch,
    LogFailed,
    MansioError,
    NotLeaderOrFollower,
    OffsetNotAvailable,
    StorageError,
    UnknownLeaderEpoch,
)
from mansio.wire.batch.record_batch import TimestampType, check_batch, read_header, with_log_append_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from mansio.broker.partition.partition_hook import PartitionHook
    from mansio.config.topic_config import TopicSettings
    from mansio.ports import Buffer, Clock, Promise, Scheduler
    from mansio.state.replica import FollowerReplica, ReplicationProgress
    from mansio.storage.flush.group_commit import GroupCommit
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader

H = TypeVar("H")


class Partition(ReadablePartition):
    """See the module. All methods belong to the broker's loop."""

    __slots__ = (
        "_commit_waits",
        "_refuses",
        "_settings",
        "after_append",
        "before_append",
        "broker_id",
        "clock",
        "closed",
        "flush_waits",
        "hooks",
        "internal",
        "is_leader",
        "on_isr_candidate",
        "rules",
        "scheduler",
        "start_offset_waits",
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
        group_commit: GroupCommit,
        replica: ReplicationProgress | FollowerReplica,
        rules: AppendRules,
        clock: Clock,
        scheduler: Scheduler,
        settings: TopicSettings | None = None,
        internal: bool = False,
        storage_health: StorageHealth | None = None,
    ) -> None:
        """`settings`: what is in force for the topic; `internal`: the broker's own, which clients may not write;
        `storage_health`: who is told of damage and of a full disk; `replica`: in a cluster a `FollowerReplica` of
        nobody, until
        `become_leader` or `become_follower`.
        """
        super().__init__(topic, index, log, replica, group_commit, storage_health or StorageHealth(clock))
        self.internal = internal
        self.topic_id = topic_id
        self.rules = rules
        self._settings = settings or topic_config.resolve({}, {}, 1)
        self.closed = False
        self.broker_id = broker_id
        self.clock = clock
        self.scheduler = scheduler
        self.hooks: list[PartitionHook] = []
        self.before_append: list[Callable[[BatchHeader], AppendResult | None]] = []
        self.after_append: list[Callable[[BatchHeader, int], None]] = []
        self._commit_waits: deque[tuple[int, Callable[[MansioError | None], None]]] = deque()
        self.flush_waits: list[tuple[int, Callable[[], None]]] = []
        self.start_offset_waits: list[tuple[int, Promise[int]]] = []
        self.on_isr_candidate: Callable[[Partition, int], None] | None = None
        """Told of a follower that has all it needs to be in sync, and is not."""
        self.is_leader = False
        self._refuses = True
        self.set_role(replica)
        log.on_failure = self._failed

    def add_hook(self, hook: PartitionHook, *, on_data_path: bool = True) -> None:
        """Let a feature see and steer this partition. `on_data_path` False: it has no say in appends and reads, so
        they do not ask it.
        """
        self.hooks.append(hook)
        if on_data_path:
            self.before_append.append(hook.before_append)
            self.after_append.append(hook.on_append)
            self._readable_ends.append(hook.readable_end)

    def find_hook(self, kind: type[H]) -> H | None:
        """The hook of this class, if there is one."""
        return next((hook for hook in self.hooks if isinstance(hook, kind)), None)

    @property
    def settings(self) -> TopicSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: TopicSettings) -> None:
        self._settings = settings
        leadership.settings_changed(self)

    # Who leads (see `roles`)

    def become_leader(
        self,
        leader_epoch: int,
        *,
        in_sync: Iterable[int],
        replicas: Iterable[int],
        is_session_valid: Callable[[], bool] | None = None,
    ) -> None:
        """Lead from now on. `is_session_valid`: is this broker's session sure to live? While it is not, nothing is
        committed and nothing taken.

        Raises `FencedLeaderEpoch` for an epoch that is over, or in which this log was written before this broker was
        started: whatever that one lost would be given out again under the same epoch. `LogFailed`.
        """
        leadership.become_leader(
            self, leader_epoch, frozenset(in_sync), frozenset(replicas), is_session_valid
        )

    def become_follower(self, leader: int, leader_epoch: int) -> None:
        """Copy this broker's log from now on; -1: nobody leads. `FencedLeaderEpoch` for an epoch that is over."""
        leadership.become_follower(self, leader, leader_epoch)

    def resign(self) -> None:
        """Lead no more, and follow nobody, until the next epoch."""
        leadership.become_follower(self, leadership.NOBODY, self.replica.leader_epoch)

    def set_role(self, replica: ReplicationProgress | FollowerReplica) -> None:
        """Everything about who leads that appends and commits look at, as it follows from `replica`."""
        self.replica = replica
        self.is_leader = leadership.is_leader(replica)
        self._refuses = self.closed or not self.is_leader or leadership.is_under_min_isr(replica)
        self.log.on_durable = self._durable if self.is_leader else self._durable_as_follower

    def ensure_leader(self) -> None:
        """Raise `NotLeaderOrFollower` unless clients are served here."""
        if self.closed or not self.is_leader:
            raise leadership.not_leader_error(self)

    def ensure_high_watermark_known(self) -> None:
        """Raise `OffsetNotAvailable` while a new leader may not know all that was committed before it (KIP-207)."""
        if leadership.is_leader(self.replica) and not self.replica.complete:
            raise OffsetNotAvailable(f"{self.name}: its new leader does not know yet what is committed")

    def check_leader_epoch(self, epoch: int) -> None:
        """KIP-320: whoever knows another leader epoch must refresh its metadata first. -1: the client knows none."""
        current = self.replica.leader_epoch
        if epoch not in (-1, current):
            if epoch < current:
                raise FencedLeaderEpoch(f"{self.name}: leader epoch {epoch} is older than {current}")
            raise UnknownLeaderEpoch(f"{self.name}: leader epoch {epoch} is newer than {current}")
        if not self.is_leader:
            raise leadership.not_leader_error(self)

    # Writing

    def append(self, batch: Buffer, *, internal: bool = False, urgent: bool = True) -> AppendResult:
        """Append one closed batch, or raise why not. `urgent`: somebody waits for it to be committed (acks=all).

        `internal` is for the broker's own batches: no size limit of the topic, control batches allowed.
        """
        header = check_batch(batch)
        rules = self.rules
        by_client = rules.timestamp_type is TimestampType.CREATE
        if self._refuses:
            leadership.reject_append(self, internal=internal, urgent=urgent)
        if not internal:
            if len(batch) > rules.message_bytes_max or header.attributes & CONTROL_OR_TRANSACTIONAL:
                refuse(self.name, rules, header)
            if by_client:
                now_ms = self.clock.wall_ms()
                if (
                    header.max_timestamp_ms > now_ms + rules.timestamp_after_max_ms
                    or 0 <= header.base_timestamp_ms < now_ms - rules.timestamp_before_max_ms
                ):
                    reject_timestamps(self.name, rules, batch, header, now_ms)
        if self.log.failure is not None:
            raise self._log_failed(self.log.failure)  # also for a repeat: what was not durable never will be
        for before in self.before_append:
            if (known := before(header)) is not None:
                return known._replace(append_time_ms=-1) if by_client else known
        if rules.keys_needed and not internal:
            check_keys(self.name, batch, header)
        append_time_ms = -1
        front = None
        if not by_client:
            append_time_ms = self.clock.wall_ms()
            front = with_log_append_time(batch, header, append_time_ms)
        try:
            base_offset = self.log.append(batch, header, self.replica.leader_epoch, front=front)
        except StorageError as error:
            raise self.append_error(error) from error
        if front is not None:
            header = read_header(front)  # what was written, for whoever remembers it
        for after in self.after_append:
            after(header, base_offset)
        if self.replica.waits_for_followers and (urgent or self._parked):
            self.group_commit.request_with_followers(self.log)
        else:
            self.group_commit.request(self.log, urgent=urgent or bool(self._parked))
        return AppendResult(base_offset, base_offset + header.last_offset_delta + 1, append_time_ms, False)

    def request_flush(self) -> None:
        """Make what was appended without urgency durable now: somebody waits for it after all."""
        self.group_commit.request(self.log, urgent=True)

    @property
    def failure(self) -> LogFailed | None:
        """Why no write is taken any more, if that is so."""
        return None if self.log.failure is None else self._log_failed(self.log.failure)

    def _log_failed(self, failed: StorageError) -> LogFailed:
        """An error of its own each time: one that is raised again and again would keep the frames of all who met it."""
        return log_failed(self.name, failed)

    def append_error(self, error: StorageError) -> StorageError:
        """What the client is told of an append that the log refused: which of the ways of a disk it was."""
        if (failure := self.failure) is not None:
            return failure
        refusal = append_error(self.name, error)
        if isinstance(refusal, DiskFull):
            self.storage_health.disk_full(self.topic, self.index, refusal)
            self.add_after_append(self._disk_space_recovered)
        return refusal

    def _disk_space_recovered(self, header: BatchHeader, base_offset: int) -> None:
        """The first append that goes well after one that found no room."""
        del header, base_offset
        self.remove_after_append(self._disk_space_recovered)
        self.storage_health.room(self.topic, self.index)

    def add_after_append(self, call: Callable[[BatchHeader, int], None]) -> None:
        """Have it called after each append, for a while: whoever does not need it must not pay for it."""
        if call not in self.after_append:
            self.after_append = [*self.after_append, call]

    def remove_after_append(self, call: Callable[[BatchHeader, int], None]) -> None:
        self.after_append = [one for one in self.after_append if one != call]

    def wake_followers(self, header: BatchHeader, base_offset: int) -> None:
        """There is an append that followers wait for."""
        del header, base_offset
        for wake in tuple(self.parked_followers):
            wake()

    def wait_committed(self, end_offset: int, callback: Callable[[MansioError | None], None]) -> bool:
        """True if everything below `end_offset` is committed now. Otherwise `callback` is called once, with None or
        with the error that means it never will be: later, but at once where nobody leads or too few are in sync."""
        if end_offset <= self.replica.high_watermark:
            return True
        if self._refuses:
            callback(leadership.commit_error(self))
            return False
        waits = self._commit_waits
        waits.append((end_offset, callback))
        if (
            len(waits) > 1 and waits[-2][0] > end_offset
        ):  # a duplicate of an older batch that is still in flight
            self._commit_waits = deque(sorted(waits, key=itemgetter(0)))
        return False

    def committed(self, end_offset: int) -> Promise[None]:
        """A promise kept when everything below `end_offset` is durable on every in-sync replica."""
        promise: Promise[None] = self.scheduler.promise()

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
        if self.replica.durable(end_offset):
            self.high_watermark_advanced()

    def _durable_as_follower(self, end_offset: int) -> None:
        if self.replica.durable(end_offset):
            self.high_watermark_advanced()
        follower_fetch.notify_durable(self, end_offset)

    def high_watermark_advanced(self) -> None:
        """The high watermark moved: tell everybody who waits for that."""
        high_watermark = self.replica.high_watermark
        for hook in self.hooks:
            hook.on_committed(high_watermark)
        waits = self._commit_waits
        while waits and waits[0][0] <= high_watermark:
            waits.popleft()[1](None)
        self.wake_readers()

    def _failed(self, error: StorageError) -> None:
        error = self.failure or error
        self.fail_waits(error)
        self.wake()

    def fail_waits(self, error: MansioError) -> None:
        """Nothing that is waited for now will be committed, as far as this broker can tell."""
        waits, self._commit_waits = self._commit_waits, deque()
        for _, callback in waits:
            callback(error)
        follower_fetch.notify_durable(self, None)

    # Keeping and ending

    def trim(self, start_offset: int) -> None:
        """Give up records below `start_offset` (at most the high watermark); whole segments leave the disk.

        Raises `NotLeaderOrFollower`, `OffsetOutOfRange`.
        """
        delete_records.trim(self, start_offset)

    def delete_records(self, before_offset: int) -> Promise[int]:
        """Give up the records below an offset (-1: the high watermark) because somebody asked for it (KIP-107).

        Keeps its promise, the new start of the log, when that is durable on every in-sync replica: what was deleted
        stays deleted, whatever happens then. Nothing a feature still needs (`retention_floor`) is given up. Raises
        `OffsetOutOfRange`, `OffsetNotAvailable`, `NotLeaderOrFollower`, `StorageError`.
        """
        return delete_records.delete_records(self, before_offset)

    def roll(self) -> None:
        """Begin a new segment, so that the one before can be let go as a whole."""
        self.log.roll()
        self.group_commit.request(self.log, urgent=False)

    def retention_floor(self) -> int | None:
        """The lowest offset any feature still needs; retention must not pass it."""
        return min(delete_records.retention_floors(self), default=None)

    def close(self, *, save: bool = True) -> None:
        """Take no more; end all waits. With `save`, hooks keep what makes the next start quick."""
        if self.closed:
            return
        self.closed = self._refuses = True
        if save:
            for hook in self.hooks:
                hook.close()
        self.hooks.clear()  # one that knows its partition would keep the files open until the collector comes by
        ended = NotLeaderOrFollower(f"{self.name} was closed on this broker")
        self.fail_waits(ended)
        delete_records.fail_waits(self, ended)
        self.wake()
        self._parked.clear()
        self.parked_followers.clear()
        self.remove_after_append(self.wake_followers)
        self.on_isr_candidate = None
        self.storage_health.forget(self.topic, self.index)
