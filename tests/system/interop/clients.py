"""The same two verbs, write and read, with each foreign client.

Owns nothing: every call opens its client and closes it. Always true: `write` returns when everything was
acknowledged and raises the client's own error when it was not; `read` returns exactly as many records as
asked for, from the beginning, or raises.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AiokafkaPartition
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaPythonPartition

from support.machine import scaled
from support.paths import required_tool
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEADLINE_S = 15.0
QUIET: dict[str, Any] = {"log_level": 0, "error_cb": lambda error: None}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


class Item(NamedTuple):
    """A record as all clients can say it. A timestamp of None: now."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None


class Got(NamedTuple):
    """A record as a client gave it back."""

    partition: int
    offset: int
    timestamp_ms: int
    item: Item


def as_sent(got: Sequence[Got]) -> list[Item]:
    """What was read, without the timestamps."""
    return [one.item._replace(timestamp_ms=None) for one in got]


# confluent-kafka (librdkafka)


def confluent_write(
    bootstrap_servers: str,
    topic: str,
    items: Sequence[Item],
    *,
    codec: str = "none",
    partition: int = 0,
    **options: Any,
) -> list[int]:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "compression.type": codec,
            "linger.ms": 20,
            "message.max.bytes": 100_000_000,
            **QUIET,
            **options,
        }
    )
    offsets: list[Any] = []  # of None with acks=0
    errors: list[Any] = []
    for key, value, headers, timestamp_ms in items:
        producer.produce(
            topic,
            value,
            key,
            partition,
            headers=list(headers),
            timestamp=timestamp_ms or 0,
            on_delivery=lambda error, message: (
                errors.append(error) if error else offsets.append(message.offset())
            ),
        )
    assert producer.flush(scaled(DEADLINE_S)) == 0, "not everything was answered"
    if errors:
        raise KafkaException(errors[0])
    return offsets


def confluent_read(bootstrap_servers: str, topic: str, count: int, *, partitions: int = 1) -> list[Got]:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap_servers, "group.id": "none", "enable.auto.commit": False, **QUIET}
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    got: list[Got] = []
    end = time.monotonic() + scaled(DEADLINE_S)
    while len(got) < count and time.monotonic() < end:
        for message in consumer.consume(count - len(got), 0.5):
            assert message.error() is None, message.error()
            headers: Any = tuple(message.headers() or ())
            item = Item(message.key(), message.value(), headers, message.timestamp()[1])
            got.append(
                Got(present(message.partition()), present(message.offset()), message.timestamp()[1], item)
            )
    consumer.close()
    assert len(got) == count, f"confluent-kafka read {len(got)} of {count}"
    return got


# kafka-python


def kafka_python_write(
    bootstrap_servers: str,
    topic: str,
    items: Sequence[Item],
    *,
    codec: str = "none",
    partition: int = 0,
    **options: Any,
) -> list[int]:
    producer = KafkaProducer(
        bootstrap_servers=bootstrap_servers,
        compression_type=None if codec == "none" else codec,
        linger_ms=20,
        max_request_size=100_000_000,
        **options,
    )
    try:
        sent = [
            producer.send(topic, value, key, list(headers), partition, timestamp_ms)
            for key, value, headers, timestamp_ms in items
        ]
        producer.flush(scaled(DEADLINE_S))
        return [one.get(scaled(DEADLINE_S)).offset for one in sent]
    finally:
        producer.close(5)


def kafka_python_read(bootstrap_servers: str, topic: str, count: int, *, partitions: int = 1) -> list[Got]:
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest", fetch_max_wait_ms=100
    )
    wanted = [KafkaPythonPartition(topic, partition) for partition in range(partitions)]
    consumer.assign(wanted)
    consumer.seek_to_beginning(*wanted)
    got: list[Got] = []
    end = time.monotonic() + scaled(DEADLINE_S)
    while len(got) < count and time.monotonic() < end:
        for messages in consumer.poll(timeout_ms=500).values():
            for one in messages:
                item = Item(one.key, one.value, tuple(one.headers), one.timestamp)
                got.append(Got(one.partition, one.offset, one.timestamp, item))
    consumer.close()
    assert len(got) == count, f"kafka-python read {len(got)} of {count}"
    return got


# aiokafka


def aiokafka_write(
    bootstrap_servers: str,
    topic: str,
    items: Sequence[Item],
    *,
    codec: str = "none",
    partition: int = 0,
    **options: Any,
) -> list[int]:
    async def write() -> list[int]:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap_servers,
            compression_type=None if codec == "none" else codec,
            linger_ms=20,
            max_request_size=100_000_000,
            acks="all",
            **options,
        )
        await producer.start()
        try:
            sent = [
                await producer.send(
                    topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=list(headers)
                )
                for key, value, headers, timestamp_ms in items
            ]
            return [one.offset for one in await asyncio.wait_for(asyncio.gather(*sent), scaled(DEADLINE_S))]
        finally:
            await producer.stop()

    return asyncio.run(write())


def aiokafka_read(bootstrap_servers: str, topic: str, count: int, *, partitions: int = 1) -> list[Got]:
    async def read() -> list[Got]:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest", fetch_max_wait_ms=100
        )
        await consumer.start()
        try:
            consumer.assign([AiokafkaPartition(topic, partition) for partition in range(partitions)])
            await consumer.seek_to_beginning()
            got: list[Got] = []
            while len(got) < count:
                one = await asyncio.wait_for(consumer.getone(), scaled(DEADLINE_S))
                item = Item(one.key, one.value, tuple(one.headers), one.timestamp)
                got.append(Got(one.partition, one.offset, one.timestamp, item))
            return got
        finally:
            await consumer.stop()

    return asyncio.run(read())


# kcat (librdkafka 2.0.2): text only, no timestamps when writing, the same headers for all


class KcatFailedError(Exception):
    """kcat ended with an error; this is its output."""


def kcat(bootstrap_servers: str, *arguments: str, stdin: bytes = b"") -> bytes:
    """Run kcat and return its output; raise with its output when it fails."""
    command = [required_tool("kcat"), "-b", bootstrap_servers, *arguments]
    done = subprocess.run(
        command, input=stdin, capture_output=True, timeout=scaled(2 * DEADLINE_S), check=False
    )
    if done.returncode:
        raise KcatFailedError(f"kcat {' '.join(arguments)}: {done.stderr.decode(errors='replace')}")
    return done.stdout


def kcat_write(
    bootstrap_servers: str,
    topic: str,
    items: Sequence[Item],
    *,
    codec: str = "none",
    partition: int = 0,
    **options: Any,
) -> list[int]:
    headers = [
        part for name, value in items[0].headers for part in ("-H", f"{name}={(value or b'').decode()}")
    ]
    lines = [(one.key or b"") + b"\t" + (one.value or b"") for one in items]
    settings = [f"compression.codec={codec}", "linger.ms=20", "message.max.bytes=100000000"]
    settings += [f"{name}={value}" for name, value in options.items()]
    more = [part for setting in settings for part in ("-X", setting)]
    place = [] if partition < 0 else ["-p", str(partition)]
    kcat(
        bootstrap_servers,
        "-P",
        "-t",
        topic,
        *place,
        "-K",
        "\t",
        "-Z",
        *headers,
        *more,
        stdin=b"\n".join(lines) + b"\n",
    )
    return []


def kcat_read(bootstrap_servers: str, topic: str, count: int, *, partitions: int = 1) -> list[Got]:
    place = ["-p", "0"] if partitions == 1 else []
    out = kcat(bootstrap_servers, "-C", "-t", topic, *place, "-o", "beginning", "-c", str(count), "-e", "-J")
    got = []
    for line in out.decode().splitlines():
        one = json.loads(line)
        flat = one.get("headers", [])
        headers = tuple((name, _bytes(value)) for name, value in zip(flat[::2], flat[1::2], strict=True))
        item = Item(_bytes(one["key"]), _bytes(one["payload"]), headers, one["ts"])
        got.append(Got(one["partition"], one["offset"], one["ts"], item))
    assert len(got) == count, f"kcat read {len(got)} of {count}"
    return got


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


WRITERS: dict[str, Callable[..., list[int]]] = {
    "confluent-kafka": confluent_write,
    "kafka-python": kafka_python_write,
    "aiokafka": aiokafka_write,
    "kcat": kcat_write,
}
READERS: dict[str, Callable[..., list[Got]]] = {
    "confluent-kafka": confluent_read,
    "kafka-python": kafka_python_read,
    "aiokafka": aiokafka_read,
    "kcat": kcat_read,
}
PYTHON_CLIENTS = ("confluent-kafka", "kafka-python", "aiokafka")
