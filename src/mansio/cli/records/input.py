"""Reads records from a file or from standard input, as they come never more than one of them whole.

Always true: bytes stay bytes; a pipe is read only when it has something, so Ctrl-C always gets through; a
record longer than `RECORD_BYTES_MAX` is an error and not a growing buffer.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import InvalidRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHUNK_BYTES = 256 * 1024
RECORD_BYTES_MAX = 64 * 1024 * 1024


class RecordFormat(NamedTuple):
    """How input becomes records. `delimiter` ends one (empty: the whole input is one); `key_separator` (or
    None)
    stands between key and value; `empty_is_null` makes an empty value a null one (a tombstone)."""

    delimiter: bytes = b"\n"
    key: bytes | None = None
    key_separator: bytes | None = None
    empty_is_null: bool = False


class RecordSplitter:
    """Turns chunks into whole pieces between delimiters."""

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The pieces that are complete now."""
        delimiter = self._delimiter
        if not delimiter or (len(delimiter) == 1 and delimiter not in chunk):
            self._buffer(chunk)
            return []
        records = b"".join((*self._pending, chunk)).split(delimiter)
        self._pending, self._pending_bytes = [], 0
        self._buffer(records.pop())
        return records

    def end(self) -> list[bytes]:
        """What stands after the last delimiter, if anything."""
        pending = b"".join(self._pending)
        self._pending, self._pending_bytes = [], 0
        return [pending] if pending else []

    def _buffer(self, chunk: bytes) -> None:
        self._pending.append(chunk)
        self._pending_bytes += len(chunk)
        if self._pending_bytes > RECORD_BYTES_MAX:
            raise InvalidRecord(f"no delimiter within {RECORD_BYTES_MAX:,} bytes")


def key_and_value(
    record_bytes: bytes, record_format: RecordFormat, number: int
) -> tuple[bytes | None, bytes | None]:
    """One piece as (key, value). `number` counts from 1, for the error when the separator is not there."""
    key, value = record_format.key, record_bytes
    if record_format.key_separator is not None:
        key, separator, value = record_bytes.partition(record_format.key_separator)
        if not separator:
            raise InvalidRecord(
                f"record {number} has no key separator {record_format.key_separator!r}: {record_bytes[:40]!r}"
            )
    return key, (None if record_format.empty_is_null and not value else value)


async def read_chunks(descriptor: int) -> AsyncIterator[bytes]:
    """What a file, pipe or terminal gives, until its end."""
    while True:
        await _readable(descriptor)
        chunk = os.read(descriptor, CHUNK_BYTES)
        if not chunk:
            return
        yield chunk


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    try:
        loop.add_reader(descriptor, _set_ready, ready)
    except (PermissionError, NotImplementedError):  # a regular file, which is always ready; or Windows
        await asyncio.sleep(0)
        return
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _set_ready(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
