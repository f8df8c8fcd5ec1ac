"""What `mansio dlq redrive` does: dead letters chosen, put in order, and offered again to the group that gave them up;
or appended to a topic that is named.

Always true: under one id nothing is offered or appended twice, however often the command is run; what was not done, and
why, has a row of its own in the end.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.cli.admin.dead_letters import MANSIO_HEADER_PREFIX, REDRIVE_HEADER, DeadLetter, original_headers
from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from mansio.client import Client

CHUNK: Final = 500
"""Records in one request."""


class SharePartition(NamedTuple):
    """One share partition."""

    group: str
    topic: str
    partition: int
    topic_id: bytes


class RateLimit:
    """So many records a second, 0 for as fast as it goes; `on_progress` is called with how many are done."""

    def __init__(self, per_second: int, on_progress: Callable[[int], None]) -> None:
        self._per_second = per_second
        self._on_progress = on_progress
        self._began = asyncio.get_running_loop().time()
        self._done = 0

    @property
    def chunk(self) -> int:
        """Records to do at once."""
        return min(CHUNK, self._per_second) or CHUNK

    async def done(self, records: int) -> None:
        """Wait until so many more may have been done."""
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
    """Offer the records again to those who gave them up. One row for each share partition, by name."""
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
            "letters": len(offsets_wanted),
            "offered": 0,
            "done_before": 0,
            "gone": 0,
            "not_dead": 0,
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

    partition = TopicPartition(share_partition.topic, share_partition.partition)
    try:
        now = await client.admin.describe_topic(share_partition.topic)
        if (
            now.topic_id != share_partition.topic_id
        ):  # another topic of that name: its offsets mean other records
            row["gone"] = len(offsets_wanted)
            return
        for at in range(0, len(offsets_wanted), rate_limit.chunk):
            chunk = offsets_wanted[at : at + rate_limit.chunk]
            found = await client.admin.shares.redrive(
                share_partition.group,
                partition,
                redrive_id=redrive_id,
                offsets=ranges_of(chunk),
                most=len(chunk),
            )
            row["offered"] += found.offered
            row["done_before"] += found.done_before
            row["gone"] += found.gone
            row["not_dead"] += len(chunk) - found.offered - found.done_before - found.gone
            await rate_limit.done(len(chunk))
    except MansioError as error:
        row["error"] = error.message


def ranges_of(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending offsets as ranges, first and last of each."""
    ranges: list[tuple[int, int]] = []
    for offset in offsets:
        if ranges and ranges[-1][1] + 1 == offset:
            ranges[-1] = (ranges[-1][0], offset)
        else:
            ranges.append((offset, offset))
    return ranges


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
    """Append the records, as they were, to a topic; they carry the ids of their letter and of the redrive. `again`: it
    may have been run before under this id, so what the target has is looked through first. `dead_letters` may be
    called more than once."""
    row: dict[str, Any] = {
        "topic": target,
        "letters": 0,
        "appended": 0,
        "done_before": 0,
        "without_value": 0,
        "error": None,
    }
    await client.admin.describe_topic(target)  # raises if there is no such topic
    done: set[str] = set()
    if again:
        earliest_ms = min([one.dead_lettered_ms async for one in dead_letters()], default=0)
        done = await _appended(client, target, redrive_id, earliest_ms)
    waiting: list[DeadLetter] = []
    try:
        async for dead_letter in dead_letters():
            row["letters"] += 1
            if not dead_letter.has_value:
                row["without_value"] += 1
            elif dead_letter.dead_letter_id in done:
                row["done_before"] += 1
            else:
                done.add(dead_letter.dead_letter_id)
                waiting.append(dead_letter)
            if len(waiting) >= rate_limit.chunk and not dry_run:
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
            (f"{MANSIO_HEADER_PREFIX}id", dead_letter.dead_letter_id.encode()),
            (REDRIVE_HEADER, redrive_id.encode()),
        )
        headers = (*original_headers(dead_letter.message), *own)
        records.append(OutgoingRecord(dead_letter.message.value, dead_letter.message.key, headers))
    count = len(waiting)
    waiting.clear()
    await client.publish_many(target, records)
    row["appended"] += count
    await rate_limit.done(count)


async def _appended(client: Client, target: str, redrive_id: str, since_ms: int) -> set[str]:
    """The letters whose records this redrive has put there. It began after the first of them was given up, but for
    what clocks are apart."""
    found: set[str] = set()
    since = datetime.fromtimestamp(max(since_ms - 3_600_000, 0) / 1000, UTC)
    async with client.consume(target, from_=since, to_end=True) as consumer:
        async for batch in consumer.batches():
            for message in batch:
                if message.header(REDRIVE_HEADER) == redrive_id.encode():
                    found.add((message.header(f"{MANSIO_HEADER_PREFIX}id") or b"").decode(errors="replace"))
    return found
