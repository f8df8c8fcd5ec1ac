"""The way from who leads share partitions to where their state is kept: `SharePersister`, near and far.

A `StateClient` is the state of one broker: `LocalStateClient` the one of this broker,
`broker.coordinator.share.remote_state_client` that of others.
`RoutingPersister` finds the right one for each share partition, looks again while leaders move, and keeps for each
the reading in which it may be written.

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

from mansio.broker.coordinator.group.error_mapping import as_coordinator_error
from mansio.broker.coordinator.share.persisted_state import WriteToken
from mansio.broker.coordinator.share.state_lookup import coordinator_key, index_of
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    FencedStateEpoch,
    MansioError,
    NotCoordinator,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.broker.coordinator.share.state_lookup import StateLookup
    from mansio.broker.coordinator.share.state_store import ShareStateStore
    from mansio.ports import Clock, Scheduler
    from mansio.state.share_partition.types import LoadedState, ShareKey, ShareSummary, Update

T = TypeVar("T")

WAIT_MS: Final = 5000
RETRY_DELAY_MS: Final = 50
RETRY_DELAY_MS_MAX: Final = 500

READ_SESSIONS_MAX: Final = 200_000
"""Beyond, the state that was written longest ago has to be read before it is written again."""


class StateClient(Protocol):
    """The state of share partitions as one broker has it. Raises as `SharePersister` does."""

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        """See `ShareStateStore.read`."""

    async def write(
        self, key: ShareKey, write_token: WriteToken, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        """Return when it is committed, or appended if it is not durable."""

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """See `ShareStateStore.initialize`."""

    async def delete(self, key: ShareKey) -> None:
        """See `ShareStateStore.delete`."""

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        """See `ShareStateStore.summary`."""


class LocalStateClient:
    """This broker's own. The first write of all makes the topic."""

    def __init__(self, store: ShareStateStore) -> None:
        self._store = store

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        return await self._store.read(key, leader_epoch)

    async def write(
        self, key: ShareKey, write_token: WriteToken, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        if not self._store.topic.partition_count:
            await self.ready()
        promise = self._store.write(key, write_token, state_epoch, leader_epoch, update)
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


class _ReadSession:
    """In which a state may be written; `session` is 0 when it has ended. `absent`: it was told that there is none."""

    __slots__ = ("absent", "number", "session")

    def __init__(self, session: int, *, absent: bool) -> None:
        self.session = session
        self.number = 0
        self.absent = absent


class RoutingPersister:
    """`SharePersister`; see the module. `places` and `remote` are given in a cluster."""

    def __init__(
        self,
        local: LocalStateClient,
        *,
        node_id: int,
        scheduler: Scheduler,
        clock: Clock,
        places: StateLookup | None = None,
        remote: Callable[[int], StateClient] | None = None,
    ) -> None:
        """`remote`: the door of another broker."""
        self._local = local
        self._node_id = node_id
        self._scheduler = scheduler
        self._clock = clock
        self._places = places
        self._remote = remote
        self._read_sessions: OrderedDict[ShareKey, _ReadSession] = OrderedDict()

    async def read(self, key: ShareKey, leader_epoch: int) -> LoadedState | None:
        if self._places is not None and not self._places.partition_count():
            self._remember(key, _ReadSession(0, absent=True))
            return None
        state, session = await self._retrying(lambda: self._read(key, leader_epoch))
        self._remember(key, _ReadSession(session, absent=state is None))
        return state

    async def write(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        if update.snapshot:
            await self._retrying(lambda: self._write_whole(key, state_epoch, leader_epoch, update))
            return
        read_session = self._read_sessions.get(key)
        if read_session is None or not read_session.session:
            raise NotCoordinator(f"share group {key.group}: the state has to be read before it is written")
        await self._write(key, read_session, state_epoch, leader_epoch, update)

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        await self._retrying(lambda: self._initialize(key, state_epoch, start_offset))

    async def delete(self, key: ShareKey) -> None:
        if self._places is None or self._places.partition_count():
            await self._retrying(lambda: self._delete(key))
        self._read_sessions.pop(key, None)

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        if self._places is not None and not self._places.partition_count():
            return None
        return await self._retrying(lambda: self._summary(key))

    # ------------------------------------------------------------------ one try

    async def _read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        return await self._client(key).read(key, leader_epoch)

    async def _summary(self, key: ShareKey) -> ShareSummary | None:
        return await self._client(key).summary(key)

    async def _initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        await self._exists()
        await self._client(key).initialize(key, state_epoch, start_offset)

    async def _delete(self, key: ShareKey) -> None:
        await self._client(key).delete(key)

    async def _write_whole(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        await self._exists()
        read_session = self._read_sessions.get(key)
        if read_session is None or not read_session.session:
            state, session = await self._read(key, leader_epoch)
            if state is not None and read_session is not None and read_session.absent:
                self._read_sessions.pop(key, None)
                raise FencedStateEpoch(f"share group {key.group}: there is a state after all")
            read_session = _ReadSession(session, absent=state is None)
            self._remember(key, read_session)
        await self._write(key, read_session, state_epoch, leader_epoch, update)
        read_session.absent = False

    async def _write(
        self, key: ShareKey, read_session: _ReadSession, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        read_session.number += 1
        try:
            write_token = WriteToken(read_session.session, read_session.number)
            await self._client(key).write(key, write_token, state_epoch, leader_epoch, update)
        except BaseException:
            read_session.session = 0  # whether or not it was stored: nobody knows
            raise

    async def _exists(self) -> None:
        if self._places is not None and not self._places.partition_count():
            await self._local.ready()

    # ------------------------------------------------------------------ where, and when

    def _client(self, key: ShareKey) -> StateClient:
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

    async def _retrying(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try again while the state is on its way from one leader to the next."""
        end_s = self._clock.monotonic() + WAIT_MS / 1000
        delay_ms = RETRY_DELAY_MS
        while True:
            try:
                return await attempt()
            except (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress):
                if self._clock.monotonic() + delay_ms / 1000 >= end_s:
                    raise
            await self._scheduler.sleep(delay_ms)
            delay_ms = min(2 * delay_ms, RETRY_DELAY_MS_MAX)

    def _remember(self, key: ShareKey, read_session: _ReadSession) -> None:
        read_sessions = self._read_sessions
        read_sessions[key] = read_session
        read_sessions.move_to_end(key)
        if len(read_sessions) > READ_SESSIONS_MAX:
            read_sessions.popitem(last=False)
