"""Header of a record's deduplication id, and how a batch with such headers is read.

On a topic with mansio.dedup.ms a record whose id was accepted in that time before is a repeat: it is not stored again.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRecord, MessageTooLarge
from mansio.tracebacks import copied
from mansio.wire.batch.inspection import REPORTED_RECORDS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.wire.batch.inspection import InspectedBatch
    from mansio.wire.batch.record_batch import BatchHeader

DEDUP_ID_HEADER: Final = "mansio-dedup-id"

ID_BYTES_MAX: Final = 128
"""Maximum size of an id in bytes; it has at least one."""

KEY_BYTES: Final = 16
"""Size of the key of an id."""

DEDUP_BATCH_RECORDS_MAX: Final = 10_000
"""Maximum number of records in a batch with ids: the ids are compared with the window on the event loop."""

DEDUP_ID_NAME: Final = DEDUP_ID_HEADER.encode()


class IdentifiedBatch(NamedTuple):
    """A producer's batch with ids. `keys`: per record the key of its id, None without one."""

    header: BatchHeader
    keys: Sequence[bytes | None]


def key_of(dedup_id: bytes) -> bytes:
    """Return the key of an id: the first 16 bytes that BLAKE2b computes of it. Two ids with one key would have to be
    found among 2**64 of them, so a record is never taken for a repeat of another one by chance."""
    return blake2b(dedup_id, digest_size=KEY_BYTES).digest()


def read_ids(inspected: InspectedBatch, name: str) -> IdentifiedBatch | None:
    """Return the ids of a producer's batch; None if none of its records has one. `name`: that of the partition, for
    errors.

    Raises `InvalidRecord` with the indexes of the records whose ids are invalid, `MessageTooLarge` for more than
    `DEDUP_BATCH_RECORDS_MAX` records or too many headers."""
    header, data = inspected.header, inspected.data
    if DEDUP_ID_NAME not in data:
        return None
    if header.record_count > DEDUP_BATCH_RECORDS_MAX:
        raise MessageTooLarge(
            f"{name}: a batch of {header.record_count} records; with ids it may have {DEDUP_BATCH_RECORDS_MAX}"
        )
    bounds = inspected.bounds
    if bounds[-1] != len(data):
        raise InvalidRecord(f"{name}: {len(data) - bounds[-1]} bytes after the last record")
    inspected.check_header_count(name)
    keys: list[bytes | None] = [None] * header.record_count
    errors: dict[int, str] = {}
    last = -1
    for index, value in inspected.find(DEDUP_ID_NAME):
        if index == last:
            errors[index] = f"a record has the header {DEDUP_ID_HEADER} once"
        elif not value or len(value) > ID_BYTES_MAX:
            errors[index] = f"{DEDUP_ID_HEADER} has 1 to {ID_BYTES_MAX} bytes"
        else:
            keys[index] = key_of(value)
        last = index
    if errors:
        first, reason = next(iter(errors.items()))
        rejection = InvalidRecord(f"{name}: {reason} (record {first} of the batch)")
        rejection.record_errors = tuple(errors.items())[:REPORTED_RECORDS_MAX]
        raise copied(rejection)
    return None if keys.count(None) == len(keys) else IdentifiedBatch(header, keys)
