"""Clients of share partition state: `SharePersister` for leaders of share partitions, local and remote.

A `StateClient` accesses the states kept by one broker: `LocalStateClient` those of this broker,
`RemoteStateClient` those of another one. `RoutingPersister` selects the client for each share partition, retries
while the states move between brokers, and keeps the read session in which each state may be written. A read session
begins when the leader of a share partition reads its state; it ends when the state is read again or a write fails.

Each remote broker has two request queues, so that updates that only have to be appended do not wait for updates that
have to be committed. One request per queue is in flight; entries that arrive meanwhile are sent in the next request.

Invariants:
* A write is sent once. If its outcome is unknown, its read session ends: no other update is written in the session, and
  the write is refused if it arrives late.
* A whole state (`update.is_snapshot`) is written in a new read session if the last one has ended. It supersedes all
  earlier updates, so it may be retried.
* A whole state does not replace a state that was reported as absent when it was read but exists.
* No wait exceeds `RETRY_WAIT_MS_MAX`, apart from one write or read in flight.
* Entries of a queue are sent in order, once, and completed once. After
  a missing or invalid response the outcome is unknown, and the entries fail with `CoordinatorNotAvailable`.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from mansio.broker.coordinator.group.error_mapping import as_coordinator_error
from mansio.broker.coordinator.share.state_messages import (
    RequestSender,
    StateRequestEntry,
    StateResult,
    decode_response,
    encode_request,
)
from mansio.broker.coordinator.share.state_store import WriteToken
from mansio.broker.routing.combining_queue import CombiningQueue
from mansio.broker.routing.routes import coordinator_of, share_partition_key
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    FencedLeaderEpoch,
    FencedStateEpoch,
    MansioError,
    NotCoordinator,
)
from mansio.ports import Backoff
from mansio.tracebacks import result_of, without_traceback
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.broker.coordinator.share.state_store import ShareStateStore
    from mansio.broker.routing.routes import InternalTopicLeaders
    from mansio.ports import Clock, Peers, Scheduler
    from mansio.state.share_partition.types import LoadedState, ShareKey, ShareSummary, Update


T = TypeVar("T")

RETRY_WAIT_MS_MAX: Final = 5000
"""Maximum time for which an operation is retried while the state moves to another broker."""

RETRY_BACKOFF: Final = Backoff(50, 500, jitter=0)
"""Pauses between two attempts."""

READ_SESSIONS_MAX: Final = 200_000
"""Maximum number of read sessions. The session of the state read least recently is dropped when it is exceeded."""


class StateClient(Protocol):
    """Access to the share states kept by one broker. The methods raise the errors that `SharePersister` describes."""

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        """Return the state, or None, and the new read session. See `ShareStateStore.read`."""

    async def write(
        self, key: ShareKey, write_token: WriteToken, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        """Store an update; return when it is committed, or appended if it is not durable."""

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """Replace the state by an empty one. See `ShareStateStore.initialize`."""

    async def delete(self, key: ShareKey) -> None:
        """Delete the state. See `ShareStateStore.delete`."""

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        """Return epochs and progress of the state, None if there is no state. See `ShareStateStore.summary`."""


class LocalStateClient:
    """`StateClient` for the states kept by this broker. The first write creates the topic `__share_group_state`."""

    def __init__(self, store: ShareStateStore) -> None:
        self._store = store

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        return await self._store.read(key, leader_epoch)

    async def write(
        self, key: ShareKey, write_token: WriteToken, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        if not self._store.topic.partition_count:
            await self.ensure_topic_exists()
        promise = self._store.write(key, write_token, state_epoch, leader_epoch, update)
        if promise is None:
            return
        try:
            await result_of(promise)
        except MansioError as error:
            raise as_coordinator_error(error) from error

    def begin_write(
        self,
        key: ShareKey,
        write_token: WriteToken,
        state_epoch: int,
        leader_epoch: int,
        update: Update,
        on_stored: Callable[[MansioError | None], None],
    ) -> None:
        """As `write` of an update that is not a whole state, but without a task: the result is passed to `on_stored`,
        possibly before this returns."""
        try:
            self._store.begin_write(key, write_token, state_epoch, leader_epoch, update, on_stored)
        except MansioError as error:  # `FencedLeaderEpoch`, too, which is no error of the topic
            on_stored(without_traceback(error))

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        await self.ensure_topic_exists()
        await self._store.initialize(key, state_epoch, start_offset)

    async def delete(self, key: ShareKey) -> None:
        await self._store.delete(key)

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        return await self._store.summary(key)

    async def ensure_topic_exists(self) -> None:
        """Create the topic `__share_group_state` if it does not exist, and wait until it is loaded."""
        try:
            await self._store.topic.ensure_topic_exists()
        except MansioError as error:
            raise as_coordinator_error(error) from error


class _ReadSession:
    """Read session of one state.

    `session`: the number of the session, 0 after it has ended. `last_write_number`: number of the last write in the
    session. `state_was_missing`: the read found no state.
    """

    __slots__ = ("last_write_number", "session", "state_was_missing")

    def __init__(self, session: int, *, state_was_missing: bool) -> None:
        self.session = session
        self.last_write_number = 0
        self.state_was_missing = state_was_missing

    def end(self) -> None:
        """End the session after a write whose outcome is unknown."""
        self.session = 0


class RoutingPersister:
    """`SharePersister` that sends each operation to the client of the broker that keeps the state."""

    def __init__(
        self,
        local: LocalStateClient,
        *,
        node_id: int,
        scheduler: Scheduler,
        clock: Clock,
        lookup: InternalTopicLeaders | None = None,
        remote_client: Callable[[int], StateClient] | None = None,
    ) -> None:
        """`remote_client`: returns the client of another broker; it and `lookup` are None on a single node."""
        self._local = local
        self._node_id = node_id
        self._scheduler = scheduler
        self._clock = clock
        self._lookup = lookup
        self._remote_client = remote_client
        self._read_sessions: OrderedDict[ShareKey, _ReadSession] = OrderedDict()

    async def read(self, key: ShareKey, leader_epoch: int) -> LoadedState | None:
        if self._lookup is not None and not self._lookup.partition_count():
            self._cache_read_session(key, _ReadSession(0, state_was_missing=True))
            return None
        state, session = await self._retry(lambda: self._read(key, leader_epoch))
        self._cache_read_session(key, _ReadSession(session, state_was_missing=state is None))
        return state

    async def write(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        if update.is_snapshot:
            await self._retry(lambda: self._write_whole(key, state_epoch, leader_epoch, update))
            return
        read_session = self._read_sessions.get(key)
        if read_session is None or not read_session.session:
            raise NotCoordinator(f"share group {key.group}: the state has to be read before it is written")
        await self._write(key, read_session, state_epoch, leader_epoch, update)

    def begin_write(
        self,
        key: ShareKey,
        state_epoch: int,
        leader_epoch: int,
        update: Update,
        on_stored: Callable[[MansioError | None], None],
    ) -> None:
        read_session = self._read_sessions.get(key)
        if update.is_snapshot or read_session is None or not read_session.session or not self._is_local(key):
            report = self._write_and_report(key, state_epoch, leader_epoch, update, on_stored)
            self._scheduler.spawn(report, name="write share state")
            return
        read_session.last_write_number += 1
        self._local.begin_write(
            key,
            WriteToken(read_session.session, read_session.last_write_number),
            state_epoch,
            leader_epoch,
            update,
            partial(_report, read_session, on_stored),
        )

    async def _write_and_report(
        self,
        key: ShareKey,
        state_epoch: int,
        leader_epoch: int,
        update: Update,
        on_stored: Callable[[MansioError | None], None],
    ) -> None:
        outcome: MansioError = CoordinatorNotAvailable(
            f"the state of {key.group} was not stored: interrupted"
        )
        error: MansioError | None = outcome
        try:
            await self.write(key, state_epoch, leader_epoch, update)
            error = None
        except MansioError as failure:
            error = without_traceback(failure)
        finally:
            on_stored(error)

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        await self._retry(lambda: self._initialize(key, state_epoch, start_offset))

    async def delete(self, key: ShareKey) -> None:
        if self._lookup is None or self._lookup.partition_count():
            await self._retry(lambda: self._delete(key))
        self._read_sessions.pop(key, None)

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        if self._lookup is not None and not self._lookup.partition_count():
            return None
        return await self._retry(lambda: self._summary(key))

    # ------------------------------------------------------------------ one attempt

    async def _read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        return await self._client(key).read(key, leader_epoch)

    async def _summary(self, key: ShareKey) -> ShareSummary | None:
        return await self._client(key).summary(key)

    async def _initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        await self._ensure_topic_exists()
        await self._client(key).initialize(key, state_epoch, start_offset)

    async def _delete(self, key: ShareKey) -> None:
        await self._client(key).delete(key)

    async def _write_whole(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        await self._ensure_topic_exists()
        read_session = self._read_sessions.get(key)
        if read_session is None or not read_session.session:
            state, session = await self._read(key, leader_epoch)
            if state is not None and read_session is not None and read_session.state_was_missing:
                self._read_sessions.pop(key, None)
                raise FencedStateEpoch(f"share group {key.group}: a state exists after all")
            read_session = _ReadSession(session, state_was_missing=state is None)
            self._cache_read_session(key, read_session)
        await self._write(key, read_session, state_epoch, leader_epoch, update)
        read_session.state_was_missing = False

    async def _write(
        self, key: ShareKey, read_session: _ReadSession, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        read_session.last_write_number += 1
        try:
            write_token = WriteToken(read_session.session, read_session.last_write_number)
            await self._client(key).write(key, write_token, state_epoch, leader_epoch, update)
        except BaseException:
            read_session.end()
            raise

    async def _ensure_topic_exists(self) -> None:
        if self._lookup is not None and not self._lookup.partition_count():
            await self._local.ensure_topic_exists()

    # ------------------------------------------------------------------ routing and retries

    def _is_local(self, key: ShareKey) -> bool:
        """Whether this broker keeps the state, according to the metadata."""
        lookup = self._lookup
        if lookup is None or self._remote_client is None:
            return True
        try:
            return coordinator_of(share_partition_key(key), lookup).node_id == self._node_id
        except MansioError:
            return False

    def _client(self, key: ShareKey) -> StateClient:
        lookup = self._lookup
        if lookup is None or self._remote_client is None:
            return self._local
        node_id = coordinator_of(share_partition_key(key), lookup).node_id
        return self._local if node_id == self._node_id else self._remote_client(node_id)

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry an operation, for at most `RETRY_WAIT_MS_MAX`, while the state moves to another broker."""
        end_s = self._clock.monotonic() + RETRY_WAIT_MS_MAX / 1000
        failures = 0
        while True:
            try:
                return await attempt()
            except (NotCoordinator, CoordinatorNotAvailable, CoordinatorLoadInProgress):
                failures += 1
                delay_ms = RETRY_BACKOFF.delay_ms(failures)
                if self._clock.monotonic() + delay_ms / 1000 >= end_s:
                    raise
            await self._scheduler.sleep(delay_ms)

    def _cache_read_session(self, key: ShareKey, read_session: _ReadSession) -> None:
        read_sessions = self._read_sessions
        read_sessions[key] = read_session
        read_sessions.move_to_end(key)
        if len(read_sessions) > READ_SESSIONS_MAX:
            read_sessions.popitem(last=False)


def _report(
    read_session: _ReadSession, on_stored: Callable[[MansioError | None], None], error: MansioError | None
) -> None:
    if error is not None:
        read_session.end()
    on_stored(error)


class SharePersister(Protocol):
    """Storage of the states of share partitions, used by the leaders of the share partitions.

    All methods raise `NotCoordinator`, `CoordinatorNotAvailable` or `CoordinatorLoadInProgress` if the state is not
    available, in which case the outcome of a write is unknown; `FencedLeaderEpoch` if a leader with a higher leader
    epoch exists; `FencedStateEpoch` if the state was replaced or deleted.
    """

    async def read(self, key: ShareKey, leader_epoch: int) -> LoadedState | None:
        """Return the state, or None. From now on only a leader with this leader epoch or a higher one can write it."""

    async def write(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        """Store an update; return when it is committed, or appended if it is not durable."""

    def begin_write(
        self,
        key: ShareKey,
        state_epoch: int,
        leader_epoch: int,
        update: Update,
        on_stored: Callable[[MansioError | None], None],
    ) -> None:
        """As `write`. The outcome is passed to `on_stored` once, possibly before this returns: None, or the error."""

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """Replace the state by an empty one; leaders that loaded an older state epoch cannot write any more."""

    async def delete(self, key: ShareKey) -> None:
        """Delete the state."""

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        """Return epochs and progress of the state, from which the lag is computed; None if there is no state."""


STATE_TIMEOUT_MS: Final = 5000
ENTRIES_PER_REQUEST_MAX: Final = 500
RANGES_PER_REQUEST_MAX: Final = 20_000
"""Maximum number of offset ranges in one request. A range takes about 60 bytes. One larger entry is sent alone."""

STATE_CLIENT_ID: Final = "mansio-share-state"

_ERRORS: Final[dict[int, type[MansioError]]] = {
    error.kafka_code: error
    for error in (
        CoordinatorLoadInProgress,
        CoordinatorNotAvailable,
        FencedLeaderEpoch,
        FencedStateEpoch,
        NotCoordinator,
    )
}


class _QueuedEntry(NamedTuple):
    api_key: int
    state_request: StateRequestEntry


class RemoteStateClients:
    """State clients of all other brokers. All methods run on the broker's event loop."""

    def __init__(
        self,
        peers: Peers,
        *,
        node_id: int,
        broker_epoch: Callable[[], int],
        scheduler: Scheduler,
    ) -> None:
        """`peers`: unordered connections to other brokers; `broker_epoch`: returns the current epoch of this broker."""
        self._peers = peers
        self._node_id = node_id
        self._broker_epoch = broker_epoch
        self._scheduler = scheduler
        self._clients: dict[int, RemoteStateClient] = {}

    def client(self, node_id: int) -> RemoteStateClient:
        """Return the client for the states kept by a broker."""
        found = self._clients.get(node_id)
        if found is None:
            found = self._clients[node_id] = RemoteStateClient(
                self._new_queue(node_id), self._new_queue(node_id)
            )
        return found

    def _new_queue(self, node_id: int) -> _StateQueue:
        return _StateQueue(
            node_id, self._peers, lambda: RequestSender(self._node_id, self._broker_epoch()), self._scheduler
        )


class _StateQueue(CombiningQueue[_QueuedEntry, StateResult]):
    """Entries for one broker. A request has entries of one API."""

    items_max = ENTRIES_PER_REQUEST_MAX
    size_max = RANGES_PER_REQUEST_MAX

    def __init__(
        self, node_id: int, peers: Peers, sender: Callable[[], RequestSender], scheduler: Scheduler
    ) -> None:
        super().__init__(node_id, peers, scheduler)
        self.name = f"share states of broker {node_id}"
        self._sender = sender

    async def send(self, api_key: int, state_request: StateRequestEntry) -> StateResult:
        """Send an entry in one of the next requests; return its result, or raise its error."""
        result = await self.put(_QueuedEntry(api_key, state_request))
        if result.error_code:
            error = _ERRORS.get(result.error_code, CoordinatorNotAvailable)
            raise error(result.message or f"broker {self._node_id} returned error {result.error_code}")
        return result

    def kind_of(self, item: _QueuedEntry) -> int:
        return item.api_key

    def size_of(self, item: _QueuedEntry) -> int:
        update = item.state_request.update
        return (
            0
            if update is None
            else len(update.changes) + len(update.dead_ranges or ()) + len(update.added_dead_ranges)
        )

    def failure(self, _item: _QueuedEntry, reason: Exception | None) -> StateResult:
        message = (
            f"broker {self._node_id} did not return the state: {reason or 'the request was interrupted'}"
        )
        return StateResult(CoordinatorNotAvailable.kafka_code, message)

    async def request(self, items: Sequence[_QueuedEntry]) -> list[StateResult]:
        api_key, state_requests = items[0].api_key, [each.state_request for each in items]
        request = encode_request(api_key, self._sender(), state_requests, STATE_CLIENT_ID)
        answer = await self._peers.send(self._node_id, request, timeout_ms=STATE_TIMEOUT_MS)
        return decode_response(api_key, answer)


class RemoteStateClient:
    """`StateClient` for the states kept by another broker."""

    def __init__(self, durable_queue: _StateQueue, non_durable_queue: _StateQueue) -> None:
        self._durable_queue = durable_queue
        self._non_durable_queue = non_durable_queue

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        state_request = StateRequestEntry(key, leader_epoch=leader_epoch)
        result = await self._durable_queue.send(ApiKey.READ_SHARE_GROUP_STATE, state_request)
        return result.state, result.session

    async def write(
        self, key: ShareKey, write_token: WriteToken, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        state_request = StateRequestEntry(
            key, state_epoch, leader_epoch, write_token=write_token, update=update
        )
        queue = self._durable_queue if update.durable else self._non_durable_queue
        await queue.send(ApiKey.WRITE_SHARE_GROUP_STATE, state_request)

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        state_request = StateRequestEntry(key, state_epoch, start_offset=start_offset)
        await self._durable_queue.send(ApiKey.INITIALIZE_SHARE_GROUP_STATE, state_request)

    async def delete(self, key: ShareKey) -> None:
        await self._durable_queue.send(ApiKey.DELETE_SHARE_GROUP_STATE, StateRequestEntry(key))

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        result = await self._durable_queue.send(ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, StateRequestEntry(key))
        return result.summary
