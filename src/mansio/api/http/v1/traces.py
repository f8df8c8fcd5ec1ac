"""The history of records over HTTP."""

from __future__ import annotations

import base64
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BeforeValidator, Field
from pydantic_core import to_json
from starlette.responses import StreamingResponse

from mansio.api.asgi.problems import InvalidField, error_value
from mansio.api.http.v1.operation import Body, Call, Operation, Result, check_topic_name
from mansio.api.http.v1.times import format_time, format_time_ms, parse_time
from mansio.client.admin.record_search import DEFAULT_TIMEOUT_MS, FoundRecord, SearchProgress
from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from datetime import datetime

    from starlette.responses import Response

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


class SearchParameters(Body):
    key: str | None = Field(None, description="The key of the records, as text.")
    key_base64: str | None = Field(None, description="The key of the records, in Base64.")
    id: str | None = Field(None, description="The id of the record, its header `mansio-id`.")
    partition: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="All, if there is none."
    )
    since: str | None = Field(
        None,
        description="Only records with a timestamp at or after this RFC 3339 time; of an id, from ten minutes before "
        "its own time on, if there is none.",
    )
    until: str | None = Field(
        None, description="Only records with a timestamp at or before this RFC 3339 time."
    )
    limit: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="The number of records after which the search ends: 10 for a key, 1 for an id."
    )
    timeout_ms: Annotated[int, Field(ge=1, le=86_400_000)] = int(DEFAULT_TIMEOUT_MS)


async def search(call: Call) -> Response:
    query: SearchParameters = call.query
    topic = check_topic_name(call.topic)
    if sum(each is not None for each in (query.key, query.key_base64, query.id)) != 1:
        raise InvalidField("key", "give one of key, key_base64 and id")
    try:
        found = call.client.admin.traces.search(
            topic,
            key=query.key if query.key_base64 is None else base64.b64decode(query.key_base64, validate=True),
            record_id=query.id,
            partition=query.partition,
            since=None if query.since is None else parse_time(query.since, "since"),
            until=None if query.until is None else parse_time(query.until, "until"),
            limit=query.limit,
            timeout_ms=query.timeout_ms,
        )
    except ValueError as error:
        raise InvalidField("id" if query.id is not None else "key_base64", str(error)) from error
    call.context.reserve_stream()
    try:
        first = await anext(found, None)  # raises what concerns all partitions
    except BaseException:
        call.context.release_stream()
        raise
    return StreamingResponse(_lines(call, first, found), media_type="application/x-ndjson")


async def _lines(
    call: Call,
    first: FoundRecord | SearchProgress | None,
    found: AsyncGenerator[FoundRecord | SearchProgress, None],
) -> AsyncIterator[bytes]:
    """Yield a line for each record, `{"found": ...}`, and for the progress, `{"progress": ...}`; the last one is
    `{"end": true}`, or `{"problem": ...}`."""
    try:
        async with aclosing(found):
            if first is not None:
                yield _line(first)
            async for each in found:
                yield _line(each)
        yield b'{"end":true}\n'
    except MansioError as error:
        yield to_json({"problem": error_value(error)}) + b"\n"
    finally:
        call.context.release_stream()


def _line(each: FoundRecord | SearchProgress) -> bytes:
    if isinstance(each, SearchProgress):
        skipped = [one._asdict() for one in each.skipped]
        return to_json({"progress": {**asdict(each), "skipped": skipped}}) + b"\n"
    place = {"topic": each.topic, "partition": each.partition, "offset": each.offset}
    return to_json({"found": {**place, "timestamp": format_time_ms(each.timestamp_ms)}}) + b"\n"


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
    Operation(
        "GET",
        "/topics/{topic}/search",
        "Find the records that have a key or an id: a stream of JSON lines, with the progress",
        search,
        query=SearchParameters,
        media_type="application/x-ndjson",
        tag="history",
    ),
)
