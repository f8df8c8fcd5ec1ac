"""Transactions (KIP-98) as librdkafka uses them, on a broker and on a cluster."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from mansio import blocking
from support.cluster import cluster
from support.machine import scaled
from support.present import present
from support.process import served
from support.transactional_writer import (
    CALL_S,
    PARTITIONS,
    Writer,
    create,
    kill_repeatedly,
    producer,
    publish,
    read,
)
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.process import ServedBroker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    data = tmp_path_factory.mktemp("transactions") / "data"
    with served(data, http=False) as one:
        yield one


@pytest.mark.row("P4")
def test_records_are_visible_after_the_commit_and_never_after_an_abort(broker: ServedBroker) -> None:
    servers = broker.bootstrap_servers
    create(servers, "visible")
    one = producer(servers, "visible")
    one.begin_transaction()
    publish(one, "visible", "a", "b", "c")
    assert read(servers, "visible", "read_committed") == []
    assert read(servers, "visible", "read_uncommitted") == ["a", "b", "c"]
    one.commit_transaction(scaled(CALL_S))
    assert read(servers, "visible", "read_committed") == ["a", "b", "c"]
    one.begin_transaction()
    publish(one, "visible", "x", "y", "z")
    one.abort_transaction(scaled(CALL_S))
    one.begin_transaction()
    publish(one, "visible", "d")
    one.commit_transaction(scaled(CALL_S))
    assert read(servers, "visible", "read_committed") == ["a", "b", "c", "d"]
    with blocking.connect(servers) as client:  # its consumers read what is committed
        assert sorted(present(each.value).decode() for each in client.consume("visible", to_end=True)) == [
            *"abcd"
        ]


@pytest.mark.row("P4")
def test_offsets_are_committed_with_the_records_and_dropped_with_an_abort(broker: ServedBroker) -> None:
    servers = broker.bootstrap_servers
    create(servers, "input", "output")
    plain = Producer({"bootstrap.servers": servers, "log_level": 0})
    publish(plain, "input", *map(str, range(9)))
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "mover",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    one = producer(servers, "mover")
    with contextlib.closing(consumer):
        consumer.subscribe(["input"])
        values: list[str] = []
        end = time.monotonic() + scaled(CALL_S)
        while len(values) < 9:
            assert time.monotonic() < end
            message = consumer.poll(0.5)
            if message is not None and message.error() is None:
                values.append((message.value() or b"").decode())
        assignment = consumer.assignment()

        def move(ending: str) -> list[int]:
            one.begin_transaction()
            publish(one, "output", *values)
            one.send_offsets_to_transaction(
                consumer.position(assignment), consumer.consumer_group_metadata(), scaled(CALL_S)
            )
            getattr(one, ending)(scaled(CALL_S))
            return [each.offset for each in consumer.committed(assignment, scaled(CALL_S))]

        assert max(move("abort_transaction")) < 0
        assert read(servers, "output", "read_committed") == []
        assert move("commit_transaction") == [3] * PARTITIONS
        assert read(servers, "output", "read_committed") == sorted(values)


@pytest.mark.row("P4")
def test_second_producer_with_a_transactional_id_fences_the_first_one_and_aborts_its_transaction(
    broker: ServedBroker,
) -> None:
    servers = broker.bootstrap_servers
    create(servers, "fenced")
    zombie = producer(servers, "fenced")
    zombie.begin_transaction()
    publish(zombie, "fenced", "of the zombie")
    successor = producer(servers, "fenced")
    with pytest.raises(KafkaException) as raised:
        zombie.commit_transaction(scaled(CALL_S))
    assert raised.value.args[0].fatal()
    successor.begin_transaction()
    publish(successor, "fenced", "of the successor")
    successor.commit_transaction(scaled(CALL_S))
    assert read(servers, "fenced", "read_committed") == ["of the successor"]


@pytest.mark.row("P4")
def test_transaction_that_exceeds_its_timeout_is_aborted(broker: ServedBroker) -> None:
    servers = broker.bootstrap_servers
    create(servers, "late")
    one = producer(servers, "late", **{"transaction.timeout.ms": 1_000})
    one.begin_transaction()
    publish(one, "late", "never seen")
    plain = Producer({"bootstrap.servers": servers, "log_level": 0})
    publish(plain, "late", "behind it")
    wait_until(lambda: read(servers, "late", "read_committed") == ["behind it"], 30)


@pytest.mark.full
@pytest.mark.row("P4", "L5")
def test_offsets_of_a_transaction_outlive_a_kill_with_those_committed_behind_them(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        servers = broker.bootstrap_servers
        create(servers, "input")
        publish(Producer({"bootstrap.servers": servers, "log_level": 0}), "input", *map(str, range(9)))
        consumer = Consumer({"bootstrap.servers": servers, "group.id": "mover", "log_level": 0})
        with contextlib.closing(consumer):
            partitions = [TopicPartition("input", index, 2) for index in range(PARTITIONS)]
            consumer.assign(partitions)
            one = producer(servers, "mover")
            one.begin_transaction()
            one.send_offsets_to_transaction(
                partitions[:2], consumer.consumer_group_metadata(), scaled(CALL_S)
            )
            one.commit_transaction(scaled(CALL_S))
            consumer.commit(offsets=partitions[2:], asynchronous=False)
            broker.kill()
            broker.start()
            offsets = [each.offset for each in consumer.committed(partitions, scaled(CALL_S))]
        assert offsets == [2] * PARTITIONS
        assert "log_truncated" not in broker.text()


@pytest.mark.full
@pytest.mark.row("P4", "L5")
@pytest.mark.timeout(300)
def test_kills_leave_no_transaction_in_part_or_twice(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, 10)


@pytest.mark.full
@pytest.mark.row("P4", "C5")
@pytest.mark.timeout(300)
def test_brokers_of_a_cluster_that_die_leave_no_transaction_in_part_or_twice(tmp_path: Path) -> None:
    with cluster(tmp_path, broker_session_timeout_ms=3000) as one:
        create(one.bootstrap_servers, "killed")
        writer = Writer(one.bootstrap_servers, "killed")
        for node_id in (1, 2, 3):
            begin = len(writer.committed)
            wait_until(lambda begin=begin: writer.errors or len(writer.committed) >= begin + 7, 90)
            one.kill(node_id)
            begin = len(writer.committed)
            wait_until(lambda begin=begin: writer.errors or len(writer.committed) >= begin + 3, 90)
            one.start(node_id)
        writer.stop()
        wait_until(lambda: all(one.leader("killed", index) > 0 for index in range(PARTITIONS)), 60)
        writer.check()
