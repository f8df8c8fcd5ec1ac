"""Headers of delayed records: those with which a producer delays a record, and those of a delivered record.

A producer sets one of `mansio-deliver-at-ms` (ms since the Unix epoch) and `mansio-delay-ms` (after the leader receives
the record), as decimal ASCII digits. A record that was delivered has neither of them, so that a copy of it is not
delayed again; it says when it was due, which timestamp its producer gave it, and which id it had while it was pending.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRecord, MessageTooLarge
from mansio.tracebacks import copied
from mansio.wire.batch.inspection import REPORTED_RECORDS_MAX
from mansio.wire.batch.record_batch import TimestampType
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.wire.batch.inspection import InspectedBatch
    from mansio.wire.batch.record_batch import BatchHeader, Header, NewRecord

DELIVER_AT_HEADER: Final = "mansio-deliver-at-ms"
DELAY_HEADER: Final = "mansio-delay-ms"

DUE_AT_HEADER: Final = "mansio-due-at-ms"
ORIGINAL_TIMESTAMP_HEADER: Final = "mansio-original-timestamp-ms"
DELAYED_ID_HEADER: Final = "mansio-delayed-id"

NOT_DELAYED_MS: Final = -1
"""Due time of a record without delay in an accepted batch."""

DELAY_MS_MAX: Final = 365 * 24 * 60 * 60 * 1000
"""Maximum time from the acceptance of a record until it is due."""

DELAYED_BATCH_RECORDS_MAX: Final = 10_000
"""Maximum number of records in a batch with delayed records, which become pending in one step of the event loop."""

_DELIVER_AT_NAME: Final = DELIVER_AT_HEADER.encode()
_DELAY_NAME: Final = DELAY_HEADER.encode()
_DIGITS_MAX: Final = 18


class DelayedBatch(NamedTuple):
    """A producer's batch with delayed records.

    `header` is the header of the batch, `data` its decompressed records. `due_ms`: per record, ms since the Unix epoch,
    `NOT_DELAYED_MS` without delay. `bounds`: the positions of the records in `data`, and the end of the last one.
    """

    header: BatchHeader
    data: bytes
    due_ms: Sequence[int]
    bounds: Sequence[int]


def read_delays(inspected: InspectedBatch, name: str, now_ms: int) -> DelayedBatch | None:
    """Return the due times of a producer's batch; None if none of its records is delayed.

    `name`: that of the partition, for errors; `now_ms`: the leader's time. A due time in the past is possible. All
    records are decoded if a header may be there, so that they can be decoded again later. Raises `InvalidRecord` with
    the indexes of the invalid records, `MessageTooLarge` for more than `DELAYED_BATCH_RECORDS_MAX` records or too many
    headers."""
    header, data = inspected.header, inspected.data
    if _DELIVER_AT_NAME not in data and _DELAY_NAME not in data:
        return None
    if header.record_count > DELAYED_BATCH_RECORDS_MAX:
        raise MessageTooLarge(
            f"{name}: a batch of {header.record_count} records; with delayed records it may have"
            f" {DELAYED_BATCH_RECORDS_MAX}"
        )
    bounds = inspected.bounds
    inspected.check_header_count(name)
    records = read_records(inspected.batch, decompressed=data)
    due_ms = [NOT_DELAYED_MS] * len(records)
    errors: list[tuple[int, str | None]] = []
    for index, record in enumerate(records):
        if record.headers:
            try:
                due_ms[index] = _due_ms(record.headers, now_ms)
            except ValueError as error:
                errors.append((index, str(error)))
    if errors:
        rejection = InvalidRecord(f"{name}: {errors[0][1]} (record {errors[0][0]} of the batch)")
        rejection.record_errors = tuple(errors[:REPORTED_RECORDS_MAX])
        raise copied(rejection)
    if due_ms.count(NOT_DELAYED_MS) == len(due_ms):
        return None
    return DelayedBatch(header, data, due_ms, bounds)


def delivered_record(record: NewRecord, record_id: int, due_ms: int, now_ms: int) -> NewRecord:
    """Return the record that is delivered for a pending one: with the time of delivery as timestamp."""
    timestamp_ms, key, value, headers = record
    kept: list[Header] = [
        header for header in headers if header[0] != DELAY_HEADER and header[0] != DELIVER_AT_HEADER
    ]
    kept.append((DUE_AT_HEADER, b"%d" % due_ms))
    kept.append((ORIGINAL_TIMESTAMP_HEADER, b"%d" % timestamp_ms))
    kept.append((DELAYED_ID_HEADER, b"%d" % record_id))
    return now_ms, key, value, kept


def base_timestamp_ms(header: BatchHeader) -> int:
    """Return the timestamp to which the timestamp deltas of a batch's records are added."""
    is_fixed = header.timestamp_type is TimestampType.LOG_APPEND
    return header.max_timestamp_ms if is_fixed else header.base_timestamp_ms


def _due_ms(headers: Sequence[Header], now_ms: int) -> int:
    """Compute the due time. Raises `ValueError` with a message for the producer."""
    due_ms = NOT_DELAYED_MS
    for name, value in headers:
        if name == DELAY_HEADER:
            found = now_ms + _parse(name, value)
        elif name == DELIVER_AT_HEADER:
            found = _parse(name, value)
        else:
            continue
        if due_ms != NOT_DELAYED_MS:
            raise ValueError(f"a record has one of the headers {DELIVER_AT_HEADER} and {DELAY_HEADER}, once")
        if found > now_ms + DELAY_MS_MAX:
            raise ValueError(f"{name} is more than 365 days from now")
        due_ms = found
    return due_ms


def _parse(name: str, value: bytes | None) -> int:
    if value is None or not value.isdigit() or len(value) > _DIGITS_MAX:
        raise ValueError(f"{name} is not a decimal number of milliseconds")
    return int(value)
