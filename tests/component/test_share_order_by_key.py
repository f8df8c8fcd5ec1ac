"""`mansio.share.order=key`: the broker offers no record while an earlier one of its key is in flight, to any member."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from random import Random
from typing import TYPE_CHECKING

import pytest

import mansio
from support.client_fixtures import broker_in, connected, run
from support.machine import scaled
from support.receive_fixtures import group_of, publish, taken, values

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from mansio.client import Leased

SEED = 21


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("by-key")) as started:
        yield started


async def nothing_more(receiver: mansio.Receiver) -> None:
    assert await receiver.poll(timeout_ms=300) == []


async def redriven(client: mansio.Client, group: str, topic: str) -> None:
    """Redrive the one dead-lettered record of a topic, once it can be."""
    partition = mansio.TopicPartition(topic, 0)
    for _ in range(500):
        if (await client.admin.shares.redrive(group, partition, redrive_id="again")).redriven:
            return
        await asyncio.sleep(0.02)
    pytest.fail("the record was not redriven")


@pytest.mark.row("D8", "D1")
def test_no_later_record_of_a_leased_key_is_given_to_any_member(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, leased=1) as client:
            group = await group_of(client, "leased", order="key")
            await publish(client, "leased", "a:1", "a:2", "b:1", "c:1", "b:2", "a:3")
            one, other = (
                client.receive("leased", group=group, max_records=1),
                client.receive("leased", group=group),
            )
            async with one, other:
                (first,) = await taken(one, 1)
                assert values([first]) == ["a:1"]
                assert values(await taken(other, 3)) == ["b:1", "c:1", "b:2"]
                await nothing_more(other)
                await first.ack()
                assert values(await taken(other, 2)) == ["a:2", "a:3"]  # of one key, in order, in one answer

    run(scenario)


@pytest.mark.row("D8")
@pytest.mark.parametrize("ending", ["release", "expiry", "reject"])
def test_no_later_record_passes_one_that_rests_or_is_dead_lettered(
    broker: mansio.Broker, ending: str
) -> None:
    async def scenario() -> None:
        topic = f"rests-{ending}"
        async with connected(broker, **{topic.replace("-", "_"): 1}) as client:
            name = topic.replace("-", "_")
            group = await group_of(client, topic, order="key", lock_ms=1_000, backoff_ms=300)
            await publish(client, name, "a:1", "a:2", "b:1")
            one = client.receive(name, group=group, max_records=1, auto_extend=False)
            other = client.receive(name, group=group)
            async with one, other:
                (first,) = await taken(one, 1)
                if ending == "release":
                    await first.retry(after=0.5)
                elif ending == "reject":
                    await first.reject("no")
                if ending != "expiry":
                    await one.close()
                got: list[str] = []
                while "a:2" not in got:
                    messages = await other.poll(timeout_ms=20_000)
                    got += values(messages)
                    await other.ack(messages)
            order = [value for value in got if value.startswith("a")]
            assert order == (["a:2"] if ending == "reject" else ["a:1", "a:2"])
            assert "b:1" in got

    run(scenario)


@pytest.mark.row("D8")
def test_each_key_is_handled_in_order_over_all_members(broker: mansio.Broker) -> None:
    """Members that take few and many, release, reject and leave; each key is checked over all of them."""
    total, keys = 600, 12

    async def scenario() -> None:
        async with connected(broker, many=1) as client:
            group = await group_of(client, "many", order="key", lock_ms=2_000, backoff_ms=5, tries=10)
            random = Random(SEED)
            wanted: dict[bytes, list[bytes]] = defaultdict(list)
            records = []
            for number in range(total):
                key = b"k%d" % random.randrange(keys)
                wanted[key].append(b"%d" % number)
                records.append(mansio.OutgoingRecord(b"%d" % number, key=key))
            await client.publish_many("many", records)
            done: dict[bytes, list[bytes]] = defaultdict(list)
            held: Counter[bytes] = Counter()

            async def member(seed: int) -> None:
                own, most = Random(seed), (1, 1, 7, 60)[seed]
                async with client.receive("many", group=group, max_records=most) as receiver:
                    while sum(map(len, done.values())) < total:
                        messages = await receiver.poll(timeout_ms=50)
                        await handle(messages, own, releases=most == 1)

            async def handle(messages: list[Leased], own: Random, *, releases: bool) -> None:
                """A member with more than one record at a time may have prefetched later ones of a key; it releases
                none."""
                by_key: dict[bytes, list[Leased]] = defaultdict(list)
                for message in messages:
                    by_key[message.key or b""].append(message)
                for key, group_messages in by_key.items():
                    assert held[key] == 0, "two members have records of one key"
                    held[key] = 1
                    offsets = [message.offset for message in group_messages]
                    assert offsets == sorted(offsets)
                await asyncio.sleep(own.choice((0, 0, 0.002)))
                for key, group_messages in by_key.items():
                    accepted = len(group_messages) - (releases and own.random() < 0.2)
                    done[key] += [message.value or b"" for message in group_messages[:accepted]]
                    held[key] = 0
                    ends: list[Callable[[], Awaitable[None]]] = [one.ack for one in group_messages[:accepted]]
                    ends += [one.retry for one in group_messages[accepted:]]
                    await asyncio.gather(*(end() for end in ends))

            async with asyncio.timeout(scaled(60)):
                await asyncio.gather(*(member(seed) for seed in range(4)))
            assert done == wanted

    run(scenario)


@pytest.mark.row("D8")
def test_by_key_sets_the_order_of_a_new_group(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, fresh=1) as client:
            group = await group_of(client, "fresh")
            await publish(client, "fresh", "a:1", "b:1")
            receiver = client.receive("fresh", group=group)
            seen: list[str] = []

            async def handle(message: Leased) -> None:
                seen.extend(values([message]))
                if len(seen) == 2:
                    receiver.stop()

            await receiver.run(handle, mode="by_key")
            settings = await client.admin.describe_config(group, kind="group")
            assert settings["mansio.share.order"].value == "key"

    run(scenario)


@pytest.mark.row("D8")
def test_a_record_that_is_given_back_does_not_wait_for_later_ones_of_its_key(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, back=1) as client:
            group = await group_of(client, "back", order="key")
            await publish(client, "back", "a:1", "a:2", "b:1", "a:3", "a:4")
            one = client.receive("back", group=group, prefetch=0)  # what is given back goes to the other
            other = client.receive("back", group=group, prefetch=0)
            async with one, other:
                held = await taken(one, 4)
                assert values(held) == ["a:1", "a:2", "b:1", "a:3"]
                await held[1].retry(after=0)
                await nothing_more(other)  # the first one is still leased
                await held[0].retry(after=0)
                assert values(await taken(other, 2)) == ["a:1", "a:2"]  # and not the fourth
                await nothing_more(other)
                await one.ack([held[2], held[3]])
                await nothing_more(other)

    run(scenario)


@pytest.mark.row("D8")
def test_a_redriven_record_does_not_wait_for_a_later_one_of_its_key(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, redriven=1) as client:
            group = await group_of(client, "redriven", order="key")
            await publish(client, "redriven", "a:1", "a:2")
            one = client.receive("redriven", group=group, max_records=1)
            other = client.receive("redriven", group=group, max_records=1)
            async with one, other:
                (first,) = await taken(one, 1)
                await first.reject("no")
                (second,) = await taken(one, 1)
                assert values([second]) == ["a:2"]
                await redriven(client, group, "redriven")
                assert values(await taken(other, 1)) == ["a:1"]
                await second.ack()

    run(scenario)


def test_a_receiver_that_is_stopped_does_not_ask_for_the_order_of_its_group(broker: mansio.Broker) -> None:
    """Closing marks the records that were not delivered as lost; a request would outlive the receiver."""

    async def scenario() -> None:
        async with connected(broker, stopped=1) as client:
            group = await group_of(client, "stopped", order="key")
            await publish(client, "stopped", "a:1", "a:2", "a:3")
            async with client.receive("stopped", group=group) as receiver:
                await taken(receiver, 1)
                (first, *_) = receiver._in_flight_records.all_unfinished()
                receiver.stop()
                first._extend_until_s = None  # as if it was not delivered
                receiver._in_flight_records.mark_lost(first)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert not receiver._is_finding_order

    run(scenario)
