"""`mansio pipeline mirror` is killed as a real process, and so are both brokers: each record is there exactly once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.client.types import OutgoingRecord, TopicPartition
from support.machine import scaled
from support.pipeline_process import PipelineProcess
from support.process import ServedBroker
from support.seeds import chosen_seed
from support.tiers import repetitions
from support.waiting import wait_until
from system.spark.topics import contents, create

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOPIC, GROUP = "orders", "billing"
PARTITIONS = 3
KILLS = repetitions(6, 10)
BATCH = 150
TIMEOUT_S = 900


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[list[ServedBroker]]:
    made = [ServedBroker(tmp_path / name / "data", http=False) for name in ("a", "b")]
    try:
        yield [broker.start() for broker in made]
    finally:
        for broker in made:
            broker.kill()


class Writer(threading.Thread):
    """Publishes records all the time, each with its number; stops at an error, and is started again."""

    def __init__(self, servers: str, first: int) -> None:
        super().__init__(daemon=True)
        self.servers, self.number, self.may_go_on = servers, first, True
        self.acknowledged: list[int] = []

    def run(self) -> None:
        with mansio.blocking.connect(self.servers) as client:
            while self.may_go_on:
                numbers = range(self.number, self.number + BATCH)
                self.number += BATCH
                client.publish_many(
                    TOPIC,
                    [OutgoingRecord(b"%d" % number, partition=number % PARTITIONS) for number in numbers],
                )
                self.acknowledged += numbers
                time.sleep(0.01)


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.row("S10", "C7")
def test_a_mirror_killed_at_random_points_has_each_record_once_and_in_order(
    brokers: list[ServedBroker], tmp_path: Path
) -> None:
    dice = random.Random(chosen_seed())
    a, b = brokers
    create(a.bootstrap_servers, TOPIC, PARTITIONS, retention_ms="-1")
    words = ["mirror", TOPIC, "--from", a.bootstrap_servers, "--to", b.bootstrap_servers]
    words += ["--trigger", "0.05", "--groups-interval", "0.2"]
    writer = Writer(a.bootstrap_servers, 0)
    writer.start()
    for number in range(KILLS):
        process = PipelineProcess(tmp_path, words)
        process.wait_for_batches(dice.choice((0, 1, 1, 3)))
        time.sleep(dice.uniform(0, 0.5))
        if number % 4 == 3:
            seen = process.batches
            b.kill()
            b.start()
            process.wait_for_batches(seen + 2)
        process.kill()
    writer.may_go_on = False
    writer.join(scaled(30))
    places = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
    offset = writer.number // PARTITIONS // 2
    with mansio.blocking.connect(a.bootstrap_servers) as client:
        client.admin.reset_offsets(GROUP, places, to=offset)
    assert PipelineProcess(tmp_path, [*words, "--once"]).wait(scaled(60)) == 0
    source = contents(a.bootstrap_servers, TOPIC)
    # The markers of the last transaction may come after its commit.
    wait_until(lambda: len(contents(b.bootstrap_servers, TOPIC)) >= len(source), what="copies")
    copies = contents(b.bootstrap_servers, TOPIC)
    assert {int(message.value or b"") for message in source} >= set(writer.acknowledged)
    assert Counter(message.value for message in copies) == Counter(message.value for message in source)
    assert [(message.partition, message.value, message.timestamp_ms) for message in copies] == [
        (message.partition, message.value, message.timestamp_ms) for message in source
    ]
    with mansio.blocking.connect(b.bootstrap_servers) as client:
        committed = client.admin.group_offsets(GROUP)
    for place in places:
        left = [
            message.value
            for message in copies
            if message.partition == place.partition and message.offset >= committed[place].offset
        ]
        assert left == [
            message.value
            for message in source
            if message.partition == place.partition and message.offset >= offset
        ]
