"""InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, EndTxn, DescribeTransactions, ListTransactions.

Behavior
* InitProducerId without a transactional id: an idempotent producer always gets a new id.
* AddPartitionsToTxn 4+ takes several transactions and is refused unless a broker of the cluster sent it.
* A state filter of ListTransactions that Kafka does not know is returned, so that a tool can report it.

Version notes
* InitProducerId 3: the producer's last id and epoch (KIP-360); 4: PRODUCER_FENCED instead of INVALID_PRODUCER_EPOCH.
* AddPartitionsToTxn, AddOffsetsToTxn, EndTxn 2: PRODUCER_FENCED. AddPartitionsToTxn 5, AddOffsetsToTxn 4, EndTxn 4:
  TRANSACTION_ABORTABLE. EndTxn 5: returns the producer id and epoch of the next transaction (KIP-890).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.services.transactions.transaction_service import TITLES
from mansio.errors import (
    InvalidProducerEpoch,
    InvalidRequest,
    InvalidTxnState,
    MansioError,
    ProducerFenced,
    TransactionAbortable,
)
from mansio.host.gather_results import gather_results
from mansio.host.item_turns import ItemTurns
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct

Fields = dict[str, Any]

BATCHED_VERSION_MIN: Final = 4
ADDING_CLIENT_VERSION: Final = 2
"""Transaction version of a batched request that adds partitions (KIP-890)."""
BUMPING_VERSION_MIN: Final = 5


def _code(error: MansioError | None, version: int, *, fenced_from: int, abortable_from: int) -> int:
    """Return the error code that clients of this version know."""
    if error is None:
        return 0
    if isinstance(error, ProducerFenced) and version < fenced_from:
        return InvalidProducerEpoch.kafka_code
    if isinstance(error, TransactionAbortable) and version < abortable_from:
        return InvalidTxnState.kafka_code
    return error.kafka_code


async def init_producer_id(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Assign a producer id to an idempotent producer, or initialize a producer with a transactional id."""
    if request.transactional_id is None:
        new_id = await service.transactions.new_producer_id(caller=context.caller)
        return {"error_code": 0, "producer_id": new_id, "producer_epoch": 0}
    if not request.transactional_id:
        raise InvalidRequest("the transactional id is empty")
    version = context.api_version
    producer_id, epoch = (request.producer_id, request.producer_epoch) if version >= 3 else (-1, -1)
    try:
        if (producer_id == -1) != (epoch == -1) or producer_id < -1:
            raise InvalidRequest("producer id and epoch are given both or not at all")
        producer_id, epoch = await service.transactions.init_producer_id(
            request.transactional_id,
            request.transaction_timeout_ms,
            producer_id,
            epoch,
            caller=context.caller,
        )
    except MansioError as error:
        code = _code(error, version, fenced_from=4, abortable_from=5)
        return {"error_code": code, "producer_id": -1, "producer_epoch": -1}
    return {"error_code": 0, "producer_id": producer_id, "producer_epoch": epoch}


async def add_partitions_to_txn(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Add partitions to one transaction, or, between brokers, to several ones."""
    if context.api_version < BATCHED_VERSION_MIN:
        partitions = _partitions(request.v3_and_below_topics)
        codes = await _add(
            service,
            context,
            request.v3_and_below_transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
            partitions,
        )
        return {"results_by_topic_v3_and_below": _topic_results(partitions, codes)}
    peer, authenticator = context.peer, service.authenticator
    try:
        authenticator.require_identity(
            peer,
            -1 if peer is None else peer.node_id,
            -1 if peer is None else peer.broker_epoch,
            context.client_host,
        )
    except MansioError as error:
        return {"error_code": error.kafka_code}
    results: list[Fields] = [{}] * len(request.transactions)

    async def handle(number: int, asked: Struct) -> None:
        results[number] = await _batched_result(service, context, asked)

    # Concurrently: one that waits for a completing transaction must not delay the others.
    work = [handle(number, asked) for number, asked in enumerate(request.transactions)]
    await gather_results(service.scheduler, work, name="add partitions to transactions")
    return {"error_code": 0, "results_by_transaction": [each for each in results if each]}


async def _batched_result(service: BrokerServices, context: RequestContext, asked: Struct) -> Fields:
    partitions = _partitions(asked.topics)
    codes = await _add(
        service,
        context,
        asked.transactional_id,
        asked.producer_id,
        asked.producer_epoch,
        partitions,
        verifies_only=asked.verify_only,
    )
    return {"transactional_id": asked.transactional_id, "topic_results": _topic_results(partitions, codes)}


async def _add(
    service: BrokerServices,
    context: RequestContext,
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    partitions: list[tuple[str, int]],
    *,
    verifies_only: bool = False,
) -> list[int]:
    named = transactional_id, producer_id, producer_epoch, partitions
    version, caller = context.api_version, context.caller
    errors: list[MansioError | None]
    try:
        if verifies_only:
            errors = await service.transactions.verify_partitions(*named)
        elif version >= BATCHED_VERSION_MIN:
            errors = await service.transactions.add_partitions(
                *named, client_version=ADDING_CLIENT_VERSION, caller=caller
            )
        else:
            errors = await service.transactions.add_partitions(*named, caller=caller)
    except MansioError as error:
        errors = [without_traceback(error)] * len(partitions)
    return [_code(each, version, fenced_from=2, abortable_from=5) for each in errors]


def _partitions(topics: Any) -> list[tuple[str, int]]:
    return [(topic.name, index) for topic in topics for index in topic.partitions]


def _topic_results(partitions: list[tuple[str, int]], codes: list[int]) -> list[Fields]:
    found: dict[str, list[Fields]] = defaultdict(list)
    for (topic, index), code in zip(partitions, codes, strict=True):
        found[topic].append({"partition_index": index, "partition_error_code": code})
    return [{"name": topic, "results_by_partition": results} for topic, results in found.items()]


async def add_offsets_to_txn(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Add the partition with the offsets of a group to a transaction."""
    try:
        await service.transactions.add_offsets(
            request.transactional_id,
            request.producer_id,
            request.producer_epoch,
            request.group_id,
            caller=context.caller,
        )
    except MansioError as error:
        return {"error_code": _code(error, context.api_version, fenced_from=2, abortable_from=4)}
    return {"error_code": 0}


async def end_txn(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Commit or abort a transaction."""
    version = context.api_version
    try:
        producer_id, epoch = await service.transactions.end(
            request.transactional_id,
            request.producer_id,
            request.producer_epoch,
            is_commit=request.committed,
            bumps_epoch=version >= BUMPING_VERSION_MIN,
            caller=context.caller,
        )
    except MansioError as error:
        return {"error_code": _code(error, version, fenced_from=2, abortable_from=4)}
    if version < BUMPING_VERSION_MIN:
        return {"error_code": 0}
    return {"error_code": 0, "producer_id": producer_id, "producer_epoch": epoch}


async def describe_transactions(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Describe transactional ids. Each is described once, even if the request repeats it."""
    turns = ItemTurns(service.scheduler)
    states = []
    for transactional_id in dict.fromkeys(request.transactional_ids):
        found = await _described(service, transactional_id, context.caller)
        states.append(found)
        await turns.next(1 + len(found.get("topics", ())))
    return {"transaction_states": states}


async def _described(service: BrokerServices, transactional_id: str, caller: Caller) -> Fields:
    try:
        found = await service.transactions.describe(transactional_id, caller=caller)
    except MansioError as error:
        return {"error_code": error.kafka_code, "transactional_id": transactional_id}
    indexes: dict[str, list[int]] = defaultdict(list)
    for topic, index in found.partitions:
        indexes[topic].append(index)
    return {
        "error_code": 0,
        "transactional_id": transactional_id,
        "transaction_state": found.state,
        "transaction_timeout_ms": found.timeout_ms,
        "transaction_start_time_ms": found.started_ms,
        "producer_id": found.producer_id,
        "producer_epoch": found.producer_epoch,
        "topics": [{"topic": topic, "partitions": each} for topic, each in indexes.items()],
    }


async def list_transactions(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """List the transactional ids that this broker coordinates."""
    version = context.api_version
    states = frozenset(request.state_filters or ())
    unknown = [state for state in dict.fromkeys(request.state_filters or ()) if state not in TITLES]
    try:
        found = service.transactions.list_transactions(
            states=states,
            producer_ids=frozenset(request.producer_id_filters or ()),
            duration_ms_min=request.duration_filter if version >= 1 else -1,
            pattern=(request.transactional_id_pattern or "") if version >= 2 else "",
            caller=context.caller,
        )
    except MansioError as error:
        return {"error_code": error.kafka_code, "unknown_state_filters": unknown}
    return {
        "error_code": 0,
        "unknown_state_filters": unknown,
        "transaction_states": [
            {
                "transactional_id": each.transactional_id,
                "producer_id": each.producer_id,
                "transaction_state": each.state,
            }
            for each in found
        ],
    }
