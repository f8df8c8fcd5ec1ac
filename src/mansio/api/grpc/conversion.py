"""Records, times and errors of the gRPC API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from mansio.api.grpc import mansio_pb2 as pb
from mansio.broker.services.publish_records import RecordToPublish
from mansio.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.coordinator.share.received_records import ReceivedRecord
    from mansio.broker.services.publish_records import PublishedRecord
    from mansio.client.types import Message
    from mansio.errors import MansioError
    from mansio.wire.batch.record_batch import Header

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
TIME_MS_MAX: Final = 253_402_300_799_999
"""The last millisecond of the year 9999."""


def new_record(record: Any) -> RecordToPublish:
    """Return the record to publish of a `NewRecord`."""
    delivery = record.WhichOneof("delivery")
    return RecordToPublish(
        record.value if record.HasField("value") else None,
        record.key if record.HasField("key") else None,
        headers_of(record.headers),
        record.timestamp_ms if record.HasField("timestamp_ms") else None,
        record.partition if record.HasField("partition") else None,
        record.delay_ms if delivery == "delay_ms" else None,
        record.deliver_at_ms if delivery == "deliver_at_ms" else None,
        record.priority if record.HasField("priority") else None,
        record.dedup_id if record.HasField("dedup_id") else None,
    )


def headers_of(headers: Iterable[Any]) -> list[Header]:
    """Return the headers of a record."""
    return [(each.name, each.value if each.HasField("value") else None) for each in headers]


def published_ranges(results: Sequence[PublishedRecord]) -> list[Any]:
    """Return the results of records as ranges of adjacent offsets."""
    found: list[Any] = []
    last = None
    following = -1
    for position, one in enumerate(results):
        if (
            last is not None
            and one.error is None
            and not last.HasField("error")
            and last.partition == one.partition
            and one.offset == following
            and one.timestamp_ms == last.timestamp_ms
        ):
            last.count += 1
        else:
            last = pb.PublishedRange(
                first=position,
                count=1,
                partition=one.partition,
                offset=one.offset,
                timestamp_ms=one.timestamp_ms,
                error=None if one.error is None else error_of(one.error),
            )
            found.append(last)
        following = one.offset + 1
    return found


def error_of(error: MansioError) -> Any:
    """Return an error as a message."""
    return pb.Error(
        name=type(error).__name__, code=error.kafka_code, message=error.message, retriable=error.retriable
    )


def record_of(message: Message | ReceivedRecord, receipt: str = "", delivery_count: int = 0) -> Any:
    """Return a record as a message."""
    return pb.Record(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        timestamp_ms=message.timestamp_ms,
        key=message.key,
        value=message.value,
        headers=[pb.Header(name=name, value=value) for name, value in message.headers],
        receipt=receipt,
        delivery_count=delivery_count,
    )


def moment(time_ms: int, name: str) -> datetime:
    """Return milliseconds since the Unix epoch as a moment. Raises `InvalidRequest`."""
    if not 0 <= time_ms <= TIME_MS_MAX:
        raise InvalidRequest(f"{name}: {time_ms} is no time in milliseconds since the Unix epoch")
    return _EPOCH + timedelta(milliseconds=time_ms)


def to_ms(value: datetime) -> int:
    """Return a moment in milliseconds since the Unix epoch."""
    return (value - _EPOCH) // timedelta(milliseconds=1)
