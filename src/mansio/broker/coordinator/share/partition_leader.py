"""Leader of one share partition: its state machine, timer, writes and waiters (Kafka's SharePartition).

    LOADING ── state is read ──► ready ── a write fails, the role changes, it is idle ──► ended

Every update of the state machine is stored through `store` before its result is sent to a client. If storing fails or
its outcome is unknown, this object ends, and the next object for the share partition loads the state again. If the
share state moved to another broker meanwhile, the next object gets the state of this object (`known_state`) and writes
it as a whole before it delivers records, because updates may have been lost in the move.

Invariants:
* Updates are written in the order of the `WriteCombiner`; an update with the whole state is written alone.
* There is one timer, which never fires later than the next deadline of the state machine. A timer that fires more than
  `STALL_MS` late shows that the broker was stalled; leases then end after a grace period of `STALL_MS`, so that members
  can still acknowledge. Each deadline gets one grace period only.
* Nothing is decided in another leader epoch than the one in which the state was loaded.
* Only offsets whose bytes are in the result are leased, and only below the high watermark. Records are slices of the
  log files, never decoded or copied.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from mansio.broker.coordinator.share.fair_scan import (
    FairScan,
    delivered_end_of,
    load_index,
    undone_ranges_of,
)
from mansio.broker.coordinator.share.write_combiner import WriteCombiner, combine_updates
from mansio.errors import (
    UNREADABLE_CONTENT,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    DamagedRange,
    MansioError,
    NotCoordinator,
    NotLeaderOrFollower,
    StorageError,
    Unavailable,
    UnknownTopicOrPartition,
    VerificationPending,
)
from mansio.logs import fields
from mansio.ports import complete, complete_from
from mansio.state.share_partition.dead_letters import count_offsets
from mansio.state.share_partition.fairness.fair_index import FairIndex
from mansio.state.share_partition.in_flight import NOT_PENDING
from mansio.state.share_partition.machine import SCATTERED_READ_RANGES_MAX, SharePartition
from mansio.state.share_partition.snapshot import with_known_state
from mansio.state.share_partition.types import BACKLOG_QUEUES, BASE, RENEW, LoadedState
from mansio.tracebacks import copied, result_of, without_traceback
from mansio.wire.batch.isolation_filter import aborted_batches
from mansio.wire.batch.record_batch import check_stored_batch, read_header
from mansio.wire.batch.record_reader import read_group_keys
from mansio.wire.field_values import READ_COMMITTED, READ_UNCOMMITTED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence

    from mansio.broker.coordinator.share.state_client import SharePersister
    from mansio.broker.coordinator.share.write_combiner import CombinedWrite
    from mansio.broker.partition.partition import Partition
    from mansio.ports import Clock, Promise, Random, Scheduler, Timer
    from mansio.state.share_partition.key_index import HeldBack
    from mansio.state.share_partition.key_limits import KeyLimits
    from mansio.state.share_partition.share_index import ShareIndex
    from mansio.state.share_partition.types import (
        AcknowledgementBatch,
        AcquiredRange,
        AlteredRanges,
        ArchivingRange,
        Producer,
        RangeOperation,
        ShareCounts,
        ShareKey,
        ShareSettings,
        Update,
    )
    from mansio.state.trace.trace_buffer import PartitionTrace
    from mansio.storage.log import LogSlice


logger = logging.getLogger(__name__)

T = TypeVar("T")

STALL_MS: Final = 1_000
"""Delay of a timer after which the broker counts as stalled, and duration of the grace period that leases then get."""

STATE_UNAVAILABLE: Final = (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress)
"""Errors of a write to a share state that moved to another broker or has no leader; the write's outcome is unknown."""

SCANNED_RECORDS_MAX: Final = 2_000
"""Number of records whose keys are read in one turn of the event loop; a batch may exceed it."""

_LARGEST_BELOW_ONE: Final = 1 - 2**-53


class AcquiredRecords(NamedTuple):
    """Records for a member, of the share partition of `leader`.

    `acquired`: the leased ranges, valid once `update` is stored. `slices`: the parts of the log with the records,
    `size_bytes` in total.
    """

    leader: SharePartitionLeader
    acquired: list[AcquiredRange]
    update: Update | None
    slices: list[LogSlice]
    size_bytes: int

    @property
    def record_count(self) -> int:
        """The number of leased offsets."""
        return sum(last - first + 1 for first, last, _ in self.acquired)


class PlannedExchange(NamedTuple):
    """What a request of a member changes in the share partition of `leader`: ranges to accept, the range to lease, None
    for no record, and the part of the log with its records."""

    leader: SharePartitionLeader
    accepted: Sequence[tuple[int, int]]
    leased: tuple[int, int] | None = None
    records: LogSlice | None = None


class LimitedKeyNames(NamedTuple):
    """Group keys with records that a limit by key holds back: the number of those at their limit of leases and at their
    rate, and some of them."""

    at_lease_limit: int
    at_rate_limit: int
    keys: tuple[bytes, ...]


class DeadLetterSink(Protocol):
    """Receives records to be dead-lettered; implemented by `broker.coordinator.share.dead_letter_manager`."""

    def on_loaded(self, share_partition: SharePartitionLeader, producer: Producer | None) -> None:
        """Continue copying the ARCHIVING records of a share partition to the dead-letter topic, after this broker has
        loaded its state.

        `producer`: producer id, epoch and sequences stored in that state; None if there are none."""

    def add(self, share_partition: SharePartitionLeader, ranges: Sequence[ArchivingRange]) -> None:
        """Add ranges that have to be dead-lettered; the share state contains them as archiving."""

    def on_closed(self, share_partition: SharePartitionLeader) -> None:
        """Stop, because this broker does not lead the share partition any more, or loads its state again."""


class NoDeadLetters:
    """A `DeadLetterSink` without effect: records stay archiving until a broker with a working sink resumes them."""

    def on_loaded(self, share_partition: SharePartitionLeader, producer: Producer | None) -> None:
        """Do nothing."""

    def add(self, share_partition: SharePartitionLeader, ranges: Sequence[ArchivingRange]) -> None:
        """Do nothing."""

    def on_closed(self, share_partition: SharePartitionLeader) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class ShareDependencies:
    """Dependencies shared by all share partitions of a broker.

    `settings`: returns the settings of a group for a partition. `refresh_settings`: waits until these contain all
    changes that were stored before. `initial_offset`: returns the offset at which a group without state starts in a
    partition. `index_of`: returns the index of a partition's share partitions, the same object as long as it is valid;
    None if there is only one. `load_base`: returns the leader of the share partition `BASE` of another one after its
    state is loaded. `on_queues_changed`: called with the key of the share partition `BASE` of a fair group when backlog
    queues are added or removed. `key_limits`: returns the limits by key that the share partitions of a topic partition
    share, given one of them and its leader epoch. `on_end`: called with each `SharePartitionLeader` that ended.
    """

    persister: SharePersister
    clock: Clock
    scheduler: Scheduler
    random: Random
    settings: Callable[[str, Partition], ShareSettings]
    refresh_settings: Callable[[str], Awaitable[None]]
    initial_offset: Callable[[str, Partition], int]
    index_of: Callable[[Partition], ShareIndex | None]
    load_base: Callable[[ShareKey], Awaitable[SharePartitionLeader]]
    on_queues_changed: Callable[[ShareKey], None]
    key_limits: Callable[[ShareKey, int], KeyLimits]
    dead_letters: DeadLetterSink
    on_end: Callable[[SharePartitionLeader], None]


def _isolation_level(settings: ShareSettings) -> int:
    return READ_COMMITTED if settings.is_committed_only else READ_UNCOMMITTED


class _KeyReader:
    """Reads the group keys of a log for a share partition with order or limits by key, during one acquisition."""

    __slots__ = ("_partition", "_records_left", "error", "is_interrupted")

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._records_left = SCANNED_RECORDS_MAX
        self.error: MansioError | None = None
        """Why the next batch cannot be read. Nothing behind it is offered, because its keys are not known."""
        self.is_interrupted = False
        """Whether more records may be found in a later turn of the event loop."""

    def add_batch(self, machine: SharePartition, end: int) -> bool:
        """Add the keys of the next batch below the offset `end`; return whether there was one to add."""
        begin = machine.next_key_offset
        if begin is None or begin >= end:
            return False
        if self._records_left <= 0:
            self.is_interrupted = True
            return False
        try:
            batch = next(self._partition.log.batches(begin), None)
            if batch is None:  # the log was truncated: this broker does not lead the partition any more
                return False
            header = read_header(batch)
            keys: dict[int, int] = {}
            try:
                if not check_stored_batch(batch).is_control:
                    found = read_group_keys(batch, machine.settings.key_header)
                    keys = {offset: hash(key) for offset, key in found if key is not None}
            except (
                UNREADABLE_CONTENT
            ) as error:  # its records are offered without a key, and rejected when they are read
                self._partition.report_damage(begin, error)
        except MansioError as error:
            self._partition.report_damage(begin, error)
            self.error = without_traceback(error)
            return False
        was_offering = machine.is_offering
        machine.add_keys(header.last_offset + 1, keys)
        if not was_offering and machine.is_offering:
            self.is_interrupted = True  # another share partition of the topic partition may offer records now
        self._records_left -= header.last_offset + 1 - begin
        return True


class SharePartitionLeader:
    """The leader of one share partition. All methods run on the broker's event loop."""

    __slots__ = (
        "_dependencies",
        "_grace_until_ms",
        "_key_limits",
        "_log_start",
        "_state_epoch",
        "_state_machine",
        "_timer",
        "_timer_due_ms",
        "_trace",
        "_waiters",
        "_writes",
        "asked_ms",
        "end_error",
        "fair_scan",
        "index",
        "key",
        "known_state",
        "last_used_ms",
        "leader_epoch",
        "partition",
        "topic_index",
    )

    def __init__(
        self,
        key: ShareKey,
        partition: Partition,
        dependencies: ShareDependencies,
        known_state: LoadedState | None = None,
    ) -> None:
        """`known_state`: the `known_state` of the former object for the share partition."""
        self.key = key
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.topic_index = dependencies.index_of(partition)
        """The index of the share partitions of the topic partition that its topic has for all groups, if any."""
        self.index: ShareIndex | None = self.topic_index
        """The index of the share partitions; None if this is the only one. That of a fair group is known when the state
        is loaded."""
        self.fair_scan: FairScan | None = None
        """Of the share partition `BASE` of a fair group."""
        self._state_machine: SharePartition | None = None
        self.end_error: MansioError | None = None
        """The error with which this object ended; None before."""
        self.known_state = known_state
        """The state that the next object for the share partition writes again, if updates may have been lost."""
        self.last_used_ms = dependencies.clock.monotonic() * 1000
        self.asked_ms = self.last_used_ms
        """Time at which a member has last asked for records, or this object was made."""
        self._dependencies = dependencies
        self._state_epoch = 0
        self._waiters: dict[Callable[[], None], None] = {}
        self._timer: Timer | None = None
        self._timer_due_ms = math.inf
        self._grace_until_ms = -math.inf
        self._log_start = -1
        self._key_limits: KeyLimits | None = None
        """The limits by key, if other share partitions of the topic partition have them, too."""
        self._writes = WriteCombiner(dependencies.scheduler, self._begin_write)
        self._trace: PartitionTrace | None = None
        """The trace of the partition in the epoch of this object, which may have ended."""

    @property
    def state_machine(self) -> SharePartition:
        """The state machine. The state must be loaded."""
        assert self._state_machine is not None, "the state is not loaded"
        return self._state_machine

    @property
    def is_ready(self) -> bool:
        return self._state_machine is not None and self.end_error is None

    @property
    def has_writes(self) -> bool:
        """Whether updates are being written."""
        return bool(self._writes)

    @property
    def has_waiters_or_writes(self) -> bool:
        """Whether requests wait for records, or updates are being written."""
        return bool(self._waiters or self._writes)

    @property
    def waiter_count(self) -> int:
        """Number of requests that wait for records."""
        return len(self._waiters)

    @property
    def has_pending_dead_letters(self) -> bool | None:
        """Whether records wait for their copy in the dead-letter topic; None before the state is loaded."""
        return (
            None if self._state_machine is None else self._state_machine.counts(self.now_ms()).archiving > 0
        )

    def now_ms(self) -> float:
        return self._dependencies.clock.monotonic() * 1000

    # ------------------------------------------------------------------ load and end

    async def load(self) -> None:
        """Load the state, or create one. Ends this object if that fails; never raises."""
        try:
            await self._load()
        except MansioError as error:
            self.end(error)
        except Exception as error:  # noqa: BLE001 - a defect ends this object, not the broker
            self._end_after_defect(error)
        else:
            self._set_timer()
            self.wake()

    async def _refresh_settings(self) -> None:
        try:
            await self._dependencies.refresh_settings(self.key.group)
        except Unavailable as error:
            raise CoordinatorNotAvailable(
                f"the settings of group {self.key.group!r} cannot be read: {error.message}"
            ) from error

    async def _load(self) -> None:
        dependencies, partition = self._dependencies, self.partition
        own, base = None, None
        if self.index is not None and self.index.end < partition.end_offset:
            raise CoordinatorLoadInProgress(
                f"{partition.name}: the index of its share partitions is being loaded"
            )
        if self.key.number != BASE:
            base = await dependencies.load_base(self.key)
            self._join(base)
        if self.index is not None:
            own = self.index.offsets_of(self.key.number)
        found = await dependencies.persister.read(self.key, self.leader_epoch)
        state = (
            found if found is None or self.known_state is None else with_known_state(found, self.known_state)
        )
        if state is None:
            # A client may have set where the group starts just before it subscribed, on another broker.
            await self._refresh_settings()
            settings = dependencies.settings(self.key.group, partition)
            partition.ensure_high_watermark_known()
            start = self._initial_offset(base)
            state = LoadedState(
                0,
                self.leader_epoch,
                0,
                start,
                start + settings.lease_bound_step,
                0,
                (),
                (),
                (),
                None,
                True,
                0,
            )
        if base is None and (index := await self._load_fair_index(state)) is not None:
            own = index.offsets_of(BASE)
        self.ensure_leader()
        if self.end_error is not None:
            raise copied(self.end_error)
        self._state_epoch = state.state_epoch
        settings = dependencies.settings(self.key.group, partition)  # they may have changed during the read
        self._key_limits = dependencies.key_limits(self.key, self.leader_epoch)
        now_ms = self.now_ms()
        state_machine = SharePartition(
            self.key,
            settings,
            state,
            leader_epoch=self.leader_epoch,
            log_start=partition.start_offset,
            log_end=partition.end_offset,
            high_watermark=partition.readable_end(_isolation_level(settings)),
            now_ms=now_ms,
            wall_ms=dependencies.clock.wall_ms(),
            own=own,
            limits=self._key_limits,
        )
        self._state_machine = state_machine
        if state is not found:
            ready, self._state_machine = (
                state_machine,
                None,
            )  # no record is delivered before the whole state is stored
            update = ready.full_update(now_ms)
            await dependencies.persister.write(self.key, self._state_epoch, self.leader_epoch, update)
            self.ensure_leader()
            if self.end_error is not None:
                raise copied(self.end_error)
            ready.mark_persisted(update.token)
            ready.reconfigure(dependencies.settings(self.key.group, partition), self.now_ms())
            self._state_machine = ready
        self.known_state = None
        self._find_trace()
        if (trace := self._trace) is not None:
            loaded = self.state_machine.snapshot(now_ms).changes
            trace.report_loaded(self.key.group, loaded, dependencies.clock.wall_ms())
        dependencies.dead_letters.on_loaded(self, state.producer)
        if self.fair_scan is not None or self.state_machine.settings.is_fair:
            self.reconfigure()  # fairness may have been turned on or off since its index was loaded
            dependencies.on_queues_changed(self.key)
        elif dependencies.settings(self.key.group, partition) != settings:  # they changed meanwhile
            self.reconfigure()

    # ------------------------------------------------------------------ fairness

    def _join(self, base: SharePartitionLeader) -> None:
        """Use the index of the share partition `BASE`, if this is a backlog queue. Raises `UnknownTopicOrPartition` if
        `BASE` has no backlog queues."""
        if self.key.number not in BACKLOG_QUEUES:
            return
        if base.fair_scan is None or base.fair_scan.index.first_offset_of(self.key.number) is None:
            raise UnknownTopicOrPartition(f"{self.partition.name} has no such backlog queue for this group")
        self.index = base.index
        base.fair_scan.attach(self)

    def _initial_offset(self, base: SharePartitionLeader | None) -> int:
        """Return the offset at which this share partition begins without a state: that of `base`, which cannot move
        before this one is loaded, or that of the first record in a backlog queue. `base` is None if this is `BASE`."""
        if base is None:
            return self._dependencies.initial_offset(self.key.group, self.partition)
        start = base.state_machine.ranges.start
        if base.fair_scan is not None:
            first = base.fair_scan.index.first_offset_of(self.key.number)
            start = start if first is None else max(first, self.partition.start_offset)
        return start

    async def _load_fair_index(self, state: LoadedState) -> FairIndex | None:
        """Read again which share partition has which offset, if the group is fair or has backlog queues."""
        partition = self.partition
        settings = self._dependencies.settings(self.key.group, partition)
        if self.topic_index is not None or not (settings.is_fair or state.isolations):
            return None
        persister = self._dependencies.persister
        queues = {}
        for number in {each.number for each in state.isolations}:
            queue = await persister.read(self.key._replace(number=number), self.leader_epoch)
            if queue is not None:
                queues[number] = queue
        index = load_index(
            state, queues, settings, log_start=partition.start_offset, log_end=partition.end_offset
        )
        scan = FairScan(self, index, self._dependencies.scheduler, self._notify_of_queues)
        for number, queue in queues.items():
            index.pin(number, undone_ranges_of(queue))
        await scan.load(min(delivered_end_of(each) for each in (state, *queues.values())))
        self.fair_scan, self.index = scan, index
        return index

    async def reset_state_of(self, number: int, start: int) -> None:
        """Give another share partition of this group and topic partition an empty state that begins at `start`. Its
        state epoch fences late requests about a former state, which a deletion would not."""
        persister, key = self._dependencies.persister, self.key._replace(number=number)
        summary = await persister.summary(key)
        await persister.initialize(key, 1 if summary is None else summary.state_epoch + 1, start)

    def _notify_of_queues(self) -> None:
        self._dependencies.on_queues_changed(self.key)

    def _begin_fairness(self, machine: SharePartition) -> None:
        """Let records of keys with a backlog go to backlog queues from now on. All that were leased stay in `BASE`."""
        index = FairIndex(
            machine.ranges.end,
            (),
            machine.ranges.end,
            machine.settings.key_header,
        )
        machine.divide(index.offsets_of(BASE), self.now_ms())
        self.fair_scan = FairScan(self, index, self._dependencies.scheduler, self._notify_of_queues)
        self.index = index

    def group_end(self) -> int:
        """Return the offset below which the group may read the log."""
        return self.partition.readable_end(_isolation_level(self.state_machine.settings))

    def end(self, error: MansioError) -> None:
        """End this object; requests that wait for it continue with a new object for the share partition."""
        if self.end_error is not None:
            return
        self.end_error = copied(error)  # the caller may raise `error`
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._key_limits is not None:
            self._key_limits.detach(self.key.number)
        if self._trace is not None and self._writes:
            self._report_pending(self._trace)
        self._writes.end()  # their waiters find that this object has ended
        if self.fair_scan is not None:
            self.fair_scan.end(error)
        self._dependencies.dead_letters.on_closed(self)
        self._dependencies.on_end(self)
        self.wake()

    def _end_after_defect(self, error: Exception) -> MansioError:
        """End after an unexpected exception and drop `known_state`, which may have caused it; return the new error."""
        self.known_state = None
        known = fields(group=self.key.group, partition=self.partition.name, reason=error)
        logger.error("share_partition_failed", extra=known, exc_info=error)
        ended = CoordinatorNotAvailable(f"share partition of {self.partition.name} failed: {error}")
        self.end(ended)
        return copied(ended)

    def ensure_leader(self) -> None:
        """Raise `NotLeaderOrFollower` unless this broker certainly leads in the leader epoch of the loaded state."""
        partition = self.partition
        if not partition.is_leader or partition.closed or partition.leader_epoch != self.leader_epoch:
            raise NotLeaderOrFollower(f"{partition.name} is led by another broker or in a later epoch")
        if partition.is_leadership_uncertain:
            raise NotLeaderOrFollower(f"another broker may lead {partition.name}")

    @property
    def is_stale(self) -> bool:
        """Whether this broker does not lead the partition any more, or leads it in a later epoch, or the share
        partitions of the partition have another index since this object exists."""
        partition = self.partition
        return (
            not partition.is_leader
            or partition.closed
            or partition.leader_epoch != self.leader_epoch
            or self._dependencies.index_of(partition) is not self.topic_index
        )

    async def wait_until_loaded(self) -> SharePartition:
        """Wait until the state is loaded; return the state machine. Raises `end_error` if this object has ended."""
        while self._state_machine is None:
            if self.end_error is not None:
                raise copied(self.end_error)
            promise = self._dependencies.scheduler.promise()

            def wake(promise: Promise[None] = promise) -> None:
                complete(promise, None)

            self.park(wake)
            try:
                await promise
            finally:
                self.unpark(wake)
        if self.end_error is not None:
            raise copied(self.end_error)
        return self._state_machine

    def call_machine_and_set_timer(self, method: Callable[..., T], *args: Any, **named: Any) -> T:
        """Like `call_machine`; afterwards set the timer to the next deadline."""
        try:
            return self.call_machine(method, *args, **named)
        finally:
            self._set_timer()

    def call_machine(self, method: Callable[..., T], *args: Any, **named: Any) -> T:
        """Call a method of the state machine. A `MansioError` is raised unchanged; another exception ends this object.

        The timer is not set, because deadlines change only when the update is stored, unless the method documents it.
        """
        try:
            return method(*args, **named)
        except MansioError:
            raise
        except Exception as error:
            raise self._end_after_defect(error) from error

    # ------------------------------------------------------------------ acquisition and acknowledgement

    def count_available(self, member: str, max_records: int, *, is_range: bool = False) -> int:
        """Return how many records the member could acquire now: at most `max_records`, which may be too many, but 0 if
        there are none. `is_range`: by range leases. Used if there are several share partitions.

        Raises `NotLeaderOrFollower`, and `CorruptLog` or `StorageError` if there are none because keys cannot be
        read."""
        machine = self.ready_state_machine()
        if machine is None:
            return 0
        self.ensure_leader()
        end = self._readable_end(machine.settings)
        keys = _KeyReader(self.partition)
        ranges = self._find_ranges(machine, keys, member, max_records, end, self.now_ms(), is_range=is_range)
        if not ranges:
            if machine.is_lease_bound_due:
                return 1  # the bound advances with the next acquisition
            self._end_key_search(keys)
        elif keys.is_interrupted:
            self._dependencies.scheduler.call_soon(self.wake)
        return max_records if len(ranges) >= SCATTERED_READ_RANGES_MAX else count_offsets(ranges)

    def counts(self) -> ShareCounts:
        """Count the records per state, up to the end of the log that the group may read now. The state must be
        loaded."""
        machine = self.ready_state_machine() or self.state_machine
        end = self.partition.readable_end(_isolation_level(machine.settings))
        return machine.counts(self.now_ms(), end)

    def limited_keys(self) -> LimitedKeyNames:
        """Return which group keys have records that a limit by key holds back, some of them by name. The state must be
        loaded."""
        found = self.state_machine.limited_keys()
        names = tuple(self._keys_at(found.offsets))
        return LimitedKeyNames(found.at_lease_limit, found.at_rate_limit, names)

    def held_back(self) -> tuple[HeldBack, bytes | None] | None:
        """Return which record in flight holds back most others by the order of the group, and its group key, None
        without one. The state must be loaded."""
        found = self.state_machine.held_back()
        if found is None:
            return None
        is_by_key = not self.state_machine.settings.is_ordered
        return found, next(self._keys_at([found.offset]), None) if is_by_key else None

    def _keys_at(self, offsets: Iterable[int]) -> Iterator[bytes]:
        """Read the group keys of some records; those that cannot be read, or have none, are left out."""
        records_left = SCANNED_RECORDS_MAX
        for offset in offsets:
            try:
                batch = next(self.partition.log.batches(offset), None)
                if batch is None:  # the log was truncated
                    break
                records_left -= read_header(batch).record_count
                if records_left < 0:
                    break
                keys = dict(read_group_keys(batch, self.state_machine.settings.key_header))
            except MansioError:
                continue
            key = keys.get(offset)
            if key is not None:
                yield key

    def _readable_end(self, settings: ShareSettings) -> int:
        """Return the offset below which records can be leased: committed, covered by the index, and without records of
        open transactions if the group reads only committed ones."""
        end = self.partition.readable_end(_isolation_level(settings))
        if self.fair_scan is not None:
            self.fair_scan.advance(end)
        return end if self.index is None else min(end, self.index.end)

    def acquire(
        self,
        member: str,
        max_records: int,
        max_bytes: int,
        *,
        strict: bool,
        is_first: bool,
        lease_ms: int = -1,
        locks_max: int | None = None,
        ranges_max: int = 0,
    ) -> AcquiredRecords | None:
        """Lease available records to a member; return None if there are none.

        `strict`: lease at most `max_records`, even within a batch. `is_first`: the response has no records yet, so the
        first batch may exceed `max_bytes`. `lease_ms`: duration of the leases, -1 for the group's. `locks_max`: lease
        at most so many records in any case; None if only the record locks of this share partition limit them.
        `ranges_max`: above 0, lease by range leases, at most so many ranges, without reading their records.

        Raises `NotLeaderOrFollower`, `CorruptLog`, `StorageError`."""
        machine, is_range = self.ready_state_machine(), ranges_max > 0
        if machine is None:
            return None
        self.ensure_leader()
        self.asked_ms = now_ms = self.now_ms()
        end = self._readable_end(machine.settings)
        damage: list[DamagedRange] = []
        slices: list[LogSlice] = []
        keys = _KeyReader(self.partition)
        while True:
            # Damaged records do not count towards `max_records`.
            unreadable = sorted((each.first_offset, each.end_offset - 1) for each in damage)
            ranges = self._find_ranges(
                machine, keys, member, max_records, end, now_ms, unreadable, is_range=is_range
            )
            if is_range:
                read = ranges
                break
            read, slices, found = (
                self._read(ranges, max_bytes, end, is_first=is_first) if ranges else ([], [], [])
            )
            damage += found
            if read or not found:
                break
        acquired, update = self.call_machine(
            machine.acquire,
            member,
            read,
            max_records,
            strict=strict,
            batch_ends=[last for _, last in read],
            now_ms=now_ms,
            lease_ms=lease_ms,
            locks_max=locks_max,
            aborted=self._aborted_ranges(read, slices)
            if machine.settings.is_committed_only and not is_range
            else (),
            ranges_max=ranges_max,
        )
        if not acquired and update is None:
            if damage:
                raise copied(damage[0])
            self._end_key_search(keys)
            return None
        if slices and (len(slices) > 1 or not acquired):  # drop slices without leased records
            slices = [
                part
                for (first, last), part in zip(read, slices, strict=True)
                if any(each.first <= last and each.last >= first for each in acquired)
            ]
        return AcquiredRecords(self, acquired, update, slices, sum(each.length for each in slices))

    def plan_exchange(
        self,
        member: str,
        accepted: Sequence[tuple[int, int]],
        max_records: int,
        max_bytes: int,
        *,
        strict: bool,
    ) -> PlannedExchange | None:
        """Plan to accept leased ranges, and to lease the next records, at most `max_records`: the usual request, in one
        step. Changes no state of a record. `strict`: see `acquire`.

        Returns None if `acknowledge` and `acquire` have to decide: about an invalid request, records that are offered
        again, a group with an order, damage, and in general about whatever is not usual."""
        machine, partition = self._state_machine, self.partition
        if (
            machine is None
            or self.end_error is not None
            or partition.start_offset != self._log_start
            or not partition.is_leader
            or partition.closed
            or partition.leader_epoch != self.leader_epoch
            or partition.is_leadership_uncertain
        ):
            return None
        if self.fair_scan is not None:
            self.fair_scan.advance(self.group_end())
        if not (machine.has_short_path and machine.are_leased(member, accepted)):
            return None
        settings = machine.settings
        if not max_records:
            return PlannedExchange(self, accepted)
        if len(machine.ranges) + 2 * len(accepted) + 1 >= settings.in_flight_batches_max:
            return None  # each range may be split in three
        end = partition.readable_end(READ_COMMITTED if settings.is_committed_only else READ_UNCOMMITTED)
        if self.index is not None:
            end = min(end, self.index.end)
        freed_count = sum([last - first + 1 for first, last in accepted])
        first, last = machine.next_range(max_records, end, freed_count)
        if last < first:
            return PlannedExchange(self, accepted)
        is_new = first == machine.ranges.end
        if not is_new and (not strict or last - first + 1 < max_records):
            return None  # records that are offered again may lie in several ranges
        producers = partition.producers
        if settings.is_committed_only and producers is not None and producers.transactions.aborted_count:
            return None
        try:
            found = partition.log.read_range(first, last, max_bytes, end)
        except MansioError:
            return None
        if found is None or found.length > max_bytes or found.next_offset <= first:
            return None
        if not strict:  # the whole batch, as far as locks are free
            _, last = machine.next_range(found.next_offset - first, end, freed_count)
        return PlannedExchange(self, accepted, (first, min(last, found.next_offset - 1)), found)

    def exchange(
        self, plan: PlannedExchange, member: str, lease_ms: int
    ) -> tuple[list[AcquiredRange], Update]:
        """Carry out a plan that was made in the same iteration of the event loop. Returns the leased ranges and the
        update, which has to be stored. `lease_ms`: duration of the leases, -1 for the group's."""
        self.asked_ms = self.last_used_ms = now_ms = self._dependencies.clock.monotonic() * 1000
        wall_ms = self._dependencies.clock.wall_ms()
        return self.call_machine(
            self.state_machine.exchange, member, plan.accepted, plan.leased, now_ms, wall_ms, lease_ms
        )

    def _aborted_ranges(
        self, read: Sequence[tuple[int, int]], slices: Sequence[LogSlice]
    ) -> list[tuple[int, int]]:
        """Return the ranges of offsets in `read` with records of aborted transactions. Their batches are read only if
        there are such transactions between these offsets."""
        producers = self.partition.producers
        if not read or producers is None or not producers.transactions.aborted_count:
            return []
        found: list[tuple[int, int]] = []
        for (first, last), part in zip(read, slices, strict=True):
            aborted = producers.aborted_between(first, last + 1)
            if aborted:
                batches = aborted_batches(memoryview(part.read()), aborted)
                found += [(max(low, first), min(high, last)) for low, high in batches if high >= first]
        return found

    def _find_ranges(
        self,
        machine: SharePartition,
        keys: _KeyReader,
        member: str,
        max_records: int,
        end: int,
        now_ms: float,
        unreadable: Sequence[tuple[int, int]] = (),
        *,
        is_range: bool = False,
    ) -> list[tuple[int, int]]:
        """Return the ranges that `SharePartition.acquirable_ranges` finds. If they have too few records, read more keys
        of the log first."""
        while machine.free_key_count < max_records and keys.add_batch(machine, end):
            pass
        find = partial(
            self.call_machine,
            machine.acquirable_ranges,
            member,
            max_records,
            end,
            now_ms,
            unreadable,
            is_range=is_range,
        )
        ranges = find()
        if machine.next_key_offset is not None:
            # Free records may be held back by a limit.
            while count_offsets(ranges) < max_records and keys.add_batch(machine, end):
                ranges = find()
        return ranges

    def _end_key_search(self, keys: _KeyReader) -> None:
        """Continue a search for keys that found no record to offer in a later turn of the event loop, or when the rate
        of a key allows one. Raises its error, or that of the scan of a fair group."""
        if self.fair_scan is not None and self.fair_scan.error is not None:
            raise copied(self.fair_scan.error)
        if self.state_machine.has_key_limits:
            self._set_timer()
        if keys.error is not None:
            raise copied(keys.error)
        if keys.is_interrupted:
            self._dependencies.scheduler.call_soon(self.wake)

    def _read(
        self, ranges: list[tuple[int, int]], max_bytes: int, limit: int, *, is_first: bool
    ) -> tuple[list[tuple[int, int]], list[LogSlice], list[DamagedRange]]:
        """Read as much of the ranges as fits into `max_bytes`, whole batches below the offset `limit`.

        Returns the ranges read, their slices, and the damaged ranges. Damaged batches are reported and skipped; their
        records stay available and can be leased after a repair. Raises `StorageError` if the end of a damaged range is
        unknown and nothing was read before it."""
        partition = self.partition
        damage: list[DamagedRange] = []
        read: list[tuple[int, int]] = []
        slices: list[LogSlice] = []
        space, next_offset = max_bytes, -1
        for first, last in ranges:
            while (
                start := max(first, next_offset)
            ) <= last:  # otherwise the last batch read contains the range
                try:
                    part = partition.log.read_range(start, last, space, limit) if space > 0 else None
                except DamagedRange as error:
                    partition.report_damage(start, error)
                    damage.append(without_traceback(error))
                    next_offset = error.end_offset
                    continue
                except (StorageError, VerificationPending) as error:
                    if isinstance(error, StorageError):
                        partition.report_damage(start, error)
                    if read:
                        return read, slices, damage
                    raise
                if part is None or (part.length > space and (slices or not is_first)):
                    return read, slices, damage
                slices.append(part)
                space -= part.length
                next_offset = part.next_offset
                read.append((start, next_offset - 1))
                break
        return read, slices, damage

    def acknowledge(self, member: str, batches: Sequence[AcknowledgementBatch]) -> Update | None:
        """Apply acknowledgements, all or none; return the update to store, None if nothing changed.

        The state must be loaded. Raises `InvalidRequest`, `InvalidRecordState`, `NotLeaderOrFollower` if this broker
        does not lead the share partition, and `end_error` if this object has ended.
        """
        machine = self._led_state_machine()
        # A renewal takes effect at once; its deadline is earlier than the old one if the lease duration was reduced.
        is_renewal = any(RENEW in each.types for each in batches)
        call = self.call_machine_and_set_timer if is_renewal else self.call_machine
        wall_ms = self._dependencies.clock.wall_ms()
        return call(machine.acknowledge, member, batches, self.now_ms(), wall_ms, self.random_fraction())

    def check_acknowledgements(self, member: str, batches: Sequence[AcknowledgementBatch]) -> None:
        """Raise the error that `acknowledge` would raise; nothing is changed."""
        self._led_state_machine().check_acknowledgements(member, batches)

    def alter_range_leases(
        self,
        member: str,
        wanted: Sequence[AcquiredRange],
        operation: RangeOperation,
        lease_ms: int,
        *,
        releases_others: bool,
    ) -> AlteredRanges:
        """Keep, claim or accept range leases; see `SharePartition.alter_range_leases`. Also raises the errors of
        `acknowledge`."""
        return self.call_machine(
            self._led_state_machine().alter_range_leases,
            member,
            wanted,
            operation,
            lease_ms,
            self.now_ms(),
            self._dependencies.clock.wall_ms(),
            releases_others=releases_others,
        )

    def _led_state_machine(self) -> SharePartition:
        """Return the state machine of a share partition that this broker leads. Raises `NotLeaderOrFollower`, and
        `end_error` if this object has ended."""
        machine = self.ready_state_machine()
        self.ensure_leader()
        if machine is None:
            raise (
                copied(self.end_error)
                if self.end_error
                else NotLeaderOrFollower(f"{self.partition.name} is not led here")
            )
        return machine

    async def wait_for_change(self, timeout_ms: float) -> None:
        """Wait until more records may be available, this object ends, or the timeout in milliseconds has passed."""
        woken = self._dependencies.scheduler.promise()

        def wake(woken: Promise[None] = woken) -> None:
            complete(woken, None)

        self.park(wake)
        timer = self._dependencies.scheduler.call_later(timeout_ms, wake)
        try:
            await woken
        finally:
            timer.cancel()
            self.unpark(wake)

    # ------------------------------------------------------------------ waiters

    def park(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever more records may be available and when this object ends, until `unpark(wake)`."""
        self._waiters[wake] = None

    def unpark(self, wake: Callable[[], None]) -> None:
        """Undo `park(wake)`."""
        self._waiters.pop(wake, None)

    def wake(self) -> None:
        """Call all functions registered with `park`."""
        for wake in tuple(self._waiters):
            wake()

    # ------------------------------------------------------------------ writes

    def store(self, updates: Sequence[Update], on_stored: Callable[[MansioError | None], None]) -> None:
        """Store updates of the state machine as one write and report to the state machine that they are stored.

        The call determines their position in the order of writes. `on_stored` is called once, possibly before this
        returns: with None, or with an error, after which this object has ended and the outcome of the write is unknown.
        Several callers get the same error: they raise copies. `on_stored` must not raise."""
        self._writes.add(updates, on_stored)

    def persist(self, *updates: Update) -> Coroutine[Any, Any, None]:
        """As `store`, for a coroutine: the result must be awaited, and raises the error."""
        stored: Promise[None] = self._dependencies.scheduler.promise()
        self.store(updates, partial(complete_from, stored, None))
        return result_of(stored)

    def _begin_write(self, write: CombinedWrite) -> None:
        if self.end_error is not None:
            self._on_written(write, self.end_error)
            return
        try:
            self._dependencies.persister.begin_write(
                self.key,
                self._state_epoch,
                self.leader_epoch,
                combine_updates(write.updates),
                partial(self._on_written, write),
            )
        except Exception as error:  # noqa: BLE001 - a defect ends this object, not the broker
            self._on_written(write, error)

    def _on_written(self, write: CombinedWrite, outcome: Exception | None) -> None:
        if not write.callbacks:
            return  # a defect was reported after the begin of the write
        error: MansioError | None = None
        if outcome is None and self.end_error is None:
            try:
                self._mark_persisted(write.updates)
            except Exception as defect:  # noqa: BLE001 - as above
                outcome = without_traceback(defect)
        if self.partition.trace is not self._trace:
            self._find_trace()
        if (trace := self._trace) is not None:
            group, wall_ms = self.key.group, self._dependencies.clock.wall_ms()
            if outcome is None:
                trace.report_updates(group, write.updates, wall_ms)
            else:
                changes = [
                    (change.first, change.last, change.deliveries)
                    for each in write.updates
                    for change in each.changes
                ]
                trace.report_unknown(group, changes, wall_ms)
        if isinstance(outcome, MansioError):
            error = without_traceback(outcome)
            self._end_after_failed_write(error)
        elif outcome is not None:
            error = self._end_after_defect(outcome)
        elif self.end_error is not None:
            error = self.end_error
        for on_stored in self._writes.finish(write):
            try:
                on_stored(error)
            except Exception as defect:  # noqa: BLE001 - as above
                self._end_after_defect(defect)
        if error is None:
            self.wake()

    def _end_after_failed_write(self, error: MansioError) -> None:
        try:
            if isinstance(error, STATE_UNAVAILABLE):
                self._keep_known_state()
        except Exception as defect:  # noqa: BLE001 - a defect drops `known_state` and ends this object
            self._end_after_defect(defect)
        self.end(error)

    def _keep_known_state(self) -> None:
        """Keep the current state for the next object, unless records are withheld: the next object has to withhold them
        again."""
        now_ms = self.now_ms()
        if self.end_error is None and not self.state_machine.counts(now_ms).withheld:
            self.known_state = self.state_machine.snapshot(now_ms)

    def _report_pending(self, trace: PartitionTrace) -> None:
        """Report the changes that are being written when this object ends: their outcome may never be known."""
        machine = self._state_machine
        pending = (
            [] if machine is None else [each for each in machine.ranges if each.pending_token != NOT_PENDING]
        )
        trace.report_unknown(
            self.key.group,
            [(each.first, each.last, each.deliveries) for each in pending],
            self._dependencies.clock.wall_ms(),
        )

    def _find_trace(self) -> None:
        """Use the trace of the partition, if it is one of this leader epoch."""
        trace = self.partition.trace
        if trace is not None and trace.leader_epoch == self.leader_epoch:
            self._trace = trace

    def _mark_persisted(self, updates: Sequence[Update]) -> None:
        state_machine = self.state_machine
        dead_letters: list[ArchivingRange] = []
        for each in updates:
            dead_letters += state_machine.mark_persisted(each.token)
        self._set_timer()
        if dead_letters:
            self._dependencies.dead_letters.add(self, dead_letters)

    def persist_in_background(self, update: Update | None) -> None:
        """Store an update in the background and log an error.

        The call itself determines the position in the order of writes, because later updates replace the start offset
        and the dead ranges of this one."""
        if update is not None:
            self.store([update], self._log_failed_write)

    def _log_failed_write(self, error: MansioError | None) -> None:
        if error is not None:
            known = fields(group=self.key.group, partition=self.partition.name, reason=error)
            logger.warning("share_state_not_stored", extra=known)

    # ------------------------------------------------------------------ log start offset and timer

    def ready_state_machine(self) -> SharePartition | None:
        """Return the state machine after it was given the current log start offset; None if it is not ready."""
        state_machine = self._state_machine
        if state_machine is None or self.end_error is not None:
            return None
        self.last_used_ms = self.now_ms()
        start = self.partition.start_offset
        if start != self._log_start:
            self._log_start = start
            self._apply_log_start(state_machine, start)
        return state_machine

    def _apply_log_start(self, state_machine: SharePartition, start: int) -> None:
        aged = state_machine.aged_out_record_count
        if (update := self.call_machine_and_set_timer(state_machine.advance_log_start, start)) is not None:
            self.persist_in_background(update)
        if state_machine.aged_out_record_count > aged:
            records = state_machine.aged_out_record_count - aged
            known = fields(group=self.key.group, partition=self.partition.name, records=records)
            logger.warning("records_expired_undelivered", extra=known)

    def reconfigure(self) -> None:
        """Apply the current settings of the group."""
        if self._state_machine is not None and self.end_error is None:
            machine, settings = (
                self._state_machine,
                self._dependencies.settings(self.key.group, self.partition),
            )
            machine.reconfigure(settings, self.now_ms())
            if self.fair_scan is not None:
                self.fair_scan.reconfigure(settings)
            elif settings.is_fair and self.key.number == BASE and self.topic_index is None:
                self._begin_fairness(machine)
            self._set_timer()
            self.wake()

    def _set_timer(self) -> None:
        state_machine = self._state_machine
        if state_machine is None or self.end_error is not None:
            return
        due_ms = max(state_machine.next_deadline_ms(), self._grace_until_ms)
        if self._timer is not None:
            if self._timer_due_ms <= due_ms and due_ms != math.inf:
                return
            self._timer.cancel()
            self._timer = None
        if due_ms != math.inf:
            self._timer_due_ms = due_ms
            delay_ms = max(due_ms - self.now_ms(), 0.0) if due_ms > 0 else 0.0
            self._timer = self._dependencies.scheduler.call_later(delay_ms, self._tick, due_ms)

    def _tick(self, due_ms: float) -> None:
        self._timer = None
        state_machine, now_ms = self._state_machine, self.now_ms()
        if state_machine is None or self.end_error is not None:
            return
        if self.is_stale:
            self.end(
                NotLeaderOrFollower(f"{self.partition.name} is led by another broker or in a later epoch")
            )
            return
        if math.isfinite(due_ms) and due_ms != self._grace_until_ms and now_ms - due_ms > STALL_MS:
            known = fields(
                partition=self.partition.name, group=self.key.group, late_ms=round(now_ms - due_ms)
            )
            logger.warning("share_timer_late", extra=known)
            self._grace_until_ms = now_ms + STALL_MS
            self._set_timer()
            return
        try:
            update = self.call_machine_and_set_timer(
                state_machine.tick, now_ms, self._dependencies.clock.wall_ms(), self.random_fraction()
            )
        except MansioError:
            return
        self.persist_in_background(update)
        self.wake()

    def random_fraction(self) -> float:
        """Return a random number in [0, 1)."""
        return min(self._dependencies.random.uniform(0.0, 1.0), _LARGEST_BELOW_ONE)
