"""Append validation (Kafka `LogValidator`): the topic's limits, and the errors for batches that violate them.

Pure. The partition tests the limits on its hot path and calls these functions only to build the error. A batch is
decoded only for a compacted topic, which needs a key in every record, or when it is rejected anyway; the error then
names the records to remove (KIP-467).

Invariants:
* An error names the partition and no path on the broker's disk.
* What is decoded is bounded in bytes and in records, so that one batch cannot block the event loop for long.
* A batch is accepted or rejected as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from mansio.errors import (
    DiskFull,
    InvalidRecord,
    InvalidTimestamp,
    LogFailed,
    MessageTooLarge,
    RequestError,
    StorageError,
)
from mansio.ports import DISK_FULL_ERRNOS
from mansio.wire.batch.record_batch import TimestampType
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from mansio.ports import Buffer
    from mansio.wire.batch.recompress import Compression
    from mansio.wire.batch.record_batch import BatchHeader

    RecordErrors = tuple[tuple[int, str | None], ...]


CONTROL_OR_TRANSACTIONAL: Final = 0x30
"""The two bits of a batch's attributes."""


class AppendRules(NamedTuple):
    """The topic settings that are enforced on append."""

    message_bytes_max: int
    timestamp_type: TimestampType
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int
    keys_needed: bool = False
    """The topic is compacted: a record without a key could be neither retained nor deleted."""
    compression: Compression | None = None
    """Clients' batches are stored with this codec; None: as sent (see `Recompressor`)."""


def reject_batch(name: str, rules: AppendRules, header: BatchHeader) -> NoReturn:
    """Raise the error for a client's batch that is too large, or of a kind that clients may not write."""
    if header.size > rules.message_bytes_max:
        raise MessageTooLarge(
            f"{name}: a batch of {header.size} bytes is over max.message.bytes={rules.message_bytes_max}"
        )
    if header.is_control:
        raise InvalidRecord(f"{name}: clients may not write control batches")
    raise InvalidRecord(f"{name}: transactional batches are not offered by this broker")


def reject_timestamps(
    name: str, rules: AppendRules, batch: Buffer, header: BatchHeader, now_ms: int
) -> NoReturn:
    """Raise the error for timestamps out of range (KIP-937). The batch header has the first and the highest timestamp;
    those two are compared with the limits."""
    latest_ms, earliest_ms = now_ms + rules.timestamp_after_max_ms, now_ms - rules.timestamp_before_max_ms
    if header.max_timestamp_ms > latest_ms:
        error = InvalidTimestamp(
            f"{name}: timestamp {header.max_timestamp_ms} is more than message.timestamp.after.max.ms="
            f"{rules.timestamp_after_max_ms} ahead of the broker's clock"
        )
    else:
        error = InvalidTimestamp(
            f"{name}: timestamp {header.base_timestamp_ms} is more than message.timestamp.before.max.ms="
            f"{rules.timestamp_before_max_ms} behind the broker's clock"
        )
    error.record_errors = timestamp_errors(batch, header, earliest_ms, latest_ms)
    raise error


def log_failed_error(name: str, failed: StorageError) -> LogFailed:
    """The error of every write to a log that has failed."""
    return LogFailed(
        f"{name}: its log failed and takes no more writes until the broker is restarted ({_reason(failed)})"
    )


def append_error(name: str, error: StorageError) -> StorageError:
    """The error of an append that failed and may succeed later: `DiskFull` if that is the cause."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRNOS:
        return DiskFull(
            f"{name}: the broker's disk is full ({cause.strerror}); nothing was written, and the same request "
            f"succeeds when there is space"
        )
    return StorageError(f"{name}: {_reason(error)}")


def _reason(error: StorageError) -> str:
    """The part of a failure that clients may see: the system's message without file paths."""
    cause = error.__cause__
    return cause.strerror or str(cause) if isinstance(cause, OSError) else error.message


DECODED_BYTES_MAX = 32 << 20
"""Limit of a decompressed batch of a compacted topic."""

DECODED_RECORDS_MAX = 100_000
REPORTED_RECORDS_MAX = 1000
REJECTED_DECODED_BYTES_MAX = 4 << 20
"""Limit up to which a batch that was rejected by its header is decoded to name the records."""

REJECTED_DECODED_RECORDS_MAX = 10_000

NO_KEY = "a record of a compacted topic needs a key"
BAD_TIMESTAMP = "the timestamp is out of the accepted range"


def check_keys(partition: str, batch: Buffer, header: BatchHeader) -> None:
    """Check that every record has a key. Raises `InvalidRecord` with the records that have none (1,000 at most),
    `MessageTooLarge` for more records than are checked: the client then sends smaller batches."""
    if header.record_count > DECODED_RECORDS_MAX:
        raise MessageTooLarge(
            f"{partition}: a batch of {header.record_count} records; {DECODED_RECORDS_MAX} at most are taken by a"
            " compacted topic"
        )
    records = read_records(batch, output_bytes_max=DECODED_BYTES_MAX)
    keyless = [index for index, record in enumerate(records) if record.key is None]
    if not keyless:
        return
    error = InvalidRecord(f"{partition}: {NO_KEY}; {len(keyless)} of {len(records)} in the batch have none")
    error.record_errors = tuple((index, NO_KEY) for index in keyless[:REPORTED_RECORDS_MAX])
    raise error


def timestamp_errors(batch: Buffer, header: BatchHeader, earliest_ms: int, latest_ms: int) -> RecordErrors:
    """The records of a rejected batch that lie outside [earliest_ms, latest_ms]; none if decoding would take too
    long."""
    if (
        header.record_count > REJECTED_DECODED_RECORDS_MAX
        or header.timestamp_type is not TimestampType.CREATE
    ):
        return ()
    try:
        records = read_records(batch, output_bytes_max=REJECTED_DECODED_BYTES_MAX)
    except RequestError:
        return ()  # the batch is rejected in any case
    late = [
        index
        for index, record in enumerate(records)
        if record.timestamp_ms > latest_ms or 0 <= record.timestamp_ms < earliest_ms
    ]
    return tuple((index, BAD_TIMESTAMP) for index in late[:REPORTED_RECORDS_MAX])
