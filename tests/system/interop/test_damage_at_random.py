"""Damage at random in stored segments, made while the broker is stopped and while it runs: no client receives a wrong
value or misses a record without an error, and every intact batch can be read."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import mansio
from mansio.errors import CorruptMessage
from support.damage import partitions_of, value_of
from support.machine import scaled
from support.seeds import chosen_seed
from system.interop.clients import QUIET

if TYPE_CHECKING:
    from pathlib import Path

    from support.damage import Partition

TOPIC = "rotten"
PARTITIONS = 8
RECORDS = 700
SEGMENT_BYTES = 2000
ROUND = 120
"""Damages of one round; half of them are made while the broker runs."""

SMOKE = 24
FULL = 600
STALLED_S = 20.0
CORRUPT_MESSAGE = 2


def write(bootstrap_servers: str, client: mansio.blocking.Client, *, partitions: int, records: int) -> None:
    """Records in batches of one to five, in many small segments."""
    config = {"segment.bytes": str(SEGMENT_BYTES), "index.interval.bytes": "1"}
    client.admin.create_topic(TOPIC, partitions=partitions, config=config)
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 5, **QUIET})
    offset = 0
    while offset < records:
        count = 1 + offset % 5
        for partition in range(partitions):
            for each in range(offset, min(offset + count, records)):
                producer.produce(TOPIC, value_of(partition, each), partition=partition)
        offset += count
        assert producer.flush(scaled(10)) == 0


def read_through_librdkafka(
    bootstrap_servers: str, lost: dict[int, set[int]], records: int, *, retries: bool = False
) -> int:
    """Read every partition to its end without CRC checks: the intact records in order, and an error for each damaged
    range, at its first offset, before anything behind it. With `retries` such errors are passed over, because the range
    will be repaired. Returns the number of errors."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "none",
            "enable.auto.commit": False,
            "check.crcs": False,
            "fetch.error.backoff.ms": 1,
            "fetch.wait.max.ms": 50,
            "auto.offset.reset": "error",
            **QUIET,
        }
    )
    errors = 0
    try:
        for partition, damaged in lost.items():
            position = 0
            consumer.assign([TopicPartition(TOPIC, partition, position)])
            end = time.monotonic() + scaled(STALLED_S)
            while position < records:
                assert time.monotonic() < end, f"partition {partition} stalls at {position}"
                for message in consumer.consume(500, 0.01):
                    error = message.error()
                    if error is None:
                        offset = message.offset()
                        assert offset == position, f"{TOPIC}-{partition}: {offset} instead of {position}"
                        assert offset not in damaged, f"{TOPIC}-{partition}: {offset} is damaged"
                        assert message.value() == value_of(partition, offset)
                        position += 1
                    else:
                        assert retries or error.code() == CORRUPT_MESSAGE, error
                        if position not in damaged:  # of a range that was passed already
                            continue
                        errors += 1
                        while position in damaged:
                            position += 1
                        consumer.assign([TopicPartition(TOPIC, partition, position)])
                        break
                    end = time.monotonic() + scaled(STALLED_S)
    finally:
        consumer.close()
    return errors


def read_through_share_group(
    client: mansio.blocking.Client, group: str, lost: dict[int, set[int]], records: int
) -> None:
    """A share group receives every intact record once, and none that is damaged."""
    expected = {
        (partition, offset)
        for partition, damaged in lost.items()
        for offset in range(records)
        if offset not in damaged
    }
    found: set[tuple[int, int]] = set()
    client.admin.alter_group_config(group, {"share.auto.offset.reset": "earliest"})
    with client.receive(TOPIC, group=group) as receiver:
        end = time.monotonic() + scaled(STALLED_S)
        while len(found) < len(expected):
            assert time.monotonic() < end, f"{sorted(expected - found)[:10]} are missing"
            try:
                messages = receiver.poll(timeout_ms=500)
            except CorruptMessage:  # of a partition in which nothing else is available
                continue
            for message in messages:
                assert (message.partition, message.offset) in expected
                assert message.value == value_of(message.partition, message.offset)
                found.add((message.partition, message.offset))
                end = time.monotonic() + scaled(STALLED_S)
            receiver.ack(messages)


def damage(partitions: dict[int, Partition], chance: random.Random, count: int) -> int:
    """Damage so many segments, of all partitions alike; returns how many."""
    return sum(partition.damage(chance, -(-count // len(partitions))) for partition in partitions.values())


def run_rounds(directory: Path, *, damages: int, partitions: int, records: int) -> int:
    """Rounds of damage until there were so many; returns the number of errors that readers got."""
    chance = random.Random(chosen_seed())
    data = directory / "data"
    with mansio.Broker(data) as broker, mansio.blocking.connect(broker.address) as client:
        write(broker.address, client, partitions=partitions, records=records)
    replicas = partitions_of(data, TOPIC)
    assert len(replicas) == partitions
    done = errors = number = 0
    while done < damages:
        part = -(-min(ROUND, damages - done) // 2)
        done += damage(replicas, chance, part)
        with mansio.Broker(data) as broker, mansio.blocking.connect(broker.address) as client:
            done += damage(replicas, chance, part)
            lost = {index: replica.lost for index, replica in replicas.items()}
            first, second = (read_kafka, read_share) if number % 2 else (read_share, read_kafka)
            for read in (first, second):  # the first of them verifies
                errors += read(broker.address, client, f"round-{number}", lost, records)
        for replica in replicas.values():
            replica.restore()
        number += 1
    return errors


def read_kafka(
    address: str, client: mansio.blocking.Client, group: str, lost: dict[int, set[int]], records: int
) -> int:
    del client, group
    return read_through_librdkafka(address, lost, records)


def read_share(
    address: str, client: mansio.blocking.Client, group: str, lost: dict[int, set[int]], records: int
) -> int:
    del address
    read_through_share_group(client, group, lost, records)
    return 0


@pytest.mark.row("L10")
def test_damage_reaches_no_client_and_what_is_intact_is_read(tmp_path: Path) -> None:
    assert run_rounds(tmp_path, damages=SMOKE, partitions=2, records=250)


@pytest.mark.full
@pytest.mark.row("L10")
def test_hundreds_of_damages_reach_no_client_and_what_is_intact_is_read(tmp_path: Path) -> None:
    assert run_rounds(tmp_path, damages=FULL, partitions=PARTITIONS, records=RECORDS) > FULL / 4
