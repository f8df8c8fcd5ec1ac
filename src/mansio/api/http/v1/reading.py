"""Reading over HTTP: records of a partition by offset or time, and a live tail as server-sent events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from mansio.api.asgi.problems import InvalidField, error_value
from mansio.api.http.v1.answers import in_turns, record_pieces, records_answer
from mansio.api.http.v1.operation import Body, Call, Operation, check_topic_name
from mansio.api.http.v1.times import parse_time
from mansio.api.http.v1.values import Record, ValueFormat  # noqa: TC001  # pydantic reads the types
from mansio.api.record_pieces import PIECE_BYTES, content_bytes
from mansio.api.routing.read_records import (
    BYTES_MAX,
    READ_RECORDS_MAX,
    WAIT_MS_MAX,
    consume_on_threads,
    read_records,
    too_large,
)
from mansio.errors import MansioError, UnknownTopicOrPartition, UnreadableRecords
from mansio.wire.batch.unreadable import UnreadableOffsets
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from datetime import datetime

    from mansio.client.types import Message

STREAM_PREFETCH_BYTES: Final = 1 << 20
KEEP_ALIVE_MS: Final = 15_000
"""Interval of comments in an event stream without records."""


class ReadParameters(Body):
    offset: Annotated[int, Field(ge=0, lt=1 << 63)] | None = Field(
        None, description="Read from this offset on."
    )
    time: str | None = Field(
        None, description="Read from the first record at or after this RFC 3339 time on."
    )
    from_: Literal["earliest", "latest"] = Field("earliest", alias="from")
    limit: Annotated[int, Field(ge=1, le=READ_RECORDS_MAX)] = 100
    max_bytes: Annotated[int, Field(ge=1, le=BYTES_MAX)] = Field(
        1 << 20, description="Bound of keys and values; one record is returned in any case."
    )
    wait_ms: Annotated[int, Field(ge=0, le=WAIT_MS_MAX)] = Field(
        0, description="Wait for a record, if there is none."
    )
    values: ValueFormat = "auto"


class Unreadable(Body):
    """Offsets, both inclusive, of records that cannot be returned."""

    first_offset: int
    last_offset: int
    reason: str


class Records(Body):
    """Records in the order of their offsets. `next_offset`: where the next request continues."""

    records: list[Record]
    next_offset: int
    unreadable: list[Unreadable] = Field(
        description="Records before `next_offset` that cannot be read, or are larger than 64 MiB."
    )


class OffsetParameters(Body):
    at: str = Field("latest", description="earliest, latest, max_timestamp, or an RFC 3339 time.")


class PartitionOffset(Body):
    partition: int
    offset: int = Field(description="-1: no record has such a timestamp.")
    timestamp_ms: int


class PartitionOffsets(Body):
    partitions: list[PartitionOffset]


class StreamParameters(Body):
    partition: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="All, if there is none."
    )
    from_: str = Field("latest", alias="from", description="earliest, latest, or an RFC 3339 time.")
    values: ValueFormat = "auto"


def record_fields(message: Message) -> dict[str, Any]:
    """Return the members of a record in JSON beside its content."""
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp_ms": message.timestamp_ms,
    }


def unreadable_value(offsets: UnreadableOffsets) -> dict[str, Any]:
    """Return unreadable offsets in JSON."""
    return {"first_offset": offsets.first, "last_offset": offsets.last, "reason": offsets.reason}


async def read(call: Call) -> Response:
    query: ReadParameters = call.query
    partition = call.partition
    if query.offset is not None and query.time is not None:
        raise InvalidField("time", "give offset or time, not both")
    start: Any = query.from_ if query.offset is None else query.offset
    if query.time is not None:
        start = parse_time(query.time, "time")
    check_topic_name(partition.topic)
    found = await read_records(
        call.services,
        call.context.broker.clients,
        partition,
        start,
        caller=call.caller,
        max_records=query.limit,
        max_bytes=query.max_bytes,
        wait_ms=query.wait_ms,
    )
    others = {
        "next_offset": found.next_offset,
        "unreadable": [unreadable_value(each) for each in found.unreadable],
    }
    return records_answer(found.records, query.values, record_fields, others)


async def offsets(call: Call) -> dict[str, Any]:
    query: OffsetParameters = call.query
    description = await call.client.admin.describe_topic(check_topic_name(call.topic))
    at: Any = query.at
    if query.at not in ("earliest", "latest", "max_timestamp"):
        at = parse_time(query.at, "at")
    partitions = [TopicPartition(call.topic, each.index) for each in description.partitions]
    found = await call.client.admin.list_offsets(partitions, at)
    return {
        "partitions": [
            {"partition": each.partition, "offset": one.offset, "timestamp_ms": one.timestamp_ms}
            for each, one in sorted(found.items())
        ]
    }


async def stream(call: Call) -> StreamingResponse:
    """Start a stream of events: `id` has the positions of all partitions, from which `Last-Event-ID` resumes."""
    query: StreamParameters = call.query
    context = call.context
    description = await call.client.admin.describe_topic(check_topic_name(call.topic))
    wanted = [each.index for each in description.partitions if query.partition in (None, each.index)]
    if not wanted:
        raise UnknownTopicOrPartition(f"topic {call.topic} has no partition {query.partition}")
    partitions = [TopicPartition(call.topic, each) for each in wanted]
    context.reserve_stream()
    try:
        start = await _stream_start(call, partitions, query.from_)
    except BaseException:
        context.release_stream()
        raise
    return StreamingResponse(
        _events(call, partitions, start, query.values),
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        media_type="text/event-stream",
    )


async def _stream_start(call: Call, partitions: list[TopicPartition], text: str) -> dict[TopicPartition, int]:
    """Return the offset of each partition at which a stream begins."""
    at: datetime | str = text if text in ("earliest", "latest") else parse_time(text, "from")
    last_id = call.request.headers.get("last-event-id")
    listed = await call.client.admin.list_offsets(partitions, at)  # type: ignore[arg-type]
    start = {partition: one.offset for partition, one in listed.items()}
    if any(offset < 0 for offset in start.values()):  # no record is so late
        ends = await call.client.admin.list_offsets(partitions, "latest")
        start = {each: ends[each].offset if offset < 0 else offset for each, offset in start.items()}
    if last_id:
        known = _parse_event_id(last_id)
        earliest = await call.client.admin.list_offsets(partitions, "earliest")
        for partition in partitions:
            start[partition] = max(
                known.get(partition.partition, start[partition]), earliest[partition].offset
            )
    return start


async def _events(
    call: Call, partitions: list[TopicPartition], start: dict[TopicPartition, int], as_: ValueFormat
) -> AsyncIterator[bytes]:
    positions = {partition.partition: start[partition] for partition in partitions}
    topic = partitions[0].topic

    def unreadable_event(partition: int, offsets: UnreadableOffsets) -> bytes:
        positions[partition] = offsets.last + 1
        value = {"topic": topic, "partition": partition, **unreadable_value(offsets)}
        return b"event: unreadable\nid: %b\ndata: %b\n\n" % (_event_id(positions), to_json(value))

    def record_events(messages: list[Message], larges: list[UnreadableOffsets | None]) -> Iterator[bytes]:
        lines: list[bytes] = []
        size_bytes = 0
        for message, large in zip(messages, larges, strict=True):
            if large is not None:
                lines.append(unreadable_event(message.partition, large))
                continue
            positions[message.partition] = message.offset + 1
            lines += (b"id: ", _event_id(positions), b"\ndata: ")
            one_bytes = content_bytes(message)
            size_bytes += one_bytes
            if one_bytes > PIECE_BYTES:
                yield b"".join(lines)
                lines.clear()
                yield from record_pieces(message, as_, record_fields(message))
            else:
                lines += record_pieces(message, as_, record_fields(message))
            lines.append(b"\n\n")
            if size_bytes > PIECE_BYTES:
                yield b"".join(lines)
                lines.clear()
                size_bytes = 0
            else:
                yield b""
        yield b"".join(lines)

    try:
        yield b"retry: 1000\n\n"
        async with consume_on_threads(
            call.client,
            partitions,
            from_=start,
            prefetch_bytes_max=STREAM_PREFETCH_BYTES,
            on_out_of_range="earliest",
        ) as consumer:
            while True:
                try:
                    messages = await consumer.poll(timeout_ms=KEEP_ALIVE_MS)
                except UnreadableRecords as error:
                    found = UnreadableOffsets(error.first_offset, error.last_offset, error.reason)
                    yield unreadable_event(error.partition, found)
                    continue
                if not messages:
                    yield b": no records\n\n"
                async for piece in in_turns(record_events(messages, await too_large(messages))):
                    yield piece
    except MansioError as error:
        yield b"event: problem\ndata: " + to_json(error_value(error)) + b"\n\n"
    finally:
        call.context.release_stream()


def _event_id(positions: dict[int, int]) -> bytes:
    return (
        json.dumps({str(partition): offset for partition, offset in positions.items()})
        .replace(" ", "")
        .encode()
    )


def _parse_event_id(text: str) -> dict[int, int]:
    """Return the positions in the id of an event. Raises `InvalidField`."""
    try:
        found = {int(partition): int(offset) for partition, offset in json.loads(text).items()}
        if any(offset < 0 for offset in found.values()):
            raise ValueError(text)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidField("Last-Event-ID", "this is not the id of an event of this stream") from error
    return found


OPERATIONS: Final = (
    Operation(
        "GET",
        "/topics/{topic}/partitions/{partition}/records",
        "Read records by offset or time",
        read,
        query=ReadParameters,
        result=Records,
        tag="records",
    ),
    Operation(
        "GET",
        "/topics/{topic}/offsets",
        "Offsets of all partitions, at an end or a time",
        offsets,
        query=OffsetParameters,
        result=PartitionOffsets,
        tag="records",
    ),
    Operation(
        "GET",
        "/topics/{topic}/events",
        "Follow a topic: server-sent events, resumed by Last-Event-ID",
        stream,
        query=StreamParameters,
        media_type="text/event-stream",
        tag="records",
    ),
)
