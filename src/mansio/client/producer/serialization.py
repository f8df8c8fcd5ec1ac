"""Conversion of the caller's keys, values and headers into the bytes and numbers of a record.

Invariant: the result can be written into a batch; anything else raises `InvalidRecord`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mansio.client.producer.accumulator import RECORD_OVERHEAD_BYTES
from mansio.client.types import OutgoingRecord, milliseconds
from mansio.errors import InvalidRecord

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from mansio.client.types import Headers

    HeadersLike = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]
    Publishable = bytes | str | OutgoingRecord | None


def serialize_parts(
    value: bytes | str | None,
    key: bytes | str | None,
    headers: HeadersLike | None,
    partition: int | None,
    timestamp_ms: int | datetime | None,
) -> OutgoingRecord:
    """The record with its parts as bytes and numbers. Raises `InvalidRecord`."""
    return OutgoingRecord(
        _bytes(value),
        _bytes(key),
        () if headers is None else _headers(headers),
        partition,
        None if timestamp_ms is None else milliseconds(timestamp_ms),
    )


def serialize(given: Publishable) -> OutgoingRecord:
    """A record from a value or an `OutgoingRecord`, with its parts as bytes. Raises `InvalidRecord`."""
    if not isinstance(given, OutgoingRecord):
        return OutgoingRecord(_bytes(given))
    value, key, headers = given.value, given.key, given.headers
    if (
        (value is None or isinstance(value, bytes))
        and (key is None or isinstance(key, bytes))
        and not headers
    ):
        return given
    return given._replace(value=_bytes(value), key=_bytes(key), headers=_headers(headers) if headers else ())


def size_of(record: OutgoingRecord) -> int:
    """Approximate size of a record in its batch, in bytes."""
    size = RECORD_OVERHEAD_BYTES
    if record.value is not None:
        size += len(record.value)
    if record.key is not None:
        size += len(record.key)
    for name, content in record.headers:
        size += 10 + len(name) + (len(content) if content else 0)
    return size


def _bytes(given: object) -> bytes | None:
    """The bytes of a key, value or header; text is encoded as UTF-8. Types are checked at run time."""
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    raise InvalidRecord(f"keys, values and headers must be bytes, text or None, not {type(given).__name__}")


def _headers(headers: HeadersLike) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        found = tuple((name, _bytes(content)) for name, content in pairs)
    except (TypeError, ValueError):
        raise InvalidRecord("headers must be a mapping or an iterable of (name, value) pairs") from None
    for name, _ in found:
        if not isinstance(name, str):
            raise InvalidRecord(f"a header name must be text, not {type(name).__name__}")
    return found
