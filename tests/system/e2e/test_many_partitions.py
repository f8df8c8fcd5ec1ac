"""A broker with many partitions: made, filled, killed, started again, and everything is there.

How long that takes and how much memory it needs is measured by `make bench`; here it has to work, within a deadline
that only a cost per partition of another kind would miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.client.producer.producer import ProducerOptions
from support.machine import scaled
from support.present import present
from support.process import ServedBroker
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.client.client import Client

TOPICS = ("one", "two")
START_S_MAX = 20.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[ServedBroker]:
    served = ServedBroker(tmp_path / "data", http=False)
    try:
        yield served.start()
    finally:
        served.kill()


async def fill(client: Client, partitions: int, value: bytes) -> None:
    """A record into every partition, acknowledged by the disk."""
    async with client.producer(ProducerOptions(acks="all")) as producer:
        sent = [
            await producer.send(topic, value + b"%d" % index, partition=index)
            for topic in TOPICS
            for index in range(partitions)
        ]
        for delivery in sent:
            await delivery


async def everything(
    client: Client, partitions: int, records: int
) -> dict[tuple[str, int], list[bytes | None]]:
    found: dict[tuple[str, int], list[bytes | None]] = {}
    left = partitions * len(TOPICS) * records
    async for message in client.consume(list(TOPICS), from_="earliest", max_records=left):
        found.setdefault((message.topic, message.partition), []).append(message.value)
    return found


async def work(broker: ServedBroker, partitions: int) -> None:
    async with mansio.connect(broker.bootstrap_servers) as client:
        for topic in TOPICS:
            await client.admin.create_topic(topic, partitions=partitions)
        await fill(client, partitions, b"first ")
    broker.kill()
    restart(broker)
    async with mansio.connect(broker.bootstrap_servers) as client:
        await fill(client, partitions, b"second ")
        assert descriptors(broker) < len(TOPICS) * partitions + 200  # one for each segment that is written to
    assert broker.stop() == 0
    restart(broker)
    async with mansio.connect(broker.bootstrap_servers) as client:
        found = await everything(client, partitions, 2)
    assert found == {
        (topic, index): [b"first %d" % index, b"second %d" % index]
        for topic in TOPICS
        for index in range(partitions)
    }


def restart(broker: ServedBroker) -> None:
    began = time.monotonic()
    broker.start()
    assert time.monotonic() - began < scaled(START_S_MAX)


def descriptors(broker: ServedBroker) -> int:
    return len(os.listdir(f"/proc/{broker.pid}/fd"))


@pytest.mark.full
@pytest.mark.row("L5")
def test_a_broker_with_five_hundred_partitions_starts_and_serves_after_a_kill(broker: ServedBroker) -> None:
    asyncio.run(work(broker, 250))


def test_partitions_of_a_broker_that_was_killed_keep_apart_what_is_damaged(tmp_path: Path) -> None:
    """They are opened together: the reason why one of them is not served is its own."""
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("one", partitions=20)
        for index in range(20):
            client.publish("one", b"kept", partition=index)
    for index in (3, 11):
        (segment,) = tmp_path.glob(f"topics/one.*/{index}/*.log")
        segment.write_bytes(segment.read_bytes()[:20])
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        failures = present(broker._broker).service.partitions.failures()
        assert sorted(failures) == ["one-11", "one-3"]
        for index in range(20):
            if index not in (3, 11):
                assert client.publish("one", b"more", partition=index).offset == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors as Linux shows them")
def test_deleted_topic_gives_its_files_back_at_once(tmp_path: Path) -> None:
    """Not when the collector of cycles comes by: until then the disk would keep the space as well."""

    def deleted_but_open() -> list[str]:
        names = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                names.append(os.readlink(f"/proc/self/fd/{number}"))
        return [name for name in names if name.startswith(str(tmp_path)) and name.endswith("(deleted)")]

    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                client.admin.create_topic("gone", partitions=2)
                client.publish("gone", b"something", partition=1)
                client.admin.delete_topic("gone")
            wait_until(lambda: not deleted_but_open(), what="the files of deleted partitions are closed")
        finally:
            gc.enable()
