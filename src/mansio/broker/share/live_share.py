"""One share partition as its leader holds it in memory: the state machine, its timer, what it writes, who waits for it.

    LOADING ── state is read ──► ready ── a write fails, the role changes, nobody needs it ──► ended

Whatever the machine decides is stored through `perform` before anybody is told; when that fails, or nobody knows, this
object is ended for good and the state is read anew by the next one. If the state is on its way to another broker, the
next one is told what this one knew (`memory`): what the state may have lost on that way is written there again, all of
it, before anything is handed out.

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

from mansio.broker.share.turns import Turns, as_one
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    MansioError,
    NotCoordinator,
    NotLeaderOrFollower,
)
from mansio.logs import fields
from mansio.state.share_loading import remembered
from mansio.state.share_partition import SharePartition
from mansio.state.share_types import LoadedState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from mansio.broker.partition import Partition
    from mansio.broker.share.surroundings import Surroundings
    from mansio.broker.share.turns import Turn
    from mansio.ports import Promise, Timer
    from mansio.state.share_types import Archiving, ShareKey, Update

logger = logging.getLogger(__name__)

T = TypeVar("T")

STALL_MS: Final = 1_000
"""A timer this late means that we were stopped, not the members."""

STATE_MOVES: Final = (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress)
"""How a write fails whose state is led by another broker now, or by none; whether it was stored is not known."""

_BELOW_ONE: Final = 1 - 2**-53


class LiveShare:
    """See the module. All methods belong to the broker's loop."""

    __slots__ = (
        "_around",
        "_core",
        "_grace_until_ms",
        "_log_start",
        "_state_epoch",
        "_timer",
        "_timer_due_ms",
        "_turns",
        "_waiters",
        "ended",
        "key",
        "last_used_ms",
        "leader_epoch",
        "memory",
        "partition",
    )

    def __init__(
        self, key: ShareKey, partition: Partition, around: Surroundings, known: LoadedState | None = None
    ) -> None:
        """`known`: the `memory` of the one before."""
        self.key = key
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self._core: SharePartition | None = None
        self.ended: MansioError | None = None
        """Why this is of no use any more."""
        self.memory = known
        """What the next one is to be told."""
        self.last_used_ms = around.clock.monotonic() * 1000
        self._around = around
        self._state_epoch = 0
        self._waiters: dict[Callable[[], None], None] = {}
        self._timer: Timer | None = None
        self._timer_due_ms = math.inf
        self._grace_until_ms = -math.inf
        self._log_start = -1
        self._turns = Turns(around.scheduler)

    @property
    def core(self) -> SharePartition:
        """The machine; `loaded` comes first."""
        assert self._core is not None, "load comes first"
        return self._core

    @property
    def is_ready(self) -> bool:
        return self._core is not None and self.ended is None

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for it, or for what it writes."""
        return bool(self._waiters or self._turns)

    @property
    def owes_letters(self) -> bool | None:
        """Are records of it on their way to the dead-letter topic? None before it is loaded."""
        return None if self._core is None else self._core.counts(self.now_ms()).archiving > 0

    def now_ms(self) -> float:
        return self._around.clock.monotonic() * 1000

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
        around, partition = self._around, self.partition
        settings = around.settings(self.key.group, partition)
        found = await around.persister.read(self.key, self.leader_epoch)
        state = found if found is None or self.memory is None else remembered(found, self.memory)
        if state is None:
            partition.check_complete()
            start = around.first_offset(self.key.group, partition)
            state = LoadedState(
                0, self.leader_epoch, 0, start, start + settings.horizon_step, 0, (), (), (), None, True, 0
            )
        self.check_leads()
        self._state_epoch = state.state_epoch
        now_ms = self.now_ms()
        core = SharePartition(
            self.key,
            settings,
            state,
            leader_epoch=self.leader_epoch,
            log_start=partition.start_offset,
            log_end=partition.end_offset,
            high_watermark=partition.high_watermark,
            now_ms=now_ms,
            wall_ms=around.clock.wall_ms(),
        )
        self._core = core
        if state is not found:
            ready, self._core = core, None  # nobody is given anything before all of it is stored
            update = ready.reassert(now_ms)
            await around.persister.write(self.key, self._state_epoch, self.leader_epoch, update)
            self.check_leads()
            if self.ended is not None:
                raise self.ended
            ready.settled(update.token)
            self._core = ready
        self.memory = None
        around.dead_letters.opened(self, state.producer)

    def end(self, error: MansioError) -> None:
        """It is of no use any more: whoever waits looks for another one."""
        if self.ended is not None:
            return
        self.ended = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._turns.end()  # whoever waits finds that it is ended
        self._around.dead_letters.dropped(self)
        self._around.on_end(self)
        self.wake()

    def _failed(self, error: Exception) -> MansioError:
        """The machine, or this shell of it, has a defect: the state is read anew, and nothing is remembered that may
        have to do with it."""
        self.memory = None
        known = fields(group=self.key.group, partition=self.partition.name, reason=error)
        logger.error("share partition failed", extra=known, exc_info=error)
        ended = CoordinatorNotAvailable(f"share partition of {self.partition.name} failed: {error}")
        self.end(ended)
        return ended

    def check_leads(self) -> None:
        """Raise `NotLeaderOrFollower` unless this broker leads in the epoch this was loaded in, and surely so."""
        partition = self.partition
        if not partition.leads or partition.closed or partition.leader_epoch != self.leader_epoch:
            raise NotLeaderOrFollower(f"{partition.name} is led by another broker, or in a later epoch")
        if partition.outdated:
            raise NotLeaderOrFollower(f"another broker may lead {partition.name} by now")

    @property
    def is_stale(self) -> bool:
        """Another broker leads, or this one in a later epoch: this is of no use any more."""
        partition = self.partition
        return not partition.leads or partition.closed or partition.leader_epoch != self.leader_epoch

    async def loaded(self) -> SharePartition:
        """The machine, once it is there. Raises why it never will be."""
        while self._core is None:
            if self.ended is not None:
                raise self.ended
            promise = self._around.scheduler.promise()

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
        return self._core

    def ask(self, method: Callable[..., T], *args: Any, **named: Any) -> T:
        """Call a method of the machine. A typed error has changed nothing; any other ends this."""
        try:
            return self.decide(method, *args, **named)
        finally:
            self._arm()

    def decide(self, method: Callable[..., T], *args: Any, **named: Any) -> T:
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

    def perform(self, *updates: Update) -> Coroutine[Any, Any, None]:
        """Store what the machine gave, several as one, and tell it so: to be awaited, and its place in the order of
        writes is taken at once.

        Raises what the write raises, and then this is ended and nobody knows what is stored; why it ended if it did
        meanwhile, stored or not."""
        together = self._turns.joined(updates)
        return self._write(self._turns.take(updates)) if together is None else self._written(together)

    async def _write(self, turn: Turn) -> None:
        stored = False
        try:
            if turn.promise is not None:
                await turn.promise
            if self.ended is not None:
                raise self.ended
            await self._around.persister.write(
                self.key, self._state_epoch, self.leader_epoch, as_one(turn.updates)
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
            self._turns.give_back(turn, stored=stored)
        self.wake()

    def _not_written(self, error: MansioError) -> None:
        try:
            if isinstance(error, STATE_MOVES):
                self._remember()
        except Exception as defect:  # noqa: BLE001 - a defect costs what is remembered, and ends this object, too
            self._failed(defect)
        self.end(error)

    def _remember(self) -> None:
        """Keep what there is for the next one. While leases of before are withheld, that is by the wall clock in what
        is stored, and by none in here: the next one withholds again."""
        now_ms = self.now_ms()
        if self.ended is None and not self.core.counts(now_ms).withheld:
            self.memory = self.core.snapshot(now_ms)

    async def _written(self, together: Promise[bool]) -> None:
        """By another, with its own."""
        stored = await together
        if self.ended is not None:
            raise self.ended
        if not stored:
            raise CoordinatorNotAvailable(f"the state of {self.partition.name} was not stored: broken off")

    def _settled(self, updates: Sequence[Update]) -> None:
        core = self.core
        letters: list[Archiving] = []
        for each in updates:
            letters += core.settled(each.token)
        self._arm()
        if letters:
            self._around.dead_letters.add(self, letters)

    def store(self, update: Update | None) -> None:
        """Store what nobody waits for. Its place is taken at once, too: what it says of all that is dead, and of the
        start, is older than what the machine gives next."""
        if update is not None:
            self._around.scheduler.spawn(self._stored(self.perform(update)), name="share state")

    async def _stored(self, written: Coroutine[Any, Any, None]) -> None:
        try:
            await written
        except MansioError as error:
            known = fields(group=self.key.group, partition=self.partition.name, reason=error)
            logger.warning("share state not stored", extra=known)

    # ------------------------------------------------------------------ time, and what the log loses

    def look(self) -> SharePartition | None:
        """The machine, if it is ready, knowing where the log begins now."""
        core = self._core
        if core is None or self.ended is not None:
            return None
        self.last_used_ms = self.now_ms()
        start = self.partition.start_offset
        if start != self._log_start:
            self._log_start = start
            self._trimmed(core, start)
        return core

    def _trimmed(self, core: SharePartition, start: int) -> None:
        aged = core.aged_out
        if (update := self.ask(core.trimmed, start)) is not None:
            self.store(update)
        if core.aged_out > aged:
            records = core.aged_out - aged
            known = fields(group=self.key.group, partition=self.partition.name, records=records)
            logger.warning("records aged out undelivered", extra=known)

    def reconfigure(self) -> None:
        """The group's settings are others now."""
        if self._core is not None and self.ended is None:
            self._core.reconfigure(self._around.settings(self.key.group, self.partition))
            self._arm()
            self.wake()

    def _arm(self) -> None:
        core = self._core
        if core is None or self.ended is not None:
            return
        due_ms = max(core.next_deadline_ms(), self._grace_until_ms)
        if self._timer is not None:
            if self._timer_due_ms <= due_ms and due_ms != math.inf:
                return
            self._timer.cancel()
            self._timer = None
        if due_ms != math.inf:
            self._timer_due_ms = due_ms
            delay_ms = max(due_ms - self.now_ms(), 0.0) if due_ms > 0 else 0.0
            self._timer = self._around.scheduler.call_later(delay_ms, self._tick, due_ms)

    def _tick(self, due_ms: float) -> None:
        self._timer = None
        core, now_ms = self._core, self.now_ms()
        if core is None or self.ended is not None:
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
            update = self.ask(core.tick, now_ms, self._around.clock.wall_ms(), self.chance())
        except MansioError:
            return
        self.store(update)
        self.wake()

    def chance(self) -> float:
        """In [0, 1)."""
        return min(self._around.random.uniform(0.0, 1.0), _BELOW_ONE)

    def wall_ms(self) -> int:
        return self._around.clock.wall_ms()
