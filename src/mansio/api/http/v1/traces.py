"""The history of records over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BeforeValidator

from mansio.api.http.v1.operation import Call, Operation, Result, check_topic_name
from mansio.api.http.v1.times import format_time

if TYPE_CHECKING:
    from datetime import datetime

    from mansio.client.admin.traces import RecordTrace


def _format(moment: datetime | None) -> str | None:
    return None if moment is None else format_time(moment)


Time = Annotated[str | None, BeforeValidator(_format)]


class Event(Result):
    """`kind`: published, delivered, acknowledged and so on. `time`: null if it is not known, or if there is no limit.
    `wait_ms`: since the event before it of the same group. `is_computed`: derived from what the broker knows now."""

    kind: str
    time: Time
    group: str | None
    attempt: int
    who: str
    detail: str
    wait_ms: int | None
    is_computed: bool


class Trace(Result):
    """`certain`: nothing can be missing; otherwise `uncertainties` states what may be. `total_ms`: from the publication
    to the last event with which a group was done with the record."""

    topic: str
    partition: int
    offset: int
    events: list[Event]
    certain: bool
    uncertainties: list[str]
    total_ms: int | None
    leader: int
    replicas: list[int]
    in_sync: list[int]
    is_stored: bool
    timestamp: Time
    size_bytes: int


async def trace_record(call: Call) -> Trace:
    partition = call.partition
    check_topic_name(partition.topic)
    return _trace(await call.client.admin.traces.record(partition.topic, partition.partition, call.offset))


async def trace_last_failed(call: Call) -> Trace:
    return _trace(await call.client.admin.traces.last_failed(call.path("group")))


def _trace(found: RecordTrace) -> Trace:
    return Trace.model_validate(found)


OPERATIONS: Final = (
    Operation(
        "GET",
        "/topics/{topic}/partitions/{partition}/records/{offset}/trace",
        "What has happened to a record",
        trace_record,
        result=Trace,
        tag="history",
    ),
    Operation(
        "GET",
        "/groups/{group}/last-failed/trace",
        "What has happened to the record that a share group has rejected or given up last",
        trace_last_failed,
        result=Trace,
        tag="history",
    ),
)
