"""Pipeline demo: flights are archived while they are published, the log is deleted, and no record is missing.

Spark runs in `spark_thread`; this module has the steps and the checks.

Invariants:
* The broker's process, the session and the directory are removed in any case.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from mansio.cli.support.common import connect
from mansio.client.producer.producer import ProducerOptions
from mansio.client.types import TopicPartition
from mansio_demo.broker_process import BrokerProcess
from mansio_demo.console_output import Bars, new_console, print_line
from mansio_demo.delay_chart import MONTHS, Mean, chart_svg, departure_ms, differences, means
from mansio_demo.flights import load_flights
from mansio_demo.proofs import Proof
from mansio_demo.spark_thread import SparkThread, quiet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from mansio.client import Client
    from mansio.client.producer.accumulator import Delivery
    from mansio_demo.flights import Flight

TOPIC = "flights"
PARTITIONS = 6
PIPELINE = "demo"
SEGMENTS_PER_PARTITION = 25
RECORDS_PER_SECOND = 15_000
HEAD_START = 0.1
"""Share of the flights that exist when the archive starts; the others follow when it has archived the first ones."""
RECORDS_PER_TURN = 500
REDRAW_S = 0.2
RETENTION_CHECK_MS = 200
SETTLED_S = 1.5
"""Retention has finished when the log start has not moved for this time."""
RUN_S_MAX = 280.0
LIVE_FROM_MS = 1_385_856_000_000
"""2013-12-01, UTC: from here on flights are only in the log."""
DAY_FROM_MS = 1_362_700_800_000
"""2013-03-08, UTC: a snow storm with the worst delays of the year. The day that is replayed."""
DAY_MS = 86_400_000


@dataclass(slots=True)
class DemoState:
    """State of the run. `past` is archived, `live` stays in the log only."""

    past: list[tuple[int, Flight]]
    live: list[tuple[int, Flight]]
    published: int = 0
    archived: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[Flight]:
        return [flight for _, flight in self.past + self.live]

    @property
    def day(self) -> list[Flight]:
        """The flights of the replayed day, in the order of publishing."""
        return [flight for when, flight in self.past if DAY_FROM_MS <= when < DAY_FROM_MS + DAY_MS]

    def more_archived(self, records: int) -> bool:
        """Count archived records; returns whether all of `past` are archived."""
        self.archived += records
        return self.archived >= len(self.past)

    def check(self, holds: bool, otherwise: str) -> None:
        """Record an error, which is printed at the end."""
        if not holds:
            self.wrong.append(otherwise)


async def run_demo(count: int, plot: str, *, is_secure: bool = False) -> list[Proof]:
    """Run the demo with `count` flights spread over the year; returns what it proved. `is_secure`: with TLS and
    users."""
    console = new_console()
    state = _new_state(load_flights(), count)
    console.print(
        f"\n [bold]Mansio and Spark[/]: {count:,} flights, an Iceberg table, and a log with 1 ms retention\n"
    )
    settings = {"log_retention_check_interval_ms": str(RETENTION_CHECK_MS)}
    with (
        tempfile.TemporaryDirectory(prefix="mansio-demo-", ignore_cleanup_errors=True) as directory,
        BrokerProcess(os.path.join(directory, "data"), settings, is_secure=is_secure) as process,
        quiet(os.path.join(directory, "spark.log")),
    ):
        ready_s = await asyncio.to_thread(process.start)
        print_line(console, "broker", f"ready in {ready_s:.2f} s at {process.kafka}, all in {directory}")
        spark = SparkThread(process.kafka, TOPIC, os.path.join(directory, "warehouse"), PIPELINE)
        try:
            async with asyncio.timeout(RUN_S_MAX), connect(process.kafka) as client:
                await _chapters(console, state, spark, client, plot)
        except TimeoutError:
            state.check(False, f"it did not finish in {RUN_S_MAX:.0f} s")
        finally:
            await spark.stop()
        process.stop()
    for line in state.wrong:
        console.print(f"\n [bold red]Error:[/] {line}")
    if not state.wrong:
        print_line(console, "chart", plot)
    holds = not state.wrong
    return [
        Proof(
            "retention waits for archives",
            "retention.ms=1 meanwhile",
            f"{state.archived:,} archived",
            holds,
        ),
        Proof("archive and log as one table", "means by carrier and month", "equal to the file", holds),
        Proof("replay of a deleted day", "8 March, twice", f"{len(state.day):,} records, then 0", holds),
    ]


def _new_state(flights: Sequence[Flight], count: int) -> DemoState:
    """Return a sample of the flights, evenly over the year, in order of departure."""
    chosen = [flights[number * len(flights) // count] for number in range(count)]
    timed = sorted((departure_ms(flight), flight) for flight in chosen)
    return DemoState(
        [one for one in timed if one[0] < LIVE_FROM_MS], [one for one in timed if one[0] >= LIVE_FROM_MS]
    )


async def _chapters(
    console: Console, state: DemoState, spark: SparkThread, client: Client, plot: str
) -> None:
    size_bytes = sum(len(flight.value) for flight in state.all)
    segment_bytes = max(16_384, size_bytes // PARTITIONS // SEGMENTS_PER_PARTITION)
    config = {"retention.ms": "-1", "segment.bytes": str(segment_bytes)}
    await client.admin.create_topic(TOPIC, partitions=PARTITIONS, config=config)
    await _start(console, spark)
    await _stream(console, state, spark, client)
    await _publish(client, state, state.live, paced=False)
    print_line(console, "live log", f"{len(state.live):,} flights of December follow, which are not archived")
    await _shorten_retention(console, state, client)
    await _query(console, state, spark, plot)
    await _replay(console, state, spark, client)


async def _start(console: Console, spark: SparkThread) -> None:
    began = time.monotonic()
    with console.status(" Spark is starting (15 to 30 s)") if console.is_terminal else _nothing():
        version = await spark.do(spark.start)
    print_line(console, "spark", f"{version}, ready in {time.monotonic() - began:.1f} s")


async def _stream(console: Console, state: DemoState, spark: SparkThread, client: Client) -> None:
    """Publish until November and archive concurrently."""
    total = len(state.past)
    bars = Bars(console, total, ("published", "archived"))
    began = time.monotonic()
    archive = asyncio.ensure_future(spark.do(lambda: spark.archive(state.more_archived)))
    publish = asyncio.create_task(_publish_meanwhile(client, state))
    with bars.moving():
        try:
            while not (archive.done() and publish.done()):
                bars.show(state.published, state.archived, time.monotonic() - began)
                done, _ = await asyncio.wait({archive, publish}, timeout=REDRAW_S)
                for task in done:
                    task.result()
        finally:
            publish.cancel()
        bars.show(state.published, state.archived, time.monotonic() - began)
    text = f"{state.archived:,} flights until November, in {archive.result()} batches, as they came"
    print_line(console, "archive", text)
    state.check(state.archived == total, f"{state.archived:,} of {total:,} flights were archived")


async def _publish_meanwhile(client: Client, state: DemoState) -> None:
    """Publish the flights until November at a limited rate."""
    head = int(len(state.past) * HEAD_START)
    await _publish(client, state, state.past[:head], paced=False)
    while not state.archived:  # noqa: ASYNC110 - it changes in another thread
        await asyncio.sleep(REDRAW_S)
    await _publish(client, state, state.past[head:], paced=True)


async def _publish(
    client: Client, state: DemoState, flights: Sequence[tuple[int, Flight]], *, paced: bool
) -> None:
    pending: deque[Delivery] = deque()
    began = time.monotonic()
    async with client.producer(ProducerOptions(acks="all")) as producer:
        for number, (when, flight) in enumerate(flights):
            pending.append(await producer.send(TOPIC, flight.value, key=flight.key, timestamp_ms=when))
            if number % RECORDS_PER_TURN == 0:
                state.published += _acknowledged(pending)
                ahead_s = number / RECORDS_PER_SECOND - (time.monotonic() - began)
                await asyncio.sleep(max(0.0, ahead_s) if paced else 0)
        await producer.flush()
    state.published += _acknowledged(pending)


def _acknowledged(pending: deque[Delivery]) -> int:
    """Return the number of newly acknowledged records. Raises the first failure."""
    count = 0
    while pending and pending[0].done():
        pending.popleft().result()
        count += 1
    return count


async def _shorten_retention(console: Console, state: DemoState, client: Client) -> None:
    """Set retention to 1 ms and check what remains: records that are not archived."""
    began = time.monotonic()
    await client.admin.alter_topic_config(TOPIC, {"retention.ms": "1"})
    left, moved_at = await _records_left(client), 0.0
    while not moved_at or time.monotonic() - moved_at < SETTLED_S:
        await asyncio.sleep(REDRAW_S)
        before, left = left, await _records_left(client)
        if left < before or (moved_at == 0.0 and time.monotonic() - began > SETTLED_S * 4):
            moved_at = time.monotonic()
    deleted = len(state.all) - left
    text = f"retention.ms=1: {deleted:,} of {len(state.all):,} records deleted, {left:,} retained"
    print_line(console, "log", text)
    print_line(console, "", f"for pipeline {PIPELINE!r}: records that are not archived, by whole segments")
    state.check(left >= len(state.live), f"{left:,} records left, {len(state.live):,} were not archived")
    state.check(deleted > len(state.past) / 2, f"only {deleted:,} records were deleted")


async def _records_left(client: Client) -> int:
    wanted = [TopicPartition(TOPIC, index) for index in range(PARTITIONS)]
    starts = await client.admin.list_offsets(wanted, "earliest")
    ends = await client.admin.list_offsets(wanted, "latest")
    return sum(ends[place].offset - starts[place].offset for place in wanted)


async def _query(console: Console, state: DemoState, spark: SparkThread, plot: str) -> None:
    began = time.monotonic()
    with console.status(" asking archive and live log") if console.is_terminal else _nothing():
        found = await spark.do(spark.means)
    wrong = differences(means(state.all), found)
    flights = sum(mean.flights for mean in found.values())
    text = f"mean delay by carrier and month over archive and log: {len(found)} means, {flights:,} flights"
    print_line(console, "table", f"{text}, {time.monotonic() - began:.1f} s")
    worst, mean = max(
        found.items(), key=lambda one: one[1].delay_min or 0.0, default=(("", 1), Mean(0, None))
    )
    late = f"the latest: {worst[0]} in {MONTHS[worst[1] - 1]}, {mean.delay_min or 0:.0f} min"
    print_line(console, "", f"{'equal to the file' if not wrong else 'NOT equal to the file'}; {late}")
    state.check(not wrong, f"means differ from the file for {wrong[:5]}")
    await asyncio.to_thread(_write, plot, chart_svg(found, "Mean departure delay in minutes, New York 2013"))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


async def _replay(console: Console, state: DemoState, spark: SparkThread, client: Client) -> None:
    target = f"{TOPIC}-2013-03-08"
    began = time.monotonic()
    replay = partial(spark.replay, target, DAY_FROM_MS, DAY_FROM_MS + DAY_MS)
    written, again = await spark.do(replay), await spark.do(replay)
    day = state.day
    seconds = time.monotonic() - began
    print_line(
        console,
        "replay",
        f"8 March, deleted: {written:,} flights replayed to {target!r}; a repeated replay adds {again}",
    )
    state.check(written == len(day), f"{written:,} flights of {len(day):,} were replayed")
    state.check(again == 0, f"a second replay added {again} records")
    found: dict[bytes | None, list[bytes]] = {}
    async for message in client.consume(target, from_="earliest", max_records=written):
        found.setdefault(message.key, []).append(message.value or b"")
    expected: dict[bytes | None, list[bytes]] = {}
    for flight in day:
        expected.setdefault(flight.key, []).append(flight.value)
    found_unkeyed, expected_unkeyed = found.pop(None, []), expected.pop(None, [])
    same = found == expected and sorted(found_unkeyed) == sorted(expected_unkeyed)
    print_line(
        console,
        "",
        f"{len(found):,} aircraft, each in its order: {'yes' if same else 'NO'} ({seconds:.1f} s)",
    )
    state.check(same, "the replayed flights are not those of the file, or not in their order")


@contextmanager
def _nothing() -> Iterator[None]:
    yield
