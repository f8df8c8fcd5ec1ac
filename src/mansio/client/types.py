"""Public value types of the client.

Immutable named tuples, so that a consumer can create several hundred thousand of them per second. Offsets and
partitions are Kafka's; timestamps are milliseconds since the epoch; keys and values are bytes or None, not decoded.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, NamedTuple

from mansio.wire.topic_partition import TopicPartition

__all__ = [
    "Headers",
    "Message",
    "OutgoingRecord",
    "RecordMetadata",
    "StartAt",
    "TopicPartition",
    "milliseconds",
]

Headers = tuple[tuple[str, bytes | None], ...]
"""Record headers in order; a name may occur more than once."""

StartAt = Literal["earliest", "latest"] | int | datetime
"""Start position: the first record, only new records, an offset, or the first record at or after a time."""


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
        """The value of the last header called `name`; None if there is none (or its value is null)."""
        return next((value for header, value in reversed(self.headers) if header == name), None)


class RecordMetadata(NamedTuple):
    """Position of a stored record. `offset` is -1 if the broker did not return it (acks=0, a very old duplicate)."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class OutgoingRecord(NamedTuple):
    """A record for `publish_many`, with more than a value."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    timestamp_ms: int | None = None


def milliseconds(timestamp: datetime | int) -> int:
    """A timestamp as milliseconds since the epoch. A datetime without time zone is refused as ambiguous."""
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise ValueError(
                "a datetime without time zone is ambiguous; use datetime.now(UTC) or .astimezone()"
            )
        return int(timestamp.timestamp() * 1000)
    return timestamp
