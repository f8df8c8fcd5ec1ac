"""Restart of a broker on the same port: clients of other projects that stayed connected continue."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from kafka import KafkaProducer

from support.machine import scaled
from support.process import served
from system.interop.clients import QUIET, READERS, Item, as_sent, confluent_write
from system.interop.conftest import ARGUMENTS, create_topic
from system.interop.members import MEMBERS, wait_for_shares, wait_for_values
from system.interop.test_groups import committed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNT = 60
PARTITIONS = 2


@pytest.fixture
def _quiet_clients() -> Iterator[None]:
    """kafka-python leaves sockets unclosed that were refused a connection, and its log records hold on to
    them: write none, and collect the sockets while that is no error."""
    loggers = [logging.getLogger(name) for name in ("kafka", "aiokafka")]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    yield
    gc.collect()
    for logger in loggers:
        logger.setLevel(logging.NOTSET)


@pytest.mark.row("L5", "G4", "P3", "A1")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.usefixtures("_quiet_clients")
@pytest.mark.parametrize("way", [pytest.param("stop", marks=pytest.mark.full), "kill"])
def test_members_and_producers_of_all_clients_go_on_after_a_restart(tmp_path: Path, way: str) -> None:
    with served(tmp_path / "data", arguments=ARGUMENTS, http=False) as broker:
        topic = create_topic(broker.bootstrap_servers, "restarted", PARTITIONS)
        first = Producer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "enable.idempotence": True,
                "reconnect.backoff.max.ms": 200,
                **QUIET,
            }
        )
        second = KafkaProducer(
            bootstrap_servers=broker.bootstrap_servers, acks="all", retries=100, reconnect_backoff_max_ms=200
        )

        def publish(round_: str) -> set[bytes]:
            values = [f"{round_} {n}".encode() for n in range(COUNT)]
            for n, value in enumerate(values):
                if n % 2:
                    first.produce(topic, value, partition=n // 2 % PARTITIONS)
                else:
                    second.send(topic, value, partition=n // 2 % PARTITIONS)
            assert first.flush(scaled(20)) == 0
            second.flush(scaled(20))
            return set(values)

        members = {name: make(broker.bootstrap_servers, name, topic) for name, make in MEMBERS.items()}
        try:
            for member in members.values():
                member.join()
            expected = publish("before")
            for member in members.values():
                wait_for_shares([member], PARTITIONS)
                wait_for_values([member], expected)

            if way == "stop":
                assert broker.stop() == 0
            else:
                broker.kill()
            broker.start()

            expected |= publish("after")
            for name, member in members.items():
                wait_for_values([member], expected)
                assert set(member.values) == expected, name
                member.leave()
        finally:
            for member in members.values():
                member.stopping.set()
            second.close(5)
        read = READERS["confluent-kafka"](broker.bootstrap_servers, topic, 2 * COUNT, partitions=PARTITIONS)
        assert {one.item.value for one in read} == expected
        for name in members:
            assert committed(broker.bootstrap_servers, name, topic, PARTITIONS) == [COUNT] * PARTITIONS, name
            newcomer = MEMBERS[name](broker.bootstrap_servers, name, topic).join()
            wait_for_shares([newcomer], PARTITIONS)
            newcomer.leave()
            assert newcomer.received == [], "everything was committed: nothing comes twice"
        assert "Traceback" not in broker.text()


@pytest.mark.full
@pytest.mark.row("L2", "L3", "L5")
def test_everything_is_read_after_a_restart_as_it_was_before(tmp_path: Path) -> None:
    with served(tmp_path / "data", arguments=ARGUMENTS, http=False) as broker:
        topic = create_topic(broker.bootstrap_servers, "kept", segment_bytes="20000")
        items = [Item(b"%d" % n, b"value %d " % n * 20, (("n", b"%d" % n),)) for n in range(400)]
        for begin in range(0, 400, 40):
            confluent_write(broker.bootstrap_servers, topic, items[begin : begin + 40], codec="none")
        before = READERS["confluent-kafka"](broker.bootstrap_servers, topic, 400)
        assert as_sent(before) == items
        assert broker.stop() == 0
        broker.start()
        for name, read in READERS.items():
            assert read(broker.bootstrap_servers, topic, 400) == before, name
        offsets = confluent_write(broker.bootstrap_servers, topic, items[:1])
        assert offsets == [400], "offsets go on where they were"
