"""Publishing over HTTP: one record as the raw body, or many as JSON with a result for each."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from mansio.api.asgi.json_bodies import PIECE_BYTES, ElementReader, check_keys, split_list
from mansio.api.asgi.problems import InvalidField, error_value
from mansio.api.http.v1.operation import Body, Call, Operation, Result, check_topic_name, validated
from mansio.api.http.v1.times import parse_duration_ms, parse_time_ms
from mansio.api.http.v1.values import Headers, decode_headers, decode_key, decode_value, encode_text
from mansio.api.routing.publishing import publish_records
from mansio.api.routing.schema_values import encode_values
from mansio.broker.services.publish_records import (
    PUBLISHED_RECORDS_MAX,
    RecordToPublish,
    ValuesToPublish,
    joined_records,
)
from mansio.host.item_turns import ItemTurns
from mansio.tracebacks import copied
from mansio.wire.batch.dedup_header import ID_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.services.publish_records import PublishedRange
    from mansio.wire.batch.record_batch import Header

HEADER_PREFIX: Final = "mansio-header-"
COPIED_HEADERS: Final = ("content-type", "traceparent", "tracestate")
"""Headers of a request with a raw body that become headers of the record; so do `ce-*` (CloudEvents)."""

PARTITION_MAX: Final = (1 << 31) - 1
_COMPACT: Final = '{"value":""},'
"""A record with a value and nothing else in its shortest form, without the value."""


Schema = Annotated[
    str,
    Field(
        pattern="^(latest|[0-9]{1,10})$",
        description="Values are plain JSON, and encoded with this schema of the registry: `latest`, that of the subject"
        " TOPIC-value, or an id.",
    ),
]


class RawParameters(Body):
    key: str | None = None
    partition: Annotated[int, Field(ge=0, le=PARTITION_MAX)] | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


class BatchParameters(Body):
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


class NewRecord(TypedDict, total=False):
    """A record to publish. Value: `value`, `json` or `base64`; none of them: null."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    value: str | None
    json: Any
    base64: str
    key: str | None
    key_base64: str
    headers: Headers
    partition: Annotated[int, Field(ge=0, le=PARTITION_MAX)] | None
    timestamp_ms: Annotated[int, Field(ge=0, lt=1 << 63)] | None
    delay_ms: Annotated[int, Field(ge=0, lt=1 << 53)] | None
    deliver_at: str | None
    priority: Literal["high", "normal", "low"] | None
    dedup_id: Annotated[str, Field(min_length=1, max_length=ID_BYTES_MAX)] | None


class NewRecords(Body):
    records: Annotated[list[NewRecord], Field(min_length=1, max_length=PUBLISHED_RECORDS_MAX)]


_BODY: Final = TypeAdapter(NewRecords)
_PIECE: Final = TypeAdapter(list[NewRecord])


class Published(Result):
    """Where a record is stored. Of a delayed record, `offset` is its id while it is pending."""

    partition: int
    offset: int
    timestamp_ms: int


class PublishedOrError(Body):
    """Where a record is stored, or why it may not be."""

    partition: int | None = None
    offset: int | None = None
    timestamp_ms: int | None = None
    error: dict[str, Any] | None = None


class PublishResults(Body):
    """Results in the order of the records; `failed`: the number of errors among them."""

    records: list[PublishedOrError]
    failed: int


async def publish_one(call: Call) -> Published:
    query: RawParameters = call.query
    headers = call.request.headers
    delay, at = headers.get("mansio-delay"), headers.get("mansio-deliver-at")
    dedup_id = headers.get("idempotency-key")
    record = RecordToPublish(
        call.data,
        None if query.key is None else encode_text(query.key, "key"),
        _record_headers(call),
        partition=query.partition,
        delay_ms=None if delay is None else parse_duration_ms(delay, "Mansio-Delay"),
        deliver_at_ms=None if at is None else parse_time_ms(at, "Mansio-Deliver-At"),
        priority=headers.get("mansio-priority"),
        dedup_id=None if dedup_id is None else _dedup_id(dedup_id),
    )
    ((_, _, result),) = await _publish(call, [record])
    if result.error is not None:
        raise copied(result.error)
    return Published.model_validate(result)


async def publish_many(call: Call) -> dict[str, Any]:
    key = call.request.headers.get("idempotency-key")
    if call.body is not None:
        records = _records(call.body.records, call.data, key)
    elif len(call.data) <= PIECE_BYTES:
        records = await _records_in_parts(call, key)
    else:
        records = await _large_records(call, key)
    return _results(await _publish(call, records))


def _records(
    records: list[NewRecord], data: bytes, key: str | None, first: int = 0
) -> Sequence[RecordToPublish]:
    """Return the records of a JSON text, whose numbers begin with `first`. Raises `InvalidField`."""
    values = _values(records)
    if values is None or len(data) != _compact_bytes(values):  # otherwise it has no room for a second value
        check_keys(data)
    if values is not None and key is None:
        return ValuesToPublish(values)
    return [_new_record(record, number, key) for number, record in enumerate(records, first)]


async def _records_in_parts(call: Call, key: str | None) -> Sequence[RecordToPublish]:
    """Return the records of a body that is parsed in parts, and other work runs in between; as a whole if it has an
    unusual form or a fault, which is then described as that of a small body. Raises `InvalidField`."""
    turns = ItemTurns(call.services.scheduler)
    found: list[Sequence[RecordToPublish]] = []
    count = 0
    parts = split_list(call.data, "records")
    try:
        for part in parts:
            records = validated(_BODY, part).records
            found.append(_records(records, part, key, count))
            count += len(records)
            await turns.next(len(records))
    except InvalidField:
        if len(parts) == 1:
            raise
        count = PUBLISHED_RECORDS_MAX + 1
    if count > PUBLISHED_RECORDS_MAX:
        return _records(validated(_BODY, call.data).records, call.data, key)
    return joined_records(found)


async def _large_records(call: Call, key: str | None) -> Sequence[RecordToPublish]:
    """Return the records of a large body, which are parsed in pieces. Raises `InvalidField`, `TooManyRequests`."""
    budget = call.context.budget
    found: list[Sequence[RecordToPublish]] = []
    first = 0
    async with budget.turns as turns:
        with budget.parsed(len(call.data)):
            async for piece in ElementReader(call.data, "records", turns).pieces(
                _PIECE, PUBLISHED_RECORDS_MAX
            ):
                values = _values(piece) if key is None else None
                found.append(
                    [_new_record(record, number, key) for number, record in enumerate(piece, first)]
                    if values is None
                    else ValuesToPublish(values)
                )
                first += len(piece)
    return joined_records(found)


def _compact_bytes(values: list[bytes]) -> int:
    """Return the size of the shortest body with these values."""
    return len('{"records":[') + len(_COMPACT) * len(values) + sum(map(len, values)) + len("]}") - 1


def _values(records: list[NewRecord]) -> list[bytes] | None:
    """Return the values of records that have a value as text and nothing else; None if one has another form."""
    if list(map(len, records)).count(1) != len(records):
        return None
    try:
        return [record["value"].encode() for record in records]  # type: ignore[union-attr]
    except (KeyError, AttributeError, UnicodeEncodeError):
        return None


def _results(ranges: Sequence[PublishedRange]) -> dict[str, Any]:
    """Return the results of records. Raises the error of a single record."""
    found: list[dict[str, Any]] = []  # no models: a result has only the members of its kind
    failed = 0
    for _, count, one in ranges:
        if one.error is not None:
            failed += count
            found += [{"error": error_value(one.error)}] * count
            continue
        partition, time_ms = one.partition, one.timestamp_ms
        found += [
            {"partition": partition, "offset": offset, "timestamp_ms": time_ms}
            for offset in range(one.offset, one.offset + count)
        ]
    if len(found) == 1 and failed:
        assert ranges[0].result.error is not None
        raise copied(ranges[0].result.error)
    return {"records": found, "failed": failed}


def _new_record(record: NewRecord, number: int, idempotency_key: str | None) -> RecordToPublish:
    fields: dict[str, Any] = record  # type: ignore[assignment]
    pointer = f"/records/{number}"
    dedup_id = record.get("dedup_id")
    if idempotency_key is not None:
        if dedup_id is not None:
            raise InvalidField(f"{pointer}/dedup_id", "give Idempotency-Key or ids, not both")
        dedup_id = f"{idempotency_key}/{number}"
    at = record.get("deliver_at")
    headers = record.get("headers")
    return RecordToPublish(
        decode_value(fields, pointer),
        decode_key(fields, pointer),
        () if headers is None else decode_headers(headers, f"{pointer}/headers"),
        record.get("timestamp_ms"),
        record.get("partition"),
        record.get("delay_ms"),
        None if at is None else parse_time_ms(at, f"{pointer}/deliver_at"),
        record.get("priority"),
        None if dedup_id is None else _dedup_id(dedup_id),
    )


def _dedup_id(text: str) -> bytes:
    """Return a key as an id; a longer one is represented by its digest."""
    found = text.encode(errors="surrogatepass")
    return found if len(found) <= ID_BYTES_MAX else hashlib.sha256(found).hexdigest().encode()


async def _publish(call: Call, records: Sequence[RecordToPublish]) -> Sequence[PublishedRange]:
    topic = check_topic_name(call.topic)
    if call.query.schema_ is not None:
        records = await encode_values(call.services, call.client, topic, call.query.schema_, records)
    result = await publish_records(
        call.services, call.context.broker.clients, topic, records, caller=call.caller
    )
    return result.ranges


def _record_headers(call: Call) -> list[Header]:
    found: list[Header] = []
    for name, value in call.request.headers.items():
        if name.startswith(HEADER_PREFIX) and len(name) > len(HEADER_PREFIX):
            found.append((name.removeprefix(HEADER_PREFIX), value.encode("latin-1")))
        elif name in COPIED_HEADERS or name.startswith("ce-"):
            found.append((name, value.encode("latin-1")))
    return found


OPERATIONS: Final = (
    Operation(
        "POST",
        "/topics/{topic}/records",
        "Publish one record: the body is its value",
        publish_one,
        query=RawParameters,
        result=Published,
        takes_raw_body=True,
        tag="records",
        description="Headers: `Mansio-Delay` (10s, 5m or milliseconds), `Mansio-Deliver-At` (RFC 3339),"
        " `Mansio-Priority`, `Mansio-Header-NAME` (a header of the record), `Idempotency-Key` (on a topic with"
        " mansio.dedup.ms). Content-Type, traceparent, tracestate and `ce-*` become headers of the record.",
    ),
    Operation(
        "POST",
        "/topics/{topic}/records/batch",
        "Publish records, with a result for each",
        publish_many,
        query=BatchParameters,
        body=NewRecords,
        result=PublishResults,
        parses_large=True,
        tag="records",
        description="A single record that fails is an error of the request. `Idempotency-Key` gives each record the id"
        " KEY/NUMBER.",
    ),
)
