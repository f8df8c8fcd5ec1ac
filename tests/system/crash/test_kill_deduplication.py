"""kill -9 while producers repeat ids: each acknowledged id is in the log once, at the offset of each response."""

from __future__ import annotations

import random
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER
from support.machine import scaled
from support.present import present
from support.process import served
from support.waiting import wait_until
from system.crash.kill_load import QUIET

if TYPE_CHECKING:
    from pathlib import Path

    from confluent_kafka import KafkaError, Message

TOPIC = "orders"
PARTITIONS = 2
WINDOW_MS = 3_600_000
REPEATED_IDS = 600
"""Repeats are of one of so many latest ids."""


class RepeatingLoad:
    """A producer that sends most ids several times and goes on while brokers die, and the answers it received.

    `idempotent`: with batches of several records; otherwise each batch has one record, so that the offset in a response
    is exactly that of the record."""

    def __init__(self, bootstrap_servers: str, seed: int, *, idempotent: bool) -> None:
        self._random = random.Random(seed)
        self._idempotent = idempotent
        self._name = b"i" if idempotent else b"s"
        self._producing = threading.Event()
        self._producing.set()
        batching = {"enable.idempotence": True, "linger.ms": 5} if idempotent else {"batch.num.messages": 1}
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "acks": "all",
                "message.timeout.ms": 120_000,
                "reconnect.backoff.max.ms": 200,
                "retry.backoff.max.ms": 200,
                **batching,
                **QUIET,
            }
        )
        self.acknowledged: dict[bytes, set[int]] = {}
        """Id -> offsets in the responses."""
        self.responses = 0
        self.failed: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._produce)
        self._thread.start()

    def _produce(self) -> None:
        latest = number = 0
        while self._producing.is_set():
            if latest and self._random.random() < 0.6:
                number = max(0, latest - self._random.randrange(REPEATED_IDS))
            else:
                latest += 1
                number = latest
            dedup_id = b"%s-%d" % (self._name, number)
            self._producer.produce(
                TOPIC,
                b"content",
                partition=number % PARTITIONS,
                headers={DEDUP_ID_HEADER: dedup_id},
                on_delivery=partial(self._note, dedup_id=dedup_id),
            )
            self._producer.poll(0.001)

    def _note(self, error: KafkaError | None, message: Message, dedup_id: bytes) -> None:
        if error is None:
            self.responses += 1
            self.acknowledged.setdefault(dedup_id, set()).add(message.offset() or 0)
        else:
            self.failed[error.name()] += 1

    def wait_acknowledged(self, count: int) -> None:
        """Wait until so many more records are acknowledged."""
        wanted = self.responses + count
        wait_until(lambda: self.responses >= wanted, 60, f"{count} acknowledgements")

    def stop(self) -> None:
        self._producing.clear()
        self._thread.join()
        assert self._producer.flush(scaled(120)) == 0

    def check(self, found: dict[bytes, list[int]], what: str) -> None:
        """Check the offsets of each id's records in the log."""
        own = {dedup_id: offsets for dedup_id, offsets in found.items() if dedup_id.startswith(self._name)}
        lost = {*self.acknowledged} - {*own}
        assert not lost, f"{what}: {len(lost)} of {len(self.acknowledged)} acknowledged ids are lost"
        doubled = {dedup_id: offsets for dedup_id, offsets in own.items() if len(offsets) > 1}
        assert not doubled, f"{what}: {len(doubled)} ids are stored twice: {[*doubled.items()][:3]}"
        if not self._idempotent:
            for dedup_id, offsets in self.acknowledged.items():
                assert offsets == {*own[dedup_id]}, (
                    f"{what}: {dedup_id!r} is at {own[dedup_id]}, not {offsets}"
                )
        repeats = self.responses - len(self.acknowledged)
        assert repeats > self.responses // 5
        print(
            f"{what}: {len(self.acknowledged)} ids, {repeats} repeats, 0 lost, 0 doubled, failed: {self.failed}"
        )


def read_ids(bootstrap_servers: str) -> dict[bytes, list[int]]:
    """The offsets of the records of each id."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "reader", **QUIET})
    partitions = [TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)]
    consumer.assign(partitions)
    found: dict[bytes, list[int]] = {}
    ends = [consumer.get_watermark_offsets(one, scaled(10))[1] for one in partitions]

    def is_at_end() -> bool:
        for message in consumer.consume(1_000, 0.3):
            if message.error() is None:
                headers: Any = message.headers() or ()
                (dedup_id,) = (value for name, value in headers if name == DEDUP_ID_HEADER)
                found.setdefault(dedup_id, []).append(present(message.offset()))
        return [one.offset for one in consumer.position(partitions)] == ends

    wait_until(is_at_end, 60, "the end of the topic")
    consumer.close()
    return found


def kill_repeatedly(tmp_path: Path, kills: int, seed: int) -> None:
    """Kill a broker; stop it in the ordinary way now and then, so that it starts with snapshots, too."""
    chance = random.Random(seed)
    with served(tmp_path / "data", http=False) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        topic = NewTopic(TOPIC, PARTITIONS, 1, config={"mansio.dedup.ms": str(WINDOW_MS)})
        admin.create_topics([topic])[TOPIC].result(scaled(15))
        loads = [
            RepeatingLoad(broker.bootstrap_servers, seed + number, idempotent=bool(number))
            for number in range(2)
        ]
        try:
            for number in range(kills):
                loads[number % 2].wait_acknowledged(chance.randrange(20, 200))
                if number % 5 == 4:
                    broker.stop()
                    broker.start()
                    loads[0].wait_acknowledged(20)
                broker.kill()
                broker.start()
        finally:
            for load in loads:
                load.stop()
        found = read_ids(broker.bootstrap_servers)
    for load in loads:
        load.check(found, f"{kills} kills, seed {seed}")


@pytest.mark.full
@pytest.mark.row("P3")
def test_no_id_is_stored_twice_when_the_broker_is_killed(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, 2, seed=4)


@pytest.mark.full
@pytest.mark.row("P3")
def test_no_id_is_stored_twice_when_the_broker_is_killed_ten_times(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, 10, seed=5)
