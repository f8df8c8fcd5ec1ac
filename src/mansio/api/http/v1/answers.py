"""Answers with records: large ones are encoded in pieces while they are sent.

One call of an encoder holds the event loop until it has encoded everything: 60 MiB take a second in Base64. Therefore
the answer with more than `PIECE_BYTES` or `PIECE_RECORDS` is sent in pieces, and other connections are served in
between. It has the bytes of a short one. No more than a piece of it is in memory beside its records.

Invariant: one step of an answer encodes at most `PIECE_BYTES`, `PIECE_RECORDS` and `PIECE_HEADERS`, and parses at most
as much as a body of a request (`json_bodies`)."""

from __future__ import annotations

import base64
import codecs
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from mansio.api.asgi.json_bodies import VALUE_BYTES_MAX, VALUES_MAX, value_counts
from mansio.api.http.v1.values import encode_headers, encode_key, encode_value
from mansio.api.record_pieces import (
    PIECE_BYTES,
    PIECE_HEADERS,
    AnyRecord,
    content_bytes,
    in_pieces,
    is_one_piece,
)
from mansio.host.asyncio_loop import RunningLoop
from mansio.host.item_turns import ItemTurns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence

    from starlette.types import Receive, Scope, Send

    from mansio.api.http.v1.values import ValueFormat
    from mansio.broker.coordinator.share.received_records import ReceivedRecord
    from mansio.client.types import Message
    from mansio.wire.batch.record_batch import Header


def records_answer(
    records: Sequence[AnyRecord],
    as_: ValueFormat,
    fields: Callable[[AnyRecord], dict[str, Any]],
    others: dict[str, Any],
) -> Response:
    """Return the answer `{"records": [...], **others}`. `fields`: the members of a record beside its content."""
    if is_one_piece(records):
        found = [_record_value(each, as_, fields(each)) for each in records]
        return Response(to_json({"records": found, **others}), media_type="application/json")
    pieces = in_turns(_answer_pieces(records, as_, fields, others))
    return _PiecesResponse(pieces)


class _PiecesResponse(StreamingResponse):
    """A response in pieces. A client with HTTP/1.0, which has no chunks (RFC 9112, 6.1), gets it whole."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        super().__init__(pieces, media_type="application/json")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] != "1.0":
            await super().__call__(scope, receive, send)
            return
        content = b"".join([piece async for piece in self._pieces])
        await Response(content, media_type=self.media_type)(scope, receive, send)


async def in_turns(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces that are not empty, and let other connections go first after each turn."""
    turns = ItemTurns(RunningLoop(), items_per_look=1)
    for piece in pieces:
        if piece:
            yield piece
        await turns.next()


def record_pieces(
    record: Message | ReceivedRecord, as_: ValueFormat, fields: dict[str, Any]
) -> Iterator[bytes]:
    """Yield a record in JSON, in pieces of which some are empty: after each of them there may be a pause."""
    if content_bytes(record) <= PIECE_BYTES:
        yield to_json(_record_value(record, as_, fields))
        return
    yield to_json(fields)[:-1] + b","
    if record.key is None or len(record.key) <= PIECE_BYTES:
        yield _members(encode_key(record.key))
    elif (yield from _is_text(record.key)):
        yield from _text_member("key", record.key)
    else:
        yield from _base64_member("key_base64", record.key)
    yield b","
    yield from _value_pieces(record.value, as_)
    yield b',"headers":{'
    yield from _header_pieces(record.headers)
    yield b"}}"


def _record_value(
    record: Message | ReceivedRecord, as_: ValueFormat, fields: dict[str, Any]
) -> dict[str, Any]:
    return {
        **fields,
        **encode_key(record.key),
        **encode_value(record.value, as_),
        "headers": encode_headers(record.headers),
    }


def _answer_pieces(
    records: Sequence[AnyRecord],
    as_: ValueFormat,
    fields: Callable[[AnyRecord], dict[str, Any]],
    others: dict[str, Any],
) -> Iterator[bytes]:
    yield b'{"records":['
    comma = b""
    for piece in in_pieces(records):
        yield comma
        comma = b","
        if len(piece) == 1:
            yield from record_pieces(piece[0], as_, fields(piece[0]))
        else:
            yield to_json([_record_value(each, as_, fields(each)) for each in piece])[1:-1]
    yield b"]," + to_json(others)[1:]


def _members(found: dict[str, Any]) -> bytes:
    return to_json(found)[1:-1]


def _value_pieces(value: bytes | None, as_: ValueFormat) -> Iterator[bytes]:
    if value is None or len(value) <= PIECE_BYTES or (as_ == "json" and (yield from _is_small_json(value))):
        yield _members(encode_value(value, as_))
    elif as_ in ("auto", "text") and (yield from _is_text(value)):
        yield from _text_member("value", value)
    else:
        yield from _base64_member("base64", value)


def _header_pieces(headers: Sequence[Header]) -> Iterator[bytes]:
    """Yield the members of `encode_headers`."""
    last: dict[str, bytes | None] = {}
    for begin in range(0, len(headers), PIECE_HEADERS):
        last.update(headers[begin : begin + PIECE_HEADERS])
        yield b""
    small: dict[str, bytes | None] = {}
    size = 0
    comma = b""
    for name, value in last.items():
        one = len(name) + len(value or b"")
        if small and (size + one > PIECE_BYTES or len(small) == PIECE_HEADERS):
            yield comma + _members(encode_headers(small.items()))
            small, size, comma = {}, 0, b","
        if one <= PIECE_BYTES:
            small[name] = value
            size += one
            continue
        yield comma
        comma = b","
        for begin in range(0, len(name), PIECE_BYTES):
            yield (b"" if begin else b'"') + to_json(name[begin : begin + PIECE_BYTES])[1:-1]
        yield b'":' if name else b'"":'
        if value is None:
            yield b"null"
        elif (yield from _is_text(value)):
            yield from _text(value)
        else:
            yield b"{"
            yield from _base64_member("base64", value)
            yield b"}"
    if small:
        yield comma + _members(encode_headers(small.items()))


def _text_member(name: str, content: bytes) -> Iterator[bytes]:
    yield to_json(name) + b":"
    yield from _text(content)


def _text(content: bytes) -> Iterator[bytes]:
    """Yield UTF-8 as a JSON string."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    yield b'"'
    for begin in range(0, len(content), PIECE_BYTES):
        end = begin + PIECE_BYTES
        yield to_json(decode(content[begin:end], end >= len(content)))[1:-1]
    yield b'"'


def _base64_member(name: str, content: bytes) -> Iterator[bytes]:
    yield to_json(name) + b':"'
    for begin in range(0, len(content), PIECE_BYTES):
        yield base64.b64encode(content[begin : begin + PIECE_BYTES])
    yield b'"'


def _is_text(content: bytes) -> Generator[bytes, None, bool]:
    """Return whether bytes are UTF-8, with pauses."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for begin in range(0, len(content), PIECE_BYTES):
            end = begin + PIECE_BYTES
            decode(content[begin:end], end >= len(content))
            yield b""
    except UnicodeDecodeError:
        return False
    return True


def _is_small_json(value: bytes) -> Generator[bytes, None, bool]:
    """Return whether a value may be parsed as JSON in one call, with pauses."""
    if len(value) > VALUE_BYTES_MAX:
        return False
    for found in value_counts(value.decode("latin-1"), 0):  # only ASCII characters are counted
        if found > VALUES_MAX:
            return False
        yield b""
    return True
