"""Public value types of the client.

They are named tuples, so that a consumer can create several hundred thousand per second. Timestamps are milliseconds
since the Unix epoch. Keys and values are bytes or None (null).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from mansio.wire.batch.record_id_header import find_record_id
from mansio.wire.topic_partition import TopicPartition

__all__ = [
    "Headers",
    "HeadersLike",
    "Message",
    "OutgoingRecord",
    "Publishable",
    "RecordMetadata",
    "StartAt",
    "TopicPartition",
    "milliseconds",
]

Headers = tuple[tuple[str, bytes | None], ...]
"""Record headers (name, value) in order; a name may occur more than once."""

HeadersLike = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]
"""Headers to publish: a mapping, or pairs of name and value; text is sent as UTF-8."""

StartAt = Literal["earliest", "latest"] | int | datetime
"""Start position: "earliest" (log start offset), "latest" (log end offset), an offset, or a time (the first record at
or after it)."""


class Message(NamedTuple):
    """One consumed record."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    @property
    def timestamp(self) -> datetime:
        """The record's timestamp, in UTC."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)

    def header(self, name: str) -> bytes | None:
        """The value of the last header with the name `name`; None if there is no such header or its value is null."""
        return next((value for header, value in reversed(self.headers) if header == name), None)

    @property
    def record_id(self) -> str | None:
        """The id that the producer has set (`ProducerOptions.record_ids`), the header `mansio-id`; None without one."""
        return find_record_id(self.headers)


class RecordMetadata(NamedTuple):
    """Partition, offset and timestamp of a published record. `offset` is -1 if the broker did not return the offset
    (acks=0, or a duplicate that it no longer remembers). For a delayed record, (partition, offset) is its id;
    it is delivered at a later offset. `record_id`: its id, if the producer sets ids (`ProducerOptions.record_ids`)."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    record_id: str | None = None


class OutgoingRecord(NamedTuple):
    """A record to publish with `publish_many`. A `partition` of None is chosen by the producer, a `timestamp_ms` of
    None is the current time. `delay` (a duration, or seconds) or `at` delays it; `dedup_id` is the id by which a repeat
    is recognized; `priority` is "high", "normal" or "low"; see `publish`."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    timestamp_ms: int | None = None
    delay: timedelta | float | None = None
    at: datetime | None = None
    dedup_id: bytes | str | None = None
    priority: str | None = None


Publishable = bytes | str | OutgoingRecord | None
"""An element for `publish_many`: a value, or an `OutgoingRecord` with key, headers, partition, timestamp or delay."""


def milliseconds(timestamp: datetime | int) -> int:
    """Convert a datetime to milliseconds since the Unix epoch; return an int unchanged. Raises `ValueError` for a
    datetime without time zone."""
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise ValueError(
                "a datetime without time zone is ambiguous; use datetime.now(UTC) or .astimezone()"
            )
        return int(timestamp.timestamp() * 1000)
    return timestamp
