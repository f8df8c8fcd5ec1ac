"""Fixtures of the tests of leased delivery: receivers of one share group on a real broker."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import share_acknowledge, share_fetch
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import mansio

LOCK_MS = 1_000
"""As short as the broker allows."""


async def group_of(client: mansio.Client, group: str, **settings: Any) -> str:
    """A group that begins at the beginning and has short rests; others of its settings by a short name."""
    names = {
        "lock_ms": "share.record.lock.duration.ms",
        "order": "mansio.share.order",
        "tries": "share.delivery.count.limit",
        "backoff_ms": "mansio.retry.backoff.ms",
        "multiplier": "mansio.retry.backoff.multiplier",
        "leases_max": "mansio.share.key.leases.max",
        "dead_letters": "mansio.deadletterqueue.enable",
    }
    given = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "20"}
    given |= {names[name]: str(value) for name, value in settings.items()}
    await client.admin.alter_group_config(group, given)
    return group


async def publish(client: mansio.Client, topic: str, *values: str, partition: int = 0) -> None:
    """Records with what comes before a colon as their key."""
    for value in values:
        key, _, _ = value.partition(":")
        await client.publish(topic, value, key=key, partition=partition)


def values(messages: list[mansio.client.Leased]) -> list[str]:
    return [(message.value or b"").decode() for message in messages]


async def taken(receiver: mansio.client.Receiver, count: int) -> list[mansio.client.Leased]:
    """So many messages; the scenario's own time bounds it."""
    found: list[mansio.client.Leased] = []
    while len(found) < count:
        found += await receiver.poll(max_records=count - len(found))
    return found


async def start_of(client: mansio.Client, group: str, topic: str) -> int:
    """The first offset of the topic's first partition that is open, as its leader knows it."""
    place = TopicPartition(topic, 0)
    state = (await client.admin.shares.leases(group, [place]))[place]
    assert state is not None
    return state.start_offset


@asynccontextmanager
async def running(receiver: mansio.client.Receiver, handler: Any, **options: Any) -> AsyncIterator[Any]:
    """`receiver.run(handler)` beside the test, stopped after it."""
    task = asyncio.ensure_future(receiver.run(handler, **options))
    try:
        yield task
    finally:
        receiver.stop()
        await task


async def end_session(client: mansio.Client, group: str, member: str) -> None:
    """End the member's share session behind its back: the broker releases all that it has."""
    connection = await _connection(client)
    number = connection.next_correlation_id()
    framed = share_acknowledge.encode_request(2, number, "x", group, member, -1, [])
    answer = share_acknowledge.decode_response(2, await connection.exchange((framed,), number))
    assert answer.error_code == 0


async def take_over_session(client: mansio.Client, group: str, member: str) -> None:
    """Open a new session in the member's name, so that its next request comes in a wrong epoch."""
    connection = await _connection(client)
    number = connection.next_correlation_id()
    framed = share_fetch.encode_request(
        2,
        number,
        "x",
        group,
        member,
        0,
        [],
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=0,
        max_records=0,
        batch_size=0,
    )
    answer = share_fetch.decode_response(2, await connection.exchange((framed,), number))
    assert answer.error_code == 0


async def release_behind_its_back(
    client: mansio.Client, group: str, message: Any, member: str, *, delay_ms: int = 60_000
) -> None:
    """Give back one record in the member's name."""
    connection = await _connection(client)
    topic_id = (await client.admin.describe_topic(message.topic)).topic_id
    batch = {
        "first_offset": message.offset,
        "last_offset": message.offset,
        "types": b"\x02",
        "delay_ms": delay_ms,
    }
    partition = {"partition_index": message.partition, "batches": [batch]}
    fields = {
        "group_id": group,
        "member_id": member,
        "topics": [{"topic_id": topic_id, "partitions": [partition]}],
    }
    answer = await connection.request(ApiKey.ACKNOWLEDGE_RECORDS, fields)
    assert answer.topics[0].partitions[0].error_code == 0


async def _connection(client: mansio.Client) -> Any:
    return await client.admin._cluster.any_connection()
