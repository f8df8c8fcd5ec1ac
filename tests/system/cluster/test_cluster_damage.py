"""Damage at random in the segments of three replicas, made while they are stopped and while they run: readers get every
record as it was written, and in the end every replica has the bytes that it had before."""

from __future__ import annotations

import random
import re
import urllib.request
from typing import TYPE_CHECKING

import pytest

from mansio import blocking
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.batch.record_reader import read_records
from support.cluster import cluster
from support.damage import partitions_of, value_of
from support.machine import scaled
from support.seeds import chosen_seed
from support.waiting import wait_until
from system.interop.test_damage_at_random import TOPIC, read_through_librdkafka, write

if TYPE_CHECKING:
    from pathlib import Path

    from support.cluster import Cluster
    from support.damage import Partition

pytestmark = pytest.mark.full

PARTITIONS = 6
RECORDS = 1200
DAMAGES = 400
REPAIRED_S = 60.0
COPYING = 1
"""The broker that has lost its data and copies everything from the damaged ones. It is stopped first: the last one that
is stopped is the only one in sync then."""


def damage(replicas: dict[int, dict[int, Partition]], chance: random.Random, count: int) -> int:
    """Damage so many segments, on all these brokers alike, no offset on two of them; returns how many."""
    done = 0
    for node_id in replicas:
        for index, partition in replicas[node_id].items():
            others = [replicas[other][index].lost for other in replicas if other != node_id]
            done += partition.damage(
                chance, -(-count // (len(replicas) * PARTITIONS)), spare=set().union(*others)
            )
    return done


def repaired_ranges(one: Cluster) -> int:
    """By all running brokers, since they started."""
    total = 0
    for node_id in one.running:
        with urllib.request.urlopen(f"{one.brokers[node_id].http_url}/metrics", timeout=scaled(10)) as answer:
            found = re.search(r"^mansio_repaired_ranges_total (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None
        total += round(float(found[1]))
    return total


def stop_all(one: Cluster) -> None:
    for broker in one.brokers.values():
        broker.stop()


def values(data: Path, index: int) -> list[tuple[int, bytes | None]]:
    """Offsets and values of one replica, from its files."""
    return [
        (record.offset, record.value)
        for path in sorted(data.glob(f"topics/{TOPIC}.*/{index}/*.log"))
        for content in (path.read_bytes(),)
        for at, header in iterate_batches(content)
        for record in read_records(content[at : at + header.size], output_bytes_max=1 << 24)
    ]


def run_round(directory: Path, *, damages: int) -> int:
    """One round of damage, half of it while the brokers run and have not verified anything; returns the number of
    ranges that were repaired."""
    chance = random.Random(chosen_seed())
    with cluster(directory, http=True, broker_session_timeout_ms=3000) as one:
        with blocking.connect(one.bootstrap_servers) as client:
            write(one.bootstrap_servers, client, partitions=PARTITIONS, records=RECORDS)
        one.wait_in_sync(TOPIC)
        stop_all(one)
        replicas = {
            node_id: partitions_of(broker.data, TOPIC)
            for node_id, broker in one.brokers.items()
            if node_id != COPYING
        }
        done = damage(replicas, chance, damages // 2)
        one.forget_data(COPYING)
        one.start(*replicas)
        one.wait(lambda: {len(place.in_sync) for place in one.places(TOPIC)} == {2}, "two in sync")
        done += damage(replicas, chance, damages // 2)
        one.start(COPYING)
        nothing: dict[int, set[int]] = {index: set() for index in range(PARTITIONS)}
        read_through_librdkafka(one.bootstrap_servers, nothing, RECORDS, retries=True)
        one.wait_in_sync(TOPIC)
        repaired = repaired_ranges(one)
        stop_all(one)
        for broker in one.brokers.values():
            broker.arguments = [*broker.arguments, "--set", "log_scrub_interval_ms=300"]
        one.start()

        def is_repaired() -> bool:
            return all(one.is_as_written for node in replicas.values() for one in node.values())

        wait_until(is_repaired, scaled(REPAIRED_S))
        one.wait_in_sync(TOPIC)
        repaired += repaired_ranges(one)
        stop_all(one)
        expected = [
            [(offset, value_of(index, offset)) for offset in range(RECORDS)] for index in range(PARTITIONS)
        ]
        assert [values(one.brokers[COPYING].data, index) for index in range(PARTITIONS)] == expected
        one.check_logs()
    assert done >= damages
    return repaired


@pytest.mark.row("L10")
def test_damage_of_replicas_is_repaired_and_reaches_no_reader(tmp_path: Path) -> None:
    assert run_round(tmp_path, damages=DAMAGES) >= 0.9 * DAMAGES
