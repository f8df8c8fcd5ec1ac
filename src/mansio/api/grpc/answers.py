"""Answers with records: large ones are encoded on a thread, in pieces.

Protobuf copies the value of a record three times in calls that hold the interpreter: 60 MiB stop every other thread for
a quarter of a second. Therefore this module writes the fields of large records itself.

Invariant: one call of the encoder encodes at most `PIECE_BYTES` and `PIECE_RECORDS` (`api.record_pieces`).
"""

from __future__ import annotations

import asyncio
import io
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.grpc.conversion import add_record
from mansio.api.record_pieces import PIECE_BYTES, AnyRecord, content_bytes, in_pieces, is_one_piece
from mansio.wire.headers import unsigned_varint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.broker.coordinator.share.received_records import ReceivedRecord
    from mansio.client.types import Message

_COPIED_BYTES: Final = 1 << 20
_BYTES: Final = 2
"""Wire type of a field with a length."""


def serialized(response: Any) -> bytes:
    """Return the bytes of a response, which may be encoded already."""
    return response if isinstance(response, bytes) else response.SerializeToString()


async def records_response(
    kind: Any, records: Sequence[AnyRecord], delivery: Callable[[AnyRecord], tuple[str, int]], **others: Any
) -> Any:
    """Return a message of `kind`, whose field 1 are the records, or its bytes. `delivery`: receipt and delivery count
    of a record."""
    if is_one_piece(records):
        return _response(kind, records, delivery, others)
    return await asyncio.to_thread(_encoded, partial(_pieces, kind, records, delivery, others))


def _response(
    kind: Any,
    records: Sequence[AnyRecord],
    delivery: Callable[[AnyRecord], tuple[str, int]],
    others: dict[str, Any],
) -> Any:
    response = kind(**others)
    for each in records:
        add_record(response.records, each, *delivery(each))
    return response


def _encoded(pieces: Callable[[], Iterator[bytes]]) -> bytes:
    """Join pieces: other threads run between two of them."""
    found = io.BytesIO()
    for piece in pieces():
        if len(piece) <= _COPIED_BYTES:
            found.write(piece)
            continue
        view = memoryview(piece)
        for begin in range(0, len(piece), _COPIED_BYTES):
            found.write(view[begin : begin + _COPIED_BYTES])
    return found.getvalue()  # without a copy


def _pieces(
    kind: Any,
    records: Sequence[AnyRecord],
    delivery: Callable[[AnyRecord], tuple[str, int]],
    others: dict[str, Any],
) -> Iterator[bytes]:
    """Yield a message in pieces: the concatenation of encoded messages is the encoding of the merged message."""
    for piece in in_pieces(records):
        if len(piece) == 1 and content_bytes(piece[0]) > PIECE_BYTES:
            yield from _large_record(piece[0], *delivery(piece[0]))
        else:
            yield _response(kind, piece, delivery, {}).SerializeToString()
    yield kind(**others).SerializeToString()


def _large_record(record: Message | ReceivedRecord, receipt: str, delivery_count: int) -> list[bytes]:
    head = pb.Record(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        receipt=receipt,
        delivery_count=delivery_count,
    )
    parts: list[bytes] = [head.SerializeToString()]
    if record.key is not None:
        parts += (_field(5, len(record.key)), record.key)
    if record.value is not None:
        parts += (_field(6, len(record.value)), record.value)
    for name, value in record.headers:
        content = name.encode()
        header = [_field(1, len(content)), content]
        if value is not None:
            header += (_field(2, len(value)), value)
        parts += (_field(7, sum(map(len, header))), *header)
    return [_field(1, sum(map(len, parts))), *parts]


def _field(number: int, size: int) -> bytes:
    """Return the beginning of a field with `size` bytes."""
    return unsigned_varint(number << 3 | _BYTES) + unsigned_varint(size)
