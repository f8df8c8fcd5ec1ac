"""The way from who leads share partitions to where their state is kept: `SharePersister`, near and far.

A `StateDoor` is the state of one broker: `LocalDoor` the one of this broker, `broker.share.state_peers` that of others.
`Persister` finds the right one for each share partition, looks again while leaders move, and keeps for each the reading
in which it may be written.

Always true: * A write is sent once. One whose outcome is not known ends its reading: nothing else is written in it, and
what of it comes late is refused.
* A whole state (`update.snapshot`) is written in a new reading when the last one has ended. It stands for all before
it, so it may be tried again.
* A state that was told not to be there is not made over one that is there after all.
* No wait is longer than `WAIT_MS`, but for one write or read that is under way.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from mansio.broker.coordinators.refusals import as_coordinator_error
from mansio.broker.share.places import coordinator_key, index_of
from mansio.broker.share.stored import Writing
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    FencedStateEpoch,
    MansioError,
    NotCoordinator,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.broker.share.places import StatePlaces
    from mansio.broker.share.state_store import StateStore
    from mansio.ports import Clock, Promise, Scheduler
    from mansio.state.share_types import LoadedState, ShareKey, ShareSummary, Update

T = TypeVar("T")

WAIT_MS: Final = 5000
LOOK_AGAIN_MS: Final = 50
LOOK_AGAIN_MS_MAX: Final = 500

READINGS_MAX: Final = 200_000
"""Beyond, the state that was written longest ago has to be read before it is written again."""


class StateDoor(Protocol):
    """The state of share partitions as one broker has it. Raises as `SharePersister` does."""

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        """See `StateStore.read`."""

    async def write(
        self, key: ShareKey, writing: Writing, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        """Return when it is committed, or appended if it is not durable."""

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """See `StateStore.initialize`."""

    async def delete(self, key: ShareKey) -> None:
        """See `StateStore.delete`."""

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        """See `StateStore.summary`."""


class LocalDoor:
    """This broker's own. The first write of all makes the topic."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        return await self._store.read(key, leader_epoch)

    async def write(
        self, key: ShareKey, writing: Writing, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        if not self._store.topic.partition_count:
            await self.ready()
        promise = self._store.write(key, writing, state_epoch, leader_epoch, update)
        if promise is None:
            return
        try:
            await promise
        except MansioError as error:
            raise as_coordinator_error(error) from error

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        await self.ready()
        await self._store.initialize(key, state_epoch, start_offset)

    async def delete(self, key: ShareKey) -> None:
        await self._store.delete(key)

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        return await self._store.summary(key)

    async def ready(self) -> None:
        """The topic is there."""
        try:
            await self._store.topic.ready()
        except MansioError as error:
            raise as_coordinator_error(error) from error


class _Reading:
    """In which a state may be written; `session` is 0 when it has ended. `absent`: it was told that there is none."""

    __slots__ = ("absent", "number", "session")

    def __init__(self, session: int, *, absent: bool) -> None:
        self.session = session
        self.number = 0
        self.absent = absent


class Persister:
    """`SharePersister`; see the module. `places` and `remote` are given in a cluster."""

    def __init__(
        self,
        local: LocalDoor,
        *,
        node_id: int,
        scheduler: Scheduler,
        clock: Clock,
        places: StatePlaces | None = None,
        remote: Callable[[int], StateDoor] | None = None,
    ) -> None:
        """`remote`: the door of another broker."""
        self._local = local
        self._node_id = node_id
        self._scheduler = scheduler
        self._clock = clock
        self._places = places
        self._remote = remote
        self._readings: OrderedDict[ShareKey, _Reading] = OrderedDict()

    async def read(self, key: ShareKey, leader_epoch: int) -> LoadedState | None:
        if self._places is not None and not self._places.partition_count():
            self._remember(key, _Reading(0, absent=True))
            return None
        state, session = await self._patiently(lambda: self._read(key, leader_epoch))
        self._remember(key, _Reading(session, absent=state is None))
        return state

    async def write(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        if update.snapshot:
            await self._patiently(lambda: self._write_whole(key, state_epoch, leader_epoch, update))
            return
        reading = self._readings.get(key)
        if reading is None or not reading.session:
            raise NotCoordinator(f"share group {key.group}: the state has to be read before it is written")
        await self._write(key, reading, state_epoch, leader_epoch, update)

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        await self._patiently(lambda: self._initialize(key, state_epoch, start_offset))

    async def delete(self, key: ShareKey) -> None:
        if self._places is None or self._places.partition_count():
            await self._patiently(lambda: self._delete(key))
        self._readings.pop(key, None)

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        if self._places is not None and not self._places.partition_count():
            return None
        return await self._patiently(lambda: self._summary(key))

    # ------------------------------------------------------------------ one try

    async def _read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        return await self._door(key).read(key, leader_epoch)

    async def _summary(self, key: ShareKey) -> ShareSummary | None:
        return await self._door(key).summary(key)

    async def _initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        await self._exists()
        await self._door(key).initialize(key, state_epoch, start_offset)

    async def _delete(self, key: ShareKey) -> None:
        await self._door(key).delete(key)

    async def _write_whole(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        await self._exists()
        reading = self._readings.get(key)
        if reading is None or not reading.session:
            state, session = await self._read(key, leader_epoch)
            if state is not None and reading is not None and reading.absent:
                self._readings.pop(key, None)
                raise FencedStateEpoch(f"share group {key.group}: there is a state after all")
            reading = _Reading(session, absent=state is None)
            self._remember(key, reading)
        await self._write(key, reading, state_epoch, leader_epoch, update)
        reading.absent = False

    async def _write(
        self, key: ShareKey, reading: _Reading, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        reading.number += 1
        try:
            writing = Writing(reading.session, reading.number)
            await self._door(key).write(key, writing, state_epoch, leader_epoch, update)
        except BaseException:
            reading.session = 0  # whether or not it was stored: nobody knows
            raise

    async def _exists(self) -> None:
        if self._places is not None and not self._places.partition_count():
            await self._local.ready()

    # ------------------------------------------------------------------ where, and when

    def _door(self, key: ShareKey) -> StateDoor:
        places = self._places
        if places is None or self._remote is None:
            return self._local
        if not places.partition_count():
            raise NotCoordinator("there is no topic of share states yet")
        broker = places.leader(index_of(coordinator_key(key), places.partition_count()))
        if broker is None:
            raise CoordinatorNotAvailable(
                f"nobody leads the partition that the state of {key.group} lives in"
            )
        return self._local if broker.node_id == self._node_id else self._remote(broker.node_id)

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try again while the state is on its way from one leader to the next."""
        end_s = self._clock.monotonic() + WAIT_MS / 1000
        delay_ms = LOOK_AGAIN_MS
        while True:
            try:
                return await attempt()
            except (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress):
                if self._clock.monotonic() + delay_ms / 1000 >= end_s:
                    raise
            await self._pause(delay_ms)
            delay_ms = min(2 * delay_ms, LOOK_AGAIN_MS_MAX)

    async def _pause(self, delay_ms: float) -> None:
        over: Promise[None] = self._scheduler.promise()
        self._scheduler.call_later(delay_ms, over.set_result, None)
        await over

    def _remember(self, key: ShareKey, reading: _Reading) -> None:
        readings = self._readings
        readings[key] = reading
        readings.move_to_end(key)
        if len(readings) > READINGS_MAX:
            readings.popitem(last=False)
