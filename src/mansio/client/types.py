"""The values the client hands out and takes in.

Plain immutable tuples, so that a consumer can make some hundred thousand of them a second. Offsets and partitions
are Kafka's; timestamps are milliseconds since the epoch; keys and values are bytes or None, never decoded.
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
"""Where to begin: the first record, only new ones, an offset, or the first record at or after a time."""


class Message(NamedTuple):
    """One record as it was read."""

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
    """Where a record was stored. `offset` is -1 where the broker did not say (acks=0, a very old duplicate)."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class OutgoingRecord(NamedTuple):
    """A record to publish with `publish_many`, where a bare value does not say enough."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    timestamp_ms: int | None = None


def milliseconds(moment: datetime | int) -> int:
    """A moment as milliseconds since the epoch. A naive datetime is refused: nobody knows where it is."""
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ValueError(
                "a datetime without time zone is ambiguous; use datetime.now(UTC) or .astimezone()"
            )
        return int(moment.timestamp() * 1000)
    return moment
