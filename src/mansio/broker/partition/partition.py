"""Partition replica on this broker: log, role (leader or follower) and hooks (Kafka `Partition`).

Features of a partition (`PartitionFeature`) are in other modules; the partition gets them by its constructor. They
observe it as hooks (`PartitionHook`) and take part in appends (`AppendPipeline`). It knows its producers, who write
transactions. On a single node the partition is the leader from the start,
and the methods for replication are not called.

A follower receives all batches up to the end of the leader's log, flushed on the leader or not, so that all replicas
flush at the same time. This does not weaken durability: the high watermark is the smallest flushed end offset of all
in-sync replicas, including the leader. If a leader loses unflushed records in a crash, it leads again only in a new
leader epoch, and followers truncate these records.

Invariants:
* A record is readable by clients only below the high watermark, which is never above the flushed end offset.
* Only a leader accepts records from clients. No wait (`PartitionWaits`) outlives the leader epoch in which it began.
* After the log has failed, no append succeeds and no later commit is reported.
* A leader epoch that has ended is never used again. No broker leads in an epoch that its log contained before the
  broker started: unflushed records may be lost, and their offsets would be assigned again in the same epoch, which
  followers could not detect.
* The epoch of a new leader begins at the end of its log; a new leader does not truncate its log.
* A follower's fetch offset counts as flushed only if the request has this leader's epoch and the logs do not diverge
  below the offset.
* A follower's log is truncated only where its epochs and its leader's diverge (KIP-101, KIP-279), never at a high
  watermark.
* Only the leader moves the log start offset, never above the high watermark; a follower's log starts where its leader's
  does. A deletion on request is acknowledged only when every in-sync replica has flushed the new start, so that the
  records stay deleted after any change of leader.

Sources: KIP-101 and KIP-279 (epochs), KIP-107 (DeleteRecords), KIP-207, KIP-320, KIP-497 and KIP-966 (in-sync sets),
KIP-595 (diverging epochs in Fetch), KIP-903. As in Kafka, NOT_LEADER_OR_FOLLOWER is returned when the leader changed,
NOT_ENOUGH_REPLICAS before and NOT_ENOUGH_REPLICAS_AFTER_APPEND after the append.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, Protocol, TypeVar

from mansio.broker.partition.append import AppendPipeline, NewBatch
from mansio.broker.partition.append_validation import (
    CONTROL_OR_TRANSACTIONAL_BITS,
    INLINE_CONTENT_BYTES_MAX,
    AppendRules,
    check_client_batch,
    check_inline,
    check_record_count,
    new_append_error,
    new_log_failed_error,
    reject_timestamps,
)
from mansio.broker.partition.partition_hook import AppendResult
from mansio.broker.partition.partition_waits import PartitionWaits
from mansio.broker.partition.storage_health import UNKNOWN_OFFSET, StorageHealth
from mansio.config import topic_config
from mansio.errors import (
    UNREADABLE_CONTENT,
    CorruptLog,
    CorruptMessage,
    DamagedRange,
    DiskFull,
    FencedLeaderEpoch,
    LogFailed,
    MansioError,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    OffsetNotAvailable,
    OffsetOutOfRange,
    StorageError,
    UnknownLeaderEpoch,
)
from mansio.logs import fields
from mansio.ports import complete, complete_from, complete_with_error
from mansio.state.replica import NO_LEADER, FollowerReplica, ReplicationProgress
from mansio.storage.active_files import ActiveFilesInUse
from mansio.storage.checked_ranges import damaged_range_error
from mansio.storage.log import LogListener
from mansio.storage.verification import is_unreadable
from mansio.tracebacks import copied, without_traceback
from mansio.wire.batch.control_records import read_control_record
from mansio.wire.batch.end_marker import encode_end_marker
from mansio.wire.batch.record_batch import (
    CODEC_MASK,
    CONTROL_FLAG,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    TimestampType,
    check_batch,
    check_stored_batch,
    encode_batch,
    iterate_batches,
    read_header,
    read_stored_batches,
    with_log_append_time,
)
from mansio.wire.batch.record_reader import check_content
from mansio.wire.field_values import READ_COMMITTED, READ_UNCOMMITTED

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from uuid import UUID

    from mansio.broker.partition.append import AppendFeature, Draft, Following, ReleasingFeature
    from mansio.broker.partition.append_validation import InspectedRecords, RecordReader
    from mansio.broker.partition.batch_verifier import BatchVerifier
    from mansio.broker.partition.partition_hook import Contents, PartitionHook
    from mansio.broker.partition.producer_hook import ProducerHook
    from mansio.config.topic_config import TopicSettings
    from mansio.ports import Buffer, Clock, Promise, Scheduler
    from mansio.state.trace.trace_buffer import PartitionTrace, TraceBuffer
    from mansio.storage.checked_ranges import CheckedRange
    from mansio.storage.group_commit import GroupCommit
    from mansio.storage.log import Log
    from mansio.storage.segment import Segment
    from mansio.storage.segment_list import LogSlice
    from mansio.wire.batch.end_marker import EndMarker

    AfterAppend = Callable[[BatchHeader, int, Contents | None], None]

H = TypeVar("H")

logger = logging.getLogger(__name__)


HIGH_WATERMARK: Final = -1
"""The offset in a DeleteRecords request that stands for the high watermark."""

OFFSET_DELTA_MAX: Final = (1 << 31) - 1
"""Maximum difference between the last offset and the base offset of a batch."""


class FollowerFetch(Protocol):
    """A follower's request for one partition. Epochs and the follower's log start offset are -1 if unknown."""

    @property
    def current_leader_epoch(self) -> int: ...
    @property
    def fetch_offset(self) -> int: ...
    @property
    def last_fetched_epoch(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...


class FollowerReadResult(NamedTuple):
    """Response to one partition of a follower's fetch.

    `records`: a part of the log, or one batch without records; None if there are no new batches. `diverging`: set
    instead of `records` if the follower's log diverges from this one: the leader epoch and its end offset in this log.
    `urgent`: the response must be sent now, even without batches.
    """

    records: LogSlice | bytes | None = None
    diverging: tuple[int, int] | None = None
    urgent: bool = False


class Attached(NamedTuple):
    """A feature of one partition. `feature`: what services look up (`Partition.find_feature`). `hook`: observes the
    partition, only its appends and reads if `is_on_data_path`; None for nothing. `appends`: takes part in the appends
    of clients. `releases`: copies what `hook` keeps from retention."""

    feature: object
    hook: PartitionHook | None
    appends: AppendFeature | None = None
    releases: ReleasingFeature | None = None
    is_on_data_path: bool = True


class PartitionFeature(ABC):
    """A property that the records of a partition may have, or that the partition may have. One object per broker."""

    control_types: frozenset[int] = frozenset()
    """Types of the control records that the feature writes: a follower that receives one needs the feature."""

    @abstractmethod
    def is_needed(self, partition: Partition) -> bool:
        """Return whether the settings of a partition need the feature."""

    def is_stored(self, log: Log) -> bool:
        """Return whether the files of a partition that is opened need the feature, although its settings do not.
        Raises `OSError`."""
        del log
        return False

    def reader(self, settings: TopicSettings) -> RecordReader | None:
        """Return what the feature reads from clients' batches on a topic with these settings; None for nothing."""
        del settings
        return None

    @abstractmethod
    def attach(self, partition: Partition, *, is_new: bool) -> Attached:
        """Create the feature of a partition. `is_new`: the topic gets the feature now. Raises `StorageError` if it
        cannot be read, and the log has failed."""

    def truncate(self, log: Log) -> None:
        """Remove what the files of a partition without the feature contain from above the end of its log: later, the
        log has other records there. Raises `OSError`."""
        del log

    def detach(self, feature: object) -> None:
        """Give up what services look up, because the partition is closed."""
        del feature

    def close(self) -> None:  # noqa: B027 - most features do nothing by themselves
        """End all background work, because the broker stops; its partitions are closed afterwards."""


class Partition:
    """The replica of one partition on this broker. All methods run on the broker's event loop."""

    __slots__ = (
        "_acknowledged_end",
        "_after_append",
        "_attached",
        "_before_append",
        "_features",
        "_hooks",
        "_isr_listener",
        "_readable_ends",
        "_rejects",
        "_settings",
        "_trace_buffer",
        "_untraced_epoch",
        "broker_id",
        "clock",
        "closed",
        "group_commit",
        "index",
        "internal",
        "is_leader",
        "last_append_ms",
        "log",
        "pipeline",
        "producers",
        "replica",
        "rules",
        "scheduler",
        "scratch",
        "storage_health",
        "topic",
        "topic_id",
        "trace",
        "waits",
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
        producers: ProducerHook | None = None,
        verifier: BatchVerifier | None = None,
        features: Sequence[PartitionFeature] = (),
        scratch: bytearray | None = None,
        trace_buffer: TraceBuffer | None = None,
    ) -> None:
        """Create the replica of an open log.

        `settings` are the effective settings of the topic; `internal` marks a topic that clients may not write;
        `storage_health` records damage and disk-full errors. In a cluster `replica` is a `FollowerReplica` without a
        leader until `become_leader` or `become_follower`. `producers` have the transactions of the partition.
        `verifier` verifies stored batches for readers; without it, the reading thread does. `features`: all that this
        broker knows, in the order in which they take part in appends; those that are needed are attached. `scratch`: a
        buffer of `INLINE_CONTENT_BYTES_MAX` for the content of batches that are checked, which partitions may share.
        `trace_buffer`: to which the partition reports what happens to its records; None for nowhere.
        """
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.broker_id = broker_id
        self.log = log
        self.group_commit = group_commit
        self.replica = replica
        self.rules = rules
        self.clock = clock
        self.scheduler = scheduler
        self.internal = internal
        self.storage_health = storage_health or StorageHealth(clock)
        self.closed = False
        self.is_leader = False
        self.scratch = scratch
        self._isr_listener: Callable[[Partition, int], None] | None = None
        self.pipeline = AppendPipeline(f"{topic}-{index}", clock)
        """The features that take part in the appends of clients' batches."""
        self.producers = producers
        """The producers of the partition with their transactions; None if it has none."""
        self._features = features
        self._attached: dict[PartitionFeature, Attached] = {}
        self._settings = settings or topic_config.resolve_topic_settings({}, {}, 1)
        self._rejects = True
        """Appends must be checked by `_check_append`: not leader, closed, or fewer in-sync replicas than required."""
        self._acknowledged_end = 0
        """End of the last batch that was acknowledged without waiting for its commit (acks=0 and 1)."""
        self._hooks: list[PartitionHook] = []
        self._before_append: list[Callable[[BatchHeader], AppendResult | None]] = []
        self._after_append: list[AfterAppend] = []
        self._readable_ends: list[Callable[[int], int | None]] = []
        self.waits = PartitionWaits()
        """The requests that wait for this partition."""
        self._trace_buffer = None if internal else trace_buffer
        self.trace: PartitionTrace | None = None
        """The trace of the records while this broker leads the partition, unless the topic has none."""
        self._set_role(replica)
        self._untraced_epoch = -1
        """Leader epoch for which it was reported that there is no trace."""
        self.last_append_ms = 0
        """Time of the last append of a client, ms since the Unix epoch."""
        self._renew_trace()
        log.listen(
            LogListener(
                self._on_durable,
                self._on_log_failed,
                None if verifier is None else partial(verifier.request, log, self.waits.wake_all),
                self._on_damage,
                verifier.may_check if verifier is not None else lambda: True,
            )
        )
        if producers is not None:
            self.add_hook(producers)
            producers.on_committed(replica.high_watermark)
            if producers.damaged_offset is not None:  # after the caller has registered this partition
                scheduler.call_soon(self._report_lost_transaction_ends)
        self._attach_stored_features()

    # State

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

    @property
    def leader_progress(self) -> ReplicationProgress | None:
        """The leader's state of all replicas; None if this broker is not the leader."""
        replica = self.replica
        return replica if isinstance(replica, ReplicationProgress) else None

    @property
    def is_leadership_uncertain(self) -> bool:
        """Whether this broker is the leader, but another one may act as the leader, too: because the session of this
        broker may have expired, or because an earlier leader may not know that its own has ended."""
        replica = self.replica
        return isinstance(replica, ReplicationProgress) and (
            replica.is_session_uncertain or replica.has_earlier_leader
        )

    @property
    def failure(self) -> LogFailed | None:
        """The error with which all writes are rejected because the log has failed; None otherwise."""
        return None if self.log.failure is None else self._new_log_failed_error(self.log.failure)

    @property
    def settings(self) -> TopicSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: TopicSettings) -> None:
        self._settings = settings
        replica = self.replica
        if isinstance(replica, ReplicationProgress):
            required = min(settings.min_insync_replicas, 1 + len(replica.followers()))
            self._on_isr_changed(replica, replica.set_min_insync_replicas(required))

    def now_ms(self) -> float:
        """Return the monotonic time in milliseconds by which the lag of replicas is measured."""
        return self.clock.monotonic() * 1000

    def add_hook(self, hook: PartitionHook, *, on_data_path: bool = True) -> None:
        """Attach a hook. With `on_data_path` False, appends and reads do not call it."""
        self._hooks.append(hook)
        if on_data_path:
            self._before_append.append(hook.before_append)
            self._after_append = [*self._after_append, hook.on_append]
            self._readable_ends.append(hook.readable_end)

    def find_hook(self, kind: type[H]) -> H | None:
        """Return the hook of this class; None if there is none."""
        return next((hook for hook in self._hooks if isinstance(hook, kind)), None)

    def find_feature(self, kind: type[H]) -> H | None:
        """Return the object of an attached feature that has this class; None if there is none."""
        for attached in self._attached.values():
            if isinstance(attached.feature, kind):
                return attached.feature
        return None

    def apply_settings(self, settings: TopicSettings, rules: AppendRules) -> None:
        """Use changed settings of the topic, and attach the features that they need."""
        was_traced = self._settings.is_traced
        self.settings = settings
        self.rules = rules
        self._renew_trace(is_turned=settings.is_traced != was_traced)
        for feature in self._features:
            if feature not in self._attached and feature.is_needed(self):
                self.attach(feature, is_new=True)

    def attach(self, feature: PartitionFeature, *, is_new: bool) -> None:
        """Attach a feature, unless it is attached. `is_new`: the topic gets it now."""
        if feature in self._attached:
            return
        try:
            attached = feature.attach(self, is_new=is_new)
        except StorageError:  # the log has failed, which is reported
            return
        self._attached[feature] = attached
        if attached.hook is not None:
            self.add_hook(attached.hook, on_data_path=attached.is_on_data_path)
        known = {one: None for one in (*self._features, *self._attached) if one in self._attached}
        appends = [self._attached[one].appends for one in known]
        self.pipeline.features = [one for one in appends if one is not None]

    def _attach_stored_features(self) -> None:
        """Attach the features that the settings or the files of the log need, which was just opened."""
        log = self.log
        try:
            for feature in self._features:
                if feature.is_needed(self) or feature.is_stored(log):
                    self.attach(feature, is_new=False)
                else:
                    feature.truncate(log)
        except OSError as error:
            log.fail(error, f"cannot read which features {log.directory} uses")

    def _attach_received(self, records: memoryview) -> None:
        """Attach the features whose control batches a leader has sent, because its topic used them before this replica
        existed. `records`: whole batches."""
        missing = [one for one in self._features if one.control_types and one not in self._attached]
        if not missing:
            return
        for position, header in iterate_batches(records):
            if header.is_control:
                found = read_control_record(records[position : position + header.size])
                for feature in missing:
                    if found is not None and found.type in feature.control_types:
                        self.attach(feature, is_new=False)

    @property
    def uncommitted_end(self) -> int:
        """The end offset of the records that were acknowledged (acks=0 and 1) and are not committed yet; 0 if there are
        none, or if no record can be committed now."""
        end = self._acknowledged_end
        if end <= self.replica.high_watermark or self._rejects or self.log.failure is not None:
            return 0
        return end

    def ensure_leader(self) -> None:
        """Raise `NotLeaderOrFollower` unless this broker leads the partition."""
        if self.closed or not self.is_leader:
            raise self._not_leader_error()

    def ensure_high_watermark_known(self) -> None:
        """Raise `OffsetNotAvailable` while a new leader may not know the high watermark of the former one (KIP-207)."""
        replica = self.replica
        if isinstance(replica, ReplicationProgress) and not replica.is_high_watermark_known:
            raise OffsetNotAvailable(f"{self.name}: the new leader does not know the high watermark yet")

    def check_leader_epoch(self, epoch: int, *, may_follow: bool = False) -> None:
        """Check the leader epoch of a client's request, -1 if the client knows none (KIP-320).

        Raises `FencedLeaderEpoch` for a lower epoch, `UnknownLeaderEpoch` for a higher one, and `NotLeaderOrFollower`
        on a follower, unless with `may_follow`."""
        current = self.replica.leader_epoch
        if epoch not in (-1, current):
            if epoch < current:
                raise FencedLeaderEpoch(f"{self.name}: leader epoch {epoch} is older than {current}")
            raise UnknownLeaderEpoch(f"{self.name}: leader epoch {epoch} is newer than {current}")
        if not (self.is_leader or may_follow):
            raise self._not_leader_error()

    # Append

    def append(
        self,
        batch: Buffer,
        *,
        internal: bool = False,
        urgent: bool = True,
        transactional: bool = False,
        is_intact: bool = False,
        is_checked: bool = False,
        inspected: InspectedRecords | None = None,
        contents: Contents | None = None,
    ) -> AppendResult:
        """Append one encoded batch.

        `urgent`: a caller waits for the commit (acks=all), so the flush starts now. `internal`: the batch is written by
        the broker itself, may be larger than the topic's limit, may be a control batch, and needs no sequence.
        `transactional`: the request of the client is; if the batch is, too, the caller has verified its transaction.
        `is_intact`: the CRC need not be checked, because `check_batch` has accepted the batch in the broker's own
        memory, or the broker has just encoded it.
        `is_checked`: the content of the batch was checked (`check_content`); otherwise that of a compressed one is
        checked here if it is small. `inspected`: the result of `inspect_records`, without which a small batch is
        inspected here if the topic has a feature that needs it. `contents`: of an `internal` batch.

        Raises the `MansioError` for which the batch was rejected, and `DecompressedTooLarge` if its content must be
        checked or inspected by the `BatchProcessor`, because it is large. Raises `RebuildRequired` for a batch that a
        thread has `inspected`, if some of its records are repeats, and `LookUpRequired` for one that has to wait in the
        queue of the `BatchProcessor`, because another broker has to be asked before.
        """
        check = read_header if is_intact else check_stored_batch if internal else check_batch
        header = check(batch)
        rules = self.rules
        by_client = rules.timestamp_type is TimestampType.CREATE
        if self._rejects:
            self._check_append(internal=internal, urgent=urgent)
        if not internal:
            if len(batch) > rules.message_bytes_max or header.attributes & CONTROL_OR_TRANSACTIONAL_BITS:
                check_client_batch(self.name, rules, header, transactional=transactional)
            if by_client:
                now_ms = self.last_append_ms = self.clock.wall_ms()
                if (
                    header.max_timestamp_ms > now_ms + rules.timestamp_after_max_ms
                    or 0 <= header.base_timestamp_ms < now_ms - rules.timestamp_before_max_ms
                ):
                    reject_timestamps(self.name, rules, batch, header, now_ms)
            if rules.inspects_records:
                check_record_count(self.name, header)
            if header.attributes & CODEC_MASK and rules.checks_content and not is_checked:
                check_content(batch, header, INLINE_CONTENT_BYTES_MAX, scratch=self.scratch)
            if rules.inspects_records and inspected is None and not is_checked:
                check_inline(batch, header, rules)
        if self.log.failure is not None:
            raise self._new_log_failed_error(
                self.log.failure
            )  # duplicates too: what was not flushed never will be
        for before in self._before_append:
            if (known := before(header)) is not None:
                if rules.readers:
                    known = self.pipeline.with_first_offset(batch, rules, inspected, known)
                return known._replace(append_time_ms=-1) if by_client else known
        if rules.inspects_records and not internal:
            if self.pipeline.features:
                return self._append_draft(
                    self.pipeline.prepare(batch, header, rules, inspected), urgent=urgent
                )
            self.pipeline.inspect(batch, rules, inspected)  # the topic only restricts what clients may send
        # As `_write` and `_request_flush` for one batch: through them, an append makes 39 calls instead of 33 and takes
        # 1.18 times as long (a batch of one record, CPython 3.11, without a disk).
        append_time_ms = -1
        front = None
        if not by_client:
            append_time_ms = self.last_append_ms = self.clock.wall_ms()
            front = with_log_append_time(batch, header, append_time_ms)
        try:
            base_offset = self.log.append(
                batch, header, self.replica.leader_epoch, rewritten_header=front, uses_reserve=internal
            )
        except StorageError as error:
            raise self._append_error(error) from error
        if front is not None:
            header = read_header(front)  # as written, for the hooks that store it
        for after in self._after_append:
            after(header, base_offset, contents)
        end_offset = base_offset + header.last_offset_delta + 1
        if not urgent:
            self._acknowledged_end = end_offset
        waits = self.waits
        if waits.followers:
            waits.wake_followers()
        self.group_commit.request_flush(
            self.log,
            urgent=urgent or bool(waits.readers),
            with_followers=self.replica.waits_for_followers,
        )
        return AppendResult(base_offset, end_offset, append_time_ms, False)

    def _append_draft(self, draft: Draft, *, urgent: bool) -> AppendResult:
        """Append what the features have made of a client's batch, and what they have to append next."""
        base_offset, end_offset = -1, draft.known_end
        batches = draft.batches()
        if batches:
            base_offset, appended_end = self._write(batches)
            end_offset = max(end_offset, appended_end)
        if not urgent:
            self._acknowledged_end = max(self._acknowledged_end, end_offset)
        if batches or (urgent and end_offset > self.replica.high_watermark):
            self._request_flush(urgent=urgent)
        for feature in self.pipeline.features:
            if (following := feature.following()) is not None:
                try:
                    self.append_following(following)
                except MansioError as error:  # the batch was accepted: what follows is tried again
                    known = fields(topic=self.topic, partition=self.index, reason=error.message)
                    logger.warning("delivery_failed", extra=known)
        if draft.first_offset >= 0:
            base_offset = draft.first_offset
        append_time_ms = -1
        if self.rules.timestamp_type is not TimestampType.CREATE:
            append_time_ms = draft.appended_ms if draft.first_ms < 0 else draft.first_ms
        return AppendResult(base_offset, end_offset, append_time_ms, draft.batch is None)

    def _write(self, batches: Iterable[NewBatch], *, uses_reserve: bool = False) -> tuple[int, int]:
        """Append batches, and then pass them to the hooks; return the base offset of the last one and the end offset.
        `uses_reserve`: see `Log.append`.

        An error may leave the first of them in the log; their flush is then requested."""
        log, epoch = self.log, self.replica.leader_epoch
        base_offset = log.end_offset
        appended: list[tuple[NewBatch, int]] = []
        try:
            for one in batches:
                base_offset = log.append(
                    one.batch,
                    one.header,
                    epoch,
                    rewritten_header=one.front,
                    uses_reserve=uses_reserve or bool(appended),
                )
                appended.append((one, base_offset))
        except StorageError as error:
            if appended:
                self._request_flush(urgent=False)
            # With some of them in the log, the caller must not append them again when another file may be opened.
            raise self._append_error(error) from (None if appended else error)
        finally:
            end_offset = log.end_offset
            for one, offset in appended:
                for after in self._after_append:
                    after(one.header, offset, one.contents)
            if appended:
                self.waits.wake_followers()
        return base_offset, end_offset

    def _request_flush(self, *, urgent: bool) -> None:
        self.group_commit.request_flush(
            self.log,
            urgent=urgent or bool(self.waits.readers),
            with_followers=self.replica.waits_for_followers,
        )

    def append_following(self, following: Following) -> int:
        """Append what a feature has to append next; return the end offset. Raises the errors of `append`."""
        try:
            end_offset = self.append_unchanged(following.batches, following.contents)
        except BaseException:
            if following.failed is not None:
                following.failed()
            raise
        if following.done is not None:
            following.done(end_offset)
        return end_offset

    def append_unchanged(self, batches: Sequence[bytes], contents: Sequence[Contents | None] = ()) -> int:
        """Append batches of the broker itself, one directly after the other, and start their flush; return their end
        offset. Unlike `append`, this never changes a CRC. `contents`: of each batch, none if they are not known.

        An error may leave the first of them in the log. Raises the errors of `append`."""
        self._check_append(internal=True, urgent=True)
        for before in self._before_append:
            before(read_header(batches[0]))
        if self.log.failure is not None:
            raise self._new_log_failed_error(self.log.failure)
        new = [
            NewBatch(batch, check_stored_batch(batch), known)
            for batch, known in zip_longest(batches, contents)
        ]
        _, end_offset = self._write(new, uses_reserve=True)
        self._request_flush(urgent=True)
        return end_offset

    def append_marker(self, marker: EndMarker) -> AppendResult:
        """End the transaction of a producer in this partition; the caller waits for the commit of the marker.

        A marker without an open transaction is appended, too: it fences the batches of earlier epochs. Raises
        `InvalidProducerEpoch`, `TransactionCoordinatorFenced`, and the errors of `append`."""
        producers = self.producers
        if producers is None or self.closed:
            raise self._not_leader_error()
        self._check_append(internal=False, urgent=True)
        producers.check_marker(marker)
        batch = encode_end_marker(marker, self.clock.wall_ms())
        return self.append(batch, internal=True, contents={producers: marker})

    def request_flush(self) -> None:
        """Start the flush of appended batches for which no caller waits (acks other than all)."""
        self.group_commit.request_flush(self.log, urgent=True)

    def when_committed(self, end_offset: int, callback: Callable[[MansioError | None], None]) -> bool:
        """Return True if all records below `end_offset` are committed; otherwise return False and call `callback` once.

        `callback` is called with None on commit, or with the error because of which the wait ended; before this method
        returns if this broker is not the leader or too few replicas are in sync."""
        if end_offset <= self.replica.high_watermark:
            return True
        if self._rejects:
            callback(self._commit_error())
            return False
        self.waits.add_commit(end_offset, callback)
        return False

    def commit_promise(self, end_offset: int) -> Promise[None]:
        """Return a promise that completes when all records below `end_offset` are committed."""
        promise: Promise[None] = self.scheduler.promise()
        self.report_commit(end_offset, partial(complete_from, promise, None))
        return promise

    def report_commit(self, end_offset: int, callback: Callable[[MansioError | None], None]) -> None:
        """Call `callback` once, as `when_committed` does, but also if all records below `end_offset` are committed or
        the log has failed before."""
        if (failure := self.failure) is not None:
            callback(failure)
        elif self.when_committed(end_offset, callback):
            callback(None)

    def _check_append(self, *, internal: bool, urgent: bool) -> None:
        """Raise the error of an append that must be rejected. `urgent`: acks=all."""
        replica = self.replica
        if not isinstance(replica, ReplicationProgress):
            raise self._not_leader_error()
        if self.closed and not internal:
            raise self._not_leader_error()
        if urgent and replica.is_under_min_isr:
            raise NotEnoughReplicas(
                f"{self.name}: {len(replica.in_sync)} replicas are in sync, "
                f"min.insync.replicas={replica.min_insync_replicas}; nothing was written"
            )

    def _new_log_failed_error(self, failed: StorageError) -> LogFailed:
        """Return a new error; one object that is raised repeatedly would keep the frames of all its tracebacks."""
        return new_log_failed_error(self.name, failed)

    def _append_error(self, error: StorageError) -> StorageError:
        """Return the error for the client of an append that the log rejected, and report a full disk."""
        if (failure := self.failure) is not None:
            return copied(failure)
        rejection = new_append_error(self.name, error)
        if isinstance(rejection, DiskFull):
            self.storage_health.record_disk_full(self.topic, self.index, rejection)
            if self._report_disk_space_recovered not in self._after_append:
                self._after_append = [*self._after_append, self._report_disk_space_recovered]
        return rejection

    def _report_disk_space_recovered(
        self, header: BatchHeader, base_offset: int, contents: Contents | None
    ) -> None:
        """Report the first append that succeeds after a disk-full error."""
        del header, base_offset, contents
        self._after_append = [one for one in self._after_append if one != self._report_disk_space_recovered]
        self.storage_health.record_disk_space_available(self.topic, self.index)

    def _on_durable(self, end_offset: int) -> None:
        if self.replica.on_local_flush(end_offset):
            self._on_high_watermark_advanced()
        if self.waits.flushes:
            self.waits.on_flushed(end_offset)

    def _on_high_watermark_advanced(self) -> None:
        high_watermark = self.replica.high_watermark
        for hook in self._hooks:
            hook.on_committed(high_watermark)
        producers = self.producers
        has_open = producers is not None and producers.transactions.open
        self.waits.on_committed(high_watermark, self.last_stable_offset if has_open else high_watermark)
        if self.replica.has_follower_readers:
            self.waits.wake_followers()
        elif self.waits.marks:
            self.waits.mark_followers()

    def _on_log_failed(self, error: StorageError) -> None:
        failed = self.failure or error
        logger.error("log_failed", extra=fields(topic=self.topic, partition=self.index, reason=error))
        self.waits.fail(failed)

    # Read

    def readable_end(self, isolation_level: int = READ_UNCOMMITTED) -> int:
        """Return the offset below which a reader of this isolation level may read."""
        end = self.replica.high_watermark
        for readable_end in self._readable_ends:
            bound = readable_end(isolation_level)
            if bound is not None and bound < end:
                end = bound
        return end

    @property
    def last_stable_offset(self) -> int:
        """The offset below which all transactions are decided; the high watermark if none is open below it."""
        return self.readable_end(READ_COMMITTED)

    def read(self, offset: int, max_bytes: int, isolation_level: int = READ_UNCOMMITTED) -> LogSlice | None:
        """Return whole batches below the readable end, the first of which contains `offset`; None if there are none.

        An offset between the readable end and the end of the log is valid and returns None. Raises `OffsetOutOfRange`,
        `NotLeaderOrFollower`, `CorruptLog`, `StorageError`.
        """
        limit = self.readable_end(isolation_level)
        if offset >= limit:
            if offset > self.log.end_offset:
                self._raise_out_of_range(offset)
            return None
        try:
            return self.log.read(offset, max_bytes, limit)
        except StorageError as error:
            self.report_damage(offset, error)
            raise

    def _raise_out_of_range(self, offset: int) -> NoReturn:
        """Raise `OffsetOutOfRange`, or another error if another broker may lead the partition.

        After OFFSET_OUT_OF_RANGE a client resets its position, and so repeats or skips records; the other broker may
        have records that this one lacks."""
        if self.is_leadership_uncertain:
            raise NotLeaderOrFollower(
                f"{self.name}: offset {offset} is not in this log, and another broker may lead the partition"
            )
        raise OffsetOutOfRange(
            f"{self.name}: offset {offset} is beyond the end of the log, {self.log.end_offset}"
        )

    def offset_at_timestamp(self, timestamp_ms: int, limit_offset: int) -> tuple[int, int, int] | None:
        """Return offset, timestamp in ms and leader epoch of the first record at or after a timestamp, or None.

        Only records below `limit_offset` count."""
        try:
            return self.log.offset_for_time(timestamp_ms, limit_offset)
        except StorageError as error:
            self.report_damage(_damaged_offset(error), error)
            raise

    def max_timestamp_offset(self, limit_offset: int) -> tuple[int, int, int] | None:
        """Like `offset_at_timestamp`, for the first record with the largest timestamp (KIP-734)."""
        try:
            return self.log.max_timestamp(limit_offset)
        except StorageError as error:
            self.report_damage(_damaged_offset(error), error)
            raise

    def park(self, wake: Callable[[], None], isolation_level: int = READ_UNCOMMITTED) -> None:
        """Call `wake` whenever more records may be readable for this isolation level, until `waits.unpark(wake)`.

        If the log of a leader has uncommitted records, starts their flush, because a reader waits for them.
        """
        self.waits.park(wake, isolation_level)
        if self.log.end_offset > self.replica.high_watermark and self.is_leader:
            self.group_commit.request_flush(self.log, urgent=True)

    def report_damage(self, offset: int, error: MansioError) -> None:
        """Report the error of a read at an offset (-1 if unknown), if a batch is damaged or the disk cannot read it, or
        if the content of an intact one cannot be read.

        If the disk cannot read it, the segment is verified again to find all unreadable ranges."""
        if isinstance(error, StorageError) and not isinstance(error, CorruptLog):
            if not is_unreadable(error):
                return
            if offset >= 0:
                self.log.forget_checks_at(offset)
        if isinstance(error, UNREADABLE_CONTENT):
            self.storage_health.record_unreadable(self.topic, self.index, offset, error)
        else:
            self.storage_health.record_damage(self.topic, self.index, offset, error)

    def _report_lost_transaction_ends(self) -> None:
        """Report damage in which transactions may have ended. Readers of committed records do not reach it."""
        producers = self.producers
        if producers is None or not producers.transactions.has_lost_ends:
            return
        if (offset := producers.damaged_offset) is not None:
            error = CorruptLog(f"{self.name} at offset {offset}: the ends of transactions may be damaged")
            self.report_damage(offset, error)

    def on_repaired(self) -> None:
        """Handle the replacement of damaged batches by those of another replica."""
        if self.producers is not None:
            self.producers.on_repaired()
            self._report_lost_transaction_ends()

    def _on_damage(self, segment: Segment, found: CheckedRange) -> None:
        error = damaged_range_error(segment.path, found)
        self.storage_health.record_damage(self.topic, self.index, found.offset, error)

    # Role

    def become_leader(
        self,
        leader_epoch: int,
        *,
        in_sync: Iterable[int],
        replicas: Iterable[int],
        is_session_valid: Callable[[], bool] | None = None,
        has_earlier_leader: Callable[[], bool] | None = None,
    ) -> None:
        """Lead the partition. While `is_session_valid` returns False, no batch is accepted or committed; while
        `has_earlier_leader` returns True, the leadership is uncertain.

        Raises `FencedLeaderEpoch` for an epoch that has ended, or that the log contained before this broker started,
        because offsets of lost records would be assigned again in the same epoch. Raises `LogFailed`.
        """
        before, log = self.replica, self.log
        if self.is_leader and before.leader_epoch == leader_epoch:
            return
        self._check_new_epoch(leader_epoch)
        if leader_epoch <= log.leader_epochs.latest_epoch:
            raise FencedLeaderEpoch(
                f"{self.name}: leader epoch {leader_epoch} is not new, its log has {log.leader_epochs.latest_epoch}"
            )
        if (failure := self.failure) is not None:
            raise copied(failure)
        log.assign_leader_epoch(leader_epoch)
        high_watermark = max(before.high_watermark, log.start_offset)
        assigned = frozenset(replicas)
        replica = ReplicationProgress(
            self.broker_id,
            leader_epoch,
            frozenset(in_sync),
            high_watermark,
            durable_end=log.durable_end_offset,
            epoch_start_offset=log.end_offset,
            replicas=assigned,
            min_insync_replicas=min(self._settings.min_insync_replicas, len(assigned)),
            is_session_valid=is_session_valid,
            has_earlier_leader=(
                before.earlier_leader if isinstance(before, ReplicationProgress) else has_earlier_leader
            ),
            now_ms=self.now_ms(),
        )
        self._change_role(replica, f"broker {self.broker_id} is the leader in the new epoch {leader_epoch}")
        if is_session_valid is not None:
            self._before_append.insert(0, _SessionCheck(self.name, is_session_valid))
        self.group_commit.request_flush(log, urgent=True)  # the epoch, and what was not flushed before
        if replica.high_watermark > high_watermark:
            self._on_high_watermark_advanced()

    def become_follower(self, leader: int, leader_epoch: int) -> None:
        """Follow the broker `leader`, -1 for no leader. Raises `FencedLeaderEpoch` for an epoch that has ended."""
        before, log = self.replica, self.log
        if (leader, leader_epoch) == (before.leader, before.leader_epoch) and not self.is_leader:
            return
        self._check_new_epoch(leader_epoch)
        if leader == self.broker_id or (
            leader != NO_LEADER and before.leader != NO_LEADER and leader_epoch == before.leader_epoch
        ):
            raise FencedLeaderEpoch(
                f"{self.name}: cannot follow broker {leader} in leader epoch {leader_epoch}, in which broker "
                f"{before.leader} is the leader"
            )
        known = max(before.high_watermark, log.start_offset)
        replica = FollowerReplica(leader, leader_epoch, known, log.durable_end_offset)
        new_leader = "no leader" if leader == NO_LEADER else f"broker {leader} is the leader"
        self._change_role(replica, f"{new_leader} in epoch {leader_epoch}")
        if log.end_offset > log.durable_end_offset:
            self.group_commit.request_flush(log, urgent=True)  # a follower reports its flushed end

    def resign(self) -> None:
        """Have no role until the next leader epoch."""
        self.become_follower(NO_LEADER, self.replica.leader_epoch)

    def apply_committed_isr(self, in_sync: frozenset[int]) -> None:
        """Apply an in-sync set that the metadata store contains; no earlier proposal can be committed any more."""
        replica = self.replica
        if not isinstance(replica, ReplicationProgress):
            return
        self.waits.mark_followers()  # one that is removed has to report its position again
        moved = replica.on_isr_committed(in_sync, self.now_ms())
        self._set_role(replica)
        if moved:
            self._on_high_watermark_advanced()
        self.waits.on_start_offset_flushed(replica.all_start_at, self.log.start_offset)
        if replica.is_under_min_isr:
            self.waits.fail_commits(self._not_enough_replicas_error(replica))

    def set_isr_listener(self, listener: Callable[[Partition, int], None] | None) -> None:
        """Call `listener` with a follower that is not in the in-sync set and meets all conditions to join it."""
        self._isr_listener = listener

    def check_session(self) -> None:
        """Fail all waits for commits if the broker's session may have expired; otherwise advance the high watermark.

        To be called periodically."""
        replica = self.replica
        if not isinstance(replica, ReplicationProgress):
            return
        if replica.is_session_uncertain:
            self.waits.fail_commits(_session_expired_error(self.name))
        elif replica.advance():
            self._on_high_watermark_advanced()

    def _on_isr_changed(self, replica: ReplicationProgress, moved: bool) -> None:
        self._set_role(replica)
        if moved:
            self._on_high_watermark_advanced()
        if replica.is_under_min_isr:
            self.waits.fail_commits(self._not_enough_replicas_error(replica))

    def _check_new_epoch(self, leader_epoch: int) -> None:
        current = self.replica.leader_epoch
        if leader_epoch < current:
            raise FencedLeaderEpoch(f"{self.name}: leader epoch {leader_epoch} is older than {current}")

    def _set_role(self, replica: ReplicationProgress | FollowerReplica) -> None:
        """Set the attributes that depend on the role."""
        self.replica = replica
        self.is_leader = isinstance(replica, ReplicationProgress)
        self._rejects = (
            self.closed or not isinstance(replica, ReplicationProgress) or replica.is_under_min_isr
        )

    def _change_role(self, replica: ReplicationProgress | FollowerReplica, reason: str) -> None:
        self._before_append = [one for one in self._before_append if not isinstance(one, _SessionCheck)]
        self._acknowledged_end = 0
        self._set_role(replica)
        self._renew_trace()
        ended = NotLeaderOrFollower(
            f"{self.name}: {reason}; this broker does not know whether the batch is kept"
        )
        self.waits.end(ended)
        logger.info(
            "partition_role_changed",
            extra=fields(
                topic=self.topic,
                partition=self.index,
                leader=replica.leader,
                leader_epoch=replica.leader_epoch,
                end=self.end_offset,
            ),
        )

    def _renew_trace(self, *, is_turned: bool = False) -> None:
        """Begin or end the trace, as the role and the settings say. `is_turned`: the settings have changed that."""
        buffer, trace, epoch = self._trace_buffer, self.trace, self.replica.leader_epoch
        if buffer is None:
            return
        is_led, is_traced = self.is_leader and not self.closed, self._settings.is_traced
        if trace is not None and not (is_led and is_traced and trace.leader_epoch == epoch):
            trace.end(self.clock.wall_ms(), is_turned_off=is_turned)
            self.trace = trace = None
        if is_led and (trace is None) and (is_traced or epoch != self._untraced_epoch):
            topic_id, now_ms = self.topic_id.bytes, self.clock.wall_ms()
            if is_traced:
                self.trace = buffer.lead(topic_id, self.index, epoch, now_ms, is_turned_on=is_turned)
            else:
                self._untraced_epoch = epoch
                buffer.lead(topic_id, self.index, epoch, now_ms, is_off=True)

    def _not_leader_error(self) -> NotLeaderOrFollower:
        if self.closed:
            return NotLeaderOrFollower(f"{self.name} is closed on this broker")
        leader = self.replica.leader
        known = "current leader unknown" if leader == NO_LEADER else f"the leader is broker {leader}"
        return NotLeaderOrFollower(f"not the leader of {self.name}; {known}")

    def _commit_error(self) -> MansioError:
        """Return the error because of which no record can be committed now."""
        replica = self.replica
        if isinstance(replica, ReplicationProgress) and replica.is_under_min_isr and not self.closed:
            return self._not_enough_replicas_error(replica)
        return self._not_leader_error()

    def _not_enough_replicas_error(self, replica: ReplicationProgress) -> NotEnoughReplicasAfterAppend:
        return NotEnoughReplicasAfterAppend(
            f"{self.name}: {len(replica.in_sync)} replicas are in sync, "
            f"min.insync.replicas={replica.min_insync_replicas}; the batch is written and may be committed later"
        )

    # Replication, as leader

    def read_for_follower(
        self, node_id: int, broker_epoch: int, wanted: FollowerFetch, max_bytes: int, *, first: bool
    ) -> FollowerReadResult:
        """Read for a follower's fetch request. `first`: the request has just arrived, so its offsets are recorded.

        Raises `FencedLeaderEpoch`, `UnknownLeaderEpoch`, `NotLeaderOrFollower`, `OffsetOutOfRange`, `StorageError`.
        """
        replica, log = self._leader_progress_for(node_id, wanted.current_leader_epoch), self.log
        offset = wanted.fetch_offset
        if wanted.last_fetched_epoch >= 0:
            epoch, end = log.end_offset_for_epoch(wanted.last_fetched_epoch)
            if epoch < 0:
                raise OffsetOutOfRange(
                    f"{self.name}: leader epoch {wanted.last_fetched_epoch} of broker {node_id} is unknown"
                )
            if epoch != wanted.last_fetched_epoch or end < offset:
                return FollowerReadResult(diverging=(epoch, end), urgent=True)
        if not log.start_offset <= offset <= log.end_offset:
            raise OffsetOutOfRange(
                f"{self.name}: broker {node_id} requested offset {offset}, "
                f"the log has {log.start_offset} to {log.end_offset}"
            )
        follower = replica.followers()[node_id]
        if first:
            if offset < follower.durable_end or wanted.log_start_offset < follower.durable_start:
                self.waits.mark_followers()  # a late request, after which the session has to report again
            now_ms = self.now_ms()
            if replica.on_follower_fetch(
                node_id, broker_epoch, offset, log.end_offset, now_ms, wanted.log_start_offset
            ):
                self._on_high_watermark_advanced()
            if self.waits.start_offsets:
                self.waits.on_start_offset_flushed(replica.all_start_at, log.start_offset)
            if (
                node_id not in replica.in_sync
                and self._isr_listener is not None
                and replica.can_join_isr(node_id)
            ):
                self._isr_listener(self, node_id)
        is_urgent = follower.reported_start_offset < log.start_offset or (
            replica.has_follower_readers and follower.reported_high_watermark < replica.high_watermark
        )
        follower.reported_start_offset = log.start_offset
        follower.reported_high_watermark = replica.high_watermark
        if max_bytes <= 0 or offset == log.end_offset:
            return FollowerReadResult(urgent=is_urgent)
        try:
            found = log.read(offset, max_bytes, log.end_offset)
        except StorageError as error:
            self.report_damage(offset, error)
            raise
        records = found or self._empty_batch(offset)
        return FollowerReadResult(records, urgent=is_urgent)

    def read_for_repair(self, leader_epoch: int, offset: int, max_bytes: int) -> LogSlice | None:
        """Return batches from `offset` on for a replica in whose log they are damaged; this broker may have any role.

        The other replica compares their leader epochs with its own. Only batches that are flushed and intact in this
        log are returned. Raises `FencedLeaderEpoch`, `UnknownLeaderEpoch`,
        `NotLeaderOrFollower`, `OffsetOutOfRange`, `VerificationPending`, `CorruptLog`, `StorageError`.
        """
        self._check_epoch_of_replica(leader_epoch)
        if self.closed:
            raise self._not_leader_error()
        log = self.log
        if not log.start_offset <= offset < log.durable_end_offset:
            raise OffsetOutOfRange(
                f"{self.name}: offset {offset} is not in [{log.start_offset}, {log.durable_end_offset})"
            )
        return log.read(offset, max_bytes, log.durable_end_offset)

    def _check_epoch_of_replica(self, requested_epoch: int) -> None:
        current = self.replica.leader_epoch
        if requested_epoch < current:
            raise FencedLeaderEpoch(f"{self.name}: leader epoch {requested_epoch} is older than {current}")
        if requested_epoch > current:
            raise UnknownLeaderEpoch(f"{self.name}: leader epoch {requested_epoch} is newer than {current}")

    def _leader_progress_for(self, node_id: int, requested_epoch: int) -> ReplicationProgress:
        self._check_epoch_of_replica(requested_epoch)
        replica = self.replica
        if self.closed or not isinstance(replica, ReplicationProgress):
            raise self._not_leader_error()
        if node_id not in replica.followers():
            raise NotLeaderOrFollower(f"{self.name}: broker {node_id} is not a replica")
        return replica

    def _empty_batch(self, offset: int) -> bytes:
        """Return a batch without records, for a log from which compaction removed all records from `offset` on."""
        log = self.log
        delta = min(log.end_offset - 1 - offset, OFFSET_DELTA_MAX)
        epoch = log.leader_epochs.epoch_for_offset(offset + delta)
        return encode_batch(BatchHeader(offset, 0, epoch, 2, 0, 0, delta, -1, -1, -1, -1, -1, 0), b"")

    # Replication, as follower

    def append_from_leader(self, records: memoryview, sparse_end_offset: int) -> int:
        """Append the whole batches of a leader's response unchanged; return their size in bytes. The caller must
        request the flush.

        All batches are validated before the first is appended. Below `sparse_end_offset`, the leader's high watermark,
        compaction may have left gaps. Raises `CorruptMessage` for bytes that are not the leader's next batches,
        `ConcurrentChange` if the log must be reset while it is being flushed, and `StorageError`. Batches that were
        appended before the error stay in the log.
        """
        self._follower_replica()
        log = self.log
        headers, size = read_stored_batches(records)
        current = self.replica.leader_epoch
        attributes = 0
        for header in headers:
            attributes |= header.attributes
            if header.leader_epoch > current:
                raise CorruptMessage(
                    f"{self.name}: a batch of leader epoch {header.leader_epoch} from a leader of epoch {current}"
                )
        if not headers:
            raise CorruptMessage(f"{self.name}: the leader sent {len(records)} bytes without a whole batch")
        if attributes & CONTROL_FLAG:
            self._attach_received(records[:size])
        markers: dict[int, Contents] = {}
        if attributes & TRANSACTIONAL_FLAG and attributes & CONTROL_FLAG and self.producers is not None:
            markers = self.producers.read_markers(records[:size])
        first = headers[0]
        if first.base_offset < log.end_offset <= first.last_offset and log.start_offset == log.end_offset:
            self.reset_to(first.base_offset)  # the leader's log starts inside this batch
        before = log.end_offset
        try:
            log.append_as_follower(records[:size], headers, sparse_end_offset=sparse_end_offset)
        except StorageError as error:
            raise self._append_error(error) from error
        finally:
            end = log.end_offset
            if end > before:
                for header in headers:
                    if header.base_offset + header.last_offset_delta < end:
                        contents = markers.get(header.base_offset) if markers else None
                        for after in self._after_append:
                            after(header, header.base_offset, contents)
                self.waits.wake_followers()
        return size

    def update_from_leader(self, leader_high_watermark: int, leader_start_offset: int) -> None:
        """Apply the high watermark and the log start offset of the leader's response."""
        replica, log = self._follower_replica(), self.log
        if replica.on_leader_high_watermark(leader_high_watermark):
            self._on_high_watermark_advanced()
        if log.start_offset < leader_start_offset <= replica.high_watermark:
            self._advance_start(leader_start_offset)
            self.group_commit.persist_start_offset(log, self._report_start_offset)

    def truncate_diverging(self, diverging: tuple[int, int]) -> None:
        """Truncate the log to the offset at which it diverges from the leader's log. Blocks.

        `diverging`: the highest leader epoch in the leader's log that this log may contain, and its end offset there.
        The logs may still diverge afterwards; then the next fetch response causes another truncation.

        Raises `ConcurrentChange` while the log is being flushed, `CorruptMessage`, `StorageError`.
        """
        epoch, leader_end = diverging
        log = self.log
        _, own_end = log.end_offset_for_epoch(epoch)
        end = min(leader_end, own_end)
        if own_end < 0 or end >= log.end_offset:
            raise CorruptMessage(
                f"{self.name}: the leader reported that the logs diverge at {leader_end} of epoch {epoch}, "
                f"but this log has nothing to truncate there"
            )
        before = log.end_offset
        if end < log.start_offset:
            self.reset_to(end)
        else:
            log.truncate_to(end)
            self._on_truncated()
        logger.info(
            "log_truncated",
            extra=fields(topic=self.topic, partition=self.index, end=before, to=log.end_offset, epoch=epoch),
        )

    def reset_to(self, offset: int) -> None:
        """Remove all records and continue at `offset`, where the leader's log has records. Blocks.

        Raises `ConcurrentChange` while the log is being flushed, `StorageError`.
        """
        self._follower_replica()
        log = self.log
        was_empty = log.start_offset == log.end_offset
        log.reset_to(offset)
        self._on_truncated(was_empty=was_empty)

    def _on_truncated(self, *, was_empty: bool = False) -> None:
        replica, log = self._follower_replica(), self.log
        known = replica.high_watermark
        if not replica.on_truncation(log.start_offset, log.end_offset) and not was_empty:
            logger.error(
                "committed_records_truncated",
                extra=fields(topic=self.topic, partition=self.index, high_watermark=known, to=log.end_offset),
            )
        try:
            for hook in self._hooks:
                hook.on_truncate(log.end_offset)
            for feature in self._features:
                if feature not in self._attached:
                    feature.truncate(log)
        except OSError as error:  # the state of a hook may contain what was truncated
            raise log.fail(
                error, f"cannot remove the state of what was truncated in {log.directory}"
            ) from error

    def when_flushed(self, end_offset: int, callback: Callable[[], None]) -> bool:
        """Return True if all records below `end_offset` are flushed on this broker, the log has failed or is closed.

        Otherwise return False and call `callback` once: when they are flushed, the log fails or the role changes."""
        log = self.log
        if end_offset <= log.durable_end_offset or log.failure is not None or self.closed:
            return True
        self.waits.add_flush(end_offset, callback)
        return False

    def _follower_replica(self) -> FollowerReplica:
        """Return the follower's state. Raises `NotLeaderOrFollower` if this broker does not follow a leader."""
        replica = self.replica
        if not isinstance(replica, FollowerReplica) or self.closed:
            raise NotLeaderOrFollower(f"{self.name}: this broker is not a follower")
        return replica

    def _report_start_offset(self, error: StorageError | None) -> None:
        """Have the next fetch report the flushed log start offset; a failed log has woken its fetcher."""
        if error is None:
            self.waits.wake_followers()

    # Log start

    def trim(self, start_offset: int) -> None:
        """Delete records below `start_offset` (at most the high watermark); whole segments are removed from disk.

        Raises `NotLeaderOrFollower`, `OffsetOutOfRange`.
        """
        self.ensure_leader()
        start, high_watermark = self.log.start_offset, self.high_watermark
        if not start <= start_offset <= high_watermark:
            raise OffsetOutOfRange(
                f"{self.name}: cannot trim to {start_offset}, outside [{start}, {high_watermark}]"
            )
        self._advance_start(start_offset)

    def delete_records(self, before_offset: int) -> Promise[int]:
        """Delete the records below an offset (-1: the last stable offset) on request (KIP-107).

        The promise completes with the new log start offset when it is flushed on every in-sync replica. Records at or
        above `retention_floor` are not deleted. Raises `OffsetOutOfRange`, `OffsetNotAvailable`, `NotLeaderOrFollower`,
        `StorageError`.
        """
        self.ensure_leader()
        if (failure := self.failure) is not None:
            raise copied(failure)
        self.ensure_high_watermark_known()
        stable_offset = self.last_stable_offset
        if before_offset == HIGH_WATERMARK:
            before_offset = stable_offset
        if not 0 <= before_offset <= stable_offset:
            limit = "high watermark" if stable_offset == self.high_watermark else "last stable offset"
            raise OffsetOutOfRange(
                f"{self.name}: records can be deleted below {stable_offset}, the {limit}, not {before_offset}"
            )
        promise: Promise[int] = self.scheduler.promise()

        def on_persisted(error: StorageError | None) -> None:
            if promise.done():
                return
            replica = self.replica
            if error is not None:
                promise.set_exception(copied(error))
            elif self.closed or not isinstance(replica, ReplicationProgress):
                promise.set_exception(self._not_leader_error())
            else:
                self.waits.add_start_offset(start_offset, promise)
                self.waits.on_start_offset_flushed(replica.all_start_at, self.log.start_offset)

        start_offset = min(before_offset, *self._retention_floors(), stable_offset)
        if start_offset > self.log.start_offset:
            self.trim(start_offset)
        self.group_commit.persist_start_offset(self.log, on_persisted)
        return promise

    def roll(self) -> None:
        """Start a new segment, so that the former active segment can be deleted. Raises `ActiveFilesInUse`, after which
        the caller can `wait_for_file`, and `StorageError`."""
        self.log.roll()
        self.group_commit.request_flush(self.log, urgent=False)

    async def roll_when_possible(self) -> None:
        """Call `roll`, after flushes if it needs them. Raises `StorageError`; `ActiveFilesInUse` if none is due."""
        rolled: Promise[None] = self.scheduler.promise()

        def attempt() -> None:
            try:
                self.roll()
            except ActiveFilesInUse as refused:
                if not self.wait_for_file(attempt, attempt):
                    complete_with_error(rolled, without_traceback(refused))
            except MansioError as error:
                complete_with_error(rolled, without_traceback(error))
            else:
                complete(rolled, None)

        attempt()
        await rolled

    def wait_for_file(self, waiter: Hashable, attempt: Callable[[], object]) -> bool:
        """Call `attempt` when an append or roll that was refused with `ActiveFilesInUse` may succeed: see
        `ActiveFiles.wait`."""
        return self.log.wait_for_file(waiter, attempt, self.group_commit.call_after_job)

    def retention_floor(self, *, after_release: bool = False) -> int | None:
        """Return the offset from which retention must keep records, because a hook needs them; None for no limit.
        `after_release`: after `release_below`, as far as that is possible."""
        return min(self._retention_floors(after_release=after_release), default=None)

    def _retention_floors(self, *, after_release: bool = False) -> list[int]:
        released = [one.hook for one in self._attached.values() if after_release and one.releases is not None]
        hooks = [hook for hook in self._hooks if hook not in released]
        return [floor for hook in hooks if (floor := hook.retention_floor()) is not None]

    @property
    def kept_bytes(self) -> int:
        """Size of what features need from the log; it does not count for retention.bytes."""
        return sum(one.replay.view.kept_bytes for one in self._releasing())

    def _releasing(self) -> list[ReleasingFeature]:
        return [one.releases for one in self._attached.values() if one.releases is not None]

    async def release_below(self, offset: int) -> None:
        """Copy what features still need from below an offset to the end of the log, so that retention can delete that
        part. Returns when the copies are committed.

        Raises the errors of `ReleasingFeature.release_below` and `append_unchanged`, the last one of several features,
        after all have been asked."""
        raised: MansioError | None = None
        is_awaited = False
        for feature in self._releasing():
            replay = feature.replay
            floor = replay.retention_floor()
            try:
                for following in feature.release_below(offset):
                    replay.retain(self.append_following(following), offset if floor is None else floor)
                    await self.scheduler.sleep(0)
            except MansioError as error:
                raised = without_traceback(error)
            is_awaited |= replay.is_retaining
        if raised is not None:
            raise copied(raised)
        if is_awaited:
            await self.commit_promise(self.end_offset)

    def _advance_start(self, start_offset: int) -> None:
        self.log.trim_to(start_offset)
        for hook in self._hooks:
            hook.on_trim(start_offset)
        self.waits.wake_followers()  # a follower's log starts where this one does

    def close(self, *, save: bool = True) -> None:
        """Reject all requests from now on and fail all waits. With `save`, hooks write files for a fast next start."""
        if self.closed:
            return
        self.closed = self._rejects = True
        self._renew_trace()
        for hook in self._hooks:
            hook.close(save=save)
        for feature, attached in self._attached.items():
            feature.detach(attached.feature)
        self._attached.clear()
        self.producers = None
        self.pipeline.features.clear()
        # A hook that refers to its partition would keep files open until garbage collection.
        self._hooks.clear()
        self._before_append.clear()
        self._after_append = []
        self._readable_ends = [_closed_end]
        self.waits.close(NotLeaderOrFollower(f"{self.name} was closed on this broker"))
        self._isr_listener = None
        self.storage_health.remove_partition(self.topic, self.index)


def _damaged_offset(error: StorageError) -> int:
    return error.first_offset if isinstance(error, DamagedRange) else UNKNOWN_OFFSET


def _closed_end(_: int) -> int:
    """Return the end for readers of a closed partition: without its producers, it does not know what was aborted."""
    return 0


class _SessionCheck:
    """Rejects clients' batches while the leader's session may have expired. Runs before the hooks."""

    __slots__ = ("_is_session_valid", "_name")

    def __init__(self, name: str, is_session_valid: Callable[[], bool]) -> None:
        self._name = name
        self._is_session_valid = is_session_valid

    def __call__(self, header: BatchHeader) -> AppendResult | None:  # noqa: ARG002 - the signature of a hook
        if not self._is_session_valid():
            raise _session_expired_error(self._name)
        return None


def _session_expired_error(name: str) -> NotLeaderOrFollower:
    return NotLeaderOrFollower(
        f"{name}: this broker has not reached the metadata store in time; another broker may lead the partition"
    )
