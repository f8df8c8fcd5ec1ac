"""Leader of one share partition: its state machine, timer, writes and waiters (Kafka's SharePartition).

    LOADING ── state is read ──► ready ── a write fails, the role changes, it is idle ──► ended

Every decision of the state machine is stored through `persist` before it is reported. If that fails, or its outcome is
unknown, this object ends for good and the next one loads the state again. If the state moves to another broker,
the next object gets what this one knew (`known_state`): changes that the state may have lost in the move are
written again, all of them, before anything is delivered.

Invariants:
* Updates are written in the order of the `WriteCombiner`; an update with the whole state is written alone.
* There is one timer, never later than the next deadline of the state machine. A timer that fires much too late shows
  that the broker was stalled, not the members: they get a grace period to use their leases. One per deadline: if every
  timer is late, leases end nevertheless.
* Nothing is decided in another leader epoch than the one in which the state was loaded.
* Only offsets whose bytes are in the result are leased, all below the readable end. Records are slices of the log
  files, never decoded or copied.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from mansio.broker.coordinator.share.write_combiner import WriteCombiner, combine_updates
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    DamagedRange,
    MansioError,
    NotCoordinator,
    NotLeaderOrFollower,
    StorageError,
    VerificationPending,
)
from mansio.logs import fields
from mansio.state.share_partition.machine import SharePartition
from mansio.state.share_partition.snapshot import with_known_state
from mansio.state.share_partition.types import RENEW, LoadedState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from mansio.broker.coordinator.share.state_client import SharePersister
    from mansio.broker.coordinator.share.write_combiner import CombinedWrite
    from mansio.broker.partition.partition import Partition
    from mansio.ports import Clock, Promise, Random, Scheduler, Timer
    from mansio.state.share_partition.types import (
        AcknowledgementBatch,
        AcquiredRange,
        ArchivingRange,
        Producer,
        ShareKey,
        ShareSettings,
        Update,
    )
    from mansio.storage.log import LogSlice


logger = logging.getLogger(__name__)

T = TypeVar("T")

STALL_MS: Final = 1_000
"""A timer this late shows that the broker was stalled, not the members."""

STATE_UNAVAILABLE: Final = (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress)
"""Errors of a write whose state moved to another broker, or has no leader; its outcome is unknown."""

_BELOW_ONE: Final = 1 - 2**-53


class AcquiredRecords(NamedTuple):
    """Records for a member: leases, valid once `update` is stored, and the bytes."""

    acquired: list[AcquiredRange]
    update: Update | None
    slices: list[LogSlice]
    size_bytes: int

    @property
    def records(self) -> int:
        """Number of leased offsets."""
        return sum(last - first + 1 for first, last, _ in self.acquired)


class DeadLetterSink(Protocol):
    """Receives records to be dead-lettered; implemented by `broker.coordinator.share.dead_letter_manager`."""

    def on_loaded(self, share_partition: SharePartitionLeader, producer: Producer | None) -> None:
        """A share partition is led here; its archiving ranges are to be resumed."""

    def add(self, share_partition: SharePartitionLeader, ranges: Sequence[ArchivingRange]) -> None:
        """Ranges to be dead-lettered, stored as such."""

    def on_closed(self, share_partition: SharePartitionLeader) -> None:
        """The share partition is not led here any more, or its state is loaded again."""


class NoDeadLetters:
    """Ignores all: ranges stay ARCHIVING until a broker resumes them."""

    def on_loaded(self, share_partition: SharePartitionLeader, producer: Producer | None) -> None:
        """Ignored."""

    def add(self, share_partition: SharePartitionLeader, ranges: Sequence[ArchivingRange]) -> None:
        """Ignored."""

    def on_closed(self, share_partition: SharePartitionLeader) -> None:
        """Ignored."""


@dataclass(frozen=True, slots=True)
class ShareDependencies:
    """Dependencies shared by all share partitions of a broker. `on_end` is called for each that ended; `first_offset`:
    start of a group without state."""

    persister: SharePersister
    clock: Clock
    scheduler: Scheduler
    random: Random
    settings: Callable[[str, Partition], ShareSettings]
    first_offset: Callable[[str, Partition], int]
    dead_letters: DeadLetterSink
    on_end: Callable[[SharePartitionLeader], None]


class SharePartitionLeader:
    """All methods run on the broker's event loop."""

    __slots__ = (
        "_dependencies",
        "_grace_until_ms",
        "_log_start",
        "_state_epoch",
        "_state_machine",
        "_timer",
        "_timer_due_ms",
        "_waiters",
        "_writes",
        "ended",
        "key",
        "known_state",
        "last_used_ms",
        "leader_epoch",
        "partition",
    )

    def __init__(
        self,
        key: ShareKey,
        partition: Partition,
        dependencies: ShareDependencies,
        known: LoadedState | None = None,
    ) -> None:
        """`known`: the `known_state` of the object before."""
        self.key = key
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self._state_machine: SharePartition | None = None
        self.ended: MansioError | None = None
        """The reason after the end, otherwise None."""
        self.known_state = known
        """State for the next object."""
        self.last_used_ms = dependencies.clock.monotonic() * 1000
        self._dependencies = dependencies
        self._state_epoch = 0
        self._waiters: dict[Callable[[], None], None] = {}
        self._timer: Timer | None = None
        self._timer_due_ms = math.inf
        self._grace_until_ms = -math.inf
        self._log_start = -1
        self._writes = WriteCombiner(dependencies.scheduler)

    @property
    def state_machine(self) -> SharePartition:
        """The state machine; valid once it is loaded."""
        assert self._state_machine is not None, "the state is not loaded"
        return self._state_machine

    @property
    def is_ready(self) -> bool:
        return self._state_machine is not None and self.ended is None

    @property
    def is_awaited(self) -> bool:
        """Whether there are waiters or pending writes."""
        return bool(self._waiters or self._writes)

    @property
    def has_pending_dead_letters(self) -> bool | None:
        """Whether records wait for their dead letter; None before the state is loaded."""
        return (
            None if self._state_machine is None else self._state_machine.counts(self.now_ms()).archiving > 0
        )

    def now_ms(self) -> float:
        return self._dependencies.clock.monotonic() * 1000

    # ------------------------------------------------------------------ life

    async def load(self) -> None:
        """Load the state, or create one. Ends this object on failure; never raises."""
        try:
            await self._load()
        except MansioError as error:
            self.end(error)
        except Exception as error:  # noqa: BLE001 - a defect costs this object, not the broker
            self._failed(error)
        else:
            self._arm()
            self.wake()

    async def _load(self) -> None:
        dependencies, partition = self._dependencies, self.partition
        settings = dependencies.settings(self.key.group, partition)
        found = await dependencies.persister.read(self.key, self.leader_epoch)
        state = (
            found if found is None or self.known_state is None else with_known_state(found, self.known_state)
        )
        if state is None:
            partition.ensure_high_watermark_known()
            start = dependencies.first_offset(self.key.group, partition)
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
        self.ensure_leader()
        self._state_epoch = state.state_epoch
        now_ms = self.now_ms()
        state_machine = SharePartition(
            self.key,
            settings,
            state,
            leader_epoch=self.leader_epoch,
            log_start=partition.start_offset,
            log_end=partition.end_offset,
            high_watermark=partition.high_watermark,
            now_ms=now_ms,
            wall_ms=dependencies.clock.wall_ms(),
        )
        self._state_machine = state_machine
        if state is not found:
            ready, self._state_machine = (
                state_machine,
                None,
            )  # nothing is delivered before all of it is stored
            update = ready.full_update(now_ms)
            await dependencies.persister.write(self.key, self._state_epoch, self.leader_epoch, update)
            self.ensure_leader()
            if self.ended is not None:
                raise self.ended
            ready.mark_persisted(update.token)
            self._state_machine = ready
        self.known_state = None
        dependencies.dead_letters.on_loaded(self, state.producer)

    def end(self, error: MansioError) -> None:
        """End for good; waiters look for the next object."""
        if self.ended is not None:
            return
        self.ended = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._writes.end()  # their waiters find that this object has ended
        self._dependencies.dead_letters.on_closed(self)
        self._dependencies.on_end(self)
        self.wake()

    def _failed(self, error: Exception) -> MansioError:
        """End after a defect: the state is loaded again, without `known_state`, which may be related to the defect."""
        self.known_state = None
        known = fields(group=self.key.group, partition=self.partition.name, reason=error)
        logger.error("share_partition_failed", extra=known, exc_info=error)
        ended = CoordinatorNotAvailable(f"share partition of {self.partition.name} failed: {error}")
        self.end(ended)
        return ended

    def ensure_leader(self) -> None:
        """Raise `NotLeaderOrFollower` unless this broker certainly leads in the epoch in which the state was loaded."""
        partition = self.partition
        if not partition.is_leader or partition.closed or partition.leader_epoch != self.leader_epoch:
            raise NotLeaderOrFollower(f"{partition.name} is led by another broker or in a later epoch")
        if partition.is_leadership_uncertain:
            raise NotLeaderOrFollower(f"another broker may lead {partition.name}")

    @property
    def is_stale(self) -> bool:
        """Whether another broker leads, or this one in a later epoch."""
        partition = self.partition
        return not partition.is_leader or partition.closed or partition.leader_epoch != self.leader_epoch

    async def loaded(self) -> SharePartition:
        """Wait until the state is loaded; returns the state machine. Raises the reason if loading failed."""
        while self._state_machine is None:
            if self.ended is not None:
                raise self.ended
            promise = self._dependencies.scheduler.promise()

            def wake(promise: Promise[None] = promise) -> None:
                if not promise.done():
                    promise.set_result(None)

            self.park(wake)
            try:
                await promise
            finally:
                self.unpark(wake)
        if self.ended is not None:
            raise self.ended
        return self._state_machine

    def call_and_rearm(self, method: Callable[..., T], *args: Any, **named: Any) -> T:
        """Like `call`, and set the timer to the next deadline."""
        try:
            return self.call(method, *args, **named)
        finally:
            self._arm()

    def call(self, method: Callable[..., T], *args: Any, **named: Any) -> T:
        """Call a method of the state machine. A typed error has changed nothing; any other error ends this object.

        The timer is not changed: for methods whose deadlines change only once their update is stored.
        """
        try:
            return method(*args, **named)
        except MansioError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    # ------------------------------------------------------------------ acquisition and acknowledgement

    def acquire(
        self, member: str, max_records: int, max_bytes: int, *, strict: bool, is_first: bool
    ) -> AcquiredRecords | None:
        """Lease available records to a member, or return None. `is_first`: the result has no records yet, so one batch
        may exceed `max_bytes`. Raises `NotLeaderOrFollower`, `CorruptLog`, `StorageError`."""
        machine = self.ready_state_machine()
        if machine is None:
            return None
        self.ensure_leader()
        now_ms, end = self.now_ms(), self.partition.readable_end()
        damage: list[DamagedRange] = []
        while True:
            # Damaged records take no space of the others.
            unreadable = sorted((each.first_offset, each.end_offset - 1) for each in damage)
            ranges = self.call(machine.acquirable_ranges, member, max_records, end, now_ms, unreadable)
            read, slices, found = (
                self._read(ranges, max_bytes, end, is_first=is_first) if ranges else ([], [], [])
            )
            damage += found
            if read or not found:
                break
        acquired, update = self.call(
            machine.acquire,
            member,
            read,
            max_records,
            strict=strict,
            batch_ends=[last for _, last in read],
            now_ms=now_ms,
        )
        if not acquired and update is None:
            if damage:
                raise damage[0]
            return None
        if len(slices) > 1 or not acquired:  # drop slices without leased records
            slices = [
                part
                for (first, last), part in zip(read, slices, strict=True)
                if any(each.first <= last and each.last >= first for each in acquired)
            ]
        return AcquiredRecords(acquired, update, slices, sum(each.length for each in slices))

    def _read(
        self, ranges: list[tuple[int, int]], max_bytes: int, limit: int, *, is_first: bool
    ) -> tuple[list[tuple[int, int]], list[LogSlice], list[DamagedRange]]:
        """The parts of these ranges that fit, each to the end of its last batch, and their slices.

        Damaged batches, the third value, are reported and passed over: their records stay available, for after a
        repair. Raises `StorageError` if the limits of the damage are not known and nothing was read before it."""
        partition = self.partition
        damage: list[DamagedRange] = []
        read: list[tuple[int, int]] = []
        slices: list[LogSlice] = []
        space, next_offset = max_bytes, -1
        for first, last in ranges:
            while (start := max(first, next_offset)) <= last:  # else it is covered by the batch before
                try:
                    part = partition.log.read_range(start, last, space, limit) if space > 0 else None
                except DamagedRange as error:
                    partition.report_damage(start, error)
                    damage.append(error)
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
        """Apply acknowledgements, all or none; returns the update to store, None for nothing. The state is loaded.

        Raises `InvalidRequest`, `InvalidRecordState`, and the reason if the share partition is not led here.
        """
        machine = self.ready_state_machine()
        self.ensure_leader()
        if machine is None:
            raise self.ended or NotLeaderOrFollower(f"{self.partition.name} is not led here")
        # A renewal is effective at once, and its deadline may be earlier than the old one if the duration of leases was
        # reduced.
        is_renewal = any(RENEW in each.types for each in batches)
        call = self.call_and_rearm if is_renewal else self.call
        return call(
            machine.acknowledge, member, batches, self.now_ms(), self.wall_ms(), self.random_fraction()
        )

    async def wait_change(self, timeout_ms: float) -> None:
        """Wait until there may be more to lease, until this object ends, or for the timeout."""
        woken = self._dependencies.scheduler.promise()

        def wake(woken: Promise[None] = woken) -> None:
            if not woken.done():
                woken.set_result(None)

        self.park(wake)
        timer = self._dependencies.scheduler.call_later(timeout_ms, wake)
        try:
            await woken
        finally:
            timer.cancel()
            self.unpark(wake)

    # ------------------------------------------------------------------ waiters

    def park(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever more may be available, and at the end, until `unpark`."""
        self._waiters[wake] = None

    def unpark(self, wake: Callable[[], None]) -> None:
        self._waiters.pop(wake, None)

    def wake(self) -> None:
        for wake in tuple(self._waiters):
            wake()

    # ------------------------------------------------------------------ writes

    def persist(self, *updates: Update) -> Coroutine[Any, Any, None]:
        """Store updates of the state machine as one and report them to it. Their position in the order of writes is
        taken at once; the result has to be awaited.

        Raises the error of the write, after which this object has ended and the outcome is unknown, or the reason if it
        ended meanwhile."""
        joined = self._writes.join(updates)
        return self._write(self._writes.enqueue(updates)) if joined is None else self._written(joined)

    async def _write(self, turn: CombinedWrite) -> None:
        stored = False
        try:
            if turn.promise is not None:
                await turn.promise
            if self.ended is not None:
                raise self.ended
            await self._dependencies.persister.write(
                self.key, self._state_epoch, self.leader_epoch, combine_updates(turn.updates)
            )
            stored = True
            if self.ended is not None:
                raise self.ended
            self._settled(turn.updates)
        except MansioError as error:
            self._not_written(error)
            raise
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self._writes.finish(turn, stored=stored)
        self.wake()

    def _not_written(self, error: MansioError) -> None:
        try:
            if isinstance(error, STATE_UNAVAILABLE):
                self._remember()
        except Exception as defect:  # noqa: BLE001 - a defect drops `known_state` and ends this object
            self._failed(defect)
        self.end(error)

    def _remember(self) -> None:
        """Keep the state for the next object, unless it has withheld leases: the next one has to withhold them
        again."""
        now_ms = self.now_ms()
        if self.ended is None and not self.state_machine.counts(now_ms).withheld:
            self.known_state = self.state_machine.snapshot(now_ms)

    async def _written(self, joined: Promise[bool]) -> None:
        """Wait for a write that includes the updates."""
        stored = await joined
        if self.ended is not None:
            raise self.ended
        if not stored:
            raise CoordinatorNotAvailable(f"the state of {self.partition.name} was not stored: interrupted")

    def _settled(self, updates: Sequence[Update]) -> None:
        state_machine = self.state_machine
        dead_letters: list[ArchivingRange] = []
        for each in updates:
            dead_letters += state_machine.mark_persisted(each.token)
        self._arm()
        if dead_letters:
            self._dependencies.dead_letters.add(self, dead_letters)

    def store(self, update: Update | None) -> None:
        """Store in the background. The position in the order of writes is taken at once, because the start and the dead
        ranges of later updates are newer."""
        if update is not None:
            self._dependencies.scheduler.spawn(self._stored(self.persist(update)), name="share state")

    async def _stored(self, written: Coroutine[Any, Any, None]) -> None:
        try:
            await written
        except MansioError as error:
            known = fields(group=self.key.group, partition=self.partition.name, reason=error)
            logger.warning("share_state_not_stored", extra=known)

    # ------------------------------------------------------------------ time, and the start of the log

    def ready_state_machine(self) -> SharePartition | None:
        """The state machine if it is ready, with the current start of the log."""
        state_machine = self._state_machine
        if state_machine is None or self.ended is not None:
            return None
        self.last_used_ms = self.now_ms()
        start = self.partition.start_offset
        if start != self._log_start:
            self._log_start = start
            self._trimmed(state_machine, start)
        return state_machine

    def _trimmed(self, state_machine: SharePartition, start: int) -> None:
        aged = state_machine.aged_out_records
        if (update := self.call_and_rearm(state_machine.advance_log_start, start)) is not None:
            self.store(update)
        if state_machine.aged_out_records > aged:
            records = state_machine.aged_out_records - aged
            known = fields(group=self.key.group, partition=self.partition.name, records=records)
            logger.warning("records_expired_undelivered", extra=known)

    def reconfigure(self) -> None:
        """Apply changed settings of the group."""
        if self._state_machine is not None and self.ended is None:
            self._state_machine.reconfigure(self._dependencies.settings(self.key.group, self.partition))
            self._arm()
            self.wake()

    def _arm(self) -> None:
        state_machine = self._state_machine
        if state_machine is None or self.ended is not None:
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
        if state_machine is None or self.ended is not None:
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
            self._arm()
            return
        try:
            update = self.call_and_rearm(
                state_machine.tick, now_ms, self._dependencies.clock.wall_ms(), self.random_fraction()
            )
        except MansioError:
            return
        self.store(update)
        self.wake()

    def random_fraction(self) -> float:
        """A random number in [0, 1)."""
        return min(self._dependencies.random.uniform(0.0, 1.0), _BELOW_ONE)

    def wall_ms(self) -> int:
        return self._dependencies.clock.wall_ms()
