"""The state of share partitions on other brokers: questions wait in a line for each broker, and leave together.

Two ways lead to each broker, so that what only has to be appended does not wait for what has to be committed. On a way
one request is under way at a time; what comes meanwhile goes in the next one.

Always true: on a way, questions are asked in the order in which they came; each is asked once, and answered or failed
once; a line holds at most `LINE_MAX` questions, a request `QUESTIONS_PER_REQUEST_MAX` and about `REQUEST_BYTES_MAX`. An
answer that does not come, or is none, leaves it unknown what was stored: `CoordinatorNotAvailable`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.share.state_messages import Answer, Question, Sender, decode_answer, encode_request
from mansio.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    FencedLeaderEpoch,
    FencedStateEpoch,
    MansioError,
    NotCoordinator,
)
from mansio.wire.versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.share.stored import Writing
    from mansio.ports import Peers, Promise, Scheduler
    from mansio.state.share_types import LoadedState, ShareKey, ShareSummary, Update

TIMEOUT_MS: Final = 5000
LINE_MAX: Final = 10_000
QUESTIONS_PER_REQUEST_MAX: Final = 500
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
    question: Question
    promise: Promise[Answer]


class StatePeers:
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
        self._doors: dict[int, RemoteDoor] = {}

    def door(self, node_id: int) -> RemoteDoor:
        """The states that a broker keeps."""
        found = self._doors.get(node_id)
        if found is None:
            lines = (self._line(node_id, self._durable), self._line(node_id, self._quick))
            found = self._doors[node_id] = RemoteDoor(*lines)
        return found

    def _line(self, node_id: int, peers: Peers) -> Line:
        return Line(node_id, peers, lambda: Sender(self._node_id, self._broker_epoch()), self._scheduler)


class Line:
    """One way to one broker."""

    def __init__(
        self, node_id: int, peers: Peers, sender: Callable[[], Sender], scheduler: Scheduler
    ) -> None:
        self._node_id = node_id
        self._peers = peers
        self._sender = sender
        self._scheduler = scheduler
        self._waiting: deque[_Waiting] = deque()
        self._running = False

    async def ask(self, api_key: int, question: Question) -> Answer:
        """The answer, if it is not an error; else raise that."""
        if len(self._waiting) >= LINE_MAX:
            raise CoordinatorNotAvailable(f"{LINE_MAX} questions wait for broker {self._node_id}")
        promise: Promise[Answer] = self._scheduler.promise()
        self._waiting.append(_Waiting(api_key, question, promise))
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
                together = self._take()
                answers = await self._exchange(together)
                for each, answer in zip(together, answers, strict=True):
                    if not each.promise.done():
                        each.promise.set_result(answer)
        finally:
            self._running = False

    def _take(self) -> list[_Waiting]:
        """What goes in the next request: questions of one kind, in their order."""
        first = self._waiting.popleft()
        together, changes = [first], _size(first)
        while self._waiting and len(together) < QUESTIONS_PER_REQUEST_MAX:
            following = self._waiting[0]
            changes += _size(following)
            if following.api_key != first.api_key or changes > CHANGES_PER_REQUEST_MAX:
                break
            together.append(self._waiting.popleft())
        return together

    async def _exchange(self, together: list[_Waiting]) -> list[Answer]:
        api_key, questions = together[0].api_key, [each.question for each in together]
        try:
            request = encode_request(api_key, self._sender(), questions, CLIENT_ID)
            answers = decode_answer(
                api_key, await self._peers.send(self._node_id, request, timeout_ms=TIMEOUT_MS)
            )
            if len(answers) == len(together):
                return answers
            reason = f"{len(answers)} answers to {len(together)} questions"
        except MansioError as error:
            reason = error.message
        except Exception:  # a defect: nobody waits for ever because of it
            for each in (*together, *self._waiting):
                if not each.promise.done():
                    each.promise.set_exception(CoordinatorNotAvailable("the question could not be asked"))
            self._waiting.clear()
            raise
        message = f"broker {self._node_id} keeps the state, but: {reason}"
        return [Answer(CoordinatorNotAvailable.kafka_code, message)] * len(together)


class RemoteDoor:
    """`StateDoor` of another broker."""

    def __init__(self, durable: Line, quick: Line) -> None:
        self._durable = durable
        self._quick = quick

    async def read(self, key: ShareKey, leader_epoch: int) -> tuple[LoadedState | None, int]:
        question = Question(key, leader_epoch=leader_epoch)
        answer = await self._durable.ask(ApiKey.READ_SHARE_GROUP_STATE, question)
        return answer.state, answer.session

    async def write(
        self, key: ShareKey, writing: Writing, state_epoch: int, leader_epoch: int, update: Update
    ) -> None:
        question = Question(key, state_epoch, leader_epoch, writing=writing, update=update)
        line = self._durable if update.durable else self._quick
        await line.ask(ApiKey.WRITE_SHARE_GROUP_STATE, question)

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        question = Question(key, state_epoch, start_offset=start_offset)
        await self._durable.ask(ApiKey.INITIALIZE_SHARE_GROUP_STATE, question)

    async def delete(self, key: ShareKey) -> None:
        await self._durable.ask(ApiKey.DELETE_SHARE_GROUP_STATE, Question(key))

    async def summary(self, key: ShareKey) -> ShareSummary | None:
        answer = await self._durable.ask(ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, Question(key))
        return answer.summary


def _size(waiting: _Waiting) -> int:
    update = waiting.question.update
    return 0 if update is None else len(update.changes) + len(update.dead or ()) + len(update.dead_added)
