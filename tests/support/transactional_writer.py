"""Transactions of librdkafka, and a writer of them that goes on while brokers die."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from mansio import blocking
from support.machine import scaled
from support.markers import wait_for_markers
from support.process import served
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

PARTITIONS = 3
CALL_S = 30
COMMITS_MAX = 7
"""A broker is killed after so many commits at most since its start."""


def create(servers: str, *topics: str, partitions: int = PARTITIONS) -> None:
    with blocking.connect(servers) as client:
        for topic in topics:
            client.admin.create_topic(topic, partitions=partitions)


def producer(servers: str, transactional_id: str, **more: Any) -> Producer:
    config = {"bootstrap.servers": servers, "transactional.id": transactional_id, "log_level": 0}
    one = Producer({**config, "reconnect.backoff.max.ms": 500, **more})
    one.init_transactions(scaled(CALL_S))
    return one


def read(servers: str, topic: str, isolation: str) -> list[str]:
    """All values of a topic up to where a consumer of this isolation level reads, once decided transactions have their
    markers."""
    wait_for_markers(servers)
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "reader",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    with contextlib.closing(consumer):
        consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
        found: list[str] = []
        ended: set[int | None] = set()
        end = time.monotonic() + scaled(CALL_S)
        while len(ended) < PARTITIONS:
            assert time.monotonic() < end, "no end of the partitions"
            message = consumer.poll(0.5)
            if message is None:
                continue
            if message.error() is not None:
                ended.add(message.partition())
            else:
                found.append((message.value() or b"").decode())
        return sorted(found)


def publish(one: Producer, topic: str, *values: str) -> None:
    """Publish each value to the partition of its position."""
    for position, value in enumerate(values):
        one.produce(topic, value, partition=position % PARTITIONS)
    assert one.flush(scaled(CALL_S)) == 0


class Writer:
    """A producer that writes transactions of one record to each partition, until it is stopped."""

    def __init__(self, servers: str, topic: str) -> None:
        self._servers = servers
        self._topic = topic
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.committed: set[int] = set()
        self.aborted: set[int] = set()
        self.unknown: set[int] = set()
        self.errors: list[str] = []
        self._thread.start()

    def _run(self) -> None:
        number = 0
        one: Producer | None = None
        while not self._is_over.is_set():
            number += 1
            try:
                if one is None:
                    one = producer(self._servers, self._topic)
                one.begin_transaction()
                for index in range(PARTITIONS):
                    one.produce(self._topic, f"{number}", partition=index)
                if number % 4 == 0:
                    one.flush(scaled(CALL_S))  # the abort would drop what is not sent
                    one.abort_transaction(scaled(CALL_S))
                    self.aborted.add(number)
                else:
                    one.commit_transaction(scaled(CALL_S))
                    self.committed.add(number)
            except KafkaException as error:
                self.unknown.add(number)
                with contextlib.suppress(KafkaException):
                    if one is not None and error.args[0].txn_requires_abort():
                        one.abort_transaction(scaled(CALL_S))
                        continue
                one = None  # a new instance fences this one
            except BaseException as error:  # noqa: BLE001 - it fails the test
                self.errors.append(repr(error))
                return

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(scaled(4 * CALL_S))
        assert not self._thread.is_alive()

    def check(self) -> None:
        """Raise `AssertionError` unless readers see each committed transaction whole, once, and no aborted one, of
        which the log has records."""
        assert self.errors == []
        stored = set(map(int, read(self._servers, self._topic, "read_uncommitted")))
        assert not self.aborted or self.aborted & stored, "no aborted record is in the log"
        counts = Counter(map(int, read(self._servers, self._topic, "read_committed")))
        assert set(counts.values()) <= {PARTITIONS}, {k: n for k, n in counts.items() if n != PARTITIONS}
        assert self.committed <= set(counts), sorted(self.committed - set(counts))
        assert not self.aborted & set(counts), sorted(self.aborted & set(counts))
        assert set(counts) <= self.committed | self.unknown


def kill_repeatedly(directory: Path, kills: int, *, seed: int = 0) -> Writer:
    """Kill a broker again and again while transactions are written, then check what readers see. Returns the writer."""
    choose = random.Random(seed)
    topic = "killed"
    with served(directory / "data", http=False) as broker:
        create(broker.bootstrap_servers, topic)
        writer = Writer(broker.bootstrap_servers, topic)

        def wait_for_commits(count: int) -> None:
            begin = len(writer.committed)
            wait_until(lambda: writer.errors or len(writer.committed) >= begin + count, 60)

        for _ in range(kills):
            wait_for_commits(choose.randint(1, COMMITS_MAX))
            broker.kill()
            broker.start()
        wait_for_commits(COMMITS_MAX)
        writer.stop()
        writer.check()
        assert "Traceback" not in broker.text(), broker.text()
    return writer
