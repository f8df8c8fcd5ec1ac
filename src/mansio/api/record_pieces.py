"""Pieces of answers with records: how much of one is encoded before other connections are served.

One call of an encoder holds the event loop, or the interpreter, until it has encoded everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.broker.coordinator.share.received_records import ReceivedRecord
    from mansio.client.types import Message

AnyRecord = TypeVar("AnyRecord", "Message", "ReceivedRecord")

PIECE_BYTES: Final = 192 << 10
"""Size of keys, values and headers that are encoded at a time: a multiple of 3, so that the Base64 of pieces is that of
the whole."""

PIECE_RECORDS: Final = 500
PIECE_HEADERS: Final = 1_000


def content_bytes(record: Message | ReceivedRecord) -> int:
    """Return the size of key, value and headers; of more than `PIECE_HEADERS`, that of more than a piece."""
    size = 0
    if record.value is not None:
        size = len(record.value)
    if record.key is not None:
        size += len(record.key)
    if record.headers:
        if len(record.headers) > PIECE_HEADERS:
            return size + PIECE_BYTES + 1
        size += sum([len(name) + len(value or b"") for name, value in record.headers])
    return size


def is_one_piece(records: Sequence[Message | ReceivedRecord]) -> bool:
    """Return whether the records can be encoded at a time."""
    return len(records) <= PIECE_RECORDS and sum(map(content_bytes, records)) <= PIECE_BYTES


def in_pieces(records: Sequence[AnyRecord]) -> Iterator[Sequence[AnyRecord]]:
    """Yield the records in groups that can be encoded at a time; a record that is larger than a piece is alone."""
    begin, size = 0, 0
    for number, record in enumerate(records):
        size += (one := content_bytes(record))
        if begin < number and (size > PIECE_BYTES or number - begin == PIECE_RECORDS):
            yield records[begin:number]
            begin, size = number, one
    if records:
        yield records[begin:]
