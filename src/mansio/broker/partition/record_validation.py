"""Rules about single records, for topics that ask for them: which records of a batch are at fault, by their index.

A batch is opened here only for a compacted topic, or when it is refused anyway. Always true: what is opened is bounded
in bytes and in records, so that one batch can hold up the broker's loop for a fraction of a second at most; a batch
stands or falls as a whole, and the answer names what to take out of it (KIP-467).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import InvalidRecord, MessageTooLarge, RequestError
from mansio.wire.batch.record_batch import TimestampType
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from mansio.ports import Buffer
    from mansio.wire.batch.record_batch import BatchHeader

    RecordErrors = tuple[tuple[int, str | None], ...]

DECODED_BYTES_MAX = 32 << 20
"""What a batch for a compacted topic may grow to when it is decompressed."""

DECODED_RECORDS_MAX = 100_000
REPORTED_RECORDS_MAX = 1000
REJECTED_DECODED_BYTES_MAX = 4 << 20
"""A batch that is refused by its header is opened to name the records only up to so many bytes."""

REJECTED_DECODED_RECORDS_MAX = 10_000

NO_KEY = "a record of a compacted topic needs a key"
BAD_TIMESTAMP = "the timestamp is out of the accepted range"


def check_keys(partition: str, batch: Buffer, header: BatchHeader) -> None:
    """Refuse a batch with a record without a key. Raises `InvalidRecord`, which names them (1,000 at most);
    `MessageTooLarge` for more records than are looked at: a client then sends smaller batches.
    """
    if header.record_count > DECODED_RECORDS_MAX:
        raise MessageTooLarge(
            f"{partition}: a batch of {header.record_count} records; {DECODED_RECORDS_MAX} at most are taken by a"
            " compacted topic"
        )
    records = read_records(batch, max_output_bytes=DECODED_BYTES_MAX)
    keyless = [index for index, record in enumerate(records) if record.key is None]
    if not keyless:
        return
    error = InvalidRecord(f"{partition}: {NO_KEY}; {len(keyless)} of {len(records)} in the batch have none")
    error.record_errors = tuple((index, NO_KEY) for index in keyless[:REPORTED_RECORDS_MAX])
    raise error


def timestamp_errors(batch: Buffer, header: BatchHeader, earliest_ms: int, latest_ms: int) -> RecordErrors:
    """The records of a refused batch that lie outside [earliest_ms, latest_ms]; none when it would take long to say."""
    if (
        header.record_count > REJECTED_DECODED_RECORDS_MAX
        or header.timestamp_type is not TimestampType.CREATE
    ):
        return ()
    try:
        records = read_records(batch, max_output_bytes=REJECTED_DECODED_BYTES_MAX)
    except RequestError:
        return ()  # it is refused in any case
    late = [
        index
        for index, record in enumerate(records)
        if record.timestamp_ms > latest_ms or 0 <= record.timestamp_ms < earliest_ms
    ]
    return tuple((index, BAD_TIMESTAMP) for index in late[:REPORTED_RECORDS_MAX])
