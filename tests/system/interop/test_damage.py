"""One batch of a log is damaged on the disk: its readers get an error, with each client, and can go on after it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPythonPartition

import mansio
from mansio.errors import CorruptMessage, StorageError
from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import HEADER_BYTES, iterate_batches
from support.machine import scaled
from support.present import present
from support.raw_peer import RawPeer, fetch_frame
from system.interop.clients import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOPIC = "damaged"
VALUES = [b"value-%d" % number * 20 for number in range(9)]
BAD = 4
CORRUPT_MESSAGE = 2
DEADLINE_S = 15.0


def write(data: Path) -> None:
    """Nine batches of one record in partition 0, and one in partition 1."""
    with mansio.Broker(data) as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic(TOPIC, partitions=2)
        for value in VALUES:
            client.publish(TOPIC, value, partition=0)
        client.publish(TOPIC, b"elsewhere", partition=1)


def damage(data: Path, change: Callable[[bytearray, int], None]) -> None:
    """Change the segment of partition 0 at its bad batch."""
    (segment,) = (data / "topics").glob(f"{TOPIC}.*/0/*.log")
    content = bytearray(segment.read_bytes())
    (position,) = [at for at, header in iterate_batches(content) if header.base_offset == BAD]
    change(content, position)
    segment.write_bytes(content)


def flip_value(content: bytearray, position: int) -> None:
    content[position + HEADER_BYTES + 20] ^= 4


def lengthen(content: bytearray, position: int) -> None:
    content[position + 8] = 0x7F


@pytest.fixture
def flipped(tmp_path: Path) -> Iterator[mansio.Broker]:
    write(tmp_path)
    damage(tmp_path, flip_value)
    with mansio.Broker(tmp_path) as broker:
        yield broker


@pytest.mark.row("L10")
def test_our_client_reports_the_batch_and_reads_on_after_it(flipped: mansio.Broker) -> None:
    where = mansio.TopicPartition(TOPIC, 0)
    with (
        mansio.blocking.connect(flipped.address) as client,
        client.consume([where], from_="earliest") as consumer,
    ):
        messages = iter(consumer)
        assert [next(messages).value for _ in range(BAD)] == VALUES[:BAD]
        for _ in range(2):  # and not passed over when it is asked again
            with pytest.raises(CorruptMessage, match=f"{TOPIC}-0 at offset {BAD}"):
                next(messages)
        consumer.seek(where, BAD + 1)
        assert [next(messages).value for _ in VALUES[BAD + 1 :]] == VALUES[BAD + 1 :]


@pytest.mark.row("L10")
@pytest.mark.parametrize("check_crcs", [False, True])
def test_librdkafka_reports_the_batch_and_reads_on_after_it(flipped: mansio.Broker, check_crcs: bool) -> None:
    """The broker does not send the batch, whether or not the client would check it (it does not by default).

    It asks for the batch again until it is told to seek; then its next position is chance (it was never set), which
    is out of range, and the answer to that may overtake the seek. So it begins again where it may, and one that reads
    has to seek at each report."""
    consumer = Consumer(
        {
            "bootstrap.servers": flipped.address,
            "group.id": "none",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "check.crcs": check_crcs,
            **QUIET,
        }
    )
    consumer.assign([TopicPartition(TOPIC, 0, 0), TopicPartition(TOPIC, 1, 0)])
    good: dict[tuple[int, int], bytes] = {}
    reported: set[tuple[int, int | None, int | None]] = set()
    end = time.monotonic() + scaled(DEADLINE_S)
    while len(good) < len(VALUES) and time.monotonic() < end:
        for message in consumer.consume(1, 0.2):
            error = message.error()
            if error is None:
                good[present(message.partition()), present(message.offset())] = present(message.value())
            else:
                reported.add((error.code(), message.partition(), message.offset()))
                consumer.seek(TopicPartition(TOPIC, 0, BAD + 1))
    consumer.close()
    assert reported == {(CORRUPT_MESSAGE, 0, BAD)}
    expected: dict[tuple[int, int], Any] = {(0, n): v for n, v in enumerate(VALUES) if n != BAD}
    assert good == {**expected, (1, 0): b"elsewhere"}


@pytest.mark.row("L10")
def test_kafka_python_reports_the_batch_and_reads_on_after_it(flipped: mansio.Broker) -> None:
    where = KafkaPythonPartition(TOPIC, 0)
    consumer = KafkaConsumer(
        bootstrap_servers=flipped.address, check_crcs=True, enable_auto_commit=False, max_poll_records=1
    )
    consumer.assign([where])
    consumer.seek(where, 0)
    good: dict[int, bytes] = {}
    errors = 0
    end = time.monotonic() + scaled(DEADLINE_S)
    while len(good) < len(VALUES) - 1 and time.monotonic() < end:
        try:
            for messages in consumer.poll(200).values():
                good.update((message.offset, message.value) for message in messages)
        except Exception as error:
            if "CRC" not in str(error) and "orrupt" not in str(error):
                raise
            errors += 1
            consumer.seek(where, BAD + 1)
    consumer.close()
    assert errors
    assert good == {n: v for n, v in enumerate(VALUES) if n != BAD}


@pytest.mark.row("L10")
def test_what_the_broker_itself_cannot_frame_is_answered_as_corruption_and_the_rest_is_served(
    tmp_path: Path,
) -> None:
    """The length of a batch is damaged, in a segment that is closed: it is unknown where the next one begins,
    but through the index."""
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic(
            TOPIC, partitions=2, config={"index.interval.bytes": "1", "segment.bytes": "2000"}
        )
        for value in (*VALUES, *VALUES):
            client.publish(TOPIC, value, partition=0)
        client.publish(TOPIC, b"elsewhere", partition=1)
    first = min((tmp_path / "topics").glob(f"{TOPIC}.*/0/*.log"))
    content = bytearray(first.read_bytes())
    (position,) = [at for at, header in iterate_batches(content) if header.base_offset == BAD]
    lengthen(content, position)
    first.write_bytes(content)
    port = 0
    with mansio.Broker(tmp_path) as broker:
        port = int(broker.address.rpartition(":")[2])
        with RawPeer(port) as peer:
            codes = {}
            for offset in range(2 * len(VALUES)):
                peer.send(fetch_frame(TOPIC, offset=offset, max_bytes=1))
                answer = peer.frame()
                assert answer is not None
                found = fetch.decode_response(12, answer).topics[0][2][0]
                codes[offset] = found.error_code
                if not found.error_code:
                    batches = bytes(found.records)
                    ((_, header),) = iterate_batches(batches)
                    assert header.base_offset == offset
                    assert VALUES[offset % len(VALUES)] in batches
            assert {offset: code for offset, code in codes.items() if code} == {BAD: CORRUPT_MESSAGE}
            peer.send(fetch_frame(TOPIC, offset=BAD))
            answer = peer.frame()
            assert answer is not None
            assert fetch.decode_response(12, answer).topics[0][2][0].error_code == CORRUPT_MESSAGE
        with mansio.blocking.connect(broker.address) as client:
            where = mansio.TopicPartition(TOPIC, 0)
            with client.consume([where], from_=BAD) as consumer, pytest.raises(CorruptMessage):
                next(iter(consumer))
            other = mansio.TopicPartition(TOPIC, 1)
            assert [m.value for m in client.consume([other], from_="earliest", max_records=1)] == [
                b"elsewhere"
            ]
        partition = present(broker._broker).service.partitions.find(TOPIC, None, 0)
        with pytest.raises(StorageError, match="damaged"):
            partition.log.verify()
