"""Kafka's protocol: confluent-kafka's producer, consumer and share consumer (KIP-932)."""

from __future__ import annotations

import contextlib
import time
from typing import Any, ClassVar, Final

from confluent_kafka import (
    AcknowledgeType,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    ShareConsumer,
    TopicPartition,
)

from component.conformance.protocol import (
    INVALID,
    LEASE_LOST,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    WAIT_S,
    Protocol,
    Received,
    Refused,
)
from support.machine import scaled
from support.present import present

NAMES: Final = {
    KafkaError.UNKNOWN_TOPIC_OR_PART: UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_TOPIC: UNKNOWN_TOPIC,
    KafkaError.MSG_SIZE_TOO_LARGE: TOO_LARGE,
    KafkaError.INVALID_RECORD_STATE: LEASE_LOST,
    KafkaError.INVALID_RECORD: INVALID,
}
HOW: Final = {
    "accept": AcknowledgeType.ACCEPT,
    "release": AcknowledgeType.RELEASE,
    "reject": AcknowledgeType.REJECT,
}
EMPTY_S: Final = 1.0


def check(error: KafkaError | None) -> None:
    """Raise `Refused` for an error."""
    if error is not None:
        raise Refused(NAMES.get(error.code(), str(error)))


class Member:
    """A member of a share group and the messages that it has leased."""

    def __init__(self, bootstrap_servers: str, group: str, topic: str) -> None:
        self.consumer = ShareConsumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": group,
                "share.acknowledgement.mode": "explicit",
                "max.poll.records": 1,
                "log_level": 0,
            }
        )
        self.consumer.subscribe([topic])
        self.leased: Message | None = None

    def poll(self, timeout_s: float) -> Message | None:
        for message in self.consumer.poll(timeout_s):
            check(message.error())
            self.leased = message
        return self.leased

    def acknowledge(self, kind: str) -> None:
        assert self.leased is not None
        self.consumer.acknowledge(self.leased, HOW[kind])
        self.leased = None
        for error in self.consumer.commit_sync(scaled(WAIT_S)).values():
            check(error.args[0] if isinstance(error, KafkaException) else error)


class Kafka(Protocol):
    name = "kafka"
    cannot: ClassVar = {
        "retry_delay": "KIP-932 releases a record by the group's backoff; Mansio's own request has a delay",
        "extend": "renewal (KIP-1222) is not in librdkafka yet; Java's client has it",
        "transactions": "librdkafka does not administer transactions; Java's AdminClient does",
        "redrive": "Kafka's protocol has no redrive; Mansio's own request, HTTP, gRPC and the command line have it",
    }

    def __init__(self, broker: Any) -> None:
        super().__init__(broker)
        self._servers = {"bootstrap.servers": broker.bootstrap_servers, "log_level": 0}
        self._producer = Producer(
            {
                **self._servers,
                "message.max.bytes": 10_000_000,
                "linger.ms": 0,
                "topic.metadata.propagation.max.ms": 0,
                "enable.idempotence": True,
            }
        )
        self._members: dict[str, list[Member]] = {}

    def publish(
        self,
        topic: str,
        value: str,
        *,
        key: str | None = None,
        delay_s: int | None = None,
        priority: str | None = None,
        dedup_id: str | None = None,
    ) -> None:
        headers: list[tuple[str, str | bytes | None]] = [
            (name, str(text).encode())
            for name, text in (
                ("mansio-delay-ms", None if delay_s is None else delay_s * 1000),
                ("mansio-priority", priority),
                ("mansio-dedup-id", dedup_id),
            )
            if text is not None
        ]
        errors: list[KafkaError | None] = []
        try:
            self._producer.produce(
                topic, value.encode(), key, headers=headers, on_delivery=lambda error, _: errors.append(error)
            )
        except KafkaException as error:
            check(error.args[0])
        assert self._producer.flush(scaled(WAIT_S)) == 0
        check(errors[0])

    def _poll(self, topic: str, within_s: float) -> Member | None:
        """A member that has leased a record, from those without one."""
        self._check_topic(topic)
        members = self._members.setdefault(topic, [])
        if all(each.leased is not None for each in members):
            members.append(Member(self.broker.bootstrap_servers, self.group(topic), topic))
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            for each in members:
                if each.leased is None and each.poll(0.1) is not None:
                    return each
        return None

    def _check_topic(self, topic: str) -> None:
        """A subscription to a topic that does not exist waits for it; its metadata has the error."""
        metadata = self._producer.list_topics(topic, timeout=scaled(WAIT_S))
        check(metadata.topics[topic].error)

    def receive(self, topic: str, count: int) -> list[Received]:
        found: list[Received] = []
        for _ in range(count):
            member = self._poll(topic, scaled(WAIT_S))
            assert member is not None, "no record"
            assert member.leased is not None
            found.append(received(member.leased, member))
        return found

    def take(self, topic: str, count: int, then: str) -> list[Received]:
        found: list[Received] = []
        for _ in range(count):
            found += self.receive(topic, 1)
            found[-1].handle.acknowledge(then)
        return found

    def accept(self, topic: str, record: Received) -> None:
        del topic
        record.handle.acknowledge("accept")

    def is_empty(self, topic: str) -> bool:
        return self._poll(topic, EMPTY_S) is None

    def read_from(self, topic: str, time_ms: int) -> list[str]:
        consumer = Consumer({**self._servers, "group.id": "reader", "enable.partition.eof": True})
        with contextlib.closing(consumer):
            (start,) = consumer.offsets_for_times([TopicPartition(topic, 0, time_ms)], scaled(WAIT_S))
            consumer.assign([start])
            found: list[str] = []
            while (message := consumer.poll(scaled(WAIT_S))) is not None and message.error() is None:
                found.append((message.value() or b"").decode())
            assert message is not None
            assert present(message.error()).code() == KafkaError._PARTITION_EOF
            return found

    def close(self) -> None:
        for members in self._members.values():
            for each in members:
                each.consumer.close()


def received(message: Message, handle: Any) -> Received:
    key = message.key()
    value = message.value() or b""
    return Received(
        value.decode(), None if key is None else key.decode(), present(message.delivery_count()), handle
    )
