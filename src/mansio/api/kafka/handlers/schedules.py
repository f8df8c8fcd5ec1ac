"""ListSchedules (20107) and AlterSchedules (20108), APIs of Mansio for recurring schedules. Their fields are defined in
`mansio.wire.apis.mansio_apis`.

Behavior: the leader of a partition answers; each query of a list succeeds or fails on its own. A change is committed
before it is answered.
Not obvious: a schedule that exists with the same definition is not created again, which is no error; so each change but
DELETE can be repeated. A name is unique in a partition; clients look for it in all partitions of the topic first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from mansio.broker.features.delays.schedule_service import ScheduleQuery
from mansio.errors import InvalidRequest, MansioError
from mansio.host.item_turns import ItemTurns
from mansio.wire.apis.mansio_apis import ScheduleChange
from mansio.wire.batch.schedule_control_records import NOT_DUE_MS, CatchUpMode, Schedule

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.features.delays.schedule_service import ListedSchedule
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct


async def list_schedules(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Return schedules with their next due times."""
    turns = ItemTurns(service.scheduler)
    queries = []
    for one in request.queries:
        await turns.next()
        queries.append(ScheduleQuery(one.topic_id or b"", one.partition_index, one.name))
    found = await service.schedules.list_schedules(
        queries, times_max=request.times_max, caller=context.caller
    )
    value_bytes_max = max(0, request.value_bytes_max)
    results: list[dict[str, Any]] = []
    for result in found:
        if isinstance(result, MansioError):
            service.statistics.count_error(context.api_key, result.kafka_code)
            results.append(
                {"error_code": result.kafka_code, "error_message": result.message, "schedules": []}
            )
        else:
            results.append({"schedules": [_schedule_fields(one, value_bytes_max) for one in result]})
            await turns.next(len(result))
        await turns.next()
    return {"results": results}


def _schedule_fields(listed: ListedSchedule, value_bytes_max: int) -> dict[str, Any]:
    schedule = listed.schedule
    value = schedule.value
    return {
        "id": schedule.id.bytes,
        "name": schedule.name,
        "cron": schedule.cron,
        "every_ms": schedule.every_ms,
        "timezone": schedule.timezone,
        "catch_up": schedule.catch_up,
        "key": schedule.key,
        "value": None if value is None else value[:value_bytes_max],
        "value_size": -1 if value is None else len(value),
        "headers": [{"name": name, "value": content} for name, content in schedule.headers],
        "created_ms": schedule.created_ms,
        "is_paused": schedule.is_paused,
        "next_due_ms": schedule.next_due_ms,
        "next_times_ms": listed.next_times_ms,
        "firings": schedule.firings,
        "error_message": listed.error or None,
    }


async def alter_schedules(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Create, pause, resume or delete a schedule."""
    caller = context.caller
    schedules = service.schedules
    topic_id, partition, name = request.topic_id or b"", request.partition_index, request.name
    timeout_ms = request.timeout_ms
    if request.change == ScheduleChange.CREATE:
        await schedules.create(
            topic_id, partition, _new_schedule(request), timeout_ms=timeout_ms, caller=caller
        )
    elif request.change == ScheduleChange.PAUSE:
        await schedules.pause(topic_id, partition, name, timeout_ms=timeout_ms, caller=caller)
    elif request.change == ScheduleChange.RESUME:
        await schedules.resume(topic_id, partition, name, timeout_ms=timeout_ms, caller=caller)
    elif request.change == ScheduleChange.DELETE:
        await schedules.delete(topic_id, partition, name, timeout_ms=timeout_ms, caller=caller)
    else:
        raise InvalidRequest(f"there is no change {request.change} of schedules")
    return {}


def _new_schedule(request: Struct) -> Schedule:
    if request.id is None:
        raise InvalidRequest("a new schedule has an id")
    if request.catch_up not in {*CatchUpMode}:
        raise InvalidRequest(f"there is no catch-up {request.catch_up}")
    return Schedule(
        UUID(bytes=request.id),
        request.name,
        request.cron,
        request.every_ms,
        request.timezone,
        CatchUpMode(request.catch_up),
        request.key,
        request.value,
        tuple((header.name, header.value) for header in request.headers),
        created_ms=NOT_DUE_MS,
        next_due_ms=NOT_DUE_MS,
    )
