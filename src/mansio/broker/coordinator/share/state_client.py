"""The way from who leads share partitions to where their state is kept: `SharePersister`, near and far.

A `StateClient` is the state of one broker: `LocalStateClient` the one of this broker,
`broker.coordinator.share.state_client` that of others.
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

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from mansio.broker.coordinator.group.error_mapping import as_coordinator_error
from mansio.broker.coordinator.share.state_lookup import coordinator_key, index_of
from mansio.broker.coordinator.share.state_messages import (
    RequestSender,
    StateRequest,
    StateResult,
    decode_answer,
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


class SharePersister(Protocol):
    """All of it raises `NotCoordinator`, `CoordinatorNotAvailable` or `CoordinatorLoadInProgress` when the state cannot
    be reached now, and then nobody knows whether it was stored; `FencedLeaderEpoch` and `FencedStateEpoch` when another
    has it."""

    async def read(self, key: ShareKey, leader_epoch: int) -> LoadedState | None:
        """The state, from now on written only by who leads in this epoch or a later one; None when there is none."""

    async def write(self, key: ShareKey, state_epoch: int, leader_epoch: int, update: Update) -> None:
        """Store a change; returns when it is committed, or appended if `update.durable` is False."""

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """Begin the state anew, with nothing in it; whoever leads with an older state epoch is fenced."""

    async def delete(self, key: ShareKey) -> None:
        """Forget the state."""

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        """What a lag is reckoned from; None when there is no state."""


TIMEOUT_MS: Final = 5000
REQUEST_QUEUE_MAX: Final = 10_000
ENTRIES_PER_REQUEST_MAX: Final = 500
CHANGES_PER_REQUEST_MAX: Final = 20_000
"""A range takes 60 bytes or so; only a whole state may have more of them than this."""

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
    """See the module. All methods belong to the broker's loop."""

    def __init__(
        self,
        durable: Peers,
        quick: Peers,
        *,
        node_id: int,
        broker_epoch: Callable[[], int],
        scheduler: Scheduler,
    ) -> None:
        """`broker_epoch`: that of this broker's session now."""
        self._durable = durable
        self._quick = quick
        self._node_id = node_id
        self._broker_epoch = broker_epoch
        self._scheduler = scheduler
        self._clients: dict[int, RemoteStateClient] = {}

    def client(self, node_id: int) -> RemoteStateClient:
        """The states that a broker keeps."""
        found = self._clients.get(node_id)
        if found is None:
            lines = (self._line(node_id, self._durable), self._line(node_id, self._quick))
            found = self._clients[node_id] = RemoteStateClient(*lines)
        return found

    def _line(self, node_id: int, peers: Peers) -> RequestQueue:
        return RequestQueue(
            node_id, peers, lambda: RequestSender(self._node_id, self._broker_epoch()), self._scheduler
        )


class RequestQueue:
    """One way to one broker."""

    def __init__(
        self, node_id: int, peers: Peers, sender: Callable[[], RequestSender], scheduler: Scheduler
    ) -> None:
        self._node_id = node_id
        self._peers = peers
        self._sender = sender
        self._scheduler = scheduler
        self._waiting: deque[_Waiting] = deque()
        self._running = False

    async def ask(self, api_key: int, state_request: StateRequest) -> StateResult:
        """The answer, if it is not an error; else raise that."""
        if len(self._waiting) >= REQUEST_QUEUE_MAX:
            raise CoordinatorNotAvailable(f"{REQUEST_QUEUE_MAX} questions wait for broker {self._node_id}")
        promise: Promise[StateResult] = self._scheduler.promise()
        self._waiting.append(_Waiting(api_key, state_request, promise))
        if not self._running:
            self._running = True
            self._scheduler.spawn(self._run(), name=f"share states of broker {self._node_id}")
        answer = await promise
        if answer.error_code:
            error = _ERRORS.get(answer.error_code, CoordinatorNotAvailable)
            raise error(answer.message or f"broker {self._node_id} answers with error {answer.error_code}")
        return answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                gather_results = self._take()
                answers = await self._exchange(gather_results)
                for each, answer in zip(gather_results, answers, strict=True):
                    if not each.promise.done():
                        each.promise.set_result(answer)
        finally:
            self._running = False

    def _take(self) -> list[_Waiting]:
        """What goes in the next request: questions of one kind, in their order."""
        first = self._waiting.popleft()
        gather_results, changes = [first], _size(first)
        while self._waiting and len(gather_results) < ENTRIES_PER_REQUEST_MAX:
            following = self._waiting[0]
            changes += _size(following)
            if following.api_key != first.api_key or changes > CHANGES_PER_REQUEST_MAX:
                break
            gather_results.append(self._waiting.popleft())
        return gather_results

    async def _exchange(self, gather_results: list[_Waiting]) -> list[StateResult]:
        api_key, state_requests = gather_results[0].api_key, [each.state_request for each in gather_results]
        try:
            request = encode_request(api_key, self._sender(), state_requests, CLIENT_ID)
            answers = decode_answer(
                api_key, await self._peers.send(self._node_id, request, timeout_ms=TIMEOUT_MS)
            )
            if len(answers) == len(gather_results):
                return answers
            reason = f"{len(answers)} answers to {len(gather_results)} questions"
        except MansioError as error:
            reason = error.message
        except Exception:  # a defect: nobody waits for ever because of it
            for each in (*gather_results, *self._waiting):
                if not each.promise.done():
                    each.promise.set_exception(CoordinatorNotAvailable("the question could not be asked"))
            self._waiting.clear()
            raise
        message = f"broker {self._node_id} keeps the state, but: {reason}"
        return [StateResult(CoordinatorNotAvailable.kafka_code, message)] * len(gather_results)


class RemoteStateClient:
    """`StateClient` of another broker."""

    def __init__(self, durable: RequestQueue, quick: RequestQueue) -> None:
        self._durable = durable
        self._quick = quick

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        state_request = StateRequest(key, leader_epoch=leader_epoch)
        answer = await self._durable.ask(ApiKey.READ_SHARE_GROUP_STATE, state_request)
        return answer.state, answer.session

    async def write(
        self, key: ShareKey, write_token: WriteToken, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        state_request = StateRequest(key, state_epoch, leader_epoch, write_token=write_token, update=update)
        line = self._durable if update.durable else self._quick
        await line.ask(ApiKey.WRITE_SHARE_GROUP_STATE, state_request)

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        state_request = StateRequest(key, state_epoch, start_offset=start_offset)
        await self._durable.ask(ApiKey.INITIALIZE_SHARE_GROUP_STATE, state_request)

    async def delete(self, key: ShareKey) -> None:
        await self._durable.ask(ApiKey.DELETE_SHARE_GROUP_STATE, StateRequest(key))

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        answer = await self._durable.ask(ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, StateRequest(key))
        return answer.summary


def _size(waiting: _Waiting) -> int:
    update = waiting.state_request.update
    return 0 if update is None else len(update.changes) + len(update.dead or ()) + len(update.dead_added)
