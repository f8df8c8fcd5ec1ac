"""Priorities: share groups get high ones first, without starvation, and the state of each priority is its own."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka import Producer as ConfluentProducer

import mansio
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.share_groups.leases import Acknowledgement
from mansio.client import OutgoingRecord
from mansio.errors import ConfigError, CorruptMessage, InvalidConfig, InvalidRecordState, PrioritiesNotEnabled
from mansio.state.share_partition.types import ACCEPT
from mansio.wire.api_versions import ApiKey
from support.client_fixtures import broker_in, connected, run
from support.machine import scaled
from support.present import present
from support.receive_fixtures import group_of, taken, values
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from mansio.client.admin.shares import PriorityLeases, ShareLeases

SETTING = {"mansio.priority.enable": "true"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("priorities")) as started:
        yield started


async def topic_of(client: mansio.Client, name: str, **settings: str) -> str:
    config = SETTING | {key.replace("_", "."): value for key, value in settings.items()}
    await client.admin.create_topic(name, partitions=1, config=config)
    return name


async def publish(client: mansio.Client, topic: str, *records: str, **more: Any) -> None:
    """Publish one record per text, `priority:value`."""
    for record in records:
        await client.publish(topic, record, priority=record.partition(":")[0], **more)


async def drain(receiver: mansio.Receiver, count: int) -> list[str]:
    """Take and acknowledge records one at a time."""
    got: list[str] = []
    for _ in range(count):
        (message,) = await taken(receiver, 1)
        got += values([message])
        await message.ack()
    return got


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition of the broker; the scenario's own time bounds it."""
    while not await condition():  # noqa: ASYNC110  # what is waited for has no event
        await asyncio.sleep(0.02)


async def leases(client: mansio.Client, group: str, topic: str) -> ShareLeases:
    partition = mansio.TopicPartition(topic, 0)
    found = (await client.admin.shares.leases(group, [partition], ranges_max=100))[partition]
    assert found is not None
    return found


async def by_priority(client: mansio.Client, group: str, topic: str) -> dict[str, PriorityLeases]:
    return {one.priority: one for one in (await leases(client, group, topic)).priorities}


@pytest.mark.row("D7")
def test_high_priority_passes_others_and_order_is_kept_within_a_priority(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "order")
            group = await group_of(client, topic)
            await publish(client, topic, "low:1", "normal:1", "low:2", "high:1", "normal:2", "high:2")
            await client.publish(topic, "without")
            async with client.receive(topic, group=group, max_records=1) as receiver:
                got = await drain(receiver, 3)
                await publish(client, topic, "high:3")
                got += await drain(receiver, 5)
            got.remove("high:3")  # the receiver may have fetched one before
            assert got == ["high:1", "high:2", "normal:1", "normal:2", "without", "low:1", "low:2"]
            async with client.receive(topic, group=group, max_records=1) as receiver:
                await publish(client, topic, "low:3", "high:4")
                assert sorted(await drain(receiver, 2)) == ["high:4", "low:3"]

    run(scenario)


@pytest.mark.row("D7")
def test_one_answer_has_records_of_all_priorities_and_the_client_hands_out_high_ones_first(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "mixed")
            group = await group_of(client, topic)
            # A client that knows nothing of priorities sends one batch with records of all of them.
            producer = ConfluentProducer({"bootstrap.servers": broker.address, "linger.ms": 200})
            names = [("low", "high", "normal")[index % 3] for index in range(60)]
            for index, name in enumerate(names):
                headers: dict[str, str | bytes | None] = {"mansio-priority": name, "other": str(index)}
                producer.produce(topic, f"{name}:{index}", headers=headers)
            assert await asyncio.to_thread(producer.flush, 30) == 0
            async with client.receive(topic, group=group, max_records=30) as receiver:
                first = await taken(receiver, 30)
                ranks = [("high", "normal", "low").index(text.partition(":")[0]) for text in values(first)]
                order = [(rank, message.offset) for rank, message in zip(ranks, first, strict=True)]
                assert order == sorted(order)
                kinds = [text.partition(":")[0] for text in values(first)]
                assert kinds.count("high") == 20
                assert kinds.count("low") >= 30 // 16
                for message in first:
                    await message.ack()
                assert sorted(await drain(receiver, 30) + values(first)) == sorted(
                    f"{name}:{index}" for index, name in enumerate(names)
                )

    run(scenario)


@pytest.mark.row("D7")
def test_lower_priorities_are_not_starved(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "fair")
            group = await group_of(client, topic)
            for name in ("low", "normal", "high"):
                await client.publish_many(
                    topic, [OutgoingRecord(name.encode(), priority=name) for _ in range(300)]
                )
            async with client.receive(topic, group=group, max_records=1) as receiver:
                got = await drain(receiver, 290)
            for begin in range(290 - 256):
                window = got[begin : begin + 256]
                assert min(window.count("low"), window.count("normal")) >= 16
            assert got.count("high") > 240

    run(scenario)


@pytest.mark.row("D7")
def test_records_of_each_priority_are_sent_in_batches_of_their_own(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "batches")
            group = await group_of(client, topic)
            records = [
                OutgoingRecord(b"%d" % index, priority=("low", "high", "normal")[index % 3])
                for index in range(300)
            ]
            stored = await client.publish_many(topic, records)
            assert sorted(one.offset for one in stored) == list(range(300))
            high = sorted(
                one.offset for one, record in zip(stored, records, strict=True) if record.priority == "high"
            )
            assert high == list(range(high[0], high[0] + 100)), "one batch"
            async with client.receive(topic, group=group, max_records=50) as receiver:
                got = [int(text) for text in values(await taken(receiver, 40))]
            assert [each for each in got if each % 3 == 1] == sorted(each for each in got if each % 3 == 1)

    run(scenario)


def test_topics_without_the_setting_refuse_priorities_by_name(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, plain=1) as client:
            with pytest.raises(PrioritiesNotEnabled, match=r"mansio topic alter plain -c mansio\.priority"):
                await client.publish("plain", "x", priority="high")
            with pytest.raises(PrioritiesNotEnabled):
                await client.publish_many("plain", [OutgoingRecord(b"x", priority="low")])
            with pytest.raises(ValueError, match="priority: not high, normal or low: 'urgent'"):
                await client.publish("plain", "x", priority="urgent")
            with pytest.raises(ValueError, match="not both"):
                await client.publish("plain", "x", headers={"mansio-priority": "low"}, priority="high")

    run(scenario)


def test_invalid_headers_are_refused_with_the_records_that_have_them(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "invalid")
            for headers in (
                [("mansio-priority", "urgent")],
                [("mansio-priority", "")],
                [("mansio-priority", None)],
                [("mansio-priority", "high"), ("mansio-priority", "high")],
            ):
                with pytest.raises(mansio.errors.InvalidRecord, match="mansio-priority"):
                    await client.publish(topic, "x", headers=headers)
            await client.publish(topic, "mansio-priority", headers={"a": "mansio-priority", "b": "high"})
            producer = ConfluentProducer({"bootstrap.servers": broker.address})
            failures: list[Any] = []
            producer.produce(
                topic,
                "x",
                headers={"mansio-priority": b"\xff"},
                on_delivery=lambda error, _: failures.append(error),
            )
            await asyncio.to_thread(producer.flush, 30)
            assert isinstance(KafkaException(failures[0]), KafkaException)
            group = await group_of(client, topic)
            async with client.receive(topic, group=group) as receiver:
                assert await drain(receiver, 1) == ["mansio-priority"]
            assert (await by_priority(client, group, topic))["high"].lag == 0

    run(scenario)


@pytest.mark.row("D7")
def test_turning_it_on_makes_older_records_normal_and_redelivers_nothing(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, grown=1) as client:
            group = await group_of(client, "grown")
            for index in range(6):
                await client.publish("grown", f"old:{index}", headers={"mansio-priority": "low"})
            async with client.receive("grown", group=group, max_records=1) as receiver:
                assert await drain(receiver, 3) == ["old:0", "old:1", "old:2"]
                (leased,) = await taken(receiver, 1)
                await client.admin.alter_topic_config("grown", SETTING)
                await publish(client, "grown", "low:6", "high:7", "normal:8")
                await leased.ack()
                assert await drain(receiver, 5) == ["high:7", "old:4", "old:5", "normal:8", "low:6"]
                assert await receiver.poll(timeout_ms=300) == []
            assert (await leases(client, group, "grown")).lag == 0

    run(scenario)


def test_it_cannot_be_turned_off_and_is_no_default_of_topics(broker: mansio.Broker, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "forever")
            for change in ({"mansio.priority.enable": "false"}, {"mansio.priority.enable": None}):
                with pytest.raises(InvalidConfig, match="cannot be turned off"):
                    await client.admin.alter_topic_config(topic, change)

    run(scenario)
    with pytest.raises(ConfigError, match="is a setting of single topics"):
        mansio.Broker(tmp_path, topic_defaults={"mansio.priority.enable": "true"})


@pytest.mark.row("D7", "D3")
def test_state_of_each_priority_is_kept_over_a_restart(tmp_path: Path) -> None:
    started = broker_in(tmp_path)

    async def before() -> None:
        async with connected(started) as client:
            topic = await topic_of(client, "kept")
            group = await group_of(client, topic, lock_ms=60_000)
            await publish(
                client,
                topic,
                *(f"{name}:{index}" for index in range(4) for name in ("low", "normal", "high")),
            )
            async with client.receive(topic, group=group, max_records=1) as receiver:
                assert await drain(receiver, 5) == ["high:0", "high:1", "high:2", "high:3", "normal:0"]
            found = await by_priority(client, group, topic)
            assert {name: one.lag for name, one in found.items()} == {"high": 0, "normal": 3, "low": 4}

    async def after() -> None:
        async with connected(started) as client:
            found = await by_priority(client, "kept", "kept")
            assert {name: one.lag for name, one in found.items()} == {"high": 0, "normal": 3, "low": 4}
            await publish(client, "kept", "high:4")
            async with client.receive("kept", group="kept", max_records=1) as receiver:
                assert await drain(receiver, 8) == [
                    "high:4", "normal:1", "normal:2", "normal:3", "low:0", "low:1", "low:2", "low:3",
                ]  # fmt: skip
                assert await receiver.poll(timeout_ms=200) == []

    for scenario in (before, after):
        with started:
            run(scenario)


def test_acknowledgements_over_several_priorities_apply_together_or_not_at_all(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "together")
            group = await group_of(client, topic)
            await publish(client, topic, "high:1", "low:1", "normal:1")
            async with client.receive(topic, group=group, auto_extend=False) as receiver:
                _high, low, _normal = await taken(receiver, 3)
                description = await client.admin.describe_topic(topic)
                connection = await client._cluster.connection(description.partitions[0].leader)

                async def acknowledge_all() -> int:
                    batch = {"first_offset": 0, "last_offset": 2, "types": b"\1"}
                    partition = {"partition_index": 0, "batches": [batch]}
                    fields = {
                        "group_id": group,
                        "member_id": receiver.member_id,
                        "topics": [{"topic_id": description.topic_id, "partitions": [partition]}],
                    }
                    response = await connection.request(ApiKey.ACKNOWLEDGE_RECORDS, fields)
                    return int(response.topics[0].partitions[0].error_code)

                await low.retry(60)
                assert await acknowledge_all() == InvalidRecordState.kafka_code
                assert (await leases(client, group, topic)).leased == 2
            assert (await leases(client, group, topic)).lag == 3

    run(scenario)


@pytest.mark.row("D5", "D7")
def test_dead_letters_of_all_priorities_are_redriven(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "rejected")
            group = await group_of(client, topic, dead_letters="true")
            await publish(client, topic, "low:1", "high:1", "normal:1")
            async with client.receive(topic, group=group, max_records=1) as receiver:
                for _ in range(3):
                    (message,) = await taken(receiver, 1)
                    await message.reject("unusable")

                async def is_archived() -> bool:
                    found = await leases(client, group, topic)
                    return found.dead == 3 and not found.archiving

                await until(is_archived)
                partition = mansio.TopicPartition(topic, 0)
                result = await client.admin.shares.redrive(group, partition, redrive_id="once", records_max=2)
                assert result.redriven == 2
                result = await client.admin.shares.redrive(group, partition, redrive_id="once")
                assert result.redriven == 1
                assert sorted(await drain(receiver, 3)) == ["high:1", "low:1", "normal:1"]

    run(scenario)


@pytest.mark.row("D7", "D8")
def test_order_by_key_holds_within_a_priority(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "keyed")
            group = await group_of(client, topic, order="key")
            await publish(client, topic, "low:1", "high:1", "low:2", "high:2", key="a")
            await publish(client, topic, "high:3", key="b")
            one, other = client.receive(topic, group=group, max_records=1), client.receive(topic, group=group)
            async with one, other:
                (first,) = await taken(one, 1)
                assert values([first]) == ["high:1"]
                assert sorted(values(await taken(other, 3))) == ["high:3", "low:1", "low:2"]
                assert await other.poll(timeout_ms=200) == []
                await first.ack()
                assert values(await taken(other, 1)) == ["high:2"]

    run(scenario)


@pytest.mark.parametrize("order", ["none", "key"])
@pytest.mark.row("D7")
def test_damaged_record_of_low_priority_does_not_keep_others_from_delivery(
    order: str, tmp_path: Path
) -> None:
    high = [f"high:{number}" for number in range(40)]
    with broker_in(tmp_path) as started:

        async def write() -> None:
            async with connected(started) as client:
                topic = await topic_of(client, "damaged")
                await group_of(client, topic, order=order)
                await publish(client, topic, "low:" + "x" * 400, *high, key="k")
                async with client.receive(topic, group=topic, max_records=1) as receiver:
                    assert await drain(receiver, 1) == high[:1]

        run(write)
    (segment,) = tmp_path.glob("topics/damaged.*/0/*.log")
    with segment.open("r+b") as file:
        file.seek(segment.read_bytes().index(b"x" * 400) + 7)
        file.write(b"y")
    with broker_in(tmp_path) as started:

        async def read() -> None:
            async with (
                connected(started) as client,
                client.receive("damaged", group="damaged", max_records=1) as receiver,
            ):
                got: list[str] = []
                while len(got) < len(high) - 1:
                    try:
                        messages = await receiver.poll(timeout_ms=200)
                    except CorruptMessage:
                        assert order == "key"  # no other record can be offered while one of the key is leased
                        continue
                    got += values(messages)
                    for message in messages:
                        await message.ack()
                assert got == high[1:]

        run(read)


@pytest.mark.row("D7")
def test_deliveries_that_damage_leaves_unused_come_in_the_same_answer(tmp_path: Path) -> None:
    high = [f"high:{number}" for number in range(30)]
    with broker_in(tmp_path) as started:

        async def write() -> None:
            async with connected(started) as client:
                topic = await topic_of(client, "unused")
                await group_of(client, topic)
                await publish(client, topic, "low:" + "x" * 400, *high)

        run(write)
    (segment,) = tmp_path.glob("topics/unused.*/0/*.log")
    with segment.open("r+b") as file:
        file.seek(segment.read_bytes().index(b"x" * 400) + 7)
        file.write(b"y")
    with broker_in(tmp_path) as started:
        services = present(started._broker).service.leases

        async def receive(count: int) -> list[str]:
            result = await services.receive(
                "unused", ["unused"], max_records=count, max_wait_ms=1000, caller=ANONYMOUS
            )
            receipts = [services.receipt_of(result, record) for record in result.records]
            accepted = await services.acknowledge(
                "unused", [Acknowledgement(each, ACCEPT) for each in receipts], caller=ANONYMOUS
            )
            assert accepted == [None] * len(receipts)
            return [(record.value or b"").decode() for record in result.records]

        async def read() -> list[str]:
            got: list[str] = []
            while len(got) < 13:  # then one of the next ten is owed to the damaged record
                got += await receive(1)
            return got + await receive(10)

        assert started._call(read(), scaled(20)) == high[:23]


@pytest.mark.row("D7")
def test_slow_members_with_low_priority_do_not_use_all_record_locks(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "locks")
            group = await group_of(client, topic)
            await client.admin.alter_group_config(group, {"share.partition.max.record.locks": "100"})
            await client.publish_many(topic, [OutgoingRecord(b"low", priority="low") for _ in range(200)])
            async with client.receive(topic, group=group, auto_extend=True) as slow:
                held = await taken(slow, 80)
                held += await slow.poll(timeout_ms=300)
                assert len(held) == 100 - 2 * (100 // 16)
                await publish(client, topic, "high:1")
                assert values(await taken(slow, 1)) == ["high:1"]

    run(scenario)


@pytest.mark.row("D7", "O1")
def test_lag_and_leases_of_each_priority_are_shown(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "shown")
            group = await group_of(client, topic)
            await publish(client, topic, "low:1", "high:1", "low:2", "normal:1", "high:2")
            async with client.receive(topic, group=group, max_records=1) as receiver:
                assert await drain(receiver, 1) == ["high:1"]
                await taken(receiver, 1)
                shell = Shell(broker.address)
                text = await asyncio.to_thread(shell, "group", "describe", group, "-o", "json")
                (row,) = json.loads(text)["partitions"]
                assert (row["start"], row["lag"], row["leased"]) == (0, 4, 1)
                assert [(one["priority"], one["lag"], one["leased"]) for one in row["priorities"]] == [
                    ("high", 1, 1),
                    ("normal", 1, 0),
                    ("low", 2, 0),
                ]
                table = await asyncio.to_thread(shell, "group", "describe", group)
                assert "PRIORITY" in table
                offsets = await client.admin.shares.offsets(group)
                assert offsets[mansio.TopicPartition(topic, 0)].lag == 4

    run(scenario)


@pytest.mark.row("D7")
def test_reset_and_deletion_of_offsets_apply_to_all_priorities(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "reset")
            group = await group_of(client, topic)
            records = ["low:1", "high:1", "normal:1", "high:2"]
            in_order = ["high:1", "high:2", "normal:1", "low:1"]
            await publish(client, topic, *records)
            async with client.receive(topic, group=group, max_records=1) as receiver:
                assert await drain(receiver, 4) == in_order
            await client.admin.shares.alter_offsets(group, {mansio.TopicPartition(topic, 0): 1})
            async with client.receive(topic, group=group, max_records=1) as receiver:
                assert await drain(receiver, 3) == ["high:1", "high:2", "normal:1"]
            await client.admin.shares.delete_offsets(group, [topic])
            async with client.receive(topic, group=group, max_records=1) as receiver:
                assert await drain(receiver, 4) == in_order
            # Before the first member, when there is no stored state of any priority.
            new = await group_of(client, "reset-new")
            await client.admin.shares.alter_offsets(new, {mansio.TopicPartition(topic, 0): 3})
            async with client.receive(topic, group=new, max_records=1) as receiver:
                assert await drain(receiver, 1) == ["high:2"]
                assert await receiver.poll(timeout_ms=200) == []

    run(scenario)


def test_deleted_records_are_delivered_in_no_priority(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "trimmed")
            group = await group_of(client, topic)
            await publish(client, topic, "low:1", "high:1", "low:2", "normal:1")
            async with client.receive(topic, group=group, max_records=1) as receiver:
                assert await drain(receiver, 1) == ["high:1"]
                await client.admin.delete_records([topic], before=2)
                assert await drain(receiver, 2) == ["normal:1", "low:2"]
            found = await leases(client, group, topic)
            assert (found.lag, found.leased) == (0, 0)

    run(scenario)


@pytest.mark.row("D6", "D7")
def test_delayed_and_deduplicated_records_keep_their_priority(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            topic = await topic_of(client, "late", mansio_delay_enable="true", mansio_dedup_ms="60000")
            group = await group_of(client, topic)
            await publish(client, topic, "high:later", delay=0.3)
            for _ in range(2):
                await client.publish(topic, "high:once", priority="high", dedup_id="one")
            await publish(client, topic, "low:1", "low:2")
            async with client.receive(topic, group=group, max_records=1) as receiver:
                assert await drain(receiver, 1) == ["high:once"]

            async def is_due() -> bool:
                return (await by_priority(client, group, topic))["high"].lag > 0

            await until(is_due)
            async with client.receive(topic, group=group, max_records=1) as receiver:
                assert await drain(receiver, 3) == ["high:later", "low:1", "low:2"]

    run(scenario)
