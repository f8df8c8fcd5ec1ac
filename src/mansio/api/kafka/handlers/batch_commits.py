"""PrepareTransaction (20112) and CommitBatch (20113), APIs of Mansio for the commit of batches that several tasks
write. Their fields are defined in `mansio.wire.apis.mansio_apis`.

Behavior: both are answered when what they did is committed, and can be repeated. An error that clients try again leaves
it open whether the request was carried out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.errors import MansioError
from mansio.host.item_turns import ItemTurns
from mansio.state.transactions.batch_decision import TaskTransaction

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def prepare_transaction(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Let an ongoing transaction wait for a decision."""
    try:
        await service.transactions.prepare(
            request.transactional_id,
            request.producer_id,
            request.producer_epoch,
            caller=context.caller,
        )
    except MansioError as error:
        return {"error_code": error.kafka_code, "error_message": error.message}
    return {"error_code": 0}


async def commit_batch(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Commit or abort the transactions of a batch."""
    turns = ItemTurns(service.scheduler)
    transactions = await _transactions(request.transactions, turns)
    abandoned = await _transactions(request.abandoned, turns)
    try:
        last_batch_id = await service.transactions.commit_batch(
            request.query_id,
            request.batch_id,
            transactions,
            abandoned,
            is_commit=request.committed,
            caller=context.caller,
        )
    except MansioError as error:
        return {"error_code": error.kafka_code, "error_message": error.message}
    return {"error_code": 0, "last_batch_id": last_batch_id}


async def _transactions(named: Any, turns: ItemTurns) -> list[TaskTransaction]:
    found = []
    for each in named:
        await turns.next()
        found.append(TaskTransaction(each.transactional_id, each.producer_id, each.producer_epoch))
    return found
