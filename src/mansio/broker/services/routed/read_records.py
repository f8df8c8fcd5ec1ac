"""Read service: decoded records of a partition by offset or time, for protocols whose clients do not fetch batches.

It reads through the broker's own client, so that every broker of a cluster answers for every partition.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRequest, OffsetOutOfRange, UnknownTopicOrPartition

if TYPE_CHECKING:
    from datetime import datetime
    from typing import Literal

    from mansio.client import Client
    from mansio.client.types import Message
    from mansio.wire.topic_partition import TopicPartition

RECORDS_MAX: Final = 10_000
BYTES_MAX: Final = 8 << 20
WAIT_MS_MAX: Final = 30_000
POLL_MS: Final = 500
_PREFETCH_BYTES_MIN: Final = 1 << 16


class ReadResult(NamedTuple):
    """Records in the order of their offsets. `next_offset`: where the next call continues."""

    records: list[Message]
    next_offset: int


async def read_records(
    client: Client,
    partition: TopicPartition,
    start: int | datetime | Literal["earliest", "latest"],
    *,
    max_records: int,
    max_bytes: int,
    wait_ms: int,
) -> ReadResult:
    """Read records from an offset, time or position on: at most `max_records`, and `max_bytes` of keys and values, at
    least one. While there are none, wait for at most `wait_ms`.

    Raises `UnknownTopicOrPartition`, `OffsetOutOfRange`, and `InvalidRequest` for a limit out of range."""
    if not (1 <= max_records <= RECORDS_MAX and 1 <= max_bytes <= BYTES_MAX and 0 <= wait_ms <= WAIT_MS_MAX):
        raise InvalidRequest(
            f"limits: 1 to {RECORDS_MAX} records, 1 to {BYTES_MAX} bytes, 0 to {WAIT_MS_MAX} ms of waiting"
        )
    await _check_start(client, partition, start if isinstance(start, int) else None)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_ms / 1000
    found: list[Message] = []
    size_bytes = 0
    async with asyncio.timeout((wait_ms + WAIT_MS_MAX) / 1000):
        async with client.consume(
            [partition],
            from_=start,
            max_records=max_records,
            to_end=not wait_ms,
            on_out_of_range="error",
            prefetch_bytes_max=max(max_bytes, _PREFETCH_BYTES_MIN),
        ) as consumer:
            while len(found) < max_records and size_bytes < max_bytes and not consumer.is_finished:
                if found and wait_ms:
                    break  # available records are returned at once
                left_ms = (deadline - loop.time()) * 1000 if wait_ms else POLL_MS
                messages = await consumer.poll(timeout_ms=max(left_ms, 0))
                if not messages and wait_ms and left_ms <= 0:
                    break
                for message in messages:
                    size_bytes += len(message.key or b"") + len(message.value or b"")
                    if found and size_bytes > max_bytes:
                        break
                    found.append(message)
            position = consumer.positions().get(partition, -1)
    return ReadResult(found, found[-1].offset + 1 if found and size_bytes > max_bytes else position)


async def _check_start(client: Client, partition: TopicPartition, offset: int | None) -> None:
    """Raise `UnknownTopicOrPartition` at once, where a consumer would wait for a topic to be created, and
    `OffsetOutOfRange` for an offset that is not in the log."""
    admin = client.admin
    description = await admin.describe_topic(partition.topic)
    if partition.partition not in {each.index for each in description.partitions}:
        raise UnknownTopicOrPartition(f"topic {partition.topic} has no partition {partition.partition}")
    if offset is None:
        return
    start = (await admin.list_offsets([partition], "earliest"))[partition].offset
    end = (await admin.list_offsets([partition], "latest"))[partition].offset
    if not start <= offset <= end:
        raise OffsetOutOfRange(f"offset {offset} is not in the log, which has {start} to {end}")
