"""Delayed records and schedules over HTTP."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from mansio.api.asgi.problems import InvalidField
from mansio.api.http.v1.arguments import checked
from mansio.api.http.v1.operation import Body, Call, Operation, Result, check_topic_name
from mansio.api.http.v1.times import format_time, parse_time
from mansio.api.http.v1.values import (
    Headers,
    decode_headers,
    decode_key,
    decode_value,
    encode_headers,
    encode_key,
    encode_text,
    encode_value,
)

if TYPE_CHECKING:
    from mansio.client.admin.delays import PendingRecord, RecordId

IDS_MAX: Final = 1_000
TIMES_MAX: Final = 100

Id = Annotated[str, Field(pattern=r"^[0-9]{1,10}:[0-9]{1,19}$")]
"""Partition and id of a pending record, as in `2:117`."""


Time = Annotated[str, BeforeValidator(format_time)]


def _milliseconds(duration: timedelta | None) -> int | None:
    return None if duration is None else duration // timedelta(milliseconds=1)


class PendingParameters(Body):
    limit: Annotated[int, Field(ge=1, le=IDS_MAX)] = 100
    cursor: Annotated[str, Field(max_length=100)] | None = None
    due_from: str | None = None
    due_to: str | None = None
    key: str | None = None


class Pending(Body):
    id: str
    due: str
    timestamp_ms: int
    key: str | None = None
    key_base64: str = ""
    value: str | None = Field(None, description="The first kilobyte.")
    base64: str = ""
    value_size: int | None
    headers: dict[str, Any]
    error: str | None


class PendingPage(Body):
    records: list[Pending]
    next_cursor: str | None


class Ids(Body):
    ids: Annotated[list[Id], Field(min_length=1, max_length=IDS_MAX)]


class NewTime(Body):
    """Give `delay_ms` or `deliver_at`."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=IDS_MAX)]
    delay_ms: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    deliver_at: str | None = None


def _id_text(record: RecordId) -> str:
    return f"{record.partition}:{record.id}"


PendingId = Annotated[str, BeforeValidator(_id_text)]


class Changed(Result):
    """`unknown`: it is not known whether the change will have an effect."""

    changed: list[PendingId]
    not_pending: list[PendingId]
    unknown: list[PendingId]


class NewSchedule(Body):
    """Give `cron` (in `timezone`) or `every_ms`. Value: `value`, `json` or `base64`."""

    cron: Annotated[str, Field(max_length=200)] | None = None
    every_ms: Annotated[int, Field(ge=1, lt=1 << 53)] | None = None
    timezone: Annotated[str, Field(max_length=100)] | None = None
    catch_up: Literal["none", "last", "all"] = "none"
    value: str | None = None
    json_: Any = Field(None, alias="json")
    base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: Headers = Field(default_factory=dict)
    partition: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None


class Schedule(Result):
    name: str
    topic: str
    partition: int
    cron: str | None
    every_ms: Annotated[int | None, BeforeValidator(_milliseconds)] = Field(validation_alias="every")
    timezone: str
    catch_up: str
    is_paused: bool
    created: Time
    next_times: list[Time]
    firings: int
    error: str | None


class Schedules(Result):
    schedules: list[Schedule]


class ScheduleParameters(Body):
    times: Annotated[int, Field(ge=1, le=TIMES_MAX)] = Field(5, description="Due times to return.")


# Delayed records


async def list_pending(call: Call) -> dict[str, Any]:
    query: PendingParameters = call.query
    with checked("cursor"):
        page = await call.client.admin.delays.list(
            check_topic_name(call.topic),
            due_from=None if query.due_from is None else parse_time(query.due_from, "due_from"),
            due_to=None if query.due_to is None else parse_time(query.due_to, "due_to"),
            key=None if query.key is None else encode_text(query.key, "key"),
            limit=query.limit,
            after=query.cursor,
        )
    return {"records": [_pending(each) for each in page.records], "next_cursor": page.next}


def _pending(record: PendingRecord) -> dict[str, Any]:
    return {  # no model: a record has only the members of its kind of key and value
        "id": f"{record.partition}:{record.id}",
        "due": format_time(record.due),
        "timestamp_ms": record.timestamp_ms,
        **encode_key(record.key),
        **encode_value(record.value, "auto"),
        "value_size": record.value_size,
        "headers": encode_headers(record.headers),
        "error": record.error,
    }


async def cancel(call: Call) -> Changed:
    return Changed.model_validate(
        await call.client.admin.delays.cancel(check_topic_name(call.topic), _ids(call.body.ids))
    )


async def deliver_now(call: Call) -> Changed:
    return Changed.model_validate(
        await call.client.admin.delays.deliver_now(check_topic_name(call.topic), _ids(call.body.ids))
    )


async def reschedule(call: Call) -> Changed:
    body: NewTime = call.body
    if (body.delay_ms is None) == (body.deliver_at is None):
        raise InvalidField("/delay_ms", "give delay_ms or deliver_at")
    at = None if body.deliver_at is None else parse_time(body.deliver_at, "/deliver_at")
    with checked("/delay_ms" if at is None else "/deliver_at"):
        delay = None if body.delay_ms is None else timedelta(milliseconds=body.delay_ms)
        found = await call.client.admin.delays.reschedule(
            check_topic_name(call.topic), _ids(body.ids), delay=delay, at=at
        )
    return Changed.model_validate(found)


def _ids(ids: list[str]) -> list[tuple[int, int]]:
    found = []
    for position, each in enumerate(ids):
        partition, _, number = each.partition(":")
        if int(partition) >= 1 << 31 or int(number) >= 1 << 63:
            raise InvalidField(f"/ids/{position}", "this is not the id of a pending record")
        found.append((int(partition), int(number)))
    return found


# Schedules


async def list_schedules(call: Call) -> Schedules:
    found = await call.client.admin.schedules.list(check_topic_name(call.topic), times=call.query.times)
    return Schedules.model_validate({"schedules": found})


async def create_schedule(call: Call) -> Schedule:
    body: NewSchedule = call.body
    if (body.cron is None) == (body.every_ms is None):
        raise InvalidField("/cron", "give cron or every_ms")
    given = body.model_dump(by_alias=True, exclude_unset=True)
    if given.get("base64", "") is None:
        del given["base64"]
    value = decode_value(given, "")
    with checked():
        found = await call.client.admin.schedules.create(
            check_topic_name(call.topic),
            call.path("name"),
            value,
            cron=body.cron,
            every=None if body.every_ms is None else timedelta(milliseconds=body.every_ms),
            timezone=body.timezone,
            catch_up=body.catch_up,
            key=decode_key(given, ""),
            headers=decode_headers(body.headers, "/headers"),
            partition=body.partition,
        )
    return Schedule.model_validate(found)


async def describe_schedule(call: Call) -> Schedule:
    name = call.path("name")
    return Schedule.model_validate(
        await call.client.admin.schedules.describe(check_topic_name(call.topic), name, times=call.query.times)
    )


async def pause_schedule(call: Call) -> None:
    await call.client.admin.schedules.pause(check_topic_name(call.topic), call.path("name"))


async def resume_schedule(call: Call) -> None:
    await call.client.admin.schedules.resume(check_topic_name(call.topic), call.path("name"))


async def delete_schedule(call: Call) -> None:
    await call.client.admin.schedules.delete(check_topic_name(call.topic), call.path("name"))


_DELAYED: Final = "/topics/{topic}/delayed"
_SCHEDULE: Final = "/topics/{topic}/schedules/{name}"


def _operation(method: str, path: str, summary: str, handler: Any, **types: Any) -> Operation:
    status = 204 if "result" not in types else 200
    return Operation(method, path, summary, handler, status=status, tag="delays", **types)


OPERATIONS: Final = (
    _operation(
        "GET", _DELAYED, "List pending records", list_pending, query=PendingParameters, result=PendingPage
    ),
    _operation("POST", f"{_DELAYED}/cancel", "Cancel pending records", cancel, body=Ids, result=Changed),
    _operation(
        "POST", f"{_DELAYED}/reschedule", "Change when they are due", reschedule, body=NewTime, result=Changed
    ),
    _operation("POST", f"{_DELAYED}/deliver-now", "Deliver them now", deliver_now, body=Ids, result=Changed),
    _operation(
        "GET",
        "/topics/{topic}/schedules",
        "List schedules",
        list_schedules,
        query=ScheduleParameters,
        result=Schedules,
    ),
    _operation("PUT", _SCHEDULE, "Create a schedule", create_schedule, body=NewSchedule, result=Schedule),
    _operation(
        "GET",
        _SCHEDULE,
        "Describe a schedule",
        describe_schedule,
        query=ScheduleParameters,
        result=Schedule,
    ),
    _operation("DELETE", _SCHEDULE, "Delete a schedule", delete_schedule),
    _operation("POST", f"{_SCHEDULE}/pause", "Stop its firings", pause_schedule),
    _operation("POST", f"{_SCHEDULE}/resume", "Let it fire again", resume_schedule),
)
