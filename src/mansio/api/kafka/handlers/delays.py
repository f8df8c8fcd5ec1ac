"""ListDelayedRecords (20105) and AlterDelayedRecords (20106), APIs of Mansio for pending records. Their fields are
defined in `mansio.wire.apis.mansio_apis`.

Behavior: the leader of a partition answers; each query of a list succeeds or fails on its own. A change is committed
before it is answered.
Not obvious: a list ends early with a cursor when it has examined many records, so a result without records is the last
one only if it has no cursor. Ids that are not pending are missing in the response to a change, which is no error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.features.delays.delay_service import Cursor, DelayQuery
from mansio.errors import InvalidRequest, MansioError
from mansio.host.item_turns import ItemTurns
from mansio.wire.apis.mansio_apis import NO_DUE_MS, DelayChange

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.features.delays.delay_service import ListedRecord, PendingPage
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def list_delayed_records(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return pending records and their counts."""
    turns = ItemTurns(service.scheduler)
    queries = []
    for one in request.queries:
        await turns.next()
        query = DelayQuery(
            one.topic_id or b"",
            one.partition_index,
            one.due_from_ms,
            one.due_to_ms,
            Cursor(one.after_due_ms, one.after_id),
            one.ids,
            one.key,
            one.records_max,
            one.value_bytes_max,
        )
        queries.append(query)
    results: list[dict[str, Any]] = []
    for result in await service.delays.list_pending(queries, caller=context.caller):
        if isinstance(result, MansioError):
            service.statistics.count_error(context.api_key, result.kafka_code)
            results.append({"error_code": result.kafka_code, "error_message": result.message, "records": []})
        else:
            results.append(_page_fields(result))
            await turns.next(len(result.records))
        await turns.next()
    return {"results": results}


def _page_fields(page: PendingPage) -> dict[str, Any]:
    after = page.next or Cursor(-1, -1)
    return {
        "pending_count": page.count,
        "pending_bytes": page.size_bytes,
        "next_due_ms": NO_DUE_MS if page.next_due_ms is None else page.next_due_ms,
        "now_ms": page.now_ms,
        "records": [_record_fields(record) for record in page.records],
        "after_due_ms": after.due_ms,
        "after_id": after.id,
    }


def _record_fields(record: ListedRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "due_ms": record.due_ms,
        "timestamp_ms": record.timestamp_ms,
        "key": record.key,
        "value": record.value,
        "value_size": record.value_size,
        "headers": [{"name": name, "value": value} for name, value in record.headers],
        "error_message": None if record.error is None else record.error.message,
    }


async def alter_delayed_records(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Cancel pending records, or change when they are due."""
    caller = context.caller
    topic_id, partition, ids = request.topic_id or b"", request.partition_index, request.ids
    timeout_ms, time_ms = request.timeout_ms, request.time_ms
    delays = service.delays
    if request.change == DelayChange.CANCEL:
        changed = await delays.cancel(topic_id, partition, ids, timeout_ms=timeout_ms, caller=caller)
    elif request.change == DelayChange.DELIVER_AT:
        changed = await delays.reschedule(
            topic_id, partition, ids, due_ms=time_ms, timeout_ms=timeout_ms, caller=caller
        )
    elif request.change == DelayChange.DELIVER_AFTER:
        changed = await delays.reschedule(
            topic_id, partition, ids, delay_ms=time_ms, timeout_ms=timeout_ms, caller=caller
        )
    else:
        raise InvalidRequest(f"there is no change {request.change} of delayed records")
    return {"ids": changed}
