"""Rebalance demo: eight partitions under constant load, three consumers of a group, and a fourth that joins.

Invariants:
* Every consumer has its own client; all times are of one monotonic clock, taken at delivery.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from mansio.cli.support.common import connect
from mansio.client.producer.producer import ProducerOptions
from mansio_demo import read_gaps
from mansio_demo.read_gaps import Read

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.client import Client
    from mansio.client.types import TopicPartition
    from mansio_demo.read_gaps import Gap

TOPIC: Final = "positions"
GROUP: Final = "radar"
PARTITIONS: Final = 8
WORKERS: Final = ("a", "b", "c")
NEWCOMER: Final = "d"
INTERVAL_S: Final = 0.025
"""Interval between two records of a partition."""
BEFORE_S: Final = 2.0
AFTER_S: Final = 3.0
POLL_MS: Final = 200
PAUSE_S_MAX: Final = 1.0
"""Maximum gap of a partition that keeps its consumer, also on a busy machine. A stop-the-world rebalance waits for the
slowest member.
"""
MOVE_S_MAX: Final = 3.0


@dataclass
class RebalanceRun:
    """Result of the run."""

    stored: dict[int, int] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    assignment_changes: list[tuple[float, int]] = field(default_factory=list)
    """(time, partition) of each assignment and revocation."""
    begin: float = 0.0
    joined: float = 0.0
    end: float = 0.0

    @cached_property
    def first_reads(self) -> list[Read]:
        return read_gaps.first_reads(self.reads)

    @cached_property
    def moved(self) -> set[int]:
        return read_gaps.moved(self.first_reads, self.joined)

    @property
    def stayed(self) -> set[int]:
        return set(range(PARTITIONS)) - self.moved

    @property
    def before_ms(self) -> float:
        return self._longest_ms(self.stayed, self.begin, self.joined)

    @property
    def stayed_ms(self) -> float:
        return self._longest_ms(self.stayed, self.joined, self.end)

    @property
    def moved_ms(self) -> float:
        return self._longest_ms(self.moved, self.joined, self.end)

    def _longest_ms(self, partitions: set[int], begin: float, end: float) -> float:
        return read_gaps.longest_s(self._gaps(begin, end), partitions) * 1000

    def _gaps(self, begin: float, end: float) -> list[Gap]:
        return read_gaps.gaps(self.first_reads, begin, end)

    def wrong(self) -> list[str]:
        """Errors: all records must be read once, and partitions that are not moved must not pause."""
        found = []
        read = {(one.partition, one.offset) for one in self.reads}
        missing = sum(
            (index, offset) not in read for index, count in self.stored.items() for offset in range(count)
        )
        if missing:
            found.append(f"{missing} records of {TOPIC!r} were not read")
        if len(self.reads) != len(read):
            found.append(f"{len(self.reads) - len(read)} records of {TOPIC!r} were read twice")
        if len(self.moved) != 2:
            found.append(f"{len(self.moved)} partitions moved, where 2 make the shares even")
        disturbed = {
            index for at, index in self.assignment_changes if self.joined < at <= self.end
        } - self.moved
        if disturbed:
            found.append(f"partitions {sorted(disturbed)} were reassigned, but stayed with their consumers")
        if self.stayed_ms > PAUSE_S_MAX * 1000:
            found.append(f"a partition that stayed was not read for {self.stayed_ms:.0f} ms")
        if self.moved_ms > MOVE_S_MAX * 1000:
            found.append(f"a partition that moved was not read for {self.moved_ms:.0f} ms")
        return found

    def sentence(self) -> str:
        rate = round(1 / INTERVAL_S)
        return f"{PARTITIONS} partitions, {rate} records a second each, {len(WORKERS)} workers; {NEWCOMER!r} joins:"

    def chart_lines(self) -> list[str]:
        """Return the chart of readers over time, with the time of the join."""
        at = read_gaps.column(self.joined, self.begin, self.end)
        return [
            *read_gaps.chart_lines(self.first_reads, self.begin, self.end),
            f"     {' ' * at}^ {NEWCOMER} joins",
        ]


async def join_and_watch(bootstrap_servers: str) -> RebalanceRun:
    """Run the load, and add the fourth consumer."""
    state = RebalanceRun()
    async with connect(bootstrap_servers) as client:
        await client.admin.create_topic(TOPIC, partitions=PARTITIONS)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for name in WORKERS:
                tasks.create_task(_read(bootstrap_servers, name, state, stop))
            load = tasks.create_task(_publish(client, state, stop))
            try:
                await _until(lambda: _is_even(state, WORKERS))
                state.begin = time.monotonic()
                await asyncio.sleep(BEFORE_S)
                state.joined = time.monotonic()
                tasks.create_task(_read(bootstrap_servers, NEWCOMER, state, stop))
                await _until(lambda: _is_even(state, (*WORKERS, NEWCOMER)))
                await asyncio.sleep(max(0.0, state.joined + AFTER_S - time.monotonic()))
                state.end = time.monotonic()
            finally:
                stop.set()
            await load
    return state


def _is_even(state: RebalanceRun, workers: tuple[str, ...]) -> bool:
    """Whether everything is read by all of these workers, with even shares."""
    readers: dict[int, str] = {}
    for read in state.reads[-20 * PARTITIONS :]:
        readers[read.partition] = read.worker
    shares = [list(readers.values()).count(name) for name in workers]
    return len(readers) == PARTITIONS and sum(shares) == PARTITIONS and max(shares) - min(shares) <= 1


async def _publish(client: Client, state: RebalanceRun, stop: asyncio.Event) -> None:
    """Publish a record to each partition periodically, each acknowledged."""
    async with client.producer(ProducerOptions(acks="all", linger_ms=0)) as producer:
        due = time.monotonic()
        while not stop.is_set():
            for index in range(PARTITIONS):
                await producer.send(TOPIC, b"N14228 is here", partition=index)
                state.stored[index] = state.stored.get(index, 0) + 1
            due = max(due + INTERVAL_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
        await producer.flush()


async def _read(bootstrap_servers: str, name: str, state: RebalanceRun, stop: asyncio.Event) -> None:
    """One member of the group, until all stored records were read by some member."""

    def assignment_changes(partitions: list[TopicPartition]) -> None:
        state.assignment_changes += [(time.monotonic(), partition.partition) for partition in partitions]

    async with connect(bootstrap_servers) as client:
        consumer = client.consume(
            TOPIC,
            group=GROUP,
            from_="earliest",
            on_assigned=assignment_changes,
            on_revoked=assignment_changes,
        )
        async with consumer:
            while not (stop.is_set() and len(state.reads) >= sum(state.stored.values())):
                for message in await consumer.poll(POLL_MS):
                    state.reads.append(Read(time.monotonic(), message.partition, message.offset, name))


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - it changes in callbacks of several clients
        await asyncio.sleep(0.02)
