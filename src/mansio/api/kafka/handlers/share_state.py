"""APIs 83 to 87 (KIP-932): state of share partitions, read and written by the brokers that lead them.

Behavior: only a broker of the same cluster may send these requests, in its own name and its registered epoch, on a
connection on which it has authenticated; a single node accepts none. A request is answered when all entries are done.
Entries to be committed are appended first, so that they share one flush.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.coordinator.share.gather_results import gather_results
from mansio.broker.coordinator.share.state_messages import StateResult, decode_request, encode_response
from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.api.kafka.server.request_router import RequestContext
    from mansio.broker.coordinator.share.state_client import LocalStateClient
    from mansio.broker.coordinator.share.state_messages import RequestSender, StateRequest
    from mansio.broker.services.broker_services import BrokerServices

UNKNOWN_SENDER = -1


async def initialize(service: BrokerServices, request: bytes, context: RequestContext) -> bytes:
    async def one(client: LocalStateClient, state_request: StateRequest) -> StateResult:
        await client.initialize(state_request.key, state_request.state_epoch, state_request.start_offset)
        return StateResult()

    return await _answer(service, request, context, one)


async def read(service: BrokerServices, request: bytes, context: RequestContext) -> bytes:
    async def one(client: LocalStateClient, state_request: StateRequest) -> StateResult:
        state, session = await client.read(state_request.key, state_request.leader_epoch)
        return StateResult(session=session, state=state)

    return await _answer(service, request, context, one)


async def write(service: BrokerServices, request: bytes, context: RequestContext) -> bytes:
    async def one(client: LocalStateClient, state_request: StateRequest) -> StateResult:
        assert state_request.write_token is not None, "a write is not read without"
        assert state_request.update is not None, "nor without this"
        await client.write(
            state_request.key,
            state_request.write_token,
            state_request.state_epoch,
            state_request.leader_epoch,
            state_request.update,
        )
        return StateResult()

    return await _answer(service, request, context, one)


async def delete(service: BrokerServices, request: bytes, context: RequestContext) -> bytes:
    async def one(client: LocalStateClient, state_request: StateRequest) -> StateResult:
        await client.delete(state_request.key)
        return StateResult()

    return await _answer(service, request, context, one)


async def summary(service: BrokerServices, request: bytes, context: RequestContext) -> bytes:
    async def one(client: LocalStateClient, state_request: StateRequest) -> StateResult:
        return StateResult(summary=await client.summary(state_request.key))

    return await _answer(service, request, context, one)


async def _answer(
    service: BrokerServices,
    request: bytes,
    context: RequestContext,
    one: Callable[[LocalStateClient, StateRequest], Awaitable[StateResult]],
) -> bytes:
    sender, state_requests = decode_request(context.api_key, request)
    refusal = _refusal(service, sender, context)
    if refusal is not None:
        answers = [refusal] * len(state_requests)
    else:
        answers = await _each(service, service.share_state.client, state_requests, one)
    for answer in answers:
        if answer.error_code:
            service.statistics.count_error(context.api_key, answer.error_code)
    return encode_response(context.api_key, context.correlation_id, state_requests, answers)


def _refusal(
    service: BrokerServices, sender: RequestSender | None, context: RequestContext
) -> StateResult | None:
    """The error for a sender that is not a broker of the cluster in its registered epoch; None if it is."""
    authenticator = service.authenticator
    try:
        if sender is None:
            raise authenticator.refused(context.peer, UNKNOWN_SENDER, context.client_host)
        authenticator.require(context.peer, *sender, context.client_host)
    except MansioError as error:
        return StateResult(error.kafka_code, error.message)
    return None


async def _each(
    service: BrokerServices,
    client: LocalStateClient,
    state_requests: list[StateRequest],
    one: Callable[[LocalStateClient, StateRequest], Awaitable[StateResult]],
) -> list[StateResult]:
    """Process all entries concurrently; each starts before any waits."""
    answers = [StateResult()] * len(state_requests)

    async def work(number: int, state_request: StateRequest) -> None:
        answers[number] = await one(client, state_request)

    works = [work(number, state_request) for number, state_request in enumerate(state_requests)]
    errors: list[MansioError | None] = await gather_results(service.scheduler, works, name="share states")
    return [
        answer if error is None else StateResult(error.kafka_code, error.message)
        for answer, error in zip(answers, errors, strict=True)
    ]
