"""A record that one client writes is read by every client, byte for byte."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AiokafkaPartition
from aiokafka.errors import MessageSizeTooLargeError as AiokafkaTooLarge
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPythonPartition
from kafka.errors import MessageSizeTooLargeError as KafkaPythonTooLarge

from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.murmur2 import partition_for_key
from support.machine import scaled
from support.raw_peer import RawPeer, fetch_frame
from system.interop.clients import (
    CODECS,
    PYTHON_CLIENTS,
    QUIET,
    READERS,
    WRITERS,
    Item,
    KcatFailedError,
    as_sent,
    kcat,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.process import ServedBroker

LIMIT_BYTES = 200_000
BATCH_OVERHEAD_BYTES = 100
T0_MS = 1_700_000_000_000


def text_items(writer: str) -> list[Item]:
    """Text that compresses, which even kcat can say."""
    headers = (("writer", writer.encode()), ("kind", b"text"))
    return [Item(b"key-%d" % n, b"%s says %d " % (writer.encode(), n) * 30, headers) for n in range(5)]


def stored_codecs(broker: ServedBroker, topic: str) -> set[str]:
    """The codecs of the batches as they lie in the log."""
    with RawPeer(broker.kafka_port) as peer:
        peer.send(fetch_frame(topic))
        answer = peer.frame()
        assert answer is not None
        records = fetch.decode_response(12, answer).topics[0][2][0].records
        return {header.codec.name.lower() for _, header in iterate_batches(records)}


@pytest.mark.row("L8", "L2", "A1")
@pytest.mark.parametrize("codec", CODECS)
def test_every_client_reads_what_every_client_writes_in(
    broker: ServedBroker, make_topic: Callable[..., str], codec: str
) -> None:
    topic = make_topic()
    written: list[Item] = []
    for name, write in WRITERS.items():
        items = text_items(name)
        write(broker.bootstrap_servers, topic, items, codec=codec)
        written += items
    assert stored_codecs(broker, topic) == {codec}, "stored as sent"
    for name, read in READERS.items():
        got = read(broker.bootstrap_servers, topic, len(written))
        assert [one.offset for one in got] == list(range(len(written))), name
        assert as_sent(got) == written, name


@pytest.mark.row("L2")
@pytest.mark.parametrize("writer", PYTHON_CLIENTS)
def test_null_empty_and_binary_keys_values_and_headers_survive(
    bootstrap_servers: str, make_topic: Callable[..., str], writer: str
) -> None:
    binary = bytes(range(256)) * 4
    items = [
        Item(b"", b"", (), T0_MS + 1),
        Item(None, b"", (("empty", b""),), T0_MS + 2),
        Item(b"", None, (("twice", b"1"), ("twice", b"2")), T0_MS + 3),
        Item(binary, binary, (("höhe", binary), ("", b"nameless")), T0_MS + 4),
        Item(b"tombstone", None, (), T0_MS - 1_000_000),
    ]
    if writer == "confluent-kafka":  # the others refuse these themselves
        items += [Item(b"k", b"v", (("null", None),), T0_MS + 5), Item(None, None, (), T0_MS)]
    topic = make_topic()
    WRITERS[writer](bootstrap_servers, topic, items)
    for name in PYTHON_CLIENTS:
        got = READERS[name](bootstrap_servers, topic, len(items))
        assert [one.item for one in got] == items, name


@pytest.mark.row("L2")
def test_kcat_writes_nulls_that_others_read_as_nulls(
    bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    WRITERS["kcat"](bootstrap_servers, topic, [Item(b"key", None), Item(None, b"value")])
    for name in READERS:
        got = READERS[name](bootstrap_servers, topic, 2)
        assert as_sent(got) == [Item(b"key", None), Item(None, b"value")], name


@pytest.mark.row("L2")
def test_log_append_time_is_the_brokers_for_every_reader(
    bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(message_timestamp_type="LogAppendTime")
    for writer in PYTHON_CLIENTS:
        WRITERS[writer](bootstrap_servers, topic, [Item(b"k", b"v" * 300, (), T0_MS)], codec="gzip")
    seen = set()
    for name in READERS:
        times = [one.timestamp_ms for one in READERS[name](bootstrap_servers, topic, len(PYTHON_CLIENTS))]
        assert min(times) > T0_MS + 1_000_000, name
        seen.add(tuple(times))
    assert len(seen) == 1, "all readers see the same times"


@pytest.mark.row("P5", "L4")
@pytest.mark.parametrize("writer", list(WRITERS))
def test_record_near_the_limit_is_kept_and_one_above_gets_the_clients_own_error(
    bootstrap_servers: str, make_topic: Callable[..., str], writer: str
) -> None:
    topic = make_topic(max_message_bytes=str(LIMIT_BYTES))
    near = b"n" * (LIMIT_BYTES - BATCH_OVERHEAD_BYTES)
    WRITERS[writer](bootstrap_servers, topic, [Item(b"near", near)])
    with pytest.raises((KafkaException, KafkaPythonTooLarge, AiokafkaTooLarge, KcatFailedError)) as caught:
        WRITERS[writer](bootstrap_servers, topic, [Item(b"above", b"a" * LIMIT_BYTES)])
    if isinstance(caught.value, KafkaException):
        assert caught.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    if isinstance(caught.value, KcatFailedError):
        assert "too large" in str(caught.value)
    for name in READERS:
        assert as_sent(READERS[name](bootstrap_servers, topic, 1)) == [Item(b"near", near)], name


@pytest.mark.row("P3")
@pytest.mark.parametrize(
    ("writer", "how"),
    [
        ("confluent-kafka", {"enable.idempotence": True}),
        ("kafka-python", {"enable_idempotence": True}),
        ("aiokafka", {"enable_idempotence": True}),
        ("kcat", {"enable.idempotence": "true"}),
    ],
)
def test_idempotent_producers_write_each_record_once_in_order(
    broker: ServedBroker, make_topic: Callable[..., str], writer: str, how: dict[str, object]
) -> None:
    topic = make_topic()
    items = [Item(b"%d" % n, b"value %d" % n) for n in range(300)]
    WRITERS[writer](broker.bootstrap_servers, topic, items, **how)
    assert as_sent(READERS["confluent-kafka"](broker.bootstrap_servers, topic, 300)) == items
    with RawPeer(broker.kafka_port) as peer:
        assert peer.end_offset(topic) == 300
        peer.send(fetch_frame(topic))
        answer = peer.frame()
        assert answer is not None
        records = fetch.decode_response(12, answer).topics[0][2][0].records
        assert all(header.producer_id >= 0 for _, header in iterate_batches(records))


@pytest.mark.row("L4")
@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_level_of_acks_is_taken_and_readable(
    bootstrap_servers: str, make_topic: Callable[..., str], acks: str
) -> None:
    topic = make_topic()
    items = [Item(b"%d" % n, b"value") for n in range(20)]
    number = acks if acks == "all" else int(acks)
    WRITERS["confluent-kafka"](bootstrap_servers, topic, items, acks=acks)
    WRITERS["kafka-python"](bootstrap_servers, topic, items, acks=number, enable_idempotence=False)
    assert as_sent(READERS["aiokafka"](bootstrap_servers, topic, 40)) == items * 2


@pytest.mark.row("P1")
def test_same_key_goes_to_the_same_partition_with_every_client(
    bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    partitions = 7
    chance = random.Random(7)
    keys = [chance.randbytes(chance.randint(1, 40)).hex().encode() for _ in range(60)] + [
        b"a",
        "schlüssel".encode(),
    ]
    items = [Item(key, b"v") for key in keys]
    expected = {key: partition_for_key(key, partitions) for key in keys}
    settings: dict[str, dict[str, Any]] = {
        "confluent-kafka": {"partition": -1, "partitioner": "murmur2_random"},
        "kafka-python": {"partition": None},
        "aiokafka": {"partition": None},
        "kcat": {"partition": -1, "topic.partitioner": "murmur2_random"},
    }
    for name, how in settings.items():
        topic = make_topic(partitions)
        WRITERS[name](bootstrap_servers, topic, items, **how)
        got = READERS["confluent-kafka"](bootstrap_servers, topic, len(items), partitions=partitions)
        assert {one.item.key: one.partition for one in got} == expected, name


@pytest.mark.row("G4")
def test_every_client_finds_the_same_offsets_by_time(
    bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    times = [T0_MS + 1000 * n for n in range(30)]
    for part, codec in ((times[:15], "none"), (times[15:], "lz4")):
        WRITERS["confluent-kafka"](
            bootstrap_servers, topic, [Item(None, b"v" * 50, (), at) for at in part], codec=codec
        )
    wanted = {
        T0_MS - 5: 0,
        T0_MS: 0,
        T0_MS + 1: 1,
        T0_MS + 14_500: 15,
        T0_MS + 20_000: 20,
        T0_MS + 29_000: 29,
    }
    beyond = T0_MS + 29_001

    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "times", **QUIET})
    for at, offset in wanted.items():
        assert (
            consumer.offsets_for_times([TopicPartition(topic, 0, at)], timeout=scaled(10))[0].offset == offset
        )
    assert consumer.offsets_for_times([TopicPartition(topic, 0, beyond)], timeout=scaled(10))[0].offset == -1
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=scaled(10)) == (0, 30)
    consumer.close()

    second = KafkaConsumer(bootstrap_servers=bootstrap_servers)
    place = KafkaPythonPartition(topic, 0)
    for at, offset in wanted.items():
        assert second.offsets_for_times({place: at})[place].offset == offset
    assert second.offsets_for_times({place: beyond})[place] is None
    assert (second.beginning_offsets([place])[place], second.end_offsets([place])[place]) == (0, 30)
    second.close()

    async def third() -> None:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap_servers)
        await consumer.start()
        place = AiokafkaPartition(topic, 0)
        for at, offset in wanted.items():
            assert (await consumer.offsets_for_times({place: at}))[place].offset == offset
        consumer.assign([place])
        consumer.seek(place, wanted[T0_MS + 20_000])
        assert (await asyncio.wait_for(consumer.getone(), scaled(10))).timestamp == T0_MS + 20_000
        await consumer.stop()

    asyncio.run(third())
    out = kcat(
        bootstrap_servers, "-C", "-t", topic, "-p", "0", "-o", f"s@{T0_MS + 20_000}", "-c", "1", "-f", "%o"
    )
    assert out == b"20"
