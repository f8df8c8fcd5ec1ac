"""kill -9 while members of a share group with order by key, or a limit by key, take, extend, accept, release and drop
records.

Leases of different durations are mixed: the group's, those of a receiver, and those of an `extend`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

import pytest

import mansio
from mansio.errors import MansioError
from support.key_history import KeyHistory
from support.machine import scaled
from support.process import served
from support.receive_fixtures import group_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mansio.client import Leased
    from support.process import ServedBroker

TOPIC = "accounts"
GROUP = "workers"
PARTITIONS = 2
KEYS = 9
LOCK_MS = 2_000
PRODUCER_PAUSE_S = 0.02
SKEW_MS = 150
"""Precision of the comparison of the ages of leases with the clock of the test."""


class Member(NamedTuple):
    """How many records it takes at once, and the duration of its leases; None for the group's."""

    most: int
    lease_ms: int | None


MEMBERS = (Member(1, None), Member(3, 900), Member(20, 4_000))
EXTENSIONS_MS = (700, 3_000, 6_000)


class KeyedLoad:
    """A producer and the members of a group, which go on while the broker dies."""

    def __init__(self, client: mansio.Client, seed: int, leases_max: int | None) -> None:
        """`leases_max`: as in `KeyHistory`."""
        self.client = client
        self.history = KeyHistory(self._delay_s, leases_max)
        self.is_ending = False
        self._seed = seed
        self._random = random.Random(seed)
        self._is_producing = True
        self._published_s: deque[tuple[float, float]] = deque(maxlen=1_000)
        """Times at which a round of publications began and was answered, the latest last."""
        self._publishing_since_s = time.monotonic()

    def _delay_s(self, received_s: float) -> float:
        """How late an answer received at a time can have been: as late as those about durable records at that time."""
        rounds = [*self._published_s, (self._publishing_since_s, time.monotonic())]
        around = (end - start for start, end in rounds if start <= received_s <= end + PRODUCER_PAUSE_S * 5)
        return max(around, default=0.0) + PRODUCER_PAUSE_S

    async def produce(self) -> None:
        number = 0
        while self._is_producing:
            records = []
            for _ in range(self._random.randrange(1, 12)):
                partition = self._random.randrange(PARTITIONS)
                key = b"%d-%d" % (partition, self._random.randrange(KEYS))
                records.append(mansio.OutgoingRecord(b"%d" % number, key=key, partition=partition))
                number += 1
            self._publishing_since_s = time.monotonic()
            results = await asyncio.gather(
                *(
                    self.client.publish(TOPIC, one.value, key=one.key, partition=one.partition)
                    for one in records
                ),
                return_exceptions=True,
            )
            self._published_s.append((self._publishing_since_s, time.monotonic()))
            for record, result in zip(records, results, strict=True):
                if not isinstance(result, BaseException):
                    self.history.published[record.value or b""] = None
            await asyncio.sleep(PRODUCER_PAUSE_S)

    def stop_producing(self) -> None:
        self._is_producing = False

    async def work(self, number: int) -> None:
        """One member after another, under one name."""
        chance, options = random.Random(self._seed * 100 + number), MEMBERS[number]
        lives = 0
        while not self.is_done():
            lives += 1
            name = f"{number}.{lives}"
            receiver = self.client.receive(
                TOPIC,
                group=GROUP,
                max_records=options.most,
                lease_ms=options.lease_ms,
                auto_extend=False,
            )
            try:
                async with receiver:
                    leaves = chance.randrange(30, 120)
                    while not self.is_done() and leaves:
                        leaves -= 1
                        messages = await receiver.poll(timeout_ms=100)
                        lease_ms = options.lease_ms or LOCK_MS
                        self.history.take(name, receiver.member_id, messages, lease_ms)
                        await self._handle(name, messages, chance)
            except MansioError:
                await asyncio.sleep(0.05)
            finally:
                self.history.leave(name)

    async def _handle(self, name: str, messages: Sequence[Leased], chance: random.Random) -> None:
        by_key: dict[bytes, list[Leased]] = defaultdict(list)
        for message in messages:
            by_key[message.key or b""].append(message)
        await asyncio.gather(*(self._handle_key(name, each, chance) for each in by_key.values()))

    async def _handle_key(self, name: str, messages: list[Leased], chance: random.Random) -> None:
        """Handle the records of a key: accept the first ones, and release the others, or let their leases end."""
        if not self.is_ending and chance.random() < 0.15:
            extension_ms = chance.choice(EXTENSIONS_MS)
            self.history.extend(messages[0], extension_ms)
            try:
                await messages[0].extend(extension_ms)
            except MansioError:
                pass
            else:
                self.history.extended(messages[0], extension_ms)
        await asyncio.sleep(chance.choice((0, 0, 0.01, 0.05)))
        accepted = len(messages)
        if not self.is_ending and chance.random() < 0.25:
            accepted = chance.randrange(len(messages))
        is_dropped = not self.is_ending and chance.random() < 0.2
        await asyncio.gather(
            *(
                self._end(name, message, is_accepted=at < accepted)
                for at, message in enumerate(messages)
                if at < accepted or not is_dropped
            )
        )

    async def _end(self, name: str, message: Leased, *, is_accepted: bool) -> None:
        self.history.give_up(name, message, is_accepted=is_accepted)
        try:
            await (message.ack() if is_accepted else message.retry())
        except MansioError:
            return
        if is_accepted:
            self.history.accept(message)

    def is_done(self) -> bool:
        return self.is_ending and not self.history.published.keys() - self.history.sent_accepts

    async def check_durations(self, started_s: float) -> None:
        """After a restart, each lease has the duration that its member has chosen, counted again."""
        partitions = [mansio.TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
        allowed = self.history.durations()
        found = await self.client.admin.shares.leases(GROUP, partitions, ranges_max=10_000)
        age_ms_max = (time.monotonic() - started_s) * 1000 + SKEW_MS
        for partition, state in found.items():
            if state is not None:
                self.history.check_durations(partition.partition, state.ranges, allowed, age_ms_max)


async def kill_while_working(
    broker: ServedBroker, kills: int, seed: int, leases_max: int | None
) -> KeyHistory:
    chance = random.Random(seed)
    async with mansio.connect(broker.bootstrap_servers) as client:
        await client.admin.create_topic(TOPIC, partitions=PARTITIONS)
        rule = {"order": "key"} if leases_max is None else {"leases_max": leases_max}
        await group_of(client, GROUP, **rule, lock_ms=LOCK_MS, backoff_ms=30, tries=10)
        load = KeyedLoad(client, seed, leases_max)
        history = load.history
        tasks = [asyncio.ensure_future(load.work(number)) for number in range(len(MEMBERS))]
        producer = asyncio.ensure_future(load.produce())
        try:
            for _ in range(kills):
                wanted = len(history.accepted) + chance.randrange(5, 60)
                await until(lambda wanted=wanted: len(history.accepted) >= wanted, tasks)
                before_s = time.monotonic()
                await asyncio.to_thread(broker.kill)
                history.on_killed()
                await asyncio.to_thread(broker.start)
                await load.check_durations(before_s)
            load.stop_producing()
            await producer
            load.is_ending = True
            async with asyncio.timeout(scaled(60)):
                await asyncio.gather(*tasks)
        finally:
            load.stop_producing()
            load.is_ending = True
            for task in (producer, *tasks):
                task.cancel()
            await asyncio.gather(producer, *tasks, return_exceptions=True)
    history.finish()
    return history


async def until(is_true: Callable[..., bool], tasks: Sequence[asyncio.Future[None]]) -> None:
    """Wait until a function returns true, or raise the error of a task."""
    async with asyncio.timeout(scaled(60)):
        while not is_true():
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)


def kill_repeatedly(tmp_path: Path, kills: int, seed: int, leases_max: int | None = None) -> Counter[str]:
    """`leases_max`: as in `KeyHistory`."""
    found: list[KeyHistory] = []
    with served(tmp_path / "data", http=False) as broker:

        async def scenario() -> None:
            found.append(await kill_while_working(broker, kills, seed, leases_max))

        asyncio.run(scenario())
        assert "Traceback" not in broker.output.read_text()
    numbers = found[0].numbers()
    print(f"{kills} kills, seed {seed}: {dict(numbers)}")
    return numbers


@pytest.mark.row("D1", "D2", "D8")
@pytest.mark.full
def test_no_kill_breaks_the_order_of_a_key_or_the_duration_of_a_lease(tmp_path: Path) -> None:
    numbers = kill_repeatedly(tmp_path, 10, seed=6)
    assert min(numbers["accepted"], numbers["delivered again"], numbers["leases compared"]) > 10


@pytest.mark.row("D1", "D9")
@pytest.mark.full
def test_no_kill_exceeds_a_limit_by_key(tmp_path: Path) -> None:
    numbers = kill_repeatedly(tmp_path, 3, seed=7, leases_max=2)
    assert min(numbers["accepted"], numbers["delivered again"], numbers["at the limit"]) > 10
