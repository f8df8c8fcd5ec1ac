"""A share group as the source of a stream, driven as Spark drives it, with a driver that dies at any step.

`Driver` has Spark's logs of offsets and commits, and a sink that takes a batch once; `Process` is what dies with the
driver. A real broker leases the records, and a receiver of the same group takes some of them.
"""

from __future__ import annotations

import json
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.errors import ConfigError, LeaseLost
from mansio.spark.options import SourceOptions
from mansio.spark.share import record_states, share_reader
from mansio.spark.share.failures import RecordFailure, send_failures
from mansio.spark.share.share_reader import ShareStreamReader
from mansio.spark.spark_versions import ReadAllAvailable
from mansio.spark.sync_client import close_sync_clients, sync_client
from mansio.testing import TestBroker
from mansio.wire.topic_partition import TopicPartition
from support.machine import scaled
from support.process import served
from support.tiers import examples
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.process import ServedBroker

COLUMNS = ("value", "topic", "partition", "offset", "delivery_count", "lease")
Row = dict[str, Any]


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started
        close_sync_clients()


class Died(Exception):
    """The driver was killed."""


class Driver:
    """A query of one checkpoint. `sink`: the rows of each batch that is in the sink; `failed`: records that fail in so
    many deliveries."""

    def __init__(self, broker: TestBroker | ServedBroker, topic: str, group: str, **options: str) -> None:
        chosen = {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "subscribe": topic,
            "shareGroup": group,
            **options,
        }
        self.options = SourceOptions.parse(chosen, streaming=True)
        self.group = group
        self.offsets: list[dict[str, Any]] = []
        self.commits: list[int] = []
        self.sink: dict[int, list[Row]] = {}
        self.dies = 0.0
        self.random = random.Random(7)
        self.failed: dict[tuple[int, int], int] = {}
        self.reader = self.new_reader()

    def new_reader(self) -> ShareStreamReader:
        assert self.options.share is not None
        return ShareStreamReader(self.options, self.options.share, COLUMNS)

    def may_die(self) -> None:
        if self.random.random() < self.dies:
            raise Died

    def kill(self) -> None:
        """End the process; what it holds stays leased."""
        if self.reader._renewal is not None:
            self.reader._renewal.stop()
        self.reader = self.new_reader()

    def start_of(self, number: int) -> dict[str, Any]:
        return self.offsets[number - 1] if number else self.reader.initialOffset()

    def step(self) -> bool:
        """Plan a batch and run it, or repeat the last one if it is not complete; return whether there was one."""
        if len(self.offsets) == len(self.commits):
            start = self.start_of(len(self.offsets))
            end = json.loads(json.dumps(self.reader.latestOffset(start, ReadAllAvailable())))
            self.may_die()
            if end == start:
                return False
            self.offsets.append(end)
            self.may_die()
            if len(self.offsets) > 1:
                self.reader.commit(start)
        number = len(self.offsets) - 1
        self.run(number)
        self.may_die()
        self.commits.append(number)
        self.may_die()
        return True

    def run(self, number: int) -> None:
        end = self.offsets[number]
        tasks = self.reader.partitions(self.start_of(number), end)
        self.may_die()
        if number not in self.sink:
            rows = [row for task in tasks for batch in self.reader.read(task) for row in batch.to_pylist()]
            self.may_die()
            failed = [row for row in rows if self.fails(row)]
            self.sink[number] = [row for row in rows if row not in failed]
            self.failures = [
                RecordFailure(row["topic"], row["partition"], row["offset"], delay_ms=0) for row in failed
            ]
        self.may_die()
        client = sync_client(self.options.bootstrap_servers, self.options.security)
        send_failures(client, self.group, end["member"], self.failures)

    def fails(self, row: Row) -> bool:
        key = row["partition"], row["offset"]
        left = self.failed.get(key, 0)
        self.failed[key] = max(left - 1, 0)
        return left > 0

    def to_end(self) -> None:
        """Run until there is no record, through the deaths of the driver."""
        idle = 0
        while idle < 2:
            try:
                idle = 0 if self.step() else idle + 1
            except Died:
                self.kill()
                idle = 0

    def results(self) -> list[tuple[int, int]]:
        return sorted((row["partition"], row["offset"]) for rows in self.sink.values() for row in rows)


def prepare(broker: TestBroker | ServedBroker, topic: str, *counts: int, **settings: str) -> None:
    """A topic with so many records in its partitions, and a group of the same name that begins at their start."""
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        client.admin.create_topic(topic, partitions=len(counts))
        configs = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "0"}
        names = {name.replace("__", "."): value for name, value in settings.items()}
        client.admin.alter_group_config(topic, {**configs, **names})
        for partition, count in enumerate(counts):
            for number in range(count):
                client.publish(topic, f"{number}", key=f"{number % 3}", partition=partition)


def state(broker: TestBroker | ServedBroker, topic: str, partition: int = 0) -> Any:
    place = TopicPartition(topic, partition)
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        return client.admin.shares.leases(topic, [place])[place]


@pytest.mark.row("S13")
def test_a_batch_has_the_leased_records_and_they_are_done_when_it_is_complete(broker: TestBroker) -> None:
    prepare(broker, "simple", 20, 10)
    driver = Driver(broker, "simple", "simple", recordsPerTask="7", maxRecordsPerTrigger="25")
    assert driver.step()
    (rows,) = driver.sink.values()
    assert len(rows) == 25
    assert {row["delivery_count"] for row in rows} == {1}
    assert {row["lease"] for row in rows} == {driver.offsets[0]["member"]}
    assert state(broker, "simple").lag + state(broker, "simple", 1).lag == 30
    driver.to_end()
    assert driver.results() == [(0, o) for o in range(20)] + [(1, o) for o in range(10)]
    assert (state(broker, "simple").lag, state(broker, "simple", 1).lag) == (0, 0)


@pytest.mark.row("S13")
def test_a_driver_that_dies_at_any_step_loses_and_repeats_no_record(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_reader, "PLANNING_LEASE_MS", 1_000)
    for seed in range(examples(3, 12)):
        topic = f"kills-{seed}"
        prepare(broker, topic, 40, 25, share__delivery__count__limit="1000")
        driver = Driver(broker, topic, topic, recordsPerTask="4", maxRecordsPerTrigger="9")
        driver.random, driver.dies = random.Random(seed), 0.12
        driver.failed = {(partition, o): o % 3 for partition in (0, 1) for o in range(0, 25, 4)}

        def is_done(driver: Driver = driver, topic: str = topic) -> bool:
            driver.to_end()  # records of batches that were not planned come back after their leases
            return not (state(broker, topic).lag or state(broker, topic, 1).lag)

        wait_until(is_done, scaled(60), "all records are done")
        driver.kill()
        assert driver.results() == [(0, o) for o in range(40)] + [(1, o) for o in range(25)]


@pytest.mark.row("S13")
def test_a_batch_that_is_begun_again_and_again_ends_as_dead_letters(broker: TestBroker) -> None:
    prepare(broker, "poison", 5, share__delivery__count__limit="3")
    driver = Driver(broker, "poison", "poison")
    for attempt in range(4):
        try:
            driver.dies = 0.0
            if attempt == 0:
                end = driver.reader.latestOffset({}, ReadAllAvailable())
                driver.offsets.append(json.loads(json.dumps(end)))
            tasks = driver.reader.partitions({}, driver.offsets[0])
            counts = {
                row["delivery_count"]
                for task in tasks
                for batch in driver.reader.read(task)
                for row in batch.to_pylist()
            }
            assert counts == ({attempt + 1} if attempt < 3 else set())
            raise Died
        except Died:
            driver.kill()
    driver.to_end()
    assert driver.results() == []
    wait_until(lambda: state(broker, "poison").dead == 5, scaled(30), "dead letters")
    assert state(broker, "poison").lag == 0


@pytest.mark.row("S13")
def test_lost_leases_fail_the_query_unless_it_may_process_records_again(broker: TestBroker) -> None:
    prepare(broker, "lost", 6)
    driver = Driver(broker, "lost", "lost")
    end = driver.reader.latestOffset({}, ReadAllAvailable())
    driver.offsets.append(json.loads(json.dumps(end)))
    client = sync_client(broker.bootstrap_servers)
    place = TopicPartition("lost", 0)
    taken = [RecordFailure("lost", 0, o, delay_ms=0) for o in (1, 2)]
    assert send_failures(client, "lost", end["member"], taken) == 0
    driver.kill()
    tasks = driver.reader.partitions({}, driver.offsets[0])
    with pytest.raises(LeaseLost, match="2 records"):
        driver.reader.read(tasks[0])
    driver.kill()
    driver.options = SourceOptions.parse(
        {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "subscribe": "lost",
            "shareGroup": "lost",
            "onLeaseLost": "reprocess",
        },
        streaming=True,
    )
    driver.reader = driver.new_reader()
    driver.to_end()
    assert driver.results() == sorted([(0, o) for o in range(6)] + [(0, 1), (0, 2)])
    assert state(broker, place.topic).lag == 0


@pytest.mark.row("S13")
def test_two_queries_and_a_receiver_share_a_group(broker: TestBroker) -> None:
    prepare(broker, "shared", 60)
    drivers = [Driver(broker, "shared", "shared", maxRecordsPerTrigger="7") for _ in range(2)]
    taken: list[tuple[int, int]] = []
    with (
        mansio.blocking.connect(broker.bootstrap_servers) as client,
        client.receive("shared", group="shared", max_records=5, prefetch=0) as receiver,
    ):
        while sum(driver.step() for driver in drivers):
            for message in receiver.poll(max_records=5, timeout_ms=1_000):
                taken.append((message.partition, message.offset))
                receiver.ack([message])
    for driver in drivers:
        driver.to_end()
    results = [driver.results() for driver in drivers]
    assert all([*results, taken])
    assert sorted([*results[0], *results[1], *taken]) == [(0, o) for o in range(60)]


@pytest.mark.row("S13")
def test_a_query_that_ends_delivers_no_record_twice_and_none_that_came_later(broker: TestBroker) -> None:
    prepare(broker, "ends", 12)
    driver = Driver(broker, "ends", "ends", stopAtLatest="true", maxRecordsPerTrigger="5")
    driver.failed = {(0, 3): 9, (0, 11): 9}
    assert driver.step()
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        client.publish("ends", "later", partition=0)
    driver.to_end()
    assert driver.results() == [(0, o) for o in range(12) if o not in (3, 11)]
    assert state(broker, "ends").lag == 3
    again = Driver(broker, "ends", "ends")
    again.to_end()
    assert again.results() == [(0, 3), (0, 11), (0, 12)]


@pytest.mark.row("S13")
def test_by_key_a_batch_has_one_record_of_each_key(broker: TestBroker) -> None:
    prepare(broker, "by-key", 12, mansio__share__order="key")
    driver = Driver(broker, "by-key", "by-key")
    driver.to_end()
    batches = [[row["offset"] for row in rows] for rows in driver.sink.values()]
    assert batches == [[3 * at, 3 * at + 1, 3 * at + 2] for at in range(4)]


@pytest.mark.row("S13")
def test_in_order_one_task_has_a_partition(broker: TestBroker) -> None:
    prepare(broker, "in-order", 12, 12, mansio__share__order="partition")
    driver = Driver(broker, "in-order", "in-order", recordsPerTask="2")
    end = driver.reader.latestOffset({}, ReadAllAvailable())
    assert end["order"] == "partition"
    assert len(driver.reader.partitions({}, end)) == 2
    driver.kill()


@pytest.mark.row("S13")
def test_a_batch_read_of_a_group_and_other_offsets_are_refused() -> None:
    options = {"kafka.bootstrap.servers": "b:1", "subscribe": "t", "shareGroup": "g"}
    with pytest.raises(ConfigError, match=r"mansio\.spark\.lease"):
        SourceOptions.parse(options)
    for name, value in (("startingOffsets", "earliest"), ("leaseDuration", "1s"), ("isolation.level", "x")):
        with pytest.raises(ConfigError, match=name):
            SourceOptions.parse({**options, name: value}, streaming=True)
    del options["shareGroup"]
    with pytest.raises(ConfigError, match="needs option shareGroup"):
        SourceOptions.parse({**options, "recordsPerTask": "5"}, streaming=True)


@pytest.mark.row("S13")
def test_states_of_records_are_rows_for_each_record_that_is_leased_retried_or_dead(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_states, "PAGE_RANGES", 2)
    prepare(broker, "states", 12, mansio__retry__backoff__ms="60000")
    driver = Driver(broker, "states", "states", maxRecordsPerTrigger="8")
    end = driver.reader.latestOffset({}, ReadAllAvailable())
    failures = [
        RecordFailure("states", 0, 1, "reject", reason="bad"),
        RecordFailure("states", 0, 3),
        RecordFailure("states", 0, 4, delay_ms=90_000),
    ]
    send_failures(sync_client(broker.bootstrap_servers), "states", end["member"], failures)
    wait_until(lambda: state(broker, "states").dead == 1, scaled(30), "a dead letter")
    options = SourceOptions.parse(
        {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "subscribe": "states",
            "recordStates": "states",
        }
    )
    reader = record_states.StateReader(options, tuple(record_states.STATE_SPARK_TYPES))
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    found = {row["offset"]: row for row in rows}
    assert len(rows) == len(found) == 8
    names = {offset: row["state"] for offset, row in found.items()}
    assert names == {**dict.fromkeys((0, 2, 5, 6, 7), "leased"), 1: "dead", 3: "retry", 4: "retry"}
    assert {row["member"] for row in rows} == {end["member"], None}
    assert found[0]["until"] - found[0]["since"] == timedelta(minutes=1)
    assert found[4]["until"] - found[3]["until"] > timedelta(seconds=10)
    assert {(row["topic"], row["partition"], row["group"], row["delivery_count"]) for row in rows} == {
        ("states", 0, "states", 1)
    }
    driver.reader.stop()


@pytest.mark.row("S13")
def test_states_of_records_of_a_group_that_has_read_nothing_are_none(broker: TestBroker) -> None:
    prepare(broker, "unread", 3)
    options = SourceOptions.parse(
        {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": "unread", "recordStates": "none"}
    )
    reader = record_states.StateReader(options, ("offset",))
    assert [batch for part in reader.partitions() for batch in reader.read(part)] == []


@pytest.mark.full
@pytest.mark.row("S13")
def test_kills_of_driver_and_broker_lose_and_repeat_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_reader, "PLANNING_LEASE_MS", 2_000)
    with served(tmp_path / "data", http=False) as broker:
        prepare(broker, "both", 80, 40, share__delivery__count__limit="1000")
        driver = Driver(broker, "both", "both", recordsPerTask="5", maxRecordsPerTrigger="12")
        driver.dies = 0.08
        driver.failed = {(0, o): o % 2 for o in range(0, 80, 3)}
        kills = 0

        def may_die() -> None:
            nonlocal kills
            chance = driver.random.random()
            if chance < 0.05 and kills < 3:
                kills += 1
                broker.kill()
                broker.start()
            elif chance > 1 - driver.dies:
                raise Died

        driver.may_die = may_die  # also kills the broker

        def is_done() -> bool:
            driver.to_end()
            return not (state(broker, "both").lag or state(broker, "both", 1).lag)

        wait_until(is_done, scaled(90), "all records are done")
        driver.kill()
        assert kills == 3
        assert driver.results() == [(0, o) for o in range(80)] + [(1, o) for o in range(40)]
        close_sync_clients()
