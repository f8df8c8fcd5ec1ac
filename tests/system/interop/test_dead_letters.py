"""Dead letters (KIP-1191) as foreign clients see them: what a stock `ShareConsumer` gives up, read by a stock consumer;
and Mansio's own requests, which no client is disturbed by."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

import mansio
from mansio.cli.admin import group as group_shares
from support.machine import scaled
from support.process import served
from support.waiting import wait_until
from system.interop.clients import QUIET, READERS, WRITERS, Item, as_sent
from system.interop.conftest import ARGUMENTS, create_topic
from system.interop.share_members import ShareMember, member

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from confluent_kafka import Message

DEADLINE_S = 20.0
SETTINGS = {
    "share.auto.offset.reset": "earliest",
    "mansio.retry.backoff.ms": "0",
    "share.delivery.count.limit": "2",
}


def prepare(
    bootstrap_servers: str, group: str, topic: str, count: int, *, records_per_batch: int = 10_000
) -> None:
    """Configure the group and produce `count` records."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in SETTINGS.items()
    ]
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(scaled(10))
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "compression.type": "lz4",
            "batch.num.messages": records_per_batch,
            "linger.ms": 10_000,  # full batches, also when this process is slow; flush() does not wait for it
            **QUIET,
        }
    )
    for at in range(count):
        producer.produce(topic, f"v{at}", f"k{at}", headers=[("own", b"\x00\xff"), ("nothing", None)])
    assert producer.flush(scaled(10)) == 0


def read(bootstrap_servers: str, topic: str, count: int) -> list[Message]:
    """So many records of partition 0, from the beginning."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap_servers, "group.id": "reader", "enable.auto.commit": False, **QUIET}
    )
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found: list[Message] = []
        end = time.monotonic() + scaled(DEADLINE_S)
        while len(found) < count and time.monotonic() < end:
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                found.append(message)
        return found
    finally:
        consumer.close()


def take(one: ShareMember, count: int, how: str) -> None:
    """Have so many, and say the same of all."""
    had = 0
    end = time.monotonic() + scaled(DEADLINE_S)
    while had < count and time.monotonic() < end:
        given = one.poll(1, 2.0)
        one.acknowledge(given, how)
        one.commit_well()
        had += len(given)
    assert had == count


@pytest.mark.row("D4")
@pytest.mark.parametrize(
    ("how", "times", "message"),
    [
        ("REJECT", 1, "Offset rejected by client."),
        ("RELEASE", 2, "Offset delivery count exceeded the threshold."),
    ],
)
def test_what_a_stock_consumer_gives_up_is_a_dead_letter_with_kafkas_headers(
    bootstrap_servers: str, make_topic: Callable[..., str], unique: str, how: str, times: int, message: str
) -> None:
    topic = make_topic(1)
    prepare(bootstrap_servers, unique, topic, 3)
    with member(bootstrap_servers, unique, topic, explicit=True) as one:
        take(one, 3 * times, how)
        found = read(bootstrap_servers, f"dlq.{topic}", 3)
    assert [(each.key(), each.value()) for each in found] == [
        (f"k{at}".encode(), f"v{at}".encode()) for at in range(3)
    ]
    for at, each in enumerate(found):
        headers: Any = each.headers()
        assert headers[:2] == [("own", b"\x00\xff"), ("nothing", None)]
        reported = {name: value.decode() for name, value in headers[2:]}
        assert reported.pop("mansio-dlq-id").endswith(f"/0/{at}/{times}")
        assert reported.pop("mansio-dlq-consumer")
        assert abs(int(reported.pop("mansio-dlq-first-ms")) - time.time() * 1000) < 60_000
        assert reported == {
            "__dlq.errors.topic": topic,
            "__dlq.errors.partition": "0",
            "__dlq.errors.offset": str(at),
            "__dlq.errors.group": unique,
            "__dlq.errors.delivery.count": str(times),
            "__dlq.errors.message": message,
        }


@pytest.mark.row("D4")
def test_a_redriven_record_comes_to_its_group_again(
    bootstrap_servers: str, make_topic: Callable[..., str], unique: str
) -> None:
    topic = make_topic(1)
    prepare(bootstrap_servers, unique, topic, 3)
    with (
        member(bootstrap_servers, unique, topic, explicit=True) as one,
        mansio.blocking.connect(bootstrap_servers) as client,
    ):
        take(one, 3, "REJECT")
        assert len(read(bootstrap_servers, f"dlq.{topic}", 3)) == 3
        partition = mansio.TopicPartition(topic, 0)
        found = client.admin.shares.redrive(unique, partition, redrive_id="r", offsets=[(1, 1)])
        assert found.redriven == 1
        (again,) = one.poll(1)
        assert (again.offset, again.deliveries) == (1, 2)
        one.acknowledge([again], "ACCEPT")
        one.commit_well()
        assert client.admin.shares.redrive(unique, partition, redrive_id="r", offsets=[(1, 1)]).redriven == 0


@pytest.mark.row("D4")
def test_a_share_group_is_described_with_its_leases_and_what_is_dead(
    bootstrap_servers: str, make_topic: Callable[..., str], unique: str, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = make_topic(1)
    prepare(bootstrap_servers, unique, topic, 5, records_per_batch=2)  # a share fetch acquires whole batches

    async def describe() -> dict[str, Any] | None:
        async with mansio.connect(bootstrap_servers) as client:
            assert await group_shares.describe_share_group(client, "nobody") is None
            return await group_shares.describe_share_group(client, unique)

    with member(bootstrap_servers, unique, topic, explicit=True, **{"max.poll.records": 2}) as one:
        take(one, 2, "REJECT")
        assert len(read(bootstrap_servers, f"dlq.{topic}", 2)) == 2
        held = one.poll(1)
        found = asyncio.run(describe())
    assert found is not None
    (partition,) = found["partitions"]
    assert (partition["leased"], partition["dead"], partition["lag"]) == (len(held), 2, 3)
    assert [each["leased"] for each in partition["holders"]] == [len(held)]
    assert partition["holders"][0]["member"] == found["members"][0]["member"]
    group_shares.show_share_group(found)
    shown = capsys.readouterr().out
    assert "LEASED" in shown
    assert found["members"][0]["member"] in shown


@pytest.mark.full
@pytest.mark.row("D4")
def test_each_is_there_once_when_the_broker_is_killed_on_the_way(tmp_path: Path) -> None:
    """Killed a moment after the last rejection was answered, however far the dead letters have come."""
    count = 600
    with served(tmp_path / "data", arguments=ARGUMENTS, http=False) as broker:
        for round_ in range(2):
            topic = create_topic(broker.bootstrap_servers, f"killed-{round_}", 1)
            prepare(broker.bootstrap_servers, "g", topic, count)
            with member(broker.bootstrap_servers, "g", topic, explicit=True) as one:
                take(one, count, "REJECT")
                broker.kill()
            broker.start()
            partition = mansio.TopicPartition(topic, 0)
            with mansio.blocking.connect(broker.bootstrap_servers) as client:

                def all_dead() -> bool:
                    found = client.admin.shares.leases("g", [partition])[partition]  # noqa: B023
                    return found is not None and found.dead == count and found.archiving == 0

                wait_until(all_dead, DEADLINE_S)
                dead_letters = mansio.TopicPartition(f"dlq.{topic}", 0)
                assert client.admin.list_offsets([dead_letters])[dead_letters].offset == count
            found = read(broker.bootstrap_servers, dead_letters.topic, count)
            offsets = [dict(each.headers() or ())["__dlq.errors.offset"] for each in found]
            assert offsets == [str(at).encode() for at in range(count)]
        assert "Traceback" not in broker.text()


@pytest.mark.row("D4")
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "kcat"])
def test_apis_that_only_mansio_has_disturb_no_client(
    name: str, bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    """They are announced with the others, under numbers no client knows (KIP-35)."""
    topic = make_topic(1)
    items = [Item(b"k", b"v%d" % at) for at in range(3)]
    WRITERS[name](bootstrap_servers, topic, items)
    assert as_sent(READERS[name](bootstrap_servers, topic, 3)) == items
