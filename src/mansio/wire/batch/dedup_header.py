"""Header of a record's deduplication id, and how a batch with such headers is read.

On a topic with mansio.dedup.ms a record whose id was accepted in that time before is a repeat: it is not stored again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRecord, MessageTooLarge
from mansio.tracebacks import copied
from mansio.wire.batch.dedup_control_records import key_of
from mansio.wire.batch.record_batch import varint
from mansio.wire.batch.record_reader import check_header_count, decompress_batch, header_bounds, record_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Buffer
    from mansio.wire.batch.record_batch import BatchHeader

DEDUP_ID_HEADER: Final = "mansio-dedup-id"

ID_BYTES_MAX: Final = 128
"""Maximum size of an id in bytes; it has at least one."""

RECORDS_MAX: Final = 10_000
"""Maximum number of records in a batch with ids: the ids are compared with the window on the event loop."""

REPORTED_RECORDS_MAX: Final = 1000
"""Maximum number of record errors in one response."""

_NAME: Final = DEDUP_ID_HEADER.encode()
_NAME_AND_LENGTH: Final = varint(len(_NAME)) + _NAME


class IdentifiedBatch(NamedTuple):
    """A producer's batch with ids. `keys`: per record the key of its id, None without one."""

    header: BatchHeader
    keys: Sequence[bytes | None]


def read_ids(batch: Buffer, name: str) -> IdentifiedBatch | None:
    """Return the ids of a producer's batch; None if none of its records has one. `name` of the partition is for errors.

    Raises `InvalidRecord` with the indexes of the records whose ids are invalid, `MessageTooLarge` for more than
    `RECORDS_MAX` records or too many headers."""
    header, data = decompress_batch(batch)
    if _NAME not in data:
        return None
    if header.record_count > RECORDS_MAX:
        raise MessageTooLarge(
            f"{name}: a batch of {header.record_count} records; with ids it may have {RECORDS_MAX}"
        )
    bounds = record_bounds(data, header.record_count)
    if bounds[-1] != len(data):
        raise InvalidRecord(f"{name}: {len(data) - bounds[-1]} bytes after the last record")
    check_header_count(data, bounds, name)
    keys: list[bytes | None] = []
    errors: list[tuple[int, str | None]] = []
    found = data.find(_NAME)
    for index in range(header.record_count):
        key = None
        if 0 <= found < bounds[index + 1]:
            try:
                key = _read_key(data, bounds[index], bounds[index + 1])
            except ValueError as error:
                errors.append((index, str(error)))
            found = data.find(_NAME, bounds[index + 1])
        keys.append(key)
    if errors:
        rejection = InvalidRecord(f"{name}: {errors[0][1]} (record {errors[0][0]} of the batch)")
        rejection.record_errors = tuple(errors[:REPORTED_RECORDS_MAX])
        raise copied(rejection)
    return None if keys.count(None) == len(keys) else IdentifiedBatch(header, keys)


def _read_key(data: bytes, begin: int, end: int) -> bytes | None:
    """Return the key of the id of the encoded record `data[begin:end]`; None if it has none.

    Raises `ValueError` with a message for the producer, `InvalidRecord`."""
    value: bytes | None = None
    is_found = False
    for name_begin, value_begin, value_end in header_bounds(data, begin, end):
        if data.startswith(_NAME_AND_LENGTH, name_begin):
            if is_found:
                raise ValueError(f"a record has the header {DEDUP_ID_HEADER} once")
            is_found = True
            value = None if value_begin < 0 else data[value_begin:value_end]
    if not is_found:
        return None
    if not value or len(value) > ID_BYTES_MAX:
        raise ValueError(f"{DEDUP_ID_HEADER} has 1 to {ID_BYTES_MAX} bytes")
    return key_of(value)
