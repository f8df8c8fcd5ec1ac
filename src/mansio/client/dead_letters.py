"""Dead letters of share groups: their topics, and how they are read, offered again and appended to another topic.

A dead letter is a dead-lettered record, as the broker has written it to a dead-letter topic.

Invariants:
* With the same redrive id no record is offered or appended twice, however often it is done.
* Each failure is in the counts of its share partition or topic.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.client.types import OutgoingRecord
from mansio.config.topic_names import dead_letter_topic_of, unified_name
from mansio.errors import MansioError, UnknownTopicOrPartition
from mansio.net.redrive import RedriveCounts, SharePartitionId, offset_ranges
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER
from mansio.wire.internal_records.dead_letter_headers import (
    ID_HEADER,
    KAFKA_HEADER_PREFIX,
    MANSIO_HEADER_PREFIX,
    parse_dead_letter_headers,
)
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from mansio.client.client import Client
    from mansio.client.types import Message
    from mansio.errors import UnreadableRecords
    from mansio.wire.internal_records.dead_letter_headers import DeadLetterHeaders

DLQ_ENABLE_CONFIG: Final = "errors.deadletterqueue.group.enable"
REDRIVE_HEADER: Final = "mansio-redrive-id"


class DeadLetter(NamedTuple):
    """One dead letter: the record of the dead-letter topic, and its decoded headers."""

    message: Message
    headers: DeadLetterHeaders

    @property
    def reason(self) -> str:
        """The reason that the consumer gave, otherwise Kafka's text."""
        return self.headers.reason or self.headers.message


def parse_dead_letter(message: Message) -> DeadLetter | None:
    """Parse a record of a dead-letter topic; None if it was not written by a Mansio broker."""
    headers = parse_dead_letter_headers(message.headers)
    return None if headers is None else DeadLetter(message, headers)


def original_headers(message: Message) -> list[tuple[str, bytes | None]]:
    """Return the headers of the original record: those of the dead letter without the headers that the broker has
    added, and without a deduplication id, of which the record would be a repeat."""
    return [
        (name, value)
        for name, value in message.headers
        if not name.startswith((KAFKA_HEADER_PREFIX, MANSIO_HEADER_PREFIX))
        and name not in (REDRIVE_HEADER, DEDUP_ID_HEADER)
    ]


async def list_dead_letter_topics(client: Client) -> list[str]:
    """All dead-letter topics, sorted by name."""
    return [name for name in await client.admin.list_topics() if await _is_dead_letter_topic(client, name)]


async def _is_dead_letter_topic(client: Client, name: str) -> bool:
    entry = (await client.admin.describe_config(name)).get(DLQ_ENABLE_CONFIG)
    return entry is not None and entry.value == "true"


async def resolve_dead_letter_topic(client: Client, name: str) -> str:
    """Return the dead-letter topic for `name`: `name` itself if it is one, otherwise the topic with the dead letters of
    `name`.

    Raises `UnknownTopicOrPartition` if there is neither.
    """
    known = await client.admin.list_topics()
    default = dead_letter_topic_of(name)
    collision = next((each for each in known if unified_name(each) == unified_name(default)), default)
    for candidate in (name, default, collision):
        if candidate in known and await _is_dead_letter_topic(client, candidate):
            return candidate
    if name in known:
        raise UnknownTopicOrPartition(f"topic {name} has no dead letters; `mansio dlq list` shows which do")
    raise UnknownTopicOrPartition(f"there is no topic {name}")


async def read_dead_letters(
    client: Client,
    topic: str,
    *,
    partitions: Sequence[int] = (),
    positions: Sequence[tuple[int, int]] = (),
    matches: Callable[[DeadLetter], bool] = lambda _: True,
    on_unreadable: Callable[[UnreadableRecords], None],
) -> AsyncGenerator[DeadLetter, None]:
    """Read the current dead letters for which `matches` returns true. `partitions`, `positions` (partition, offset): if
    not empty, only of these. Those that cannot be read are reported to `on_unreadable` and skipped."""
    sources = [TopicPartition(topic, index) for index in partitions] or topic
    wanted = frozenset(positions)
    consumer = client.consume(sources, from_="earliest", to_end=True, on_unreadable=on_unreadable)
    async with consumer:
        async for batch in consumer.batches():
            for message in batch:
                if wanted and (message.partition, message.offset) not in wanted:
                    continue
                dead_letter = parse_dead_letter(message)
                if dead_letter is not None and matches(dead_letter):
                    yield dead_letter


# -- redrive --------


REDRIVE_CHUNK_RECORDS: Final = 500
"""Maximum number of records per request."""


@dataclass(slots=True)
class AppendCounts:
    """Numbers of records of a redrive to a topic: in all, appended, appended by an earlier redrive with the same id,
    and not appended because their dead letters have no value. `error`: why it ended early."""

    records: int = 0
    appended: int = 0
    repeated: int = 0
    without_value: int = 0
    error: str | None = None


class RateLimit:
    """Limits a redrive to `per_second` records per second; 0: no limit. `on_progress` is called with the number of
    records counted so far.
    """

    def __init__(self, per_second: int, on_progress: Callable[[int], None]) -> None:
        self._per_second = per_second
        self._on_progress = on_progress
        self._began = asyncio.get_running_loop().time()
        self._done = 0

    @property
    def next_chunk_records(self) -> int:
        """Maximum number of records of the next request."""
        return min(REDRIVE_CHUNK_RECORDS, self._per_second) or REDRIVE_CHUNK_RECORDS

    async def count_and_wait(self, records: int) -> None:
        """Count `records` processed records, and wait until the rate permits more."""
        self._done += records
        self._on_progress(self._done)
        if self._per_second:
            due = self._began + self._done / self._per_second
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))


async def redrive_to_groups(
    client: Client,
    dead_letters: AsyncIterator[DeadLetter],
    redrive_id: str,
    rate_limit: RateLimit,
    *,
    dry_run: bool,
) -> list[tuple[SharePartitionId, RedriveCounts]]:
    """Offer the records again to the share groups that rejected them; return the counts of each share partition,
    sorted."""
    offsets: dict[SharePartitionId, set[int]] = {}
    async for _, headers in dead_letters:
        source = SharePartitionId(headers.group, headers.topic, headers.partition, headers.topic_id)
        offsets.setdefault(source, set()).add(headers.offset)
    found = []
    for source in sorted(offsets):
        counts = RedriveCounts(len(offsets[source]))
        found.append((source, counts))
        if not dry_run:
            await _redrive(client, source, sorted(offsets[source]), redrive_id, rate_limit, counts)
    return found


async def _redrive(
    client: Client,
    source: SharePartitionId,
    offsets: Sequence[int],
    redrive_id: str,
    rate_limit: RateLimit,
    counts: RedriveCounts,
) -> None:
    try:
        now = await client.admin.describe_topic(source.topic)
        if now.topic_id != source.topic_id:  # another topic of that name: its offsets mean other records
            counts.deleted = len(offsets)
            return
        for at in range(0, len(offsets), rate_limit.next_chunk_records):
            chunk = offsets[at : at + rate_limit.next_chunk_records]
            result = await client.admin.shares.redrive(
                source.group,
                TopicPartition(source.topic, source.partition),
                redrive_id=redrive_id,
                offsets=offset_ranges(chunk),
                records_max=len(chunk),
            )
            counts.add(len(chunk), result)
            await rate_limit.count_and_wait(len(chunk))
    except MansioError as error:
        counts.error = error.message


async def redrive_to_topic(
    client: Client,
    dead_letters: Callable[[], AsyncIterator[DeadLetter]],
    target: str,
    redrive_id: str,
    rate_limit: RateLimit,
    *,
    again: bool,
    dry_run: bool,
) -> AppendCounts:
    """Append the original records to a topic; headers of each are the ids of its dead letter and of the redrive.

    `again`: a redrive with this id may have run before, so the target is searched for its
    records first. `dead_letters` may be called twice.
    """
    counts = AppendCounts()
    await client.admin.describe_topic(target)  # raises if the topic does not exist
    done: set[str] = set()
    if again:
        earliest_ms = min([one.headers.dead_lettered_ms async for one in dead_letters()], default=0)
        done = await _find_appended_ids(client, target, redrive_id, earliest_ms)
    waiting: list[DeadLetter] = []
    try:
        async for dead_letter in dead_letters():
            counts.records += 1
            if not dead_letter.headers.has_value:
                counts.without_value += 1
            elif dead_letter.headers.dead_letter_id in done:
                counts.repeated += 1
            else:
                done.add(dead_letter.headers.dead_letter_id)
                waiting.append(dead_letter)
            if len(waiting) >= rate_limit.next_chunk_records and not dry_run:
                await _append(client, target, waiting, redrive_id, rate_limit, counts)
        if not dry_run:
            await _append(client, target, waiting, redrive_id, rate_limit, counts)
    except MansioError as error:
        counts.error = error.message
    return counts


async def _append(
    client: Client,
    target: str,
    waiting: list[DeadLetter],
    redrive_id: str,
    rate_limit: RateLimit,
    counts: AppendCounts,
) -> None:
    records = []
    for dead_letter in waiting:
        own = (
            (ID_HEADER, dead_letter.headers.dead_letter_id.encode()),
            (REDRIVE_HEADER, redrive_id.encode()),
        )
        headers = (*original_headers(dead_letter.message), *own)
        records.append(OutgoingRecord(dead_letter.message.value, dead_letter.message.key, headers))
    count = len(waiting)
    waiting.clear()
    await client.publish_many(target, records)
    counts.appended += count
    await rate_limit.count_and_wait(count)


async def _find_appended_ids(client: Client, target: str, redrive_id: str, since_ms: int) -> set[str]:
    """Ids of the dead letters that this redrive has appended to the target already. Reads the target from `since_ms`,
    less one hour for clock differences.
    """
    found: set[str] = set()
    since = datetime.fromtimestamp(max(since_ms - 3_600_000, 0) / 1000, UTC)
    # What cannot be read is not one of them: it was not written by a redrive.
    async with client.consume(target, from_=since, to_end=True, on_unreadable="skip") as consumer:
        async for batch in consumer.batches():
            for message in batch:
                if message.header(REDRIVE_HEADER) == redrive_id.encode():
                    found.add((message.header(ID_HEADER) or b"").decode(errors="replace"))
    return found
