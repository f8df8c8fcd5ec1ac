"""confluent-kafka (librdkafka), the client of both Mansio and Apache Kafka: acks=all, one partition.

A batch is produced and flushed, so that the client sends it in as few requests as it can; a single message does not
linger. A consumer acknowledges by committing the group's offset.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from bench.peers.peer import TAKE_WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

import confluent_kafka
from confluent_kafka import admin

CONFIRMATION = (
    "the answer to ShareAcknowledge (commit_sync), a round trip of its own before the next ShareFetch"
)
JOIN_DEADLINE_S = 20.0
COMMIT_DEADLINE_S = 5.0
BATCH_LINGER_MS = 100
"""Longer than it takes to enqueue a batch; `flush` ends it."""


class Driver:
    """`config`: settings of the created topics."""

    def __init__(self, port: int, config: Mapping[str, str] | None = None) -> None:
        self.address: dict[str, Any] = {"bootstrap.servers": f"127.0.0.1:{port}"}
        self.config = dict(config or {})

    async def version(self) -> str:
        return f"confluent-kafka {confluent_kafka.__version__}"

    async def create(self, queue: str) -> None:
        topic = admin.NewTopic(queue, 1, 1, config=self.config)
        client = admin.AdminClient(self.address)
        for made in client.create_topics([topic], operation_timeout=10).values():
            made.result(30)

    async def delete(self, queue: str) -> None:
        client = admin.AdminClient(self.address)
        for gone in client.delete_topics([queue], operation_timeout=10).values():
            gone.result(30)

    async def producer(self, queue: str) -> Producer:
        return Producer(self.address, queue)

    async def consumer(self, queue: str, *, confirmed: bool) -> Consumer:
        return Consumer(self.address, queue, confirmed=confirmed)

    async def deliverer(self, queue: str, count: int) -> Deliverer:
        group = f"share-{queue}"
        change = admin.AlterConfigOpType.SET
        first = admin.ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=change)
        resource = admin.ConfigResource(admin.ResourceType.GROUP, group, incremental_configs=[first])
        client = admin.AdminClient({**self.address, "log_level": 4})  # its end is told otherwise
        for altered in client.incremental_alter_configs([resource]).values():
            altered.result(30)
        return Deliverer(self.address, queue, group, count)


class Producer:
    def __init__(self, address: Mapping[str, str], queue: str) -> None:
        self.queue = queue
        self.unacknowledged = 0
        shared = {**address, "acks": "all", "queue.buffering.max.messages": 100_000}
        self.single = confluent_kafka.Producer({**shared, "linger.ms": 0})
        self.batching = confluent_kafka.Producer({**shared, "linger.ms": BATCH_LINGER_MS})

    def acknowledged(self, error: Any, _: object) -> None:
        if error is not None:
            raise confluent_kafka.KafkaException(error)
        self.unacknowledged -= 1

    async def publish(self, values: Sequence[bytes]) -> None:
        producer = self.single if len(values) == 1 else self.batching
        produce, queue, acknowledged = producer.produce, self.queue, self.acknowledged
        self.unacknowledged += len(values)
        for value in values:
            produce(queue, value, on_delivery=acknowledged)
        if len(values) > 1:
            producer.flush()
        while self.unacknowledged:
            producer.poll(1)

    async def close(self) -> None:
        self.single.flush()


class Consumer:
    """The only member of a group; constructed when it has its partition."""

    def __init__(self, address: Mapping[str, str], queue: str, *, confirmed: bool) -> None:
        self.confirmed = confirmed
        own = {"group.id": f"group-{queue}", "auto.offset.reset": "earliest", "enable.auto.commit": False}
        self.consumer = confluent_kafka.Consumer({**address, **own})
        self.consumer.subscribe([queue])
        end = time.monotonic() + JOIN_DEADLINE_S
        self.ahead: list[Any] = []
        while not self.consumer.assignment() and not self.ahead:
            if time.monotonic() > end:
                raise TimeoutError("the consumer was given no partition")
            self.ahead = self._polled(0.02)

    def _polled(self, seconds: float) -> list[Any]:
        message = self.consumer.poll(seconds)
        return [] if message is None or message.error() else [message]

    async def take(self, count: int) -> list[bytes]:
        messages, self.ahead = self.ahead, []
        messages = messages or self._polled(TAKE_WAIT_S)
        if messages:
            if count > 1:
                messages += [one for one in self.consumer.consume(count - 1, 0) if not one.error()]
            commit: Callable[..., Any] = self.consumer.commit  # its overloads have no variable `asynchronous`
            commit(message=messages[-1], asynchronous=not self.confirmed)
        return [message.value() or b"" for message in messages]

    async def close(self) -> None:
        self.consumer.close()


class Deliverer:
    """A member of a share group (KIP-932). What a poll gave is acknowledged when the next one asks for more, which is
    the client's own way; one record at a time waits for the answer to its acknowledgement first. The client tells the
    offsets that the broker has confirmed: they must be all that were returned."""

    def __init__(self, address: Mapping[str, str], queue: str, group: str, count: int) -> None:
        self.count = count
        own = {
            "group.id": group,
            "share.acknowledgement.mode": "implicit",
            "max.poll.records": count,
            "log_level": 0,
        }
        self.returned = self.confirmed = 0
        self.consumer = confluent_kafka.ShareConsumer({**address, **own})
        self.consumer.set_acknowledgement_commit_callback(self._on_confirmed)
        self.consumer.subscribe([queue])
        end = time.monotonic() + JOIN_DEADLINE_S
        self.ahead: list[bytes] = []
        while not self.ahead:
            if time.monotonic() > end:
                raise TimeoutError("the member was given no record")
            self.ahead = self._polled()

    def _on_confirmed(self, offsets: Mapping[Any, Collection[int]], error: Any) -> None:
        if error is not None:
            raise confluent_kafka.KafkaException(error)
        self.confirmed += sum(map(len, offsets.values()))

    def _polled(self) -> list[bytes]:
        messages = self.consumer.poll(TAKE_WAIT_S)
        self.returned += len(messages)
        for message in messages:
            if message.error() is not None:
                raise confluent_kafka.KafkaException(message.error())
        return [message.value() or b"" for message in messages]

    async def next(self) -> list[bytes]:
        if self.ahead:
            values, self.ahead = self.ahead, []
            return values
        if self.count == 1:
            await self.acknowledge()
        return self._polled()

    async def acknowledge(self) -> None:
        for error in (self.consumer.commit_sync(COMMIT_DEADLINE_S) or {}).values():
            if error is not None:
                raise confluent_kafka.KafkaException(error)
        if self.confirmed != self.returned:
            raise RuntimeError(f"{self.confirmed} of {self.returned} acknowledgements were confirmed")

    async def close(self) -> None:
        self.consumer.close()
