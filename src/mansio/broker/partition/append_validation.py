"""Append validation (Kafka `LogValidator`): the topic's limits, and the errors for batches that violate them.

Does no I/O. `Partition.append` compares each batch with the limits and calls these functions only to raise the error. A
batch is decoded only for the keys of a compacted topic and for what its features read (`inspect_records`), or if the
batch is rejected; the error then contains the indexes of the invalid records (`recordErrors`, KIP-467).

Invariants:
* An error names the partition and no path on the broker's disk.
* The number of decoded bytes and records is bounded, so that one batch cannot block the event loop for long.
* A batch is accepted or rejected as a whole.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from mansio.errors import (
    DecompressedTooLarge,
    DescriptorsExhausted,
    DiskFull,
    InvalidRecord,
    InvalidTimestamp,
    LogFailed,
    MansioError,
    MessageTooLarge,
    RequestError,
    StorageError,
    TransactionalIdMissing,
)
from mansio.ports import DESCRIPTOR_ERRNOS, DISK_FULL_ERRNOS
from mansio.storage.active_files import ActiveFilesInUse
from mansio.tracebacks import copied
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX
from mansio.wire.batch.inspection import REPORTED_RECORDS_MAX, InspectedBatch
from mansio.wire.batch.record_batch import ATTRIBUTES_END_POSITION, CODEC_MASK, TimestampType
from mansio.wire.batch.record_reader import decompress_batch, read_records, scan_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from mansio.ports import Buffer
    from mansio.wire.batch.recompress import Compression
    from mansio.wire.batch.record_batch import BatchHeader

    RecordErrors = tuple[tuple[int, str | None], ...]


CONTROL_OR_TRANSACTIONAL_BITS: Final = 0x30
"""The bits of a batch's attributes that mark control batches and transactional batches."""


class RecordReader(NamedTuple):
    """What one feature reads from a client's batch, once, before the append.

    `headers`: the names of headers that are found in one pass over the batch. `read` gets the batch, the name of
    the partition for errors, and the time, ms since the Unix epoch. It returns the decoded values, or an empty
    collection or None if the batch has none. It uses no state and may run on any thread. It raises `InvalidRecord`
    or another `MansioError` to reject the batch."""

    headers: tuple[bytes, ...]
    read: Callable[[InspectedBatch, str, int], Any]


class AppendRules(NamedTuple):
    """The topic settings that are enforced on append."""

    message_bytes_max: int
    timestamp_type: TimestampType
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int
    requires_keys: bool = False
    """Whether every record must have a key, because the topic is compacted."""
    readers: tuple[RecordReader, ...] = ()
    """What the features of the topic read from each batch of a client."""
    inspects_records: bool = False
    """Whether batches of clients are decoded, because of one of the settings before."""
    decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX
    """Maximum size of a batch when it is decompressed, and so of one that is not compressed."""
    checks_content: bool = True
    """Whether the content of compressed batches is checked."""
    compression: Compression | None = None
    """The codec with which batches of clients are stored; None to store them as sent. See `BatchProcessor`."""


def check_client_batch(name: str, rules: AppendRules, header: BatchHeader, *, transactional: bool) -> None:
    """Raise the error for a client's batch that is too large, a control batch or, unless the request is
    `transactional`, a transactional batch."""
    if header.size > rules.decompressed_bytes_max:
        raise new_too_large_error(name, header.size, rules.decompressed_bytes_max)
    if header.size > rules.message_bytes_max:
        raise MessageTooLarge(
            f"{name}: a batch of {header.size} bytes exceeds max.message.bytes={rules.message_bytes_max}"
        )
    if header.is_control:
        raise InvalidRecord(f"{name}: clients may not write control batches")
    if header.is_transactional and not transactional:
        raise TransactionalIdMissing(f"{name}: a transactional batch needs a request with a transactional id")


def new_too_large_error(name: str, size: int, decompressed_bytes_max: int) -> MessageTooLarge:
    """Return the error for a batch of `size` bytes, as it was sent, that is too large when it is decompressed."""
    return MessageTooLarge(
        f"{name}: a batch of {size} bytes exceeds max.decompressed.bytes={decompressed_bytes_max} when decompressed"
    )


def reject_timestamps(
    name: str, rules: AppendRules, batch: Buffer, header: BatchHeader, now_ms: int
) -> NoReturn:
    """Raise the error for a batch whose header has a first or highest timestamp out of range (KIP-937)."""
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
    error.record_errors = find_timestamp_errors(batch, header, earliest_ms, latest_ms)
    raise copied(error)


def reject_delayed(name: str) -> NoReturn:
    """Raise the error for delayed records in a transaction: they would be delivered after its end, whatever that is."""
    raise InvalidRecord(f"{name}: records of a transaction cannot be delayed")


def reject_ids(name: str) -> NoReturn:
    """Raise the error for records with deduplication ids in a transaction: if it is aborted, its records are not
    delivered, but a record that is sent again later would be dropped as a repeat."""
    raise InvalidRecord(f"{name}: records of a transaction cannot have deduplication ids")


def new_log_failed_error(name: str, failed: StorageError) -> LogFailed:
    """Return the error with which every write to a failed log is rejected. `failed`: the cause of the failure."""
    return LogFailed(
        f"{name}: its log failed and accepts no writes until the broker is restarted ({_reason(failed)})"
    )


def new_append_error(name: str, error: StorageError) -> StorageError:
    """Return the error for the client of a failed append that may succeed later: `DiskFull`, `DescriptorsExhausted`, or
    another `StorageError`."""
    if isinstance(error, ActiveFilesInUse):
        return DescriptorsExhausted(
            f"{name}: {error.message}; nothing was written, and the same request succeeds after a flush"
        )
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRNOS:
        return DiskFull(
            f"{name}: the broker's disk is full ({cause.strerror}); nothing was written, and the same request "
            f"succeeds when there is space"
        )
    if isinstance(cause, OSError) and cause.errno in DESCRIPTOR_ERRNOS:
        return DescriptorsExhausted(
            f"{name}: the broker has no free file descriptor ({cause.strerror}); nothing was written, and the same "
            f"request succeeds when there is one"
        )
    return StorageError(f"{name}: {_reason(error)}")


def awaits_flush(error: BaseException | None) -> bool:
    """Whether an append was refused that may be repeated after the next flush, because then its file can be opened."""
    return isinstance(error, DescriptorsExhausted) and isinstance(error.__cause__, ActiveFilesInUse)


def _reason(error: StorageError) -> str:
    """Return the part of an error message that clients may see: the operating system's message without file paths."""
    cause = error.__cause__
    return cause.strerror or str(cause) if isinstance(cause, OSError) else error.message


DECODED_RECORDS_MAX: Final = 100_000
"""Maximum number of records in a batch of a topic whose batches are decoded on append."""

INLINE_CONTENT_BYTES_MAX: Final = 64 << 10
"""Decompressed size up to which the content of a batch is checked and inspected on the event loop; the check takes less
than 0.2 ms."""

INLINE_RECORDS_MAX: Final = 1_000
"""Number of records up to which a batch is inspected on the event loop; it takes some milliseconds."""

REJECTED_DECODED_BYTES_MAX = 4 << 20
"""Decompressed size up to which a batch with invalid timestamps is decoded to find the invalid records."""

REJECTED_DECODED_RECORDS_MAX = 10_000
"""Number of records up to which a batch with invalid timestamps is decoded to find the invalid records."""

MISSING_KEY_MESSAGE = "a record of a compacted topic needs a key"
INVALID_TIMESTAMP_MESSAGE = "the timestamp is out of the accepted range"


class RebuiltBatch(NamedTuple):
    """A client's batch without the records that are repeats. `kept`: the indexes of the others; `decided_ms`: the time,
    ms since the Unix epoch, at which that was found. `found`: in this batch, by reader."""

    kept: Sequence[int]
    decided_ms: int
    batch: bytes
    found: Mapping[RecordReader, Any]


class InspectedRecords(NamedTuple):
    """What the features of a topic need to know of a client's batch (`inspect_records`).

    `rules`: those with which it was inspected. `found`: the decoded values of each reader that found any. `error`:
    why the batch must be rejected, unless it is a duplicate of one that was accepted before. `by_thread`: whether a
    thread has inspected it and can rebuild it without its repeats. `rebuilt`: the batch without them, once the
    thread has rebuilt it."""

    rules: AppendRules
    found: Mapping[RecordReader, Any] = MappingProxyType({})
    error: MansioError | None = None
    by_thread: bool = False
    rebuilt: RebuiltBatch | None = None


def check_record_count(name: str, header: BatchHeader) -> None:
    """Check the number of records in the header of a batch that is to be inspected, before it is decompressed.

    Raises `MessageTooLarge` for more than `DECODED_RECORDS_MAX`, after which clients send smaller batches."""
    if header.record_count > DECODED_RECORDS_MAX:
        raise MessageTooLarge(
            f"{name}: a batch of {header.record_count} records; a topic whose records are read on append accepts at"
            f" most {DECODED_RECORDS_MAX}"
        )


def needs_thread(batch: Buffer, rules: AppendRules) -> bool:
    """Return whether the content of a client's batch is read on append and larger than the event loop may read, as far
    as its size as sent shows. Costs no more than the comparison of that size for small batches."""
    return len(batch) > INLINE_CONTENT_BYTES_MAX and (
        rules.inspects_records
        or (rules.checks_content and bool(batch[ATTRIBUTES_END_POSITION - 1] & CODEC_MASK))
    )


def check_inline(batch: Buffer, header: BatchHeader, rules: AppendRules) -> None:
    """Raise `DecompressedTooLarge` for a batch that is too large to be inspected on the event loop."""
    if header.record_count > INLINE_RECORDS_MAX or len(batch) > INLINE_CONTENT_BYTES_MAX:
        raise DecompressedTooLarge("the batch is too large to be inspected on the event loop")
    if header.codec and not rules.checks_content:  # otherwise it was decompressed up to this size before
        decompress_batch(batch, INLINE_CONTENT_BYTES_MAX)


def inspect_records(name: str, rules: AppendRules, batch: Buffer, now_ms: int) -> InspectedRecords:
    """Decode a client's batch for the features of its topic. Uses no state and may run on any thread: a large batch
    takes up to seconds. `name`: that of the partition, for errors; delays begin at `now_ms`.

    Raises `InvalidRecord` with the indexes of invalid records, `MessageTooLarge`, and the errors of
    `decompress_batch`."""
    inspected = InspectedBatch(batch, [header for reader in rules.readers for header in reader.headers])
    found = read_all(rules.readers, inspected, name, now_ms)
    if rules.requires_keys:
        check_keys(name, inspected)
    return InspectedRecords(rules, found)


def read_all(
    readers: Iterable[RecordReader], inspected: InspectedBatch, name: str, now_ms: int
) -> dict[RecordReader, Any]:
    """Return what the readers find in a batch, by reader. Raises the errors of `RecordReader.read`."""
    return {reader: found for reader in readers if (found := reader.read(inspected, name, now_ms))}


def check_keys(partition: str, inspected: InspectedBatch) -> None:
    """Check that every record has a key. Values and headers are not decoded.

    Raises `InvalidRecord` with at most `REPORTED_RECORDS_MAX` of the records without key."""
    header = inspected.header
    located = scan_records(inspected.data, header.record_count, header.last_offset_delta)
    keyless = [index for index, record in enumerate(located) if record.key is None]
    if not keyless:
        return
    error = InvalidRecord(
        f"{partition}: {MISSING_KEY_MESSAGE}; {len(keyless)} of {header.record_count} in the batch have none"
    )
    error.record_errors = tuple((index, MISSING_KEY_MESSAGE) for index in keyless[:REPORTED_RECORDS_MAX])
    raise copied(error)


def find_timestamp_errors(
    batch: Buffer, header: BatchHeader, earliest_ms: int, latest_ms: int
) -> RecordErrors:
    """Return index and message for each record of a rejected batch with a timestamp outside [earliest_ms, latest_ms].

    Returns no errors if decoding the batch would take too long."""
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
    return tuple((index, INVALID_TIMESTAMP_MESSAGE) for index in late[:REPORTED_RECORDS_MAX])
