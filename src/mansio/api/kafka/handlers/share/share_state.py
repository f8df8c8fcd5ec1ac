"""InitializeShareGroupState, ReadShareGroupState, WriteShareGroupState, DeleteShareGroupState and
ReadShareGroupStateSummary (APIs 83 to 87, KIP-932). Leaders of share partitions send them to the broker that stores
their state.

Behavior: only a broker of the same cluster may send these requests. It must have authenticated on the connection, and
the request must contain its own id and registered epoch. A single node refuses all of them. A request is answered when
all its entries are processed. All entries are appended before the first one waits for its flush, so that they share one
flush.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.api.kafka.large_requests import LARGE_REQUEST_BYTES, decoded, on_thread
from mansio.broker.coordinator.share.state_messages import StateResult, decode_request, encode_response
from mansio.broker.services.statistics import COUNTED_ITEMS_MAX
from mansio.errors import MansioError
from mansio.host.gather_results import gather_results

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.coordinator.share.state_client import LocalStateClient
    from mansio.broker.coordinator.share.state_messages import RequestSender, StateRequestEntry
    from mansio.broker.services.broker_services import BrokerServices

UNKNOWN_SENDER_ID: Final = -1
"""Broker id in errors about a request that does not name its sender."""


async def initialize_share_group_state(
    service: BrokerServices, request: bytes, context: RequestContext
) -> bytes:
    """Create the state of share partitions with a start offset and a state epoch, or replace it."""

    async def process(client: LocalStateClient, state_request: StateRequestEntry) -> StateResult:
        await client.initialize(state_request.key, state_request.state_epoch, state_request.start_offset)
        return StateResult()

    return await _answer(service, request, context, process)


async def read_share_group_state(service: BrokerServices, request: bytes, context: RequestContext) -> bytes:
    """Return the state of share partitions to their new leader."""

    async def process(client: LocalStateClient, state_request: StateRequestEntry) -> StateResult:
        state, session = await client.read(state_request.key, state_request.leader_epoch)
        return StateResult(session=session, state=state)

    return await _answer(service, request, context, process)


async def write_share_group_state(service: BrokerServices, request: bytes, context: RequestContext) -> bytes:
    """Store updates of the state of share partitions."""

    async def process(client: LocalStateClient, state_request: StateRequestEntry) -> StateResult:
        assert state_request.write_token is not None, "decode_request sets the token of a write"
        assert state_request.update is not None, "decode_request sets the update of a write"
        await client.write(
            state_request.key,
            state_request.write_token,
            state_request.state_epoch,
            state_request.leader_epoch,
            state_request.update,
        )
        return StateResult()

    return await _answer(service, request, context, process)


async def delete_share_group_state(service: BrokerServices, request: bytes, context: RequestContext) -> bytes:
    """Delete the state of share partitions."""

    async def process(client: LocalStateClient, state_request: StateRequestEntry) -> StateResult:
        await client.delete(state_request.key)
        return StateResult()

    return await _answer(service, request, context, process)


async def read_share_group_state_summary(
    service: BrokerServices, request: bytes, context: RequestContext
) -> bytes:
    """Return start offset, epochs and number of completed records of share partitions, without their batches."""

    async def process(client: LocalStateClient, state_request: StateRequestEntry) -> StateResult:
        return StateResult(summary=await client.summary(state_request.key))

    return await _answer(service, request, context, process)


async def _answer(
    service: BrokerServices,
    request: bytes,
    context: RequestContext,
    process: Callable[[LocalStateClient, StateRequestEntry], Awaitable[StateResult]],
) -> bytes:
    sender, state_requests = await decoded(service, partial(decode_request, context.api_key), request)
    refusal = _authorization_error(service, sender, context)
    if refusal is not None:
        answers = [refusal] * len(state_requests)
    else:
        answers = await _process_all(service, service.share_coordinator.client, state_requests, process)
    for answer in answers[:COUNTED_ITEMS_MAX]:
        if answer.error_code:
            service.statistics.count_error(context.api_key, answer.error_code)
    encode = partial(encode_response, context.api_key, context.correlation_id, state_requests, answers)
    return encode() if len(request) <= LARGE_REQUEST_BYTES else await on_thread(service, encode)


def _authorization_error(
    service: BrokerServices, sender: RequestSender | None, context: RequestContext
) -> StateResult | None:
    """Return an error if the sender is not an authenticated broker of the cluster in its registered epoch, else
    None."""
    authenticator = service.authenticator
    try:
        if sender is None:
            raise authenticator.count_refused_request(context.peer, UNKNOWN_SENDER_ID, context.client_host)
        authenticator.require_identity(context.peer, *sender, context.client_host)
    except MansioError as error:
        return StateResult(error.kafka_code, error.message)
    return None


async def _process_all(
    service: BrokerServices,
    client: LocalStateClient,
    state_requests: list[StateRequestEntry],
    process: Callable[[LocalStateClient, StateRequestEntry], Awaitable[StateResult]],
) -> list[StateResult]:
    """Call `process` for all entries concurrently, and return one result per entry in the same order."""
    answers = [StateResult()] * len(state_requests)

    async def work(number: int, state_request: StateRequestEntry) -> None:
        answers[number] = await process(client, state_request)

    works = [work(number, state_request) for number, state_request in enumerate(state_requests)]
    errors: list[MansioError | None] = await gather_results(service.scheduler, works, name="share states")
    return [
        answer if error is None else StateResult(error.kafka_code, error.message)
        for answer, error in zip(answers, errors, strict=True)
    ]
