"""Records, times and errors of the gRPC API."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from mansio.api.grpc import mansio_pb2 as pb
from mansio.broker.services.publish_records import RecordToPublish, ValuesToPublish
from mansio.errors import InvalidRequest
from mansio.host.clock import UNIX_EPOCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.coordinator.share.received_records import ReceivedRecord
    from mansio.broker.services.publish_records import PublishResult
    from mansio.client.types import Message
    from mansio.errors import MansioError
    from mansio.host.item_turns import ItemTurns
    from mansio.wire.batch.record_batch import Header

TIME_MS_MAX: Final = 253_402_300_799_999
"""The last millisecond of the year 9999."""


async def new_records(request: Any, turns: ItemTurns) -> Sequence[RecordToPublish]:
    """Return the records to publish of a `PublishRequest`; other work runs in between."""
    records = request.records
    values = [record.value for record in records]
    if all(values):
        # A request of this size has no field but these values, as each of them adds its bytes.
        size = _field_bytes(len(request.topic.encode())) if request.topic else 0
        for length, count in Counter(map(len, values)).items():
            size += count * _field_bytes(_field_bytes(length))
        if size == request.ByteSize():
            return ValuesToPublish(values)
    found: list[RecordToPublish] = []
    for record in records:
        found.append(_new_record(record))
        if turns.is_over():
            await turns.pause()
    return found


def _field_bytes(length: int) -> int:
    """Return the encoded size of a field with `length` bytes and a number below 16."""
    return 1 + max(length.bit_length() + 6, 7) // 7 + length


def _new_record(record: Any) -> RecordToPublish:
    value, key = record.value, record.key
    if value and record.ByteSize() == _field_bytes(len(value)) + (_field_bytes(len(key)) if key else 0):
        return RecordToPublish(value, key or None)  # it has no other field
    delivery = record.WhichOneof("delivery")
    return RecordToPublish(
        value if record.HasField("value") else None,
        key if record.HasField("key") else None,
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


def published_ranges(result: PublishResult) -> list[Any]:
    """Return the results of records as messages."""
    return [
        pb.PublishedRange(
            first=first,
            count=count,
            partition=one.partition,
            offset=one.offset,
            timestamp_ms=one.timestamp_ms,
            error=None if one.error is None else error_of(one.error),
        )
        for first, count, one in result.ranges
    ]


def error_of(error: MansioError) -> Any:
    """Return an error as a message."""
    return pb.Error(
        name=type(error).__name__, code=error.kafka_code, message=error.message, retriable=error.retriable
    )


def add_record(
    found: Any, message: Message | ReceivedRecord, receipt: str = "", delivery_count: int = 0
) -> None:
    """Add a record to `found`, the records of a message. This takes a third of the time of a message that is copied."""
    record = found.add(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        timestamp_ms=message.timestamp_ms,
        value=message.value,
        receipt=receipt,
        delivery_count=delivery_count,
    )
    if message.key is not None:
        record.key = message.key
    for name, value in message.headers:
        record.headers.add(name=name, value=value)


def record_of(message: Message | ReceivedRecord, receipt: str = "", delivery_count: int = 0) -> Any:
    """Return a record as a message."""
    found = pb.FetchResponse()
    add_record(found.records, message, receipt, delivery_count)
    return found.records[0]


def moment(time_ms: int, name: str) -> datetime:
    """Return milliseconds since the Unix epoch as a moment. Raises `InvalidRequest`."""
    if not 0 <= time_ms <= TIME_MS_MAX:
        raise InvalidRequest(f"{name}: {time_ms} is no time in milliseconds since the Unix epoch")
    return UNIX_EPOCH + timedelta(milliseconds=time_ms)


def to_ms(value: datetime) -> int:
    """Return a moment in milliseconds since the Unix epoch."""
    return (value - UNIX_EPOCH) // timedelta(milliseconds=1)
