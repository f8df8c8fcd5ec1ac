"""kill -9 while delayed records are accepted and delivered: each acknowledged one is delivered once, never early."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from mansio.wire.batch.delay_headers import DELAY_HEADER, DUE_AT_HEADER
from support.machine import scaled
from support.present import present
from support.process import served
from support.waiting import wait_until
from system.crash.kill_load import QUIET

if TYPE_CHECKING:
    from pathlib import Path

    from confluent_kafka import KafkaError, Message

TOPIC = "reminders"
PARTITIONS = 2
DELAY_MS_MAX = 2_500


class DelayedLoad:
    """A producer of delayed and other records that goes on while the broker dies, and the answers it received."""

    def __init__(self, bootstrap_servers: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._producing = threading.Event()
        self._producing.set()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "linger.ms": 5,
                "message.timeout.ms": 120_000,
                "reconnect.backoff.max.ms": 200,
                **QUIET,
            }
        )
        self.acknowledged: dict[bytes, int] = {}
        """Value -> wall clock in ms before which the record is not due."""
        self.unknown: set[bytes] = set()
        self._thread = threading.Thread(target=self._produce)
        self._thread.start()

    def _produce(self) -> None:
        number = 0
        while self._producing.is_set():
            value = b"%d" % number
            number += 1
            delay_ms = self._random.randrange(DELAY_MS_MAX) if number % 4 else 0
            headers: Any = {DELAY_HEADER: b"%d" % delay_ms} if delay_ms else None
            earliest_ms = int(time.time() * 1000) + delay_ms if delay_ms else 0
            self._producer.produce(
                TOPIC,
                value,
                partition=number % PARTITIONS,
                headers=headers,
                on_delivery=partial(self._note, value=value, earliest_ms=earliest_ms),
            )
            self._producer.poll(0.002)

    def _note(self, error: KafkaError | None, _: Message, *, value: bytes, earliest_ms: int) -> None:
        if error is None:
            self.acknowledged[value] = earliest_ms
        else:
            self.unknown.add(value)

    def wait_acknowledged(self, count: int) -> None:
        """Wait until so many more records are acknowledged."""
        wanted = len(self.acknowledged) + count
        wait_until(lambda: len(self.acknowledged) >= wanted, 60, f"{count} acknowledgements")

    def stop(self) -> None:
        self._producing.clear()
        self._thread.join()
        assert self._producer.flush(scaled(120)) == 0


def read_all(bootstrap_servers: str, expected: set[bytes], deadline_s: float) -> list[Message]:
    """Every record of the topic, until all expected values were read."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "reader", **QUIET})
    consumer.assign([TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)])
    found: list[Message] = []
    missing = {*expected}
    deadline = time.monotonic() + deadline_s
    while missing and time.monotonic() < deadline:
        for message in consumer.consume(500, 0.5):
            if message.error() is None:
                found.append(message)
                missing.discard(message.value())
    ends = [consumer.get_watermark_offsets(TopicPartition(TOPIC, n), 10)[1] for n in range(PARTITIONS)]
    while [
        one.offset for one in consumer.position([TopicPartition(TOPIC, n) for n in range(PARTITIONS)])
    ] != ends:
        assert time.monotonic() < deadline + scaled(30), "the consumer does not reach the end"
        found += [one for one in consumer.consume(500, 0.2) if one.error() is None]
    consumer.close()
    return found


def check_delivered_once(load: DelayedLoad, found: list[Message], what: str) -> None:
    """Each acknowledged record was delivered once, and none before it was due."""
    values = Counter(message.value() for message in found)
    lost = {*load.acknowledged} - {*values}
    assert not lost, f"{what}: {len(lost)} of {len(load.acknowledged)} acknowledged records are lost"
    doubled = sum(count > 1 for count in values.values())
    assert not doubled, f"{what}: {doubled} records were delivered twice"
    for message in found:
        due = dict(message.headers() or []).get(DUE_AT_HEADER)
        if due is not None:
            assert message.timestamp()[1] >= int(due), "a record was delivered before it was due"
            earliest_ms = load.acknowledged.get(present(message.value()), 0)
            assert int(due) >= earliest_ms, "a record was due earlier than its producer asked for"
    print(f"{what}: {len(load.acknowledged)} acknowledged, 0 lost, 0 doubled, {len(load.unknown)} unknown")


def kill_repeatedly(tmp_path: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    with served(tmp_path / "data", http=False) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        topic = NewTopic(TOPIC, PARTITIONS, 1, config={"mansio.delay.enable": "true"})
        admin.create_topics([topic])[TOPIC].result(scaled(15))
        load = DelayedLoad(broker.bootstrap_servers, seed)
        try:
            for _ in range(kills):
                load.wait_acknowledged(chance.randrange(20, 400))
                broker.kill()
                broker.start()
        finally:
            load.stop()
        found = read_all(broker.bootstrap_servers, {*load.acknowledged}, scaled(60))
    check_delivered_once(load, found, f"{kills} kills, seed {seed}")


@pytest.mark.row("D6")
def test_delayed_records_are_delivered_once_when_the_broker_is_killed(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, 2, seed=4)


@pytest.mark.full
@pytest.mark.row("D6")
def test_delayed_records_are_delivered_once_when_the_broker_is_killed_ten_times(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, 10, seed=5)
