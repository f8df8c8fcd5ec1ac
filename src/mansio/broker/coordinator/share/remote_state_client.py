"""The state of share partitions on other brokers: questions wait in a line for each broker, and leave together.

Two ways lead to each broker, so that what only has to be appended does not wait for what has to be committed. On a way
one request is under way at a time; what comes meanwhile goes in the next one.

Always true: on a way, questions are asked in the order in which they came; each is asked once, and answered or failed
once; a line holds at most `REQUEST_QUEUE_MAX` questions, a request `ENTRIES_PER_REQUEST_MAX` and about
`REQUEST_BYTES_MAX`. An answer that does not come, or is none, leaves it unknown what was stored:
`CoordinatorNotAvailable`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.coordinator.share.state_messages import (
    RequestSender,
    StateRequest,
    StateResult,
    decode_answer,
    encode_request,
)
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
    from collections.abc import Callable

    from mansio.broker.coordinator.share.persisted_state import WriteToken
    from mansio.ports import Peers, Promise, Scheduler
    from mansio.state.share_partition.types import LoadedState, ShareKey, ShareSummary, Update

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
