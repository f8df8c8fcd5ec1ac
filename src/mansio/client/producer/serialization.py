"""What callers hand to a producer, as the bytes and numbers that go into a batch.

Always true: what comes out can be written into a batch, or `InvalidRecord` says what was wrong with it.
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
    """What the caller gave, as bytes and numbers. `InvalidRecord`."""
    return OutgoingRecord(
        _bytes(value),
        _bytes(key),
        () if headers is None else _headers(headers),
        partition,
        None if timestamp_ms is None else milliseconds(timestamp_ms),
    )


def serialize(given: Publishable) -> OutgoingRecord:
    """A value, or a record as it came or with its parts as bytes. `InvalidRecord`."""
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
    """About how many bytes a record takes in its batch."""
    size = RECORD_OVERHEAD_BYTES
    if record.value is not None:
        size += len(record.value)
    if record.key is not None:
        size += len(record.key)
    for name, content in record.headers:
        size += 10 + len(name) + (len(content) if content else 0)
    return size


def _bytes(given: object) -> bytes | None:
    """What the caller gave, whatever its types promised; text as UTF-8."""
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    raise InvalidRecord(f"keys, values and headers are bytes, text or None, not {type(given).__name__}")


def _headers(headers: HeadersLike) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        found = tuple((name, _bytes(content)) for name, content in pairs)
    except (TypeError, ValueError):
        raise InvalidRecord("headers are a mapping, or pairs of a name and its value") from None
    for name, _ in found:
        if not isinstance(name, str):
            raise InvalidRecord(f"the name of a header is text, not {type(name).__name__}")
    return found
