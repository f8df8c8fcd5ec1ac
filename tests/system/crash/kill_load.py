"""Clients that work on while a broker dies and comes back, and write down what they received.

Owns: one thread per client. Always true: a client stops only when told to, and what it does not know (a send
without an answer) it does not write into the history as known. What goes wrong for good ends up in
`failures`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import mansio
from mansio import blocking
from support.machine import scaled
from support.present import present
from support.waiting import wait_until
from system.crash.checker import Acknowledged, History, Seen, sender_of, value_of

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

    from mansio.blocking import Delivery

PARTITIONS = 4
SENT_AT_ONCE = 16
IN_FLIGHT_MAX = 2_000
READ_DEADLINE_S = 30.0
CONNECT_MS = 60_000
"""Our own client gives up connecting after ten seconds, and the first kill may come before it is connected."""

QUIET: dict[str, Any] = {"log_level": 0, "error_cb": lambda error: None}
IMPATIENT = {**QUIET, "reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 100, "retry.backoff.ms": 20}


class Load:
    """Producers, a reader and a committer on one topic of a broker that may die at any moment."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.topic = topic
        self.history = History()
        self.failures: list[str] = []
        self.progress: dict[str, int] = {}
        """Acknowledged records by producer."""
        self._producing = threading.Event()
        self._reading = threading.Event()
        self._producers: list[threading.Thread] = []
        self._others: list[threading.Thread] = []

    def create_topic(self, **config: str) -> None:
        settings = {name.replace("_", "."): value for name, value in config.items()}
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, **QUIET})
        admin.create_topics([NewTopic(self.topic, PARTITIONS, 1, config=settings)])[self.topic].result(
            scaled(15)
        )

    def start(self, *, idempotent: int, plain: int) -> None:
        self._producing.set()
        self._reading.set()
        confluent = [f"idempotent-{number}" for number in range(idempotent)]
        self.idempotent = [*confluent, "mansio"]
        self.progress = dict.fromkeys([*self.idempotent, *(f"plain-{number}" for number in range(plain))], 0)
        for name in confluent:
            self._spawn(self._producers, self._produce, name, {"enable.idempotence": True})
        self._spawn(self._producers, self._produce_with_mansio, "mansio")
        for number in range(plain):
            retries = {"acks": "all", "max.in.flight": 1}
            self._spawn(self._producers, self._produce, f"plain-{number}", retries)
        self._spawn(self._others, self._read, "reader")
        self._spawn(self._others, self._read_with_mansio, "mansio-reader")
        self._spawn(self._others, self._commit, "committer")

    def stop_producing(self, deadline_s: float = 40.0) -> None:
        """No new records; return when every one sent has been answered."""
        self._producing.clear()
        self._join(self._producers, deadline_s)

    def wait_for_readers(self, deadline_s: float = 60.0) -> None:
        """Return when each reader has had more than half of what was acknowledged; they may be behind."""
        enough = len(self.history.acknowledged) / 2
        reads = self.history.reads

        def took_part() -> bool:
            return bool(reads) and min(map(len, list(reads.values()))) > enough

        wait_until(lambda: self.failures or took_part(), deadline_s, "the readers take part")

    def stop(self) -> None:
        self._producing.clear()
        self._reading.clear()
        self._join([*self._producers, *self._others], 40.0)

    def _acknowledge(self, name: str, partition: int, offset: int, value: bytes) -> None:
        self.history.acknowledged.append(Acknowledged(partition, offset, value))
        self.progress[name] += 1

    def _spawn(self, into: list[threading.Thread], work: Any, name: str, *more: Any) -> None:
        thread = threading.Thread(target=self._guarded, args=(work, name, *more), name=name, daemon=True)
        into.append(thread)
        thread.start()

    def _guarded(self, work: Any, name: str, *more: Any) -> None:
        try:
            work(name, *more)
        except Exception as error:  # noqa: BLE001  # reported: a thread that dies in silence would weaken the test
            self.failures.append(f"{name}: {error!r}")

    def _join(self, threads: list[threading.Thread], deadline_s: float) -> None:
        for thread in threads:
            thread.join(deadline_s)
            if thread.is_alive():
                self.failures.append(f"{thread.name} has not ended within {deadline_s:g} s")

    # The clients

    def _produce(self, name: str, how: dict[str, Any]) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "linger.ms": 1,
                "message.timeout.ms": 120_000,
                **IMPATIENT,
                **how,
            }
        )

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self.failures.append(f"{name}: a record was given up: {error}")
                return
            if (offset := message.offset()) is None:
                # librdkafka concludes from the acknowledgement of a later batch that this one, whose answer was an
                # error or was lost, was appended; it does not know where.
                return
            self._acknowledge(name, present(message.partition()), offset, present(message.value()))

        next_number = 0
        while self._producing.is_set():
            if len(producer) < IN_FLIGHT_MAX:
                next_number += SENT_AT_ONCE
                self.history.sent[name] = next_number
                for number in range(next_number - SENT_AT_ONCE, next_number):
                    partition = number % PARTITIONS
                    producer.produce(
                        self.topic, value_of(name, number), partition=partition, on_delivery=delivered
                    )
            producer.poll(0.005)
        left = producer.flush(scaled(READ_DEADLINE_S))
        if left:
            self.failures.append(
                f"{name}: {left} records without an answer {READ_DEADLINE_S:g} s after the last"
            )

    def _client(self) -> blocking.Client:
        return blocking.connect(self.bootstrap_servers, connect_timeout_ms=CONNECT_MS)

    def _produce_with_mansio(self, name: str) -> None:
        """Our own client, idempotent as it is by default."""
        with self._client() as client, client.producer() as producer:
            waiting: deque[tuple[bytes, Delivery]] = deque()
            number = 0
            while self._producing.is_set() or waiting:
                if self._producing.is_set() and len(waiting) < IN_FLIGHT_MAX:
                    for _ in range(SENT_AT_ONCE):
                        value = value_of(name, number)
                        self.history.sent[name] = number + 1
                        waiting.append(
                            (value, producer.send(self.topic, value, partition=number % PARTITIONS))
                        )
                        number += 1
                while waiting and waiting[0][1].done():
                    value, delivery = waiting.popleft()
                    stored = delivery.result()
                    self._acknowledge(name, stored.partition, stored.offset, value)
                time.sleep(0.005)  # the pace of this client, as `poll` is of the others

    def _read_with_mansio(self, name: str) -> None:
        seen = self.history.reads[name]
        places = [mansio.TopicPartition(self.topic, partition) for partition in range(PARTITIONS)]
        with (
            self._client() as client,
            client.consume(places, on_out_of_range="error", fetch_wait_ms_max=20) as consumer,
        ):
            while self._reading.is_set():
                for one in consumer.poll(50):
                    seen.append(Seen(one.partition, one.offset, one.value or b""))

    def _read(self, name: str) -> None:
        seen = self.history.reads[name]
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": "reader",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 20,
                "fetch.error.backoff.ms": 10,
                **IMPATIENT,
            }
        )
        consumer.assign([TopicPartition(self.topic, partition, 0) for partition in range(PARTITIONS)])
        while self._reading.is_set():
            for message in consumer.consume(500, 0.05):
                if message.error() is None:
                    seen.append(seen_in(message))
                elif not present(message.error()).retriable():
                    self.failures.append(f"{name}: {message.error()}")
        consumer.close()

    def _commit(self, name: str) -> None:
        """Commit growing offsets, one partition after the other, and remember which were acknowledged."""
        committer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": name,
                "enable.auto.commit": False,
                **IMPATIENT,
            }
        )
        offset = 0
        while self._reading.is_set():
            offset += 1
            partition = offset % PARTITIONS
            acknowledged, _ = self.history.commits.get(partition, (-1, -1))
            self.history.commits[partition] = (acknowledged, offset)
            try:
                committer.commit(offsets=[TopicPartition(self.topic, partition, offset)], asynchronous=False)
            except KafkaException:
                continue
            self.history.commits[partition] = (offset, offset)
        committer.close()


def read_log(bootstrap_servers: str, topic: str) -> list[Seen]:
    """Everything in the topic, per partition in order, with a fresh consumer."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "final",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            **QUIET,
        }
    )
    partitions = [TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)]
    ends = {one.partition: consumer.get_watermark_offsets(one, timeout=scaled(10))[1] for one in partitions}
    consumer.assign(partitions)
    seen: list[Seen] = []
    unfinished = {partition for partition, end in ends.items() if end}
    end = time.monotonic() + scaled(READ_DEADLINE_S)
    while unfinished:
        messages = consumer.consume(2000, 0.2)
        assert time.monotonic() < end, f"partitions {unfinished} were not read to their ends"
        for message in messages:
            if message.error() is None:
                seen.append(seen_in(message))
                last = seen[-1]
                if last.offset + 1 >= ends[last.partition]:
                    unfinished.discard(last.partition)
    consumer.close()
    return seen


def committed_offsets(bootstrap_servers: str, topic: str, group: str) -> dict[int, int]:
    """Partition -> the group's committed offset."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group, **QUIET})
    wanted = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    found = {one.partition: one.offset for one in consumer.committed(wanted, timeout=scaled(15))}
    consumer.close()
    return found


def senders(seen: list[Seen]) -> set[str]:
    """Which producers have records there."""
    return {sender[0] for one in seen if (sender := sender_of(one.value))}


def seen_in(message: Message) -> Seen:
    return Seen(present(message.partition()), present(message.offset()), present(message.value()))
