"""Administration of queues: creation, size, purge, deletion, and cancellation of delayed tasks that are revoked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from mansio.client.types import TopicPartition
from mansio.errors import GroupIdNotFound, MansioError, TopicAlreadyExists, UnknownTopicOrPartition
from mansio.ports import Backoff

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.client.admin.admin import ConfigEntry
    from mansio.client.client import Client

logger = logging.getLogger(__name__)

MESSAGE_BYTES_MAX: Final = 16 << 20
"""Size of the largest message, as RabbitMQ's `max_message_size`."""

HEADER_BYTES_RESERVED: Final = 1 << 20
"""What the headers and properties of kombu may add to that."""

SIZE_CONFIG: Final = {"max.message.bytes": str(MESSAGE_BYTES_MAX + HEADER_BYTES_RESERVED)}

FEATURE_CONFIG: Final = {"mansio.delay.enable": "true", "mansio.priority.enable": "true"}
QUEUE_CONFIG: Final = {**FEATURE_CONFIG, **SIZE_CONFIG}

GROUP_CONFIG: Final = {"share.auto.offset.reset": "earliest", "share.delivery.count.limit": "10"}
"""A group would start at the end, and lose the tasks that were published before its first worker."""

EXCHANGE_CONFIG: Final = {"retention.ms": "3600000", "segment.ms": "600000", **SIZE_CONFIG}
"""Messages of exchanges are for processes that run: an hour is enough for all of them."""

TOPIC_SOURCE: Final = "topic"
"""Source of a setting that is set for the topic itself."""

REVOKED_IDS_MAX: Final = 1_000
"""Tasks of one revocation that are searched for among the delayed ones."""

PENDING_PAGE_RECORDS: Final = 1_000

CREATION_S_MAX: Final = 10.0
CREATION_BACKOFF: Final = Backoff(first_ms=10, longest_ms=200)
"""Wait for a topic that another client is creating."""


async def create_queue(
    client: Client,
    topic: str,
    *,
    partitions: int = -1,
    replication_factor: int = -1,
    topic_config: Mapping[str, str] | None = None,
    group_config: Mapping[str, str] | None = None,
) -> None:
    """Create the topic and configure the share group of a queue, as far as they are not yet.

    An existing topic, and a setting of the group that somebody has chosen, stay as they are, but a queue of an earlier
    version takes larger messages from now on."""
    current = await client.admin.describe_config(topic, kind="group")
    wanted = {**GROUP_CONFIG, **(group_config or {})}
    changes = {
        name: value for name, value in wanted.items() if name not in current or current[name].is_default
    }
    if changes:
        await client.admin.alter_group_config(topic, changes)
    try:
        await client.admin.create_topic(
            topic,
            partitions=partitions,
            replication_factor=replication_factor,
            config={**QUEUE_CONFIG, **(topic_config or {})},
        )
    except TopicAlreadyExists:
        await _raise_size(client, topic, FEATURE_CONFIG)


async def _raise_size(client: Client, topic: str, marks: Mapping[str, str]) -> None:
    """Let a topic take large messages, if it has the settings with which an earlier version created it, and its size
    was never chosen."""
    config = await _config_of(client, topic)
    name, wanted = next(iter(SIZE_CONFIG.items()))
    size = config[name]
    is_own = all(
        config[mark].source == TOPIC_SOURCE and config[mark].value == value for mark, value in marks.items()
    )
    if is_own and size.source != TOPIC_SOURCE and int(size.value or 0) < int(wanted):
        await client.admin.alter_topic_config(topic, SIZE_CONFIG)


async def _config_of(client: Client, topic: str) -> Mapping[str, ConfigEntry]:
    """Return the settings of a topic that exists, or that another client is creating: wait until it is created."""
    loop = asyncio.get_running_loop()
    end, attempts = loop.time() + CREATION_S_MAX, 0
    while True:
        try:
            return await client.admin.describe_config(topic)
        except UnknownTopicOrPartition:
            attempts += 1
            if loop.time() >= end:
                raise
        await asyncio.sleep(CREATION_BACKOFF.delay_seconds(attempts))


async def create_exchange(client: Client, topic: str, *, replication_factor: int = -1) -> None:
    """Create the topic of an exchange if it does not exist."""
    try:
        await client.admin.create_topic(
            topic, partitions=1, replication_factor=replication_factor, config=EXCHANGE_CONFIG
        )
    except TopicAlreadyExists:
        await _raise_size(client, topic, {"retention.ms": EXCHANGE_CONFIG["retention.ms"]})


async def has_queue(client: Client, topic: str) -> bool:
    """Whether the topic of a queue exists."""
    return topic in await client.admin.list_topics()


async def size(client: Client, topic: str) -> int:
    """Return the number of tasks that wait for a worker: neither delayed nor at a worker."""
    partitions = await _partitions(client, topic)
    try:
        found = await client.admin.shares.leases(topic, partitions)
    except GroupIdNotFound:
        found = {}
    unread = [one for one in partitions if found.get(one) is None]
    starts = await client.admin.list_offsets(unread, "earliest") if unread else {}
    ends = await client.admin.list_offsets(unread, "latest") if unread else {}
    waiting = sum(state.lag - state.leased for state in found.values() if state is not None)
    return max(0, waiting) + sum(ends[one].offset - starts[one].offset for one in unread)


async def purge(client: Client, topic: str) -> int:
    """Delete all tasks of a queue, delayed ones included, and return about how many there were."""
    count = await size(client, topic)
    await client.admin.delete_records([topic], before="end")
    while page := (
        await client.admin.delays.list(topic, limit=PENDING_PAGE_RECORDS, with_content=False)
    ).records:
        cancelled = await client.admin.delays.cancel(topic, [record.record_id for record in page])
        count += len(cancelled.changed)
        if not cancelled.changed:
            break  # delivered meanwhile
    return count


async def delete_queue(client: Client, topic: str) -> None:
    """Delete the topic of a queue, and its group if that has no members."""
    with contextlib.suppress(UnknownTopicOrPartition):
        await client.admin.delete_topic(topic)
    with contextlib.suppress(MansioError):
        await client.admin.delete_group(topic)


async def cancel_delayed(client: Client, task_ids: Sequence[str], known_topics: Iterable[str]) -> int:
    """Cancel the delayed tasks among `task_ids`, in all queues of the cluster, and return how many there were.

    Queues are the topics for which a share group of the same name exists, and `known_topics`."""
    if not task_ids:
        return 0
    topics = set(await client.admin.list_topics())
    groups = {group.group_id for group in await client.admin.list_groups()}
    count = 0
    for topic in sorted(topics & (groups | set(known_topics))):
        pending = await client.admin.delays.counts(topic)
        partitions = [number for number, found in pending.items() if found.count]
        for task_id in task_ids[:REVOKED_IDS_MAX] if partitions else ():
            page = await client.admin.delays.list(topic, partitions=partitions, key=task_id.encode())
            if page.records:
                ids = [record.record_id for record in page.records]
                count += len((await client.admin.delays.cancel(topic, ids)).changed)
    return count


async def _partitions(client: Client, topic: str) -> list[TopicPartition]:
    description = await client.admin.describe_topic(topic)
    return [TopicPartition(topic, partition.index) for partition in description.partitions]
