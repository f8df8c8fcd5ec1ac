"""Append validation (Kafka `LogValidator`): the topic's limits, and the errors for batches that violate them.

Pure. The partition tests the limits on its hot path and calls these functions only to build the error.

Invariant: an error names the partition and no path on the broker's disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from mansio.broker.partition.record_validation import timestamp_errors
from mansio.errors import (
    DiskFull,
    InvalidRecord,
    InvalidTimestamp,
    LogFailed,
    MessageTooLarge,
    StorageError,
)
from mansio.ports import DISK_FULL_ERRNOS

if TYPE_CHECKING:
    from mansio.ports import Buffer
    from mansio.wire.batch.record_batch import BatchHeader, TimestampType

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
