"""Clients of share partition state: `SharePersister` for leaders of share partitions, local and remote.

A `StateClient` accesses the states kept by one broker: `LocalStateClient` those of this broker,
`RemoteStateClient` those of another one. `RoutingPersister` selects the client for each share partition, retries
while leaders move, and keeps the read session in which each state may be written.

Two request queues lead to each remote broker, so that updates that only have to be appended do not wait for
updates that have to be committed. One request per queue is in flight; entries that arrive meanwhile go into the
next one.

Invariants:
* A write is sent once. If its outcome is unknown, its read session ends: nothing else is written in it, and the
  write is refused if it arrives late.
* A whole state (`update.is_snapshot`) is written in a new read session if the last one has ended. It supersedes all
  earlier updates, so it may be retried.
* A state reported as absent is not created over one that exists after all.
* No wait exceeds `WAIT_MS`, apart from one write or read in flight.
* Entries of a queue are sent in order, once, and completed once. A queue has at most `REQUEST_QUEUE_MAX` entries. After
  a missing or invalid response the outcome is unknown: `CoordinatorNotAvailable`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from mansio.broker.coordinator.group.error_mapping import as_coordinator_error
from mansio.broker.coordinator.share.state_lookup import coordinator_key, index_of
from mansio.broker.coordinator.share.state_messages import (
    RequestSender,
    StateRequest,
    StateResult,
    decode_response,
    encode_request,
)
from mansio.broker.coordinator.share.state_store import WriteToken
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    FencedLeaderEpoch,
    FencedStateEpoch,
    MansioError,
    NotCoordinator,
)
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.broker.coordinator.share.state_lookup import StateLookup
    from mansio.broker.coordinator.share.state_store import ShareStateStore
    from mansio.ports import Clock, Peers, Promise, Scheduler
    from mansio.state.share_partition.types import LoadedState, ShareKey, ShareSummary, Update


T = TypeVar("T")

WAIT_MS: Final = 5000
RETRY_DELAY_MS: Final = 50
RETRY_DELAY_MS_MAX: Final = 500

READ_SESSIONS_MAX: Final = 200_000
"""Beyond this number, the session of the least recently written state is dropped; it has to be read again."""


class StateClient(Protocol):
    """The states kept by one broker. Raises as `SharePersister`."""

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        """As `ShareStateStore`."""

    async def write(
        self, key: ShareKey, write_token: WriteToken, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        """Returns when the update is committed, or appended if it is not durable."""

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """As `ShareStateStore`."""

    async def delete(self, key: ShareKey) -> None:
        """As `ShareStateStore`."""

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        """As `ShareStateStore`."""


class LocalStateClient:
    """The states of this broker. The first write creates the topic."""

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
        """Wait until the topic exists."""
        try:
            await self._store.topic.ready()
        except MansioError as error:
            raise as_coordinator_error(error) from error


class _ReadSession:
    """Session in which a state may be written; `session` is 0 once it has ended. `absent`: there was no state."""

    __slots__ = ("absent", "number", "session")

    def __init__(self, session: int, *, absent: bool) -> None:
        self.session = session
        self.number = 0
        self.absent = absent


class RoutingPersister:
    """`SharePersister` over local and remote clients. `lookup` and `remote` are set in a cluster."""

    def __init__(
        self,
        local: LocalStateClient,
        *,
        node_id: int,
        scheduler: Scheduler,
        clock: Clock,
        lookup: StateLookup | None = None,
        remote: Callable[[int], StateClient] | None = None,
    ) -> None:
        """`remote`: client of another broker."""
        self._local = local
        self._node_id = node_id
        self._scheduler = scheduler
        self._clock = clock
        self._lookup = lookup
        self._remote = remote
        self._read_sessions: OrderedDict[ShareKey, _ReadSession] = OrderedDict()

    async def read(self, key: ShareKey, leader_epoch: int) -> LoadedState | None:
        if self._lookup is not None and not self._lookup.partition_count():
            self._remember(key, _ReadSession(0, absent=True))
            return None
        state, session = await self._retrying(lambda: self._read(key, leader_epoch))
        self._remember(key, _ReadSession(session, absent=state is None))
        return state

    async def write(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        if update.is_snapshot:
            await self._retrying(lambda: self._write_whole(key, state_epoch, leader_epoch, update))
            return
        read_session = self._read_sessions.get(key)
        if read_session is None or not read_session.session:
            raise NotCoordinator(f"share group {key.group}: the state has to be read before it is written")
        await self._write(key, read_session, state_epoch, leader_epoch, update)

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        await self._retrying(lambda: self._initialize(key, state_epoch, start_offset))

    async def delete(self, key: ShareKey) -> None:
        if self._lookup is None or self._lookup.partition_count():
            await self._retrying(lambda: self._delete(key))
        self._read_sessions.pop(key, None)

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        if self._lookup is not None and not self._lookup.partition_count():
            return None
        return await self._retrying(lambda: self._summary(key))

    # ------------------------------------------------------------------ one attempt

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
                raise FencedStateEpoch(f"share group {key.group}: a state exists after all")
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
            read_session.session = 0  # the outcome is unknown
            raise

    async def _exists(self) -> None:
        if self._lookup is not None and not self._lookup.partition_count():
            await self._local.ready()

    # ------------------------------------------------------------------ routing and retries

    def _client(self, key: ShareKey) -> StateClient:
        lookup = self._lookup
        if lookup is None or self._remote is None:
            return self._local
        if not lookup.partition_count():
            raise NotCoordinator("__share_group_state does not exist yet")
        broker = lookup.leader(index_of(coordinator_key(key), lookup.partition_count()))
        if broker is None:
            raise CoordinatorNotAvailable(f"no leader for the partition with the state of {key.group}")
        return self._local if broker.node_id == self._node_id else self._remote(broker.node_id)

    async def _retrying(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry while the state moves between leaders."""
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


class SharePersister(Protocol):
    """Storage of share partition states, for their leaders.

    All methods raise `NotCoordinator`, `CoordinatorNotAvailable` or `CoordinatorLoadInProgress` if the state is not
    available, in which case the outcome is unknown, and `FencedLeaderEpoch` or `FencedStateEpoch` if another
    leader or a newer state exists.
    """

    async def read(self, key: ShareKey, leader_epoch: int) -> LoadedState | None:
        """The state, or None. From now on only the leader of this epoch or a later one can write it."""

    async def write(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        """Store a change; returns when it is committed, or appended if it is not durable."""

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """Replace the state by an empty one; fences leaders with an older state epoch."""

    async def delete(self, key: ShareKey) -> None:
        """Delete the state."""

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        """The numbers for a lag; None if there is no state."""


TIMEOUT_MS: Final = 5000
REQUEST_QUEUE_MAX: Final = 10_000
ENTRIES_PER_REQUEST_MAX: Final = 500
CHANGES_PER_REQUEST_MAX: Final = 20_000
"""A range takes about 60 bytes; only a whole state may exceed this number."""

CLIENT_ID: Final = "mansio-share-state"

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


class _Waiting(NamedTuple):
    api_key: int
    state_request: StateRequest
    promise: Promise[StateResult]


class RemoteStateClients:
    """Clients of all other brokers. All methods run on the broker's event loop."""

    def __init__(
        self,
        durable: Peers,
        quick: Peers,
        *,
        node_id: int,
        broker_epoch: Callable[[], int],
        scheduler: Scheduler,
    ) -> None:
        """`broker_epoch`: the current epoch of this broker."""
        self._durable = durable
        self._quick = quick
        self._node_id = node_id
        self._broker_epoch = broker_epoch
        self._scheduler = scheduler
        self._clients: dict[int, RemoteStateClient] = {}

    def client(self, node_id: int) -> RemoteStateClient:
        """Client of the states of a broker."""
        found = self._clients.get(node_id)
        if found is None:
            queues = (self._queue(node_id, self._durable), self._queue(node_id, self._quick))
            found = self._clients[node_id] = RemoteStateClient(*queues)
        return found

    def _queue(self, node_id: int, peers: Peers) -> RequestQueue:
        return RequestQueue(
            node_id, peers, lambda: RequestSender(self._node_id, self._broker_epoch()), self._scheduler
        )


class RequestQueue:
    """Request queue to one broker."""

    def __init__(
        self, node_id: int, peers: Peers, sender: Callable[[], RequestSender], scheduler: Scheduler
    ) -> None:
        self._node_id = node_id
        self._peers = peers
        self._sender = sender
        self._scheduler = scheduler
        self._waiting: deque[_Waiting] = deque()
        self._running = False

    async def send(self, api_key: int, state_request: StateRequest) -> StateResult:
        """Send an entry; returns its result, or raises its error."""
        if len(self._waiting) >= REQUEST_QUEUE_MAX:
            raise CoordinatorNotAvailable(f"{REQUEST_QUEUE_MAX} entries wait for broker {self._node_id}")
        promise: Promise[StateResult] = self._scheduler.promise()
        self._waiting.append(_Waiting(api_key, state_request, promise))
        if not self._running:
            self._running = True
            self._scheduler.spawn(self._run(), name=f"share states of broker {self._node_id}")
        result = await promise
        if result.error_code:
            error = _ERRORS.get(result.error_code, CoordinatorNotAvailable)
            raise error(result.message or f"broker {self._node_id} returned error {result.error_code}")
        return result

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch = self._take()
                results = await self._exchange(batch)
                for each, result in zip(batch, results, strict=True):
                    if not each.promise.done():
                        each.promise.set_result(result)
        finally:
            self._running = False

    def _take(self) -> list[_Waiting]:
        """Entries for the next request: of one API, in their order."""
        first = self._waiting.popleft()
        batch, changes = [first], _size(first)
        while self._waiting and len(batch) < ENTRIES_PER_REQUEST_MAX:
            following = self._waiting[0]
            changes += _size(following)
            if following.api_key != first.api_key or changes > CHANGES_PER_REQUEST_MAX:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _exchange(self, batch: list[_Waiting]) -> list[StateResult]:
        api_key, state_requests = batch[0].api_key, [each.state_request for each in batch]
        try:
            request = encode_request(api_key, self._sender(), state_requests, CLIENT_ID)
            results = decode_response(
                api_key, await self._peers.send(self._node_id, request, timeout_ms=TIMEOUT_MS)
            )
            if len(results) == len(batch):
                return results
            reason = f"{len(results)} results for {len(batch)} entries"
        except MansioError as error:
            reason = error.message
        except Exception:  # a defect: complete all waiters
            for each in (*batch, *self._waiting):
                if not each.promise.done():
                    each.promise.set_exception(CoordinatorNotAvailable("the request could not be sent"))
            self._waiting.clear()
            raise
        message = f"broker {self._node_id} did not return the state: {reason}"
        return [StateResult(CoordinatorNotAvailable.kafka_code, message)] * len(batch)


class RemoteStateClient:
    """`StateClient` of another broker."""

    def __init__(self, durable: RequestQueue, quick: RequestQueue) -> None:
        self._durable = durable
        self._quick = quick

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        state_request = StateRequest(key, leader_epoch=leader_epoch)
        result = await self._durable.send(ApiKey.READ_SHARE_GROUP_STATE, state_request)
        return result.state, result.session

    async def write(
        self, key: ShareKey, write_token: WriteToken, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        state_request = StateRequest(key, state_epoch, leader_epoch, write_token=write_token, update=update)
        queue = self._durable if update.durable else self._quick
        await queue.send(ApiKey.WRITE_SHARE_GROUP_STATE, state_request)

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        state_request = StateRequest(key, state_epoch, start_offset=start_offset)
        await self._durable.send(ApiKey.INITIALIZE_SHARE_GROUP_STATE, state_request)

    async def delete(self, key: ShareKey) -> None:
        await self._durable.send(ApiKey.DELETE_SHARE_GROUP_STATE, StateRequest(key))

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        result = await self._durable.send(ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, StateRequest(key))
        return result.summary


def _size(waiting: _Waiting) -> int:
    update = waiting.state_request.update
    return (
        0
        if update is None
        else len(update.changes) + len(update.dead_ranges or ()) + len(update.added_dead_ranges)
    )
