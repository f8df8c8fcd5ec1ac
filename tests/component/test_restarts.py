"""Restart of a broker with torn tails, missing directories and deleted topics."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.wire.batch.record_batch import iterate_batches
from support.present import present

if TYPE_CHECKING:
    from pathlib import Path

TOPIC = "restarts"


def publish(broker: mansio.Broker, *values: bytes, partition: int = 0) -> list[int]:
    with mansio.blocking.connect(broker.address) as client:
        return [client.publish(TOPIC, value, partition=partition).offset for value in values]


def read(broker: mansio.Broker, partition: int, count: int) -> list[bytes | None]:
    with mansio.blocking.connect(broker.address) as client:
        where = mansio.TopicPartition(TOPIC, partition)
        return [m.value for m in client.consume([where], from_="earliest", max_records=count)]


def create(broker: mansio.Broker, partitions: int = 1) -> None:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic(TOPIC, partitions=partitions)


def directories(data: Path) -> list[Path]:
    return sorted((data / "topics").glob(f"{TOPIC}.*/*"))


@pytest.mark.row("L5")
def test_a_torn_tail_is_truncated_and_later_records_have_a_new_leader_epoch(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path) as broker:
        create(broker)
        publish(broker, b"kept", b"kept too")
    (segment,) = directories(tmp_path)[0].glob("*.log")
    whole = segment.read_bytes()
    segment.write_bytes(whole + whole[: len(whole) // 3])  # a batch that began to be written
    with mansio.Broker(tmp_path) as broker:
        assert publish(broker, b"after") == [2]
        assert read(broker, 0, 3) == [b"kept", b"kept too", b"after"]
    epochs = [header.leader_epoch for _, header in iterate_batches(segment.read_bytes())]
    assert epochs == [0, 0, 1]


def test_a_partition_whose_directory_is_gone_is_reported_and_the_others_are_served(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path) as broker:
        create(broker, partitions=2)
        publish(broker, b"zero", partition=0)
        publish(broker, b"one", partition=1)
    shutil.rmtree(directories(tmp_path)[1])
    with mansio.Broker(tmp_path) as broker:
        assert read(broker, 0, 1) == [b"zero"]
        service = present(broker._broker).service
        failures = {name: str(error) for name, error in service.partitions.failures().items()}
        assert list(failures) == [f"{TOPIC}-1"]
        assert "missing" in failures[f"{TOPIC}-1"]
        with pytest.raises(mansio.errors.StorageError):
            service.partitions.find(TOPIC, None, 1)
    assert len(directories(tmp_path)) == 1, "no empty log took its place"


@pytest.mark.row("L1")
def test_a_deleted_topic_takes_its_data_and_its_offsets_with_it(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        create(broker)
        publish(broker, b"old")
        with client.consume(TOPIC, group="g", from_="earliest") as consumer:
            next(iter(consumer))
            consumer.commit()
        client.admin.delete_topic(TOPIC)
        assert directories(tmp_path) == []
        create(broker)
        assert read(broker, 0, 0) == []
        assert publish(broker, b"new") == [0]
        with client.consume(TOPIC, group="g", from_="earliest") as consumer:
            assert next(iter(consumer)).value == b"new"


def test_a_data_directory_belongs_to_one_broker_at_a_time(tmp_path: Path) -> None:
    with (
        mansio.Broker(tmp_path),
        pytest.raises(mansio.errors.DataDirectoryLocked),
        mansio.Broker(tmp_path),
    ):
        pytest.fail("two brokers on one directory")
    with mansio.Broker(tmp_path):
        pass


def test_a_damaged_partition_of_group_offsets_keeps_only_its_own_groups_waiting(tmp_path: Path) -> None:
    groups = [f"group-{number}" for number in range(6)]
    with mansio.Broker(tmp_path, offsets_topic_num_partitions=3) as broker:
        create(broker)
        publish(broker, b"one")
        with mansio.blocking.connect(broker.address) as client:
            for group in groups:
                client.admin.reset_offsets(group, [TOPIC], to="latest")
    damaged = next((tmp_path / "topics").glob("__consumer_offsets.*/*/*.log"))
    sizes = {path: path.stat().st_size for path in damaged.parent.parent.glob("*/*.log")}
    damaged = max(sizes, key=lambda path: sizes[path])
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(content)
    for checkpoint in (tmp_path / "views").glob("*"):
        checkpoint.unlink()  # else the view would not need the log
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        coordinator = present(broker._broker).service.group_coordinator
        served = []
        for group in groups:
            try:
                coordinator.runtime.check_loaded(coordinator.store.partition_for(group))
            except mansio.errors.CoordinatorNotAvailable:
                continue
            served.append(group)
        assert 0 < len(served) < len(groups)
        for group in served:
            assert client.admin.group_lag(group)[mansio.TopicPartition(TOPIC, 0)].committed_offset == 1
