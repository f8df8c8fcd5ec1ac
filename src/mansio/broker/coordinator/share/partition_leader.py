"""One share partition as its leader holds it in memory: the state machine, its timer, what it writes, who waits for it.

    LOADING ── state is read ──► ready ── a write fails, the role changes, nobody needs it ──► ended

Whatever the machine decides is stored through `persist` before anybody is told; when that fails, or nobody knows, this
object is ended for good and the state is read anew by the next one. If the state is on its way to another broker, the
next one is told what this one knew (`known_state`): what the state may have lost on that way is written there
again, all of it, before anything is handed out.

Always true:
* Updates are written in the order that `turns` says; one that is the whole state has nothing beside it under way.
* There is one timer, never later than the machine's next deadline. One that fires much too late means that we stood
  still, not the members: whoever has leases gets a while to use them before they end. One while each time: where
  every timer is late, they end all the same.
* Nothing is decided in another leader epoch than the one it was loaded in.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mansio.broker.coordinator.share.write_combiner import WriteCombiner, combine_updates
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    MansioError,
    NotCoordinator,
    NotLeaderOrFollower,
)
from mansio.logs import fields
from mansio.state.share_partition.machine import SharePartition
from mansio.state.share_partition.snapshot import with_known_state
from mansio.state.share_partition.types import LoadedState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from mansio.broker.coordinator.share.dependencies import ShareDependencies
    from mansio.broker.coordinator.share.write_combiner import CombinedWrite
    from mansio.broker.partition.partition import Partition
    from mansio.ports import Promise, Timer
    from mansio.state.share_partition.types import ArchivingRange, ShareKey, Update

logger = logging.getLogger(__name__)

T = TypeVar("T")

STALL_MS: Final = 1_000
"""A timer this late means that we were stopped, not the members."""

STATE_UNAVAILABLE: Final = (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress)
"""How a write fails whose state is led by another broker now, or by none; whether it was stored is not known."""

_BELOW_ONE: Final = 1 - 2**-53


class SharePartitionLeader:
    """See the module. All methods belong to the broker's loop."""

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
        """`known`: the `known_state` of the one before."""
        self.key = key
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self._state_machine: SharePartition | None = None
        self.ended: MansioError | None = None
        """Why this is of no use any more."""
        self.known_state = known
        """What the next one is to be told."""
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
        """The machine; `loaded` comes first."""
        assert self._state_machine is not None, "load comes first"
        return self._state_machine

    @property
    def is_ready(self) -> bool:
        return self._state_machine is not None and self.ended is None

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for it, or for what it writes."""
        return bool(self._waiters or self._writes)

    @property
    def has_pending_dead_letters(self) -> bool | None:
        """Are records of it on their way to the dead-letter topic? None before it is loaded."""
        return (
            None if self._state_machine is None else self._state_machine.counts(self.now_ms()).archiving > 0
        )

    def now_ms(self) -> float:
        return self._dependencies.clock.monotonic() * 1000

    # ------------------------------------------------------------------ life

    async def load(self) -> None:
        """Read the state, or begin one. Ends it if that fails; never raises."""
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
            )  # nobody is given anything before all of it is stored
            update = ready.full_update(now_ms)
            await dependencies.persister.write(self.key, self._state_epoch, self.leader_epoch, update)
            self.ensure_leader()
            if self.ended is not None:
                raise self.ended
            ready.persisted(update.token)
            self._state_machine = ready
        self.known_state = None
        dependencies.dead_letters.on_loaded(self, state.producer)

    def end(self, error: MansioError) -> None:
        """It is of no use any more: whoever waits looks for another one."""
        if self.ended is not None:
            return
        self.ended = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._writes.end()  # whoever waits finds that it is ended
        self._dependencies.dead_letters.on_closed(self)
        self._dependencies.on_end(self)
        self.wake()

    def _failed(self, error: Exception) -> MansioError:
        """The machine, or this shell of it, has a defect: the state is read anew, and nothing is remembered that may
        have to do with it."""
        self.known_state = None
        known = fields(group=self.key.group, partition=self.partition.name, reason=error)
        logger.error("share partition failed", extra=known, exc_info=error)
        ended = CoordinatorNotAvailable(f"share partition of {self.partition.name} failed: {error}")
        self.end(ended)
        return ended

    def ensure_leader(self) -> None:
        """Raise `NotLeaderOrFollower` unless this broker leads in the epoch this was loaded in, and surely so."""
        partition = self.partition
        if not partition.is_leader or partition.closed or partition.leader_epoch != self.leader_epoch:
            raise NotLeaderOrFollower(f"{partition.name} is led by another broker, or in a later epoch")
        if partition.is_leadership_uncertain:
            raise NotLeaderOrFollower(f"another broker may lead {partition.name} by now")

    @property
    def is_stale(self) -> bool:
        """Another broker leads, or this one in a later epoch: this is of no use any more."""
        partition = self.partition
        return not partition.is_leader or partition.closed or partition.leader_epoch != self.leader_epoch

    async def loaded(self) -> SharePartition:
        """The machine, once it is there. Raises why it never will be."""
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
        """Call a method of the machine. A typed error has changed nothing; any other ends this."""
        try:
            return self.call(method, *args, **named)
        finally:
            self._arm()

    def call(self, method: Callable[..., T], *args: Any, **named: Any) -> T:
        """The same of one that brings no deadline forward before its update is stored, which looks at the time."""
        try:
            return method(*args, **named)
        except MansioError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    # ------------------------------------------------------------------ who waits

    def park(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever there may be more to lease, and when this ends, until `unpark`."""
        self._waiters[wake] = None

    def unpark(self, wake: Callable[[], None]) -> None:
        self._waiters.pop(wake, None)

    def wake(self) -> None:
        for wake in tuple(self._waiters):
            wake()

    # ------------------------------------------------------------------ what is stored

    def persist(self, *updates: Update) -> Coroutine[Any, Any, None]:
        """Store what the machine gave, several as one, and tell it so: to be awaited, and its place in the order of
        writes is taken at once.

        Raises what the write raises, and then this is ended and nobody knows what is stored; why it ended if it did
        meanwhile, stored or not."""
        gather_results = self._writes.join(updates)
        return (
            self._write(self._writes.enqueue(updates))
            if gather_results is None
            else self._written(gather_results)
        )

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
        except Exception as defect:  # noqa: BLE001 - a defect costs what is remembered, and ends this object, too
            self._failed(defect)
        self.end(error)

    def _remember(self) -> None:
        """Keep what there is for the next one. While leases of before are withheld, that is by the wall clock in what
        is stored, and by none in here: the next one withholds again."""
        now_ms = self.now_ms()
        if self.ended is None and not self.state_machine.counts(now_ms).withheld:
            self.known_state = self.state_machine.snapshot(now_ms)

    async def _written(self, gather_results: Promise[bool]) -> None:
        """By another, with its own."""
        stored = await gather_results
        if self.ended is not None:
            raise self.ended
        if not stored:
            raise CoordinatorNotAvailable(f"the state of {self.partition.name} was not stored: broken off")

    def _settled(self, updates: Sequence[Update]) -> None:
        state_machine = self.state_machine
        letters: list[ArchivingRange] = []
        for each in updates:
            letters += state_machine.persisted(each.token)
        self._arm()
        if letters:
            self._dependencies.dead_letters.add(self, letters)

    def store(self, update: Update | None) -> None:
        """Store what nobody waits for. Its place is taken at once, too: what it says of all that is dead, and of the
        start, is older than what the machine gives next."""
        if update is not None:
            self._dependencies.scheduler.spawn(self._stored(self.persist(update)), name="share state")

    async def _stored(self, written: Coroutine[Any, Any, None]) -> None:
        try:
            await written
        except MansioError as error:
            known = fields(group=self.key.group, partition=self.partition.name, reason=error)
            logger.warning("share state not stored", extra=known)

    # ------------------------------------------------------------------ time, and what the log loses

    def ready_state_machine(self) -> SharePartition | None:
        """The machine, if it is ready, knowing where the log begins now."""
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
        aged = state_machine.aged_out
        if (update := self.call_and_rearm(state_machine.advance_log_start, start)) is not None:
            self.store(update)
        if state_machine.aged_out > aged:
            records = state_machine.aged_out - aged
            known = fields(group=self.key.group, partition=self.partition.name, records=records)
            logger.warning("records aged out undelivered", extra=known)

    def reconfigure(self) -> None:
        """The group's settings are others now."""
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
                NotLeaderOrFollower(f"{self.partition.name} is led by another broker, or in a later epoch")
            )
            return
        if math.isfinite(due_ms) and due_ms != self._grace_until_ms and now_ms - due_ms > STALL_MS:
            known = fields(
                partition=self.partition.name, group=self.key.group, late_ms=round(now_ms - due_ms)
            )
            logger.warning("share timer late", extra=known)
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
        """In [0, 1)."""
        return min(self._dependencies.random.uniform(0.0, 1.0), _BELOW_ONE)

    def wall_ms(self) -> int:
        return self._dependencies.clock.wall_ms()
