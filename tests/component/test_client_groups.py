"""Consumer groups with a real broker: assignment, commits, fail-over, no skipped record."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer as ConfluentConsumer

import mansio
from mansio.client import OutgoingRecord, TopicPartition
from mansio.errors import FencedInstanceId, InvalidRequest, UnknownMember, UnknownTopicOrPartition
from support.client_fixtures import QUICK_MEMBER, broker_in, connected, run, until
from support.machine import scaled
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Iterator


either_protocol = pytest.mark.parametrize("protocol", ["consumer", "classic"])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("groups")) as started:
        yield started


async def fill(client: mansio.Client, topic: str, partitions: int, each: int, first: int = 0) -> None:
    records = [
        OutgoingRecord(b"%d:%d" % (p, n), None, (), p)
        for n in range(first, first + each)
        for p in range(partitions)
    ]
    await client.publish_many(topic, records)


class Reader:
    """A member in a task of its own that notes what it reads."""

    def __init__(self, client: mansio.Client, topic: str, *, work_seconds: float = 0, **how: Any) -> None:
        self.seen: list[tuple[int, int]] = []
        self.work_seconds = work_seconds
        self.consumer = client.consume(topic, **{"group": topic, **QUICK_MEMBER, **how})
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async with self.consumer:
            async for message in self.consumer:
                self.seen.append((message.partition, message.offset))
                if self.work_seconds:
                    await asyncio.sleep(self.work_seconds)

    @property
    def partitions(self) -> set[int]:
        return {partition for _, partition in self.consumer.assignment()}

    async def stop(self) -> None:
        await self.consumer.close()
        await self.task


def die(reader: Reader) -> None:
    """No heartbeat any more, and no goodbye."""
    part = reader.consumer._membership
    assert part is not None
    for task in reader.consumer._tasks:
        task.cancel()

    async def say_nothing() -> None: ...

    part.leave = say_nothing


@pytest.mark.row("G1", "G2", "G3")
@either_protocol
def test_every_record_is_read_while_members_join_and_leave(broker: mansio.Broker, protocol: str) -> None:
    topic = f"shared-{protocol}"
    how: dict[str, Any] = {"auto_commit": True, "group_protocol": protocol}

    async def scenario() -> None:
        async with connected(broker, **{topic: 4}) as client:
            await fill(client, topic, 4, 50)
            first = Reader(client, topic, **how)
            await until(lambda: len(first.seen) == 200)
            second = Reader(client, topic, **how)
            await until(lambda: len(first.partitions) == len(second.partitions) == 2)
            assert not first.partitions & second.partitions
            await fill(client, topic, 4, 50, first=50)
            await until(lambda: len(set(first.seen + second.seen)) == 400)
            await first.stop()
            await until(lambda: len(second.partitions) == 4)
            await fill(client, topic, 4, 50, first=100)
            await until(lambda: len(set(first.seen + second.seen)) == 600)
            await second.stop()
            repeated = [place for place, times in Counter(first.seen + second.seen).items() if times > 1]
            assert repeated == []

    run(scenario)


@pytest.mark.row("G3")
@either_protocol
def test_retained_partition_is_delivered_during_a_rebalance(broker: mansio.Broker, protocol: str) -> None:
    events: list[tuple[str, set[int]]] = []
    topic = f"staying-{protocol}"

    async def scenario() -> None:
        async with connected(broker, **{topic: 4}) as client:
            first = Reader(
                client,
                topic,
                group_protocol=protocol,
                on_assigned=lambda p: events.append(("assigned", {index for _, index in p})),
                on_revoked=lambda p: events.append(("revoked", {index for _, index in p})),
            )
            await until(lambda: len(first.partitions) == 4)
            second = Reader(client, topic, group_protocol=protocol)
            await until(lambda: len(first.partitions) == len(second.partitions) == 2)
            assert events == [("assigned", {0, 1, 2, 3}), ("revoked", second.partitions)]
            await first.stop()
            await second.stop()

    run(scenario)


@pytest.mark.row("G3")
@either_protocol
def test_current_message_is_processed_before_revocation_and_none_is_read_twice(
    broker: mansio.Broker, protocol: str
) -> None:
    topic = f"slow-{protocol}"
    how: dict[str, Any] = {"auto_commit": True, "group_protocol": protocol}

    async def scenario() -> None:
        async with connected(broker, **{topic: 2}) as client:
            # Two partitions, of which the later one moves to the second member: the one that is being read.
            await client.publish_many(topic, [OutgoingRecord(b"x", partition=1)] * 40)
            first = Reader(client, topic, work_seconds=0.02, **how)
            await until(lambda: len(first.seen) > 3)
            second = Reader(client, topic, **how)
            readers = (first, second)
            await until(lambda: len({place for reader in readers for place in reader.seen}) == 40)
            assert second.partitions == {1}
            for reader in readers:
                await reader.stop()
            seen = Counter(place for reader in readers for place in reader.seen)
            assert [place for place, times in seen.items() if times > 1] == []

    run(scenario)


@pytest.mark.row("G3", "G4")
@either_protocol
def test_no_message_is_delivered_after_the_commit_of_a_revocation(
    broker: mansio.Broker, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"given-back-{protocol}"

    async def scenario() -> None:
        async with connected(broker, **{topic: 2}) as client:
            revoked: list[Any] = []
            first = Reader(client, topic, group_protocol=protocol, on_revoked=revoked.append)
            await until(lambda: len(first.partitions) == 2)
            commit, begun, goes_on = first.consumer._commit, asyncio.Event(), asyncio.Event()

            async def slow_commit(*given: Any, **how: Any) -> None:
                begun.set()
                await goes_on.wait()
                await commit(*given, **how)

            monkeypatch.setattr(first.consumer, "_commit", slow_commit)
            second = Reader(client, topic, group_protocol=protocol)
            await begun.wait()
            await fill(client, topic, 2, 10)
            await until(lambda: len(first.seen) == 10)
            assert first.partitions == {0, 1}
            assert revoked == []
            goes_on.set()
            await until(lambda: len(second.seen) == 10)
            assert {partition for partition, _ in first.seen}.isdisjoint(second.partitions)
            await first.stop()
            await second.stop()

    run(scenario)


@pytest.mark.row("G4")
def test_next_consumer_starts_at_the_committed_offsets(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, resumed=1) as client:
            await fill(client, "resumed", 1, 20)
            how: dict[str, Any] = {"group": "resumed", "auto_commit": False, **QUICK_MEMBER}
            async with client.consume("resumed", **how) as consumer:
                for _ in range(7):
                    await anext(consumer)
                assert consumer.positions() == {TopicPartition("resumed", 0): 7}
                await consumer.commit()
                await anext(consumer)
            async with client.consume("resumed", **how) as consumer:
                assert (await anext(consumer)).offset == 7
                await consumer.commit({TopicPartition("resumed", 0): 15})
            lag = await client.admin.group_lag("resumed")
            assert lag[TopicPartition("resumed", 0)].lag == 5

    run(scenario)


@pytest.mark.row("G4")
def test_auto_commit_covers_processed_messages_and_not_failed_ones(broker: mansio.Broker) -> None:
    how: dict[str, Any] = {"group": "done", **QUICK_MEMBER}

    async def scenario() -> None:
        async with connected(broker, done=1) as client:
            await fill(client, "done", 1, 20)
            async with client.consume("done", **how) as consumer:
                async for message in consumer:
                    if message.offset == 4:
                        break
            with pytest.raises(KeyError):  # noqa: PT012  # how the consumer is left is the point
                async with client.consume("done", **how) as consumer:
                    async for message in consumer:
                        if message.offset == 9:
                            raise KeyError("the work on message 9 failed")
            async with client.consume("done", **how) as consumer:
                batch = await consumer.poll(10_000)
                assert batch[0].offset == 9
                await consumer.close()
            async with client.consume("done", **how) as consumer:
                assert (await anext(consumer)).offset == 9

    run(scenario)


@pytest.mark.row("G4")
@pytest.mark.parametrize("end", ["max_records", "to_end", "to_time"])
def test_group_continues_after_a_finished_iteration_without_close(broker: mansio.Broker, end: str) -> None:
    topic = "ended-" + end.replace("_", "-")

    async def scenario() -> None:
        async with connected(broker, **{topic: 1}) as client:
            for expected in ([0, 1, 2], [3, 4, 5]):
                await fill(client, topic, 1, 3)
                now_ms = int(time.time() * 1000)
                await until(lambda past=now_ms: time.time() * 1000 > past + 1)
                how: dict[str, Any] = {"max_records": 3, "to_end": True, "to_time": now_ms + 1}
                consumer = client.consume(topic, group=topic, **{end: how[end]})  # a session of 45 s
                async with asyncio.timeout(scaled(20)):
                    assert [message.offset async for message in consumer] == expected
                assert consumer.is_closed
                assert consumer.is_finished
            assert (await client.admin.describe_group(topic)).members == ()
            async with asyncio.timeout(scaled(20)):
                last = client.consume(topic, group=topic, from_="earliest", to_end=True, auto_commit=False)
                assert [message async for message in last] == []
            assert not last.is_closed
            await last.commit()

    run(scenario)


@pytest.mark.row("G4")
def test_poll_timeout_during_the_final_commit_still_leaves_the_group(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with connected(broker, overtaken=1) as client:
            await fill(client, "overtaken", 1, 3)
            consumer = client.consume("overtaken", group="overtaken", max_records=3)
            assert len(await consumer.poll(20_000)) == 3
            commit, goes_on = consumer._commit, asyncio.Event()

            async def slow_commit(*given: Any, **how: Any) -> None:
                await goes_on.wait()
                await commit(*given, **how)

            monkeypatch.setattr(consumer, "_commit", slow_commit)
            assert await consumer.poll(50) == []
            goes_on.set()
            await consumer.close()
            assert (await client.admin.describe_group("overtaken")).members == ()
            assert (await client.admin.group_lag("overtaken"))[TopicPartition("overtaken", 0)].lag == 0

    run(scenario)


@pytest.mark.parametrize("group", [None, "nowhere"])
def test_assigning_a_missing_partition_is_a_typed_error(broker: mansio.Broker, group: str | None) -> None:
    async def scenario() -> None:
        topic = f"short-{group}".lower()
        async with connected(broker, **{topic: 1}) as client:
            for index in (99, -1):
                consumer = client.consume(TopicPartition(topic, index), group=group, to_end=True)
                with pytest.raises(UnknownTopicOrPartition, match=f"topic {topic} has no partition {index}"):
                    await anext(consumer)

    run(scenario)


@pytest.mark.row("G1", "G2")
@either_protocol
def test_dead_member_is_replaced_after_its_session_timeout(broker: mansio.Broker, protocol: str) -> None:
    topic = f"deserted-{protocol}"

    async def scenario() -> None:
        async with connected(broker, **{topic: 2}) as client, mansio.connect(broker.address) as other:
            dying = Reader(other, topic, group_protocol=protocol)
            await until(lambda: len(dying.partitions) == 2)
            die(dying)
            heir = Reader(client, topic, group_protocol=protocol)
            await until(lambda: len(heir.partitions) == 2)
            with pytest.raises(UnknownMember):
                await dying.consumer.commit({TopicPartition(topic, 0): 0})
            await heir.stop()
            await dying.stop()

    run(scenario)


@pytest.mark.row("G1", "G2")
@either_protocol
def test_static_member_rejoins_its_partitions_without_a_rebalance(
    broker: mansio.Broker, protocol: str
) -> None:
    topic = f"static-{protocol}"
    how: dict[str, Any] = {"group_protocol": protocol}

    async def scenario() -> None:
        async with connected(broker, **{topic: 4}) as client:
            moved: list[Any] = []
            other = Reader(client, topic, instance_id="b", on_revoked=moved.append, **how)
            first = Reader(client, topic, instance_id="a", **how)
            await until(lambda: len(first.partitions) == len(other.partitions) == 2)
            kept = first.partitions
            moved.clear()
            await first.stop()
            back = Reader(client, topic, instance_id="a", **how)
            await until(lambda: len(back.partitions) == 2)
            assert back.partitions == kept
            assert moved == []
            if protocol == "classic":  # in the other one, the place of a member that lives is not to be had
                thief = client.consume(topic, group=topic, **QUICK_MEMBER, instance_id="a", **how)
                taking = asyncio.ensure_future(thief.start())
                with pytest.raises(FencedInstanceId):
                    await back.task
                await taking
                await thief.close()
            else:
                await back.stop()
            await other.stop()

    run(scenario)


@pytest.mark.row("G1", "A1")
@pytest.mark.parametrize("strategy", ["range", "roundrobin,range", "cooperative-sticky"])
@either_protocol
def test_group_is_shared_with_librdkafka(broker: mansio.Broker, strategy: str, protocol: str) -> None:
    topic = f"mixed-{protocol}-" + strategy.replace(",", "-")
    foreign = ConfluentConsumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": topic,
            "partition.assignment.strategy": strategy,
            "session.timeout.ms": 6_000,
            "heartbeat.interval.ms": 100,
            "auto.offset.reset": "earliest",
        }
    )

    async def scenario() -> None:
        async with connected(broker, **{topic: 4}) as client:
            ours = Reader(client, topic, group_protocol=protocol)
            await until(lambda: len(ours.partitions) == 4)
            foreign.subscribe([topic])
            seen: set[tuple[int, int]] = set()

            def poll() -> None:
                message = foreign.poll(0)
                if message is not None and not message.error():
                    seen.add((present(message.partition()), present(message.offset())))

            def shared() -> bool:
                poll()
                return len(ours.partitions) == 2 and len(foreign.assignment()) == 2

            await until(shared)
            await fill(client, topic, 4, 10)
            await until(lambda: poll() is None and len(seen | set(ours.seen)) == 40)
            assert {partition for partition, _ in seen} == {p.partition for p in foreign.assignment()}
            await asyncio.to_thread(foreign.close)
            await until(lambda: len(ours.partitions) == 4)
            await ours.stop()

    run(scenario)


@either_protocol
def test_member_that_does_not_poll_leaves_and_rejoins(broker: mansio.Broker, protocol: str) -> None:
    topic = f"stuck-{protocol}"

    async def scenario() -> None:
        async with connected(broker, **{topic: 1}) as client:
            await fill(client, topic, 1, 5)
            lost: list[Any] = []
            how: dict[str, Any] = {**QUICK_MEMBER, "auto_commit": False, "group_protocol": protocol}
            stuck = client.consume(
                topic, group=topic, on_lost=lost.append, **{**how, "poll_interval_ms_max": 200}
            )
            assert (await anext(stuck)).offset == 0
            await until(lambda: bool(lost))
            other = Reader(client, topic, **how)
            await until(lambda: len(other.seen) == 5)
            await other.stop()
            assert (await anext(stuck)).offset == 0  # nothing was committed: it begins again
            await stuck.close()

    run(scenario)


@either_protocol
def test_new_partition_is_assigned_to_a_member(broker: mansio.Broker, protocol: str) -> None:
    topic = f"grown-{protocol}"

    async def scenario() -> None:
        async with connected(broker, **{topic: 1}) as client:
            reader = Reader(client, topic, metadata_interval_ms=100, group_protocol=protocol)
            await until(lambda: reader.partitions == {0})
            await client.admin.create_partitions(topic, 3)
            await until(lambda: reader.partitions == {0, 1, 2})
            await reader.stop()

    run(scenario)


def test_assigned_partitions_commit_offsets_without_joining_the_group(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, loose=1) as client:
            await fill(client, "loose", 1, 5)
            chosen = TopicPartition("loose", 0)
            async with client.consume(chosen, group="loose") as consumer:
                await anext(consumer)
                await consumer.commit()
                assert (await client.admin.describe_group("loose")).members == ()
            async with client.consume(chosen, group="loose") as consumer:
                assert (await anext(consumer)).offset == 1
            async with client.consume(chosen) as consumer:
                with pytest.raises(InvalidRequest, match="group"):
                    await consumer.commit()

    run(scenario)
