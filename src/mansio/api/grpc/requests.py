"""Messages of gRPC requests: the fields of a large one are counted before it is parsed, and its records in pieces.

Protobuf's parser builds an object for each element of a repeated field, in one call that holds the event loop: two
bytes of a request are enough for one. Therefore gRPC passes the bytes of messages on, and this module parses them.

Invariants:
* One call of the parser parses at most `SMALL_BYTES`, or `FIELDS_MAX` fields, fields of nested messages included.
* A request has at most `PUBLISHED_RECORDS_MAX` records with `HEADERS_MAX` headers together.
* Of the large requests one is parsed at a time, and what is being stored has at most `BUDGET_BYTES`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.grpc.conversion import new_records
from mansio.api.request_budget import RequestBudget
from mansio.broker.services.publish_records import PUBLISHED_RECORDS_MAX, joined_records
from mansio.errors import InvalidRequest
from mansio.host.asyncio_loop import RunningLoop
from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from mansio.broker.services.publish_records import RecordToPublish

SMALL_BYTES: Final = 128 << 10
FIELDS_MAX: Final = 50_000
OTHER_FIELDS_MAX: Final = 1_000
"""Fields of a large `PublishRequest` beside its records."""

HEADERS_MAX: Final = 100_000
PIECE_RECORDS: Final = 500
"""Records of a large request that are parsed in one call, as far as they have `PIECE_BYTES` together."""

PIECE_BYTES: Final = 32 << 10

_RECORDS: Final = pb.PublishRequest.DESCRIPTOR.fields_by_name["records"]
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_VARINT_BYTES_MAX: Final = 10


class Publication(NamedTuple):
    """A `PublishRequest`: the topic, the records to publish, and the schema that encodes their values, "" for none."""

    topic: str
    records: Sequence[RecordToPublish]
    schema: str = ""


class Requests:
    """Parses the messages of one listener."""

    def __init__(self) -> None:
        self._budget = RequestBudget()

    @contextlib.asynccontextmanager
    async def publication(self, data: bytes) -> AsyncIterator[Publication]:
        """Parse a `PublishRequest`; its memory is counted until the end of the context. Raises `InvalidRequest`,
        `TooManyRequests`."""
        if len(data) <= SMALL_BYTES:
            request = _parsed(pb.PublishRequest, data)
            if len(request.records) > PUBLISHED_RECORDS_MAX:
                raise InvalidRequest(f"more than {PUBLISHED_RECORDS_MAX} records in one request")
            records = await new_records(request, ItemTurns(RunningLoop()))
            yield Publication(request.topic, records, request.schema)
            return
        with self._budget.parsed(len(data)):
            found = await self._large_publication(data)
            yield found

    async def _large_publication(self, data: bytes) -> Publication:
        topic = schema = ""
        found: list[Sequence[RecordToPublish]] = []
        headers = 0
        async with self._budget.turns as turns:
            for start, end in _pieces(data):
                request = _parsed(pb.PublishRequest, data[start:end])
                topic = request.topic or topic
                schema = request.schema or schema
                headers += sum(len(each.headers) for each in request.records)
                if headers > HEADERS_MAX:
                    raise InvalidRequest(f"more than {HEADERS_MAX} headers in one request")
                found.append(await new_records(request, ItemTurns(RunningLoop())))
                await turns.pause()
        return Publication(topic, joined_records(found), schema)


def parse(message: Any, data: bytes) -> Any:
    """Parse a message. Raises `InvalidRequest`, also if it is large and has more than `FIELDS_MAX` fields."""
    if len(data) > SMALL_BYTES:
        _count_fields(message.DESCRIPTOR, data, 0, len(data), FIELDS_MAX)
    return _parsed(message, data)


def _parsed(message: Any, data: bytes) -> Any:
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise InvalidRequest("this is not the message of the method") from error


def _pieces(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the bounds of pieces of a `PublishRequest`, each of whole fields: the message is what all of them are,
    merged. Raises `InvalidRequest`."""
    start = records = others = fields = 0
    for number, begin, content, end in _fields(data, 0, len(data)):
        if end - begin > PIECE_BYTES and number == _RECORDS.number:
            _count_fields(_RECORDS.message_type, data, content, end, FIELDS_MAX)
        if begin > start and (end - start > PIECE_BYTES or fields == PIECE_RECORDS):
            yield start, begin
            start, fields = begin, 0
        fields += 1
        if number == _RECORDS.number:
            records += 1
        else:
            others += 1
        if records > PUBLISHED_RECORDS_MAX or others > OTHER_FIELDS_MAX:
            raise InvalidRequest(f"more than {PUBLISHED_RECORDS_MAX} records in one request, or other fields")
    yield start, len(data)


def _count_fields(descriptor: Any, data: bytes, start: int, end: int, left: int) -> int:
    """Count the fields of a message and of those in it; return how many more there may be. Raises `InvalidRequest`."""
    known = descriptor.fields_by_number
    for number, _, content, field_end in _fields(data, start, end):
        left -= 1
        field = known.get(number)
        if field is not None and field.message_type is not None:
            left = _count_fields(field.message_type, data, content, field_end, left)
        elif field is not None and field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
            left -= field_end - content  # numbers can be packed
        if left < 0:
            raise InvalidRequest(f"more than {FIELDS_MAX} fields in one request")
    return left


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, begin, begin of the content, and end of each field. Raises `InvalidRequest`."""
    at = start
    try:
        while at < end:
            begin = at
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = _varint(data, begin)
            kind = tag & 7
            content = at
            if kind == _BYTES:
                size = data[at]
                at += 1
                if size >= 0x80:
                    size, at = _varint(data, at - 1)
                content = at
                at += size
            elif kind == _VARINT:
                _, at = _varint(data, at)
            elif kind in (_FIXED_32, _FIXED_64):
                at += 4 if kind == _FIXED_32 else 8
            else:
                raise InvalidRequest("this is not the message of the method")
            if at > end:
                raise InvalidRequest("this is not the message of the method")
            yield tag >> 3, begin, content, at
    except IndexError:
        raise InvalidRequest("this is not the message of the method") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    for position in range(at, at + _VARINT_BYTES_MAX):
        byte = data[position]
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, position + 1
        shift += 7
    raise InvalidRequest("this is not the message of the method")
