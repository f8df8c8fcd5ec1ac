"""Read service: decoded records of a partition by offset or time, for protocols whose clients do not fetch batches.

It reads through a routed client, so that every broker of a cluster answers for every partition. Batches of more
than `INLINE_DECOMPRESSED_BYTES_MAX` are decoded on threads.

Invariants:
* Records that cannot be read, or are too large to be returned, end nothing: they are listed, and reading continues.
* The memory of a call is that of one decompressed batch and of the records that are returned.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import InvalidRequest, OffsetOutOfRange, UnknownTopicOrPartition, UnreadableRecords
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.unreadable import UnreadableOffsets

if TYPE_CHECKING:
    from datetime import datetime
    from typing import Literal

    from mansio.api.routing.routed_clients import RoutedClients
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.client import Client
    from mansio.client.consumer.consumer import Consumer
    from mansio.client.types import Message
    from mansio.wire.topic_partition import TopicPartition

READ_RECORDS_MAX: Final = 10_000
BYTES_MAX: Final = 8 << 20
WAIT_MS_MAX: Final = 30_000
POLL_MS: Final = 500
RECORD_BYTES_MAX: Final = 64 << 20
"""Maximum size of a record that is returned: its encoded form takes several times as much memory."""
UNREADABLE_MAX: Final = 100
"""Maximum number of ranges of unreadable offsets in one result."""
INLINE_DECOMPRESSED_BYTES_MAX: Final = 128 << 10
"""Decompressed size of a batch up to which it is decoded on the event loop, which takes less than 50 ms for small
records."""
INLINE_HEADERS_MAX: Final = 1_000
"""Number of headers of a record up to which their size is computed on the event loop."""
_PREFETCH_BYTES_MIN: Final = 1 << 16


class ReadResult(NamedTuple):
    """Records in the order of their offsets. `next_offset`: where the next call continues. `unreadable`: the offsets
    before it of records that cannot be returned, with the reason."""

    records: list[Message]
    next_offset: int
    unreadable: list[UnreadableOffsets]


async def too_large(messages: list[Message]) -> list[UnreadableOffsets | None]:
    """Return, for each record, its offset if it is too large to be returned by these protocols; None for any other."""
    if any(len(each.headers) > INLINE_HEADERS_MAX for each in messages):
        return await asyncio.to_thread(list, map(_too_large, messages))
    return list(map(_too_large, messages))


def _too_large(message: Message) -> UnreadableOffsets | None:
    size_bytes = len(message.key or b"") + len(message.value or b"")
    size_bytes += sum(len(value or b"") for _, value in message.headers)
    if size_bytes <= RECORD_BYTES_MAX:
        return None
    reason = f"a record of {size_bytes} bytes, more than the {RECORD_BYTES_MAX} that are returned"
    return UnreadableOffsets(message.offset, message.offset, reason)


def consume_on_threads(client: Client, partitions: list[TopicPartition], **options: Any) -> Consumer:
    """Return the consumer of `Client.consume`, which decodes large batches on threads: the event loop of the broker
    serves other clients meanwhile."""
    consumer = client.consume(partitions, **options)
    consumer._decode_on_threads(INLINE_DECOMPRESSED_BYTES_MAX)
    return consumer


async def read_records(
    services: BrokerServices,
    clients: RoutedClients,
    partition: TopicPartition,
    start: int | datetime | Literal["earliest", "latest"],
    *,
    caller: Caller,
    max_records: int,
    max_bytes: int,
    wait_ms: int,
) -> ReadResult:
    """Read records from an offset, time or position on: at most `max_records`, and `max_bytes` of keys and values, at
    least one. While there are none, wait for at most `wait_ms`. Records that cannot be read, or have more than
    `RECORD_BYTES_MAX`, are skipped and listed; after `UNREADABLE_MAX` of these ranges the call returns. Returns
    when the quota of the caller allows its next call.

    Raises `TopicAuthorizationFailed` unless the caller may READ the topic, and `UnknownTopicOrPartition`,
    `OffsetOutOfRange`, and `InvalidRequest` for a limit out of range."""
    if not (
        1 <= max_records <= READ_RECORDS_MAX and 1 <= max_bytes <= BYTES_MAX and 0 <= wait_ms <= WAIT_MS_MAX
    ):
        raise InvalidRequest(
            f"limits: 1 to {READ_RECORDS_MAX} records, 1 to {BYTES_MAX} bytes, 0 to {WAIT_MS_MAX} ms of waiting"
        )
    _check_right(services.authorization, caller, partition.topic)
    throttle = clients.new_throttle()
    client = clients.client(caller, throttle)
    await _check_start(client, partition, start if isinstance(start, int) else None)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_ms / 1000
    found: list[Message] = []
    unreadable: list[UnreadableOffsets] = []
    size_bytes = 0
    next_offset: int | None = None
    async with asyncio.timeout((wait_ms + WAIT_MS_MAX) / 1000):
        async with consume_on_threads(
            client,
            [partition],
            from_=start,
            max_records=max_records,
            to_end=not wait_ms,
            on_out_of_range="error",
            prefetch_bytes_max=max(max_bytes, _PREFETCH_BYTES_MIN),
        ) as consumer:
            while (
                len(found) < max_records
                and size_bytes < max_bytes
                and len(unreadable) < UNREADABLE_MAX
                and not consumer.is_finished
            ):
                if (found or unreadable) and wait_ms:
                    break  # what is available is returned at once
                left_ms = (deadline - loop.time()) * 1000 if wait_ms else POLL_MS
                try:
                    messages = await consumer.poll(timeout_ms=max(left_ms, 0))
                except UnreadableRecords as error:
                    unreadable.append(UnreadableOffsets(error.first_offset, error.last_offset, error.reason))
                    continue
                if not messages and wait_ms and left_ms <= 0:
                    break
                for message, large in zip(messages, await too_large(messages), strict=True):
                    if large is not None:
                        unreadable.append(large)
                        continue
                    size_bytes += len(message.key or b"") + len(message.value or b"")
                    if len(unreadable) >= UNREADABLE_MAX or (found and size_bytes > max_bytes):
                        next_offset = message.offset
                        size_bytes = max(size_bytes, max_bytes)
                        break
                    found.append(message)
            if next_offset is None:
                next_offset = consumer.positions().get(partition, -1)
    await throttle.wait()
    return ReadResult(found, next_offset, unreadable)


def _check_right(authorization: Authorization, caller: Caller, topic: str) -> None:
    """Raise `TopicAuthorizationFailed` unless a caller may READ a topic."""
    # The leader asks with each fetch, but nothing is fetched of a partition without records.
    if not authorization.allows(caller, Operation.READ, ResourceType.TOPIC, topic):
        fetching = replace(caller, api=ApiKey.FETCH.name)  # for the audit
        raise authorization.refusal(fetching, Operation.READ, ResourceType.TOPIC, topic)


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
