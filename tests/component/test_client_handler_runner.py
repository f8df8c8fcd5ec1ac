"""Order of records with `fifo` and `by_key`, with failing handlers and members that die, on a real broker.

The tests compare the calls of the handlers with the sequence of each key: a record begins when all earlier records of
its key are acknowledged or dead-lettered, and none begins after a later one has begun.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mansio
from mansio.client import Leased, TopicPartition
from support.client_fixtures import broker_in, run
from support.receive_fixtures import group_of
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.client import Client, Receiver

TRIES = 10
"""So many that members that die, which counts for a try, do not use them up."""

NUMBERS = count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("run-modes")) as started:
        yield started


@dataclass
class Plan:
    """`failures`: how often the handler fails for an offset; `TRIES` times is for ever. `deaths`: after so many calls
    that ended, the older member dies and another one joins."""

    mode: Literal["fifo", "by_key"]
    keys: list[str | None]
    failures: dict[int, int]
    deaths: list[int]
    concurrency: int
    max_records: int


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    keys = draw(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=4, max_size=24))
    offsets = st.integers(0, len(keys) - 1)
    return Plan(
        mode=draw(st.sampled_from(["by_key", "by_key", "fifo"])),
        keys=keys,
        failures=draw(st.dictionaries(offsets, st.sampled_from([1, 2, TRIES]), max_size=5)),
        deaths=sorted(draw(st.lists(st.integers(1, len(keys)), max_size=2))),
        concurrency=draw(st.integers(1, 5)),
        max_records=draw(st.sampled_from([1, 3, 500])),
    )


@dataclass
class Calls:
    """What the handlers say, in order: (member, "begin" | "done" | "failed", offset)."""

    plan: Plan
    calls: list[tuple[int, str, int]] = field(default_factory=list)
    failed: Counter[int] = field(default_factory=Counter)
    dead: set[int] = field(default_factory=set)

    @property
    def ended(self) -> int:
        return sum(1 for _, what, _ in self.calls if what != "begin")

    def handler(self, member: int) -> Any:
        async def handle(message: Leased) -> None:
            offset = message.offset
            await self.tell(member, "begin", offset)
            await asyncio.sleep(0.001 * (offset % 3))
            most = self.plan.failures.get(offset, 0)
            if self.failed[offset] < most or most == TRIES:
                self.failed[offset] += 1
                await self.tell(member, "failed", offset)
                raise RuntimeError(f"offset {offset} fails")
            await self.tell(member, "done", offset)

        return handle

    async def tell(self, member: int, what: str, offset: int) -> None:
        if member in self.dead:  # the dead do nothing
            await asyncio.sleep(3_600)
        self.calls.append((member, what, offset))

    def sequence_of(self, offset: int) -> Any:
        key = self.plan.keys[offset]
        if self.plan.mode == "fifo":
            return "all"
        return offset if key is None else key

    def check(self) -> None:
        over: set[int] = set()
        begun: dict[Any, int] = {}
        in_a_row: Counter[tuple[int, int]] = Counter()
        for member, what, offset in self.calls:
            sequence = self.sequence_of(offset)
            if what == "begin":
                before = {o for o in range(offset) if self.sequence_of(o) == sequence}
                assert before <= over, f"offset {offset} began before {before - over} was over"
                assert begun.get(sequence, -1) <= offset, f"offset {offset} began after {begun[sequence]}"
                begun[sequence] = offset
            elif what == "done":
                over.add(offset)
            else:
                in_a_row[member, offset] += 1
                if in_a_row[member, offset] == TRIES:
                    over.add(offset)
        assert over == set(range(len(self.plan.keys)))


class Member:
    """One receiver with connections of its own."""

    def __init__(self, number: int, client: Client, receiver: Receiver, task: asyncio.Task[None]) -> None:
        self.number = number
        self.client = client
        self.receiver = receiver
        self.task = task

    @classmethod
    async def join(cls, number: int, broker: mansio.Broker, noted: Calls, group: str) -> Member:
        plan = noted.plan
        client = await mansio.connect(broker.address).__aenter__()
        receiver = client.receive(group, group=group, max_records=plan.max_records, fetch_wait_ms_max=100)
        work = receiver.run(noted.handler(number), mode=plan.mode, concurrency=plan.concurrency)
        return cls(number, client, receiver, asyncio.ensure_future(work))

    async def die(self, noted: Calls) -> None:
        """Its connections end, without a word."""
        noted.dead.add(self.number)
        self.receiver._options = replace(self.receiver._options, close_ms_max=10)
        await self.client._cluster.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def leave(self) -> None:
        self.receiver.stop()
        await self.task
        await self.client.close()


@given(plans())
@settings(max_examples=examples(8, 20), deadline=None)
def test_no_record_passes_another_of_its_key_whatever_fails_or_dies(
    broker: mansio.Broker, plan: Plan
) -> None:
    name = f"order-{next(NUMBERS)}"
    noted = Calls(plan)

    async def scenario() -> None:
        async with mansio.connect(broker.address) as client:
            await client.admin.create_topic(name, partitions=1)
            await group_of(
                client,
                name,
                tries=TRIES,
                backoff_ms=2,
                multiplier=1,
                order="partition",
                dead_letters="false",
            )
            records = [
                mansio.client.OutgoingRecord(b"x", None if key is None else key.encode()) for key in plan.keys
            ]
            await client.publish_many(name, records)
            members = [await Member.join(number, broker, noted, name) for number in range(2)]
            deaths = list(plan.deaths)
            place = TopicPartition(name, 0)
            while True:
                if deaths and noted.ended >= deaths[0]:
                    deaths.pop(0)
                    await members.pop(0).die(noted)
                    members.append(await Member.join(10 + len(deaths), broker, noted, name))
                with suppress(mansio.MansioError):
                    found = await client.admin.shares.leases(name, [place])
                    if (state := found[place]) is not None and state.start_offset == len(plan.keys):
                        break
                for member in members:
                    if member.task.done():
                        member.task.result()
                await asyncio.sleep(0.01)
            for member in members:
                await member.leave()

    run(scenario)
    noted.check()
