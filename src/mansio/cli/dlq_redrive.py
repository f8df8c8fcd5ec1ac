"""What `mansio dlq redrive` does: dead letters chosen, put in order, and offered again to the group that gave them up;
or appended to a topic that is named.

Always true: under one id nothing is offered or appended twice, however often the command is run; what was not done, and
why, has a row of its own in the end.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.cli.dlq_letters import OURS, REDRIVE, Letter, original_headers
from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from mansio.client import Client

CHUNK: Final = 500
"""Records in one request."""


class Place(NamedTuple):
    """One share partition."""

    group: str
    topic: str
    partition: int
    topic_id: bytes


class Pace:
    """So many records a second, 0 for as fast as it goes; `told` is called with how many are done."""

    def __init__(self, per_second: int, told: Callable[[int], None]) -> None:
        self._per_second = per_second
        self._told = told
        self._began = asyncio.get_running_loop().time()
        self._done = 0

    @property
    def chunk(self) -> int:
        """Records to do at once."""
        return min(CHUNK, self._per_second) or CHUNK

    async def done(self, records: int) -> None:
        """Wait until so many more may have been done."""
        self._done += records
        self._told(self._done)
        if self._per_second:
            due = self._began + self._done / self._per_second
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))


async def to_groups(
    client: Client, letters: AsyncIterator[Letter], redrive_id: str, pace: Pace, *, dry_run: bool
) -> list[dict[str, Any]]:
    """Offer the records again to those who gave them up. One row for each share partition, by name."""
    offsets: dict[Place, list[int]] = {}
    async for letter in letters:
        place = Place(letter.group, letter.topic, letter.partition, letter.topic_id)
        offsets.setdefault(place, []).append(letter.offset)
    rows = []
    for place in sorted(offsets):
        wanted = sorted(set(offsets[place]))
        row: dict[str, Any] = {
            "group": place.group,
            "topic": place.topic,
            "partition": place.partition,
            "letters": len(wanted),
            "offered": 0,
            "done_before": 0,
            "gone": 0,
            "not_dead": 0,
            "error": None,
        }
        rows.append(row)
        if not dry_run:
            await _offer(client, place, wanted, redrive_id, pace, row)
    return rows


async def _offer(
    client: Client, place: Place, wanted: Sequence[int], redrive_id: str, pace: Pace, row: dict[str, Any]
) -> None:
    from mansio.client.types import TopicPartition

    partition = TopicPartition(place.topic, place.partition)
    try:
        now = await client.admin.describe_topic(place.topic)
        if now.topic_id != place.topic_id:  # another topic of that name: its offsets mean other records
            row["gone"] = len(wanted)
            return
        for at in range(0, len(wanted), pace.chunk):
            chunk = wanted[at : at + pace.chunk]
            found = await client.admin.shares.redrive(
                place.group,
                partition,
                redrive_id=redrive_id,
                offsets=ranges_of(chunk),
                most=len(chunk),
            )
            row["offered"] += found.offered
            row["done_before"] += found.done_before
            row["gone"] += found.gone
            row["not_dead"] += len(chunk) - found.offered - found.done_before - found.gone
            await pace.done(len(chunk))
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


async def to_topic(
    client: Client,
    letters: Callable[[], AsyncIterator[Letter]],
    target: str,
    redrive_id: str,
    pace: Pace,
    *,
    again: bool,
    dry_run: bool,
) -> list[dict[str, Any]]:
    """Append the records, as they were, to a topic; they carry the ids of their letter and of the redrive. `again`: it
    may have been run before under this id, so what the target has is looked through first. `letters` may be called more
    than once."""
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
        earliest_ms = min([one.given_up_ms async for one in letters()], default=0)
        done = await _appended(client, target, redrive_id, earliest_ms)
    waiting: list[Letter] = []
    try:
        async for letter in letters():
            row["letters"] += 1
            if not letter.has_value:
                row["without_value"] += 1
            elif letter.letter_id in done:
                row["done_before"] += 1
            else:
                done.add(letter.letter_id)
                waiting.append(letter)
            if len(waiting) >= pace.chunk and not dry_run:
                await _append(client, target, waiting, redrive_id, pace, row)
        if not dry_run:
            await _append(client, target, waiting, redrive_id, pace, row)
    except MansioError as error:
        row["error"] = error.message
    return [row]


async def _append(
    client: Client, target: str, waiting: list[Letter], redrive_id: str, pace: Pace, row: dict[str, Any]
) -> None:
    from mansio.client.types import OutgoingRecord

    records = []
    for letter in waiting:
        own = ((f"{OURS}id", letter.letter_id.encode()), (REDRIVE, redrive_id.encode()))
        headers = (*original_headers(letter.message), *own)
        records.append(OutgoingRecord(letter.message.value, letter.message.key, headers))
    count = len(waiting)
    waiting.clear()
    await client.publish_many(target, records)
    row["appended"] += count
    await pace.done(count)


async def _appended(client: Client, target: str, redrive_id: str, since_ms: int) -> set[str]:
    """The letters whose records this redrive has put there. It began after the first of them was given up, but for
    what clocks are apart."""
    found: set[str] = set()
    since = datetime.fromtimestamp(max(since_ms - 3_600_000, 0) / 1000, UTC)
    async with client.consume(target, from_=since, to_end=True) as consumer:
        async for batch in consumer.batches():
            for message in batch:
                if message.header(REDRIVE) == redrive_id.encode():
                    found.add((message.header(f"{OURS}id") or b"").decode(errors="replace"))
    return found
