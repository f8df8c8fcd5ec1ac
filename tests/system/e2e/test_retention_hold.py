"""Retention holds on a real broker: records that a pipeline has not read survive retention, compaction and a
restart."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from typer.testing import CliRunner

import mansio
from mansio.cli.main import app
from mansio.wire.internal_records.hold_metadata import encode_hold_metadata, pipeline_group_id
from support.machine import scaled
from support.present import present
from support.process import ServedBroker, served
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUIET: dict[str, Any] = {"log_level": 0, "error_cb": lambda error: None}
VALUE = bytes(600)  # more than half a segment: each batch gets its own
EVERYTHING_GOES = {"segment.bytes": "1024", "retention.ms": "1"}
_numbers = itertools.count(1)


def broker_in(directory: Path) -> mansio.Broker:
    return mansio.Broker(
        directory,
        log_retention_check_interval_ms=20,
        log_flush_offset_checkpoint_interval_ms=20,
        log_cleaner_backoff_ms=20,
        group_initial_rebalance_delay_ms=0,
    )


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("hold")) as started:
        yield started


class World:
    """One topic, and a pipeline that reads it, through confluent-kafka."""

    def __init__(self, broker: mansio.Broker | ServedBroker, **configs: str) -> None:
        number = next(_numbers)
        self.topic, self.pipeline = f"held-{number}", f"archive-{number}"
        self.move_to(broker)
        self.admin.create_topics([NewTopic(self.topic, 1, 1, config=configs)])[self.topic].result(scaled(10))

    def move_to(self, broker: mansio.Broker | ServedBroker) -> None:
        self.broker = broker
        self.address = broker.bootstrap_servers if isinstance(broker, ServedBroker) else broker.address
        self.admin = AdminClient({"bootstrap.servers": self.address, **QUIET})
        self.producer = Producer({"bootstrap.servers": self.address, "linger.ms": 0, **QUIET})

    def alter(self, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, self.topic, incremental_configs=[entry])
        self.admin.incremental_alter_configs([resource])[resource].result(scaled(10))

    def write(self, *keys: bytes, age_ms: int = 60_000) -> None:
        for key in keys:
            when = int(time.time() * 1000) - age_ms
            self.producer.produce(self.topic, VALUE, key=key, partition=0, timestamp=when)
            assert self.producer.flush(scaled(10)) == 0

    def commit(self, offset: int) -> None:
        group = pipeline_group_id(self.pipeline)
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": group, **QUIET})
        place = TopicPartition(self.topic, 0, offset, encode_hold_metadata("q"))
        consumer.commit(offsets=[place], asynchronous=False)
        consumer.close()

    def start(self) -> int:
        place = TopicPartition(self.topic, 0)
        return int(self.admin.list_offsets({place: OffsetSpec.earliest()})[place].result(scaled(10)).offset)

    def offsets(self) -> list[int]:
        """Every record that is still there."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "reader",
                "enable.partition.eof": True,
                **QUIET,
            }
        )
        consumer.assign([TopicPartition(self.topic, 0, self.start())])
        found: list[int] = []
        try:
            while True:
                message = consumer.poll(scaled(10))
                assert message is not None
                if message.error() is not None:
                    assert present(message.error()).code() == KafkaError._PARTITION_EOF
                    return found
                found.append(present(message.offset()))
        finally:
            consumer.close()

    def let_it_check(self) -> None:
        """Return when retention has looked again, twice."""
        assert isinstance(self.broker, mansio.Broker)
        service = present(self.broker._broker).service
        assert service.retention is not None
        begun = service.retention.counts.checks
        wait_until(lambda: service.retention is not None and service.retention.counts.checks > begun + 1)

    def release(self, *arguments: str) -> Any:
        return CliRunner().invoke(
            app, ["pipeline", "release", *arguments, "--bootstrap-servers", self.address]
        )


def test_retention_stops_at_the_hold_over_a_restart_until_it_is_released(tmp_path: Path) -> None:
    with broker_in(tmp_path) as broker:
        world = World(broker, **EVERYTHING_GOES | {"retention.ms": "-1"})
        world.commit(0)
        world.write(*[b"k"] * 8)
        world.commit(3)
    with broker_in(tmp_path) as broker:
        world.move_to(broker)
        world.alter("retention.ms", "1")
        assert wait_until(lambda: world.start() == 3)
        world.let_it_check()
        assert world.offsets() == [3, 4, 5, 6, 7]
        world.commit(5)
        assert wait_until(lambda: world.start() == 5)
        shown = json.loads(world.release(world.pipeline, "--dry-run", "--output", "json").stdout)
        assert [(row["committed"], row["held"], row["released"]) for row in shown] == [(5, 3, False)]
        world.let_it_check()
        assert world.start() == 5
        unknown = world.release("nobody").exception
        assert isinstance(unknown, mansio.MansioError)
        assert unknown.message == f"there is no pipeline 'nobody'; there are {world.pipeline}"
        assert world.release(world.pipeline).exit_code == 0
        assert wait_until(lambda: world.start() == 8)


@pytest.mark.full
def test_a_hold_survives_kill_9_of_the_broker_and_so_does_its_release(tmp_path: Path) -> None:
    """Nothing is deleted in the first life. In the next two retention looks from the first moment on, and is known to
    have gone through all topics when records are gone from one that nobody holds."""
    broker = ServedBroker(tmp_path / "data", http=False)
    broker.environment["MANSIO_LOG_RETENTION_CHECK_INTERVAL_MS"] = "3600000"
    try:
        broker.start()
        held, free = World(broker, **EVERYTHING_GOES), World(broker, **EVERYTHING_GOES)
        for one in (held, free):
            one.write(*[b"k"] * 8)
        held.commit(1)
        held.commit(3)
        for life in ("held", "released"):
            broker.kill()
            broker.environment["MANSIO_LOG_RETENTION_CHECK_INTERVAL_MS"] = "20"
            broker.start()
            for one in (held, free):
                one.move_to(broker)
            end = 8 if life == "held" else 10
            assert wait_until(lambda end=end: free.start() == end)
            free.write(b"k", b"k")
            assert wait_until(lambda end=end: free.start() == end + 2)
            if life == "held":
                assert held.offsets() == [3, 4, 5, 6, 7]
                assert held.release(held.pipeline).exit_code == 0
        assert wait_until(lambda: held.start() == 8)
    finally:
        broker.kill()


def test_delete_records_is_refused_while_a_pipeline_needs_them(broker: mansio.Broker) -> None:
    world = World(broker, **{"segment.bytes": "1024"})
    world.write(*[b"k"] * 4)
    world.commit(2)
    for offset in (3, -1):
        with pytest.raises(KafkaException) as refused:
            world.admin.delete_records([TopicPartition(world.topic, 0, offset)])[
                TopicPartition(world.topic, 0, offset)
            ].result(scaled(10))
        assert refused.value.args[0].code() == KafkaError.POLICY_VIOLATION
    for arguments in ((), ("--dry-run",)):
        command = [
            "topic",
            "delete-records",
            world.topic,
            "--before",
            "3",
            "--bootstrap-servers",
            broker.address,
        ]
        reported = CliRunner().invoke(app, [*command, "--output", "json", *arguments])
        (row,) = json.loads(reported.stdout)
        assert f"pipeline {world.pipeline} still needs the records from offset 2 on" in row["error"]
    place = TopicPartition(world.topic, 0, 2)
    assert world.admin.delete_records([place])[place].result(scaled(10)).low_watermark == 2


def test_compaction_leaves_what_a_pipeline_has_not_read(broker: mansio.Broker) -> None:
    config = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "segment.bytes": "1024"}
    world, free = World(broker, **config), World(broker, **config)
    world.commit(0)
    for one in (world, free):
        one.write(*[b"k"] * 8)
    assert wait_until(lambda: len(free.offsets()) == 2), "nobody holds this one"
    assert world.offsets() == list(range(8))
    world.commit(4)
    assert wait_until(lambda: world.offsets() == [3, 4, 5, 6, 7]), (
        "the latest of what was read, and all that was not"
    )
    world.commit(8)
    assert wait_until(lambda: world.offsets() == free.offsets())


def test_a_hold_broken_by_its_limit_is_seen_in_health_and_metrics(tmp_path: Path) -> None:
    often = {"MANSIO_LOG_RETENTION_CHECK_INTERVAL_MS": "20"}
    with served(tmp_path / "data", environment=often) as process:
        admin = AdminClient({"bootstrap.servers": process.bootstrap_servers, **QUIET})
        config = {**EVERYTHING_GOES, "mansio.hold.bytes.max": "2500"}
        admin.create_topics([NewTopic("t", 1, 1, config=config)])["t"].result(scaled(10))
        group = pipeline_group_id("slow")
        consumer = Consumer({"bootstrap.servers": process.bootstrap_servers, "group.id": group, **QUIET})
        consumer.commit(offsets=[TopicPartition("t", 0, 0, encode_hold_metadata("q"))], asynchronous=False)
        producer = Producer({"bootstrap.servers": process.bootstrap_servers, "linger.ms": 0, **QUIET})
        for _ in range(8):
            producer.produce("t", VALUE, timestamp=1)
            assert producer.flush(scaled(10)) == 0

        def warning() -> dict[str, Any] | None:
            ready = _http(process.http_port, "/health/ready")
            found = [one for one in json.loads(ready)["warnings"] if one["reason"] == "hold_released"]
            return found[0] if found else None

        assert wait_until(lambda: warning() is not None)
        found = warning()
        assert found is not None
        assert (found["topic"], found["partition"]) == ("t", 0)
        assert "pipeline 'slow' is at offset 0 of t-0" in found["detail"]
        assert "mansio.hold.bytes.max" in found["detail"]
        numbers = _http(process.http_port, "/metrics")
        assert 'mansio_released_holds_total{reason="bytes"} 1.0' in numbers
        assert "mansio_retention_holds 1.0" in numbers
        assert "mansio_holds_behind_log_start 1.0" in numbers
        consumer.commit(offsets=[TopicPartition("t", 0, 8, encode_hold_metadata("q"))], asynchronous=False)
        assert wait_until(lambda: warning() is None)
        consumer.close()
    assert process.output.read_text().count("ERROR hold_released pipeline=slow topic=t partition=0") == 1


def _http(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=scaled(10)) as answer:
        return str(answer.read().decode())
