"""`mansio.share.fair`: records of a key with a backlog do not delay those of other keys."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.broker.coordinator.share import fair_scan
from support.client_fixtures import broker_in, connected, run
from support.machine import scaled
from support.present import present
from support.receive_fixtures import group_of, taken

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mansio.client import Leased

BACKLOG = 3_000
QUIET = 20
SEED = 5


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("fair")) as started:
        yield started


async def publish_keys(client: mansio.Client, topic: str, keys: Sequence[str]) -> None:
    """Records with these keys, in batches."""
    records = [mansio.OutgoingRecord(b"%d" % number, key=key.encode()) for number, key in enumerate(keys)]
    for first in range(0, len(records), 500):
        await client.publish_many(topic, records[first : first + 500])


async def fair_group(client: mansio.Client, group: str) -> str:
    await group_of(client, group)
    await set_fair(client, group, is_fair=True)
    return group


async def set_fair(client: mansio.Client, group: str, *, is_fair: bool) -> None:
    await client.admin.alter_group_config(group, {"mansio.share.fair": str(is_fair).lower()})


def key_of(message: Leased) -> str:
    return (message.key or b"").decode()


async def accepted(receiver: mansio.Receiver, count: int) -> list[int]:
    """Take and accept at least so many records; return their offsets in the order of delivery."""
    found: list[int] = []
    while len(found) < count:
        messages = await receiver.poll(max_records=min(50, count - len(found)))
        await receiver.ack(messages)
        found += [message.offset for message in messages]
    return found


@pytest.mark.row("D9")
def test_records_of_others_do_not_wait_for_the_backlog_of_a_key(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, fair=1) as client:
            group = await fair_group(client, "fair")
            await publish_keys(client, "fair", ["noisy"] * BACKLOG)
            await publish_keys(client, "fair", [f"quiet-{number}" for number in range(QUIET)])
            async with client.receive("fair", group=group, max_records=10, prefetch=0) as receiver:
                seen: list[str] = []
                while sum(key != "noisy" for key in seen) < QUIET:
                    messages = await taken(receiver, 1)
                    seen += [key_of(message) for message in messages]
                    await receiver.ack(messages)
                assert Counter(seen)["noisy"] < BACKLOG // 10
                await accepted(receiver, BACKLOG + QUIET - len(seen))
                assert await receiver.poll(timeout_ms=300) == []

    run(scenario)


@pytest.mark.row("D9")
def test_a_key_in_a_header_is_the_key_that_has_the_backlog(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, by_header=1) as client:
            group = await fair_group(client, "by-header")
            await client.admin.alter_group_config(group, {"mansio.share.key.header": "tenant"})
            tenants = [b"noisy"] * 1_000 + [b"quiet"]
            await client.publish_many(
                "by_header", [mansio.OutgoingRecord(each, headers=(("tenant", each),)) for each in tenants]
            )
            async with client.receive("by_header", group=group, max_records=1, prefetch=0) as receiver:
                before = 0
                while (await _accept_one(receiver)).value != b"quiet":
                    before += 1
                assert before < 500  # it is isolated while others are accepted: later on a loaded machine

    run(scenario)


async def _accept_one(receiver: mansio.Receiver) -> Leased:
    (message,) = await taken(receiver, 1)
    await receiver.ack([message])
    return message


@pytest.mark.full
@pytest.mark.row("D9", "D5")
def test_nothing_is_lost_or_delivered_again_when_fairness_is_turned_on_and_off(tmp_path: Path) -> None:
    chance = Random(SEED)
    keys = [chance.choice(["noisy", "noisy", "loud", f"quiet-{chance.randrange(500)}"]) for _ in range(3_000)]
    done: list[int] = []

    async def phase(broker: mansio.Broker, *, is_fair: bool, count: int) -> None:
        async with connected(broker) as client:
            await set_fair(client, "changing", is_fair=is_fair)
            one = client.receive("changing", group="changing", max_records=40, prefetch=0, auto_extend=False)
            other = client.receive("changing", group="changing", max_records=7, prefetch=0)
            async with one, other:
                await one.poll(max_records=20)  # not acknowledged: offered again when the session ends
                for _ in range(count // 150):
                    done.extend(await accepted(other, 50))
                    done.extend(await accepted(one, 100))
                    if chance.random() < 0.3:
                        is_fair = not is_fair
                        await set_fair(client, "changing", is_fair=is_fair)

    async def begin(broker: mansio.Broker) -> None:
        async with connected(broker, changing=1) as client:
            await group_of(client, "changing")
            await publish_keys(client, "changing", keys[:2_000])
        await phase(broker, is_fair=True, count=600)

    async def go_on(broker: mansio.Broker) -> None:
        async with connected(broker) as client:
            await publish_keys(client, "changing", keys[2_000:])
        await phase(broker, is_fair=False, count=600)

    async def end(broker: mansio.Broker) -> None:
        await phase(broker, is_fair=True, count=600)
        async with (
            connected(broker) as client,
            client.receive("changing", group="changing", max_records=200, prefetch=0) as receiver,
        ):
            while len(set(done)) < len(keys):
                done.extend(await accepted(receiver, 1))
            assert await receiver.poll(timeout_ms=300) == []

    for part in (begin, go_on, end):
        with broker_in(tmp_path / "data") as broker:
            run(partial(part, broker))
    assert sorted(done) == list(range(len(keys))), "an accepted record is delivered once"


@pytest.mark.full
@pytest.mark.row("D9")
def test_queues_end_when_their_records_are_done(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_scan, "REVIEW_INTERVAL_MS", 20)

    async def scenario() -> None:
        async with connected(broker, ends=1) as client:
            group = await fair_group(client, "ends")
            place = mansio.TopicPartition("ends", 0)
            for round_ in (1, 2):
                await publish_keys(client, "ends", ["noisy"] * 500 + ["quiet"])
                async with client.receive("ends", group=group, max_records=100, prefetch=0) as receiver:
                    await accepted(receiver, 501)
                deadline = asyncio.get_running_loop().time() + scaled(20)
                while (await _start_of(client, group, place)) < 501 * round_:
                    assert asyncio.get_running_loop().time() < deadline, (
                        "records of a backlog queue are not done"
                    )
                    await asyncio.sleep(0.01)

    run(scenario)


async def _start_of(client: mansio.Client, group: str, place: mansio.TopicPartition) -> int:
    state = (await client.admin.shares.leases(group, [place]))[place]
    return -1 if state is None else state.start_offset


@pytest.mark.full
@pytest.mark.row("D9")
def test_a_group_that_is_set_back_delivers_all_again(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, back=1) as client:
            group = await fair_group(client, "set-back")
            await publish_keys(client, "back", ["noisy"] * 1_000 + ["quiet"])
            for _ in range(2):
                async with client.receive("back", group=group, max_records=100, prefetch=0) as receiver:
                    assert sorted(await accepted(receiver, 1_001)) == list(range(1_001))
                    assert await receiver.poll(timeout_ms=300) == []
                await client.admin.shares.alter_offsets(group, {mansio.TopicPartition("back", 0): 0})
            await client.admin.delete_group(group)
            await fair_group(client, "set-back")
            async with client.receive("back", group=group, max_records=100, prefetch=0) as receiver:
                assert sorted(await accepted(receiver, 1_001)) == list(range(1_001))

    run(scenario)


@pytest.mark.full
@pytest.mark.row("D9")
def test_a_record_that_was_dead_lettered_before_fairness_began_is_redriven(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, before=1) as client:
            group = await group_of(client, "before", dead_letters="true")
            await publish_keys(client, "before", ["poison", "quiet"])
            place = mansio.TopicPartition("before", 0)
            async with client.receive("before", group=group, max_records=2, prefetch=0) as receiver:
                poison, quiet = await taken(receiver, 2)
                await poison.reject("poison")
                await receiver.ack([quiet])
                deadline = asyncio.get_running_loop().time() + scaled(20)
                while present((await client.admin.shares.leases(group, [place]))[place]).dead == 0:
                    assert asyncio.get_running_loop().time() < deadline, "no dead letter"
                    await asyncio.sleep(0.01)
                await set_fair(client, group, is_fair=True)
                await publish_keys(client, "before", ["noisy"] * 200)
                await accepted(receiver, 200)
                assert (await client.admin.shares.redrive(group, place, redrive_id="again")).redriven == 1
                assert await accepted(receiver, 1) == [poison.offset]

    run(scenario)
