"""A record acknowledged with acks=1 counts for later requests, as in Kafka: for the latest offset, for a reader at the
end and for a deletion, although it is not flushed yet.

The broker's background flush would come after a minute, so only a flush that a request starts makes a record readable.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AiokafkaPartition
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaPythonPartition

import mansio
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from support.machine import scaled
from support.raw_peer import RawPeer, batch_of, fetch_frame
from system.interop.clients import QUIET
from system.interop.conftest import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRIES = 20
ONE_MINUTE_MS = 60_000


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("acks-one") / "data"
    with mansio.Broker(directory, listeners="127.0.0.1:0", log_flush_interval_ms=ONE_MINUTE_MS) as broker:
        yield broker.address


def test_the_latest_offset_includes_what_aiokafka_was_acknowledged(address: str, unique: str) -> None:
    create_topic(address, unique)
    partition = AiokafkaPartition(unique, 0)

    async def work() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=address, acks=1)
        consumer = AIOKafkaConsumer(bootstrap_servers=address)
        await producer.start()
        await consumer.start()
        try:
            for _ in range(TRIES):
                sent = await producer.send_and_wait(unique, b"v", partition=0)
                assert await consumer.end_offsets([partition]) == {partition: sent.offset + 1}
        finally:
            await consumer.stop()
            await producer.stop()

    asyncio.run(work())


def test_a_seek_to_the_end_passes_what_kafka_python_was_acknowledged(address: str, unique: str) -> None:
    create_topic(address, unique)
    partition = KafkaPythonPartition(unique, 0)
    producer = KafkaProducer(bootstrap_servers=address, acks=1)
    consumer = KafkaConsumer(bootstrap_servers=address)
    try:
        consumer.assign([partition])
        sent = producer.send(unique, b"v", partition=0).get(scaled(15))
        consumer.seek_to_end(partition)
        assert consumer.position(partition) == sent.offset + 1
    finally:
        consumer.close()
        producer.close(5)


def test_records_acknowledged_to_librdkafka_count_as_lag_and_can_be_deleted(
    address: str, unique: str
) -> None:
    create_topic(address, unique)
    partition = TopicPartition(unique, 0)
    producer = Producer({"bootstrap.servers": address, "acks": "1", **QUIET})
    consumer = Consumer({"bootstrap.servers": address, "group.id": unique, **QUIET})
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    try:
        for _ in range(3):
            producer.produce(unique, b"v", partition=0)
            assert producer.flush(scaled(15)) == 0
        assert consumer.get_watermark_offsets(partition, scaled(15)) == (0, 3)
        producer.produce(unique, b"v", partition=0)
        assert producer.flush(scaled(15)) == 0
        (deleted,) = admin.delete_records([TopicPartition(unique, 0, 4)]).values()
        assert deleted.result(scaled(15)).low_watermark == 4
        producer.produce(unique, b"v", partition=0)
        assert producer.flush(scaled(15)) == 0
        (listed,) = admin.list_offsets({partition: OffsetSpec.max_timestamp()}).values()
        assert listed.result(scaled(15)).offset == 4
    finally:
        consumer.close()


def test_a_fetch_that_does_not_wait_returns_what_was_acknowledged(address: str, unique: str) -> None:
    with RawPeer(int(address.rpartition(":")[2])) as peer:
        peer.create_topic(unique)
        for offset in range(TRIES):
            assert peer.produce(unique, batch_of(b"v"), acks=1).base_offset == offset
            peer.send(fetch_frame(unique, offset=offset))
            response = peer.frame()
            assert response is not None
            found = fetch.decode_response(12, response).topics[0][2][0]
            assert found.error_code == 0
            assert found.records_bytes, f"the record at {offset} was acknowledged and is not readable"


def test_records_of_the_only_replica_are_deleted_with_a_timeout_of_zero(address: str, unique: str) -> None:
    with RawPeer(int(address.rpartition(":")[2])) as peer:
        peer.create_topic(unique)
        for end_offset in range(1, TRIES):
            peer.produce(unique, batch_of(b"v"))
            partitions = [{"partition_index": 0, "offset": end_offset}]
            fields = {"topics": [{"name": unique, "partitions": partitions}], "timeout_ms": 0}
            deleted = peer.call(ApiKey.DELETE_RECORDS, 1, fields).topics[0].partitions[0]
            assert (deleted.error_code, deleted.low_watermark) == (0, end_offset)


def test_deleting_up_to_the_high_watermark_includes_what_was_acknowledged(address: str, unique: str) -> None:
    with RawPeer(int(address.rpartition(":")[2])) as peer:
        peer.create_topic(unique)
        peer.produce(unique, batch_of(b"v"), acks=1)
        partitions = [{"partition_index": 0, "offset": -1}]
        fields = {"topics": [{"name": unique, "partitions": partitions}], "timeout_ms": 10_000}
        deleted = peer.call(ApiKey.DELETE_RECORDS, 1, fields).topics[0].partitions[0]
        assert (deleted.error_code, deleted.low_watermark) == (0, 1)
