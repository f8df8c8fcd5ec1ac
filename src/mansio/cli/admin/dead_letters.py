"""Dead letters of share groups for the command `mansio dlq`: topics, parsing, filters and redrive.

A dead letter is a dead-lettered record, as the broker has written it to a dead-letter topic.

Invariants:
* With the same redrive id no record is offered or appended twice, however often the command runs.
* The output has a row with the reason for each failure.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.cli.support.common import UnreadableReport
from mansio.config.topic_names import dead_letter_topic_of, unified_name
from mansio.errors import MansioError, UnknownTopicOrPartition
from mansio.wire.internal_records.dead_letter_headers import (
    ID_HEADER,
    KAFKA_HEADER_PREFIX,
    MANSIO_HEADER_PREFIX,
    parse_dead_letter_headers,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from mansio.client import Client
    from mansio.client.types import Message, TopicPartition

DLQ_ENABLE_CONFIG: Final = "errors.deadletterqueue.group.enable"
REDRIVE_HEADER: Final = "mansio-redrive-id"

FILTER_HELP: Final = (
    "key=VALUE, group=NAME, topic=NAME (where the record was), reason=TEXT, consumer=ID, or header.NAME=VALUE"
)
FILTER_NAMES: Final = ("key", "group", "topic", "reason", "consumer")


class DeadLetter(NamedTuple):
    """One dead letter. `topic`, `topic_id`, `partition`, `offset`: position of the original record. `reason`: that of
    the consumer, otherwise Kafka's text. `has_value`: whether the dead letter contains the value of the original
    record.
    """

    message: Message
    group: str
    topic: str
    topic_id: bytes
    partition: int
    offset: int
    deliveries: int
    reason: str
    consumer: str
    dead_lettered_ms: int
    dead_letter_id: str
    has_value: bool


def parse_dead_letter(message: Message) -> DeadLetter | None:
    """Parse a record of a dead-letter topic; None if it was not written by a Mansio broker."""
    headers = parse_dead_letter_headers(message.headers)
    if headers is None:
        return None
    return DeadLetter(
        message,
        headers.group,
        headers.topic,
        headers.topic_id,
        headers.partition,
        headers.offset,
        headers.deliveries,
        headers.reason or headers.message,
        headers.consumer,
        headers.dead_lettered_ms,
        headers.dead_letter_id,
        headers.has_value,
    )


def original_headers(message: Message) -> list[tuple[str, bytes | None]]:
    """The headers of the original record: those of the dead letter without the headers that the broker has added, and
    without a deduplication id, of which the record would be a repeat."""
    from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER  # with a codec that few commands need

    return [
        (name, value)
        for name, value in message.headers
        if not name.startswith((KAFKA_HEADER_PREFIX, MANSIO_HEADER_PREFIX))
        and name not in (REDRIVE_HEADER, DEDUP_ID_HEADER)
    ]


class Filter(NamedTuple):
    """Selects dead letters whose field or header `name` has this value."""

    name: str
    value: str

    def matches(self, dead_letter: DeadLetter) -> bool:
        if self.name.startswith("header."):
            return dead_letter.message.header(self.name.removeprefix("header.")) == self.value.encode()
        if self.name == "key":
            return dead_letter.message.key == self.value.encode()
        return bool(getattr(dead_letter, self.name) == self.value)


def parse_filter(text: str) -> Filter:
    """Parse a filter such as `group=NAME` (see `FILTER_HELP`). Raises `ValueError`."""
    name, equals, value = text.partition("=")
    if not equals or (
        name not in FILTER_NAMES and not (name.startswith("header.") and len(name) > len("header."))
    ):
        raise ValueError(f"{text!r} is none of: {FILTER_HELP}")
    return Filter(name, value)


def parse_position(text: str) -> tuple[int, int]:
    """Parse `PARTITION:OFFSET`. Raises `ValueError`."""
    partition, colon, offset = text.partition(":")
    if not colon or not (partition.isdecimal() and offset.isdecimal()):
        raise ValueError(f"{text!r} is not PARTITION:OFFSET of a dead letter, such as 0:42")
    return int(partition), int(offset)


async def list_dead_letter_topics(client: Client) -> list[str]:
    """All dead-letter topics, sorted by name."""
    return [name for name in await client.admin.list_topics() if await _is_dead_letter_topic(client, name)]


async def _is_dead_letter_topic(client: Client, name: str) -> bool:
    entry = (await client.admin.describe_config(name)).get(DLQ_ENABLE_CONFIG)
    return entry is not None and entry.value == "true"


async def resolve_dead_letter_topic(client: Client, name: str) -> str:
    """The dead-letter topic for `name`: `name` itself if it is one, otherwise the topic with the dead letters of
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
    filters: Sequence[Filter] = (),
    positions: Sequence[tuple[int, int]] = (),
    starts: dict[TopicPartition, int] | None = None,
) -> AsyncGenerator[DeadLetter, None]:
    """Read the current dead letters that match all filters. Those that cannot be read are reported and skipped.
    `positions`: if not empty, only those at one of these
    (partition, offset).
    """
    from mansio.client.types import TopicPartition

    sources = [TopicPartition(topic, index) for index in partitions] or topic
    wanted = frozenset(positions)
    consumer = client.consume(
        sources, from_=starts or "earliest", to_end=True, on_unreadable=UnreadableReport().show
    )
    async with consumer:
        async for batch in consumer.batches():
            for message in batch:
                if wanted and (message.partition, message.offset) not in wanted:
                    continue
                dead_letter = parse_dead_letter(message)
                if dead_letter is not None and all(one.matches(dead_letter) for one in filters):
                    yield dead_letter


# -- redrive --------


REDRIVE_CHUNK_RECORDS: Final = 500
"""Maximum number of records per request."""


class SharePartition(NamedTuple):
    """One partition of a topic as one share group reads it. `topic_id`: id of the topic of the original records."""

    group: str
    topic: str
    partition: int
    topic_id: bytes


class RateLimit:
    """Limits a redrive to `per_second` records per second; 0: no limit. `on_progress` is called with the number of
    records counted so far.
    """

    def __init__(self, per_second: int, on_progress: Callable[[int], None]) -> None:
        self._per_second = per_second
        self._on_progress = on_progress
        import asyncio

        self._began = asyncio.get_running_loop().time()
        self._done = 0

    @property
    def next_chunk_records(self) -> int:
        """Maximum number of records of the next request."""
        return min(REDRIVE_CHUNK_RECORDS, self._per_second) or REDRIVE_CHUNK_RECORDS

    async def count_and_wait(self, records: int) -> None:
        """Count `records` processed records, and wait until the rate permits more."""
        import asyncio

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
) -> list[dict[str, Any]]:
    """Offer the records again to the share groups that rejected them. Returns one row per share partition, sorted."""
    offsets: dict[SharePartition, list[int]] = {}
    async for dead_letter in dead_letters:
        share_partition = SharePartition(
            dead_letter.group, dead_letter.topic, dead_letter.partition, dead_letter.topic_id
        )
        offsets.setdefault(share_partition, []).append(dead_letter.offset)
    rows = []
    for share_partition in sorted(offsets):
        offsets_wanted = sorted(set(offsets[share_partition]))
        row: dict[str, Any] = {
            "group": share_partition.group,
            "topic": share_partition.topic,
            "partition": share_partition.partition,
            "records": len(offsets_wanted),
            "redriven": 0,
            "repeated": 0,
            "deleted": 0,
            "not_dead_lettered": 0,
            "error": None,
        }
        rows.append(row)
        if not dry_run:
            await _redrive(client, share_partition, offsets_wanted, redrive_id, rate_limit, row)
    return rows


async def _redrive(
    client: Client,
    share_partition: SharePartition,
    offsets_wanted: Sequence[int],
    redrive_id: str,
    rate_limit: RateLimit,
    row: dict[str, Any],
) -> None:
    from mansio.client.types import TopicPartition
    from mansio.net.redrive import offset_ranges

    partition = TopicPartition(share_partition.topic, share_partition.partition)
    try:
        now = await client.admin.describe_topic(share_partition.topic)
        if (
            now.topic_id != share_partition.topic_id
        ):  # another topic of that name: its offsets mean other records
            row["deleted"] = len(offsets_wanted)
            return
        for at in range(0, len(offsets_wanted), rate_limit.next_chunk_records):
            chunk = offsets_wanted[at : at + rate_limit.next_chunk_records]
            found = await client.admin.shares.redrive(
                share_partition.group,
                partition,
                redrive_id=redrive_id,
                offsets=offset_ranges(chunk),
                records_max=len(chunk),
            )
            row["redriven"] += found.redriven
            row["repeated"] += found.repeated
            row["deleted"] += found.deleted
            row["not_dead_lettered"] += len(chunk) - found.redriven - found.repeated - found.deleted
            await rate_limit.count_and_wait(len(chunk))
    except MansioError as error:
        row["error"] = error.message


async def redrive_to_topic(
    client: Client,
    dead_letters: Callable[[], AsyncIterator[DeadLetter]],
    target: str,
    redrive_id: str,
    rate_limit: RateLimit,
    *,
    again: bool,
    dry_run: bool,
) -> list[dict[str, Any]]:
    """Append the original records to a topic; headers of each are the ids of its dead letter and of the redrive.

    Returns one row of output. `again`: a redrive with this id may have run before, so the target is searched for its
    records first. `dead_letters` may be called twice.
    """
    row: dict[str, Any] = {
        "topic": target,
        "records": 0,
        "appended": 0,
        "repeated": 0,
        "without_value": 0,
        "error": None,
    }
    await client.admin.describe_topic(target)  # raises if the topic does not exist
    done: set[str] = set()
    if again:
        earliest_ms = min([one.dead_lettered_ms async for one in dead_letters()], default=0)
        done = await _find_appended_ids(client, target, redrive_id, earliest_ms)
    waiting: list[DeadLetter] = []
    try:
        async for dead_letter in dead_letters():
            row["records"] += 1
            if not dead_letter.has_value:
                row["without_value"] += 1
            elif dead_letter.dead_letter_id in done:
                row["repeated"] += 1
            else:
                done.add(dead_letter.dead_letter_id)
                waiting.append(dead_letter)
            if len(waiting) >= rate_limit.next_chunk_records and not dry_run:
                await _append(client, target, waiting, redrive_id, rate_limit, row)
        if not dry_run:
            await _append(client, target, waiting, redrive_id, rate_limit, row)
    except MansioError as error:
        row["error"] = error.message
    return [row]


async def _append(
    client: Client,
    target: str,
    waiting: list[DeadLetter],
    redrive_id: str,
    rate_limit: RateLimit,
    row: dict[str, Any],
) -> None:
    from mansio.client.types import OutgoingRecord

    records = []
    for dead_letter in waiting:
        own = (
            (ID_HEADER, dead_letter.dead_letter_id.encode()),
            (REDRIVE_HEADER, redrive_id.encode()),
        )
        headers = (*original_headers(dead_letter.message), *own)
        records.append(OutgoingRecord(dead_letter.message.value, dead_letter.message.key, headers))
    count = len(waiting)
    waiting.clear()
    await client.publish_many(target, records)
    row["appended"] += count
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
