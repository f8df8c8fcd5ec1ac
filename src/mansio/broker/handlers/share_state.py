"""The state of share partitions, asked for and written by the brokers that lead them (APIs 83 to 87, KIP-932).

Behaviour: brokers of the same cluster only, in the session they have now; on a single node nobody. A request is
answered when all of it is: what is to be committed is appended first, so that it shares one sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.broker.share.state_messages import Answer, decode_request, encode_answer
from mansio.broker.share.together import together
from mansio.errors import MansioError, StaleBrokerEpoch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.broker.context import RequestContext
    from mansio.broker.service import Service
    from mansio.broker.share.persister import LocalDoor
    from mansio.broker.share.state_messages import Question, Sender

CLUSTER_AUTHORIZATION_FAILED: Final = 31


async def initialize(service: Service, request: bytes, context: RequestContext) -> bytes:
    async def one(door: LocalDoor, question: Question) -> Answer:
        await door.initialize(question.key, question.state_epoch, question.start_offset)
        return Answer()

    return await _answer(service, request, context, one)


async def read(service: Service, request: bytes, context: RequestContext) -> bytes:
    async def one(door: LocalDoor, question: Question) -> Answer:
        state, session = await door.read(question.key, question.leader_epoch)
        return Answer(session=session, state=state)

    return await _answer(service, request, context, one)


async def write(service: Service, request: bytes, context: RequestContext) -> bytes:
    async def one(door: LocalDoor, question: Question) -> Answer:
        assert question.writing is not None, "a write is not read without"
        assert question.update is not None, "nor without this"
        await door.write(
            question.key, question.writing, question.state_epoch, question.leader_epoch, question.update
        )
        return Answer()

    return await _answer(service, request, context, one)


async def delete(service: Service, request: bytes, context: RequestContext) -> bytes:
    async def one(door: LocalDoor, question: Question) -> Answer:
        await door.delete(question.key)
        return Answer()

    return await _answer(service, request, context, one)


async def summary(service: Service, request: bytes, context: RequestContext) -> bytes:
    async def one(door: LocalDoor, question: Question) -> Answer:
        return Answer(summary=await door.summary(question.key))

    return await _answer(service, request, context, one)


async def _answer(
    service: Service,
    request: bytes,
    context: RequestContext,
    one: Callable[[LocalDoor, Question], Awaitable[Answer]],
) -> bytes:
    sender, questions = decode_request(context.api_key, request)
    refusal = _refusal(service, sender)
    if refusal is not None or service.share_state is None:
        answers = [refusal or Answer(CLUSTER_AUTHORIZATION_FAILED)] * len(questions)
    else:
        answers = await _each(service, service.share_state.door, questions, one)
    for answer in answers:
        if answer.error_code:
            service.statistics.refused(context.api_key, answer.error_code)
    return encode_answer(context.api_key, context.correlation_id, questions, answers)


def _refusal(service: Service, sender: Sender | None) -> Answer | None:
    """What is told to whoever is no broker of the cluster, in its session of now."""
    known_epoch_of = service.broker_epoch_of
    if known_epoch_of is None or sender is None:
        return Answer(
            CLUSTER_AUTHORIZATION_FAILED, "only brokers of the same cluster ask for the state of share groups"
        )
    known_epoch = known_epoch_of(sender.node_id)
    if not known_epoch or sender.broker_epoch < known_epoch:
        return Answer(
            StaleBrokerEpoch.kafka_code,
            f"broker {sender.node_id} has another session, or none that is known here",
        )
    return None


async def _each(
    service: Service,
    door: LocalDoor,
    questions: list[Question],
    one: Callable[[LocalDoor, Question], Awaitable[Answer]],
) -> list[Answer]:
    """All at once: each begins before any waits."""
    answers = [Answer()] * len(questions)

    async def work(number: int, question: Question) -> None:
        answers[number] = await one(door, question)

    works = [work(number, question) for number, question in enumerate(questions)]
    errors: list[MansioError | None] = await together(service.scheduler, works, name="share states")
    return [
        answer if error is None else Answer(error.kafka_code, error.message)
        for answer, error in zip(answers, errors, strict=True)
    ]
