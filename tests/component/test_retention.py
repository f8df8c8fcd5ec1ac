"""Retention of a real broker with other clients: records are deleted by time, by size and on request, and do not
reappear."""

from __future__ import annotations

import itertools
import time
import warnings
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

import mansio
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch, produce
from mansio.wire.batch.record_batch import build_batch, iterate_batches
from support.machine import scaled
from support.present import present
from support.process import served
from support.raw_peer import RawPeer, fetch_frame, produce_frame
from support.waiting import wait_until

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "(read|open)_text is deprecated", DeprecationWarning)
    from kafka import KafkaAdminClient
    from kafka import TopicPartition as KafkaPythonPartition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")

HOUR_MS = 3_600_000
SEGMENT_BYTES = 1024
VALUE = bytes(600)  # one record fills more than half a segment: each batch gets its own
QUIET: dict[str, Any] = {"log_level": 0, "error_cb": lambda error: None}
_numbers = itertools.count(1)


def broker_in(directory: Path) -> mansio.Broker:
    return mansio.Broker(
        directory, log_retention_check_interval_ms=20, log_flush_offset_checkpoint_interval_ms=20
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("retention")


@pytest.fixture(scope="module")
def broker(data: Path) -> Iterator[mansio.Broker]:
    with broker_in(data) as started:
        yield started


class World:
    """One topic of a broker, through confluent-kafka."""

    def __init__(self, address: str, **configs: str) -> None:
        self.address = address
        self.topic = f"age-{next(_numbers)}"
        self.connect()
        config = {"segment.bytes": str(SEGMENT_BYTES)} | {k.replace("_", "."): v for k, v in configs.items()}
        self.admin.create_topics([NewTopic(self.topic, 1, 1, config=config)])[self.topic].result(scaled(10))

    def connect(self) -> None:
        """With clients that know nothing yet: those of a broker that is gone take their time to notice."""
        self.admin = AdminClient({"bootstrap.servers": self.address, **QUIET})
        self.producer = Producer({"bootstrap.servers": self.address, "linger.ms": 0, **QUIET})

    def write(self, count: int, *, age_ms: int = 0) -> None:
        """So many records in batches, and segments, of their own."""
        for _ in range(count):
            when = int(time.time() * 1000) - age_ms
            self.producer.produce(self.topic, VALUE, partition=0, timestamp=when)
            assert self.producer.flush(scaled(10)) == 0

    def alter(self, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, self.topic, incremental_configs=[entry])
        self.admin.incremental_alter_configs([resource])[resource].result(scaled(10))

    def bounds(self) -> tuple[int, int]:
        found = []
        for spec in (OffsetSpec.earliest(), OffsetSpec.latest()):
            partition = TopicPartition(self.topic, 0)
            found.append(self.admin.list_offsets({partition: spec})[partition].result(scaled(10)).offset)
        return found[0], found[1]

    def delete(self, offset: int) -> int:
        partition = TopicPartition(self.topic, 0, offset)
        return int(self.admin.delete_records([partition])[partition].result(scaled(10)).low_watermark)

    def read(self, *, start: int, reset: str, count: int) -> list[int]:
        """The offsets of the first `count` records that a consumer gets which begins at `start`."""
        settings = {"group.id": self.topic, "auto.offset.reset": reset, "enable.auto.commit": False}
        consumer = Consumer({"bootstrap.servers": self.address, **settings, **QUIET})
        try:
            consumer.assign([TopicPartition(self.topic, 0, start)])
            messages = consumer.consume(count, scaled(10))
            for message in messages:
                if message.error() is not None:
                    raise KafkaException(message.error())
            return [present(message.offset()) for message in messages]
        finally:
            consumer.close()


def let_it_check(broker: mansio.Broker) -> None:
    """Return when the retention manager has gone over all partitions once more."""
    manager = present(broker._broker).service.retention
    assert manager is not None
    begun = manager.counts.checks
    wait_until(lambda: manager.counts.checks > begun + 1)


def segment_names(data: Path, topic: str) -> list[str]:
    (directory,) = (data / "topics").glob(f"{topic}.*")
    return sorted(path.name for path in (directory / "0").glob("*.log"))


@pytest.mark.row("L6")
def test_old_records_leave_and_the_young_stay(broker: mansio.Broker, data: Path) -> None:
    world = World(broker.address, retention_ms=str(HOUR_MS))
    world.write(8, age_ms=2 * HOUR_MS)
    world.write(4)
    assert wait_until(lambda: world.bounds() == (8, 12))
    wait_until(lambda: segment_names(data, world.topic)[0] == f"{8:020d}.log")
    assert world.read(start=8, reset="error", count=4) == [8, 9, 10, 11]


@pytest.mark.row("L6")
def test_a_log_that_is_old_as_a_whole_is_emptied_and_its_offsets_go_on(
    broker: mansio.Broker, data: Path
) -> None:
    world = World(broker.address, retention_ms=str(HOUR_MS))
    world.write(3, age_ms=2 * HOUR_MS)
    wait_until(lambda: world.bounds() == (3, 3))
    wait_until(lambda: segment_names(data, world.topic) == [f"{3:020d}.log"])
    world.write(1)
    assert world.bounds() == (3, 4)
    assert world.read(start=0, reset="earliest", count=1) == [3]


@pytest.mark.row("L6")
def test_a_log_keeps_to_its_size_and_to_a_smaller_one_when_that_is_set(
    broker: mansio.Broker, data: Path
) -> None:
    world = World(broker.address, retention_bytes="-1")
    world.write(20)
    (directory,) = (data / "topics").glob(f"{world.topic}.*")
    closed = (
        directory / "0" / f"{0:020d}.log"
    )  # without space reserved behind its batch, and nothing deletes it yet
    batch_bytes = closed.stat().st_size
    world.alter("retention.bytes", "5000")

    def kept() -> int:
        low, high = world.bounds()
        assert high == 20
        return high - low

    def settled(batches: int) -> None:
        wait_until(lambda: kept() <= batches)
        let_it_check(broker)
        assert kept() == batches, "one less would be below retention.bytes"

    settled(-(-5000 // batch_bytes))
    world.alter("retention.bytes", "1500")
    settled(-(-1500 // batch_bytes))
    world.alter("retention.bytes", "-1")
    low = world.bounds()[0]
    world.write(20)
    let_it_check(broker)
    assert world.bounds() == (low, 40), "no limit any more"


@pytest.mark.row("L6")
def test_a_time_set_later_counts_for_what_is_there(broker: mansio.Broker) -> None:
    world = World(broker.address, retention_ms="-1")
    world.write(5, age_ms=2 * HOUR_MS)
    world.write(2)
    assert world.bounds() == (0, 7)
    world.alter("retention.ms", str(HOUR_MS))
    wait_until(lambda: world.bounds() == (5, 7))


@pytest.mark.row("L6")
def test_retention_goes_on_after_a_restart_and_what_left_stays_away(tmp_path: Path) -> None:
    with broker_in(tmp_path) as broker:
        world = World(broker.address, retention_ms=str(HOUR_MS), retention_bytes="-1")
        world.write(4, age_ms=2 * HOUR_MS)
        world.write(3, age_ms=HOUR_MS // 2)
        world.write(1)
        wait_until(lambda: world.bounds() == (4, 8))
    with mansio.Broker(tmp_path) as broker:  # this one does not look for a while
        again = World(broker.address)
        again.topic = world.topic
        assert again.bounds() == (4, 8)
        again.alter("retention.ms", str(HOUR_MS // 4))
    with broker_in(tmp_path) as broker:
        again = World(broker.address)
        again.topic = world.topic
        wait_until(lambda: again.bounds() == (7, 8))


@pytest.mark.row("L6")
def test_confluent_kafka_deletes_records_and_readers_see_where_the_log_begins(broker: mansio.Broker) -> None:
    world = World(broker.address)
    world.write(6)
    assert world.delete(4) == 4
    assert world.bounds() == (4, 6)
    assert world.delete(2) == 4, "nothing comes back"
    assert world.read(start=0, reset="earliest", count=2) == [4, 5]
    assert world.read(start=4, reset="error", count=2) == [4, 5]
    with pytest.raises(KafkaException) as caught:
        world.read(start=3, reset="error", count=1)
    assert caught.value.args[0].code() == KafkaError._AUTO_OFFSET_RESET
    with pytest.raises(KafkaException) as caught:
        world.delete(7)
    assert caught.value.args[0].code() == KafkaError.OFFSET_OUT_OF_RANGE
    assert world.delete(-1) == 6
    assert world.bounds() == (6, 6)


@pytest.mark.row("L6")
def test_kafka_python_deletes_records_in_many_partitions_at_once(broker: mansio.Broker) -> None:
    world, other = World(broker.address), World(broker.address)
    world.write(3)
    other.write(2)
    admin = KafkaAdminClient(bootstrap_servers=broker.address)
    try:
        deleted = admin.delete_records(
            {KafkaPythonPartition(world.topic, 0): 2, KafkaPythonPartition(other.topic, 0): -1}
        )
    finally:
        admin.close()
    lows = {partition.topic: answer["low_watermark"] for partition, answer in deleted.items()}
    assert lows == {world.topic: 2, other.topic: 2}
    assert (world.bounds(), other.bounds()) == ((2, 3), (2, 2))


@pytest.mark.row("L6")
def test_records_that_may_not_be_deleted_stay(broker: mansio.Broker) -> None:
    world = World(broker.address, cleanup_policy="compact")
    partition = TopicPartition(world.topic, 0, -1)
    with pytest.raises(KafkaException) as caught:
        world.admin.delete_records([partition])[partition].result(scaled(10))
    assert caught.value.args[0].code() == KafkaError.POLICY_VIOLATION
    plain = World(broker.address)
    plain.write(2)
    wanted = [
        (plain.topic, 0, 3, KafkaError.OFFSET_OUT_OF_RANGE),
        (plain.topic, 0, -2, KafkaError.OFFSET_OUT_OF_RANGE),
        (plain.topic, 1, 0, KafkaError.UNKNOWN_TOPIC_OR_PART),
        ("nowhere", 0, 0, KafkaError.UNKNOWN_TOPIC_OR_PART),
        (world.topic, 0, 0, KafkaError.POLICY_VIOLATION),
        (plain.topic, 0, 1, KafkaError.NO_ERROR),
    ]
    topics = [
        {"name": topic, "partitions": [{"partition_index": index, "offset": offset}]}
        for topic, index, offset, _ in wanted
    ]
    with RawPeer(int(broker.address.rpartition(":")[2])) as peer:
        for version in (0, 1, 2):
            answer = peer.call(ApiKey.DELETE_RECORDS, version, {"topics": topics, "timeout_ms": 10_000})
            entries = [(topic.name, topic.partitions[0]) for topic in answer.topics]
            assert [name for name, _ in entries] == [topic for topic, *_ in wanted]
            assert [entry.error_code for _, entry in entries] == [code for *_, code in wanted]
            assert [entry.low_watermark for _, entry in entries] == [-1] * 5 + [1]
    with mansio.blocking.connect(broker.address) as client:
        client.admin.reset_offsets("g", [world.topic], to="earliest")  # makes the broker's own topic
        with pytest.raises(mansio.errors.InvalidTopic):
            client.admin.delete_records([mansio.TopicPartition("__consumer_offsets", 0)], before="end")
        settings = client.admin.describe_config("__consumer_offsets")
    assert settings["cleanup.policy"].value == "compact"
    assert settings["segment.bytes"].value == str(100 << 20)


@pytest.mark.row("L6")
def test_own_client_deletes_by_offset_by_time_and_to_the_end(broker: mansio.Broker) -> None:
    world = World(broker.address)
    world.write(2, age_ms=2 * HOUR_MS)
    world.write(2)
    one = mansio.TopicPartition(world.topic, 0)
    cut = int(time.time() * 1000) - HOUR_MS
    moment = datetime.fromtimestamp(cut / 1000, UTC)
    with mansio.blocking.connect(broker.address) as client:
        assert client.admin.delete_records([one], before=1) == {one: 1}
        assert client.admin.delete_records([world.topic], before=moment, dry_run=True) == {one: 2}
        assert world.bounds() == (1, 4), "a dry run deletes nothing"
        assert client.admin.delete_records([world.topic], before=moment) == {one: 2}
        for dry_run in (True, False):
            with pytest.raises(mansio.errors.OffsetOutOfRange):
                client.admin.delete_records([one], before=5, dry_run=dry_run)
        assert client.admin.delete_records([one], before="end", dry_run=True) == {one: 4}
        assert client.admin.delete_records([one], before="end") == {one: 4}
    assert world.bounds() == (4, 4)


@pytest.mark.row("L6")
def test_what_was_deleted_stays_deleted_after_a_kill_right_after_the_answer(tmp_path: Path) -> None:
    arguments = [
        "--set",
        "log_flush_offset_checkpoint_interval_ms=60000",
    ]  # the next ordinary checkpoint would be far away
    with served(tmp_path / "data", arguments=arguments, http=False) as process:
        world = World(process.bootstrap_servers)
        world.write(5)
        assert world.delete(3) == 3
        process.kill()
        process.start()
        world.connect()
        assert world.bounds() == (3, 5)
        assert world.delete(-1) == 5
        process.kill()
        process.start()
        world.connect()
        assert world.bounds() == (5, 5)


@pytest.mark.row("L6")
def test_a_response_in_progress_is_complete_when_its_records_are_deleted(
    broker: mansio.Broker, data: Path
) -> None:
    world = World(broker.address, segment_bytes=str(16 << 20), retention_ms="-1")
    values = [number.to_bytes(4, "big") * 50_000 for number in range(60)]  # 12 MB in one segment
    for value in values:
        world.producer.produce(world.topic, value, partition=0)
    assert world.producer.flush(scaled(20)) == 0
    port = int(broker.address.rpartition(":")[2])
    with RawPeer(port, receive_buffer_bytes=4096) as slow:
        slow.send(fetch_frame(world.topic, max_bytes=50 << 20))
        first = slow.socket.recv(1000)  # it has begun
        assert world.delete(-1) == 60
        wait_until(lambda: segment_names(data, world.topic) == [f"{60:020d}.log"])
        length = int.from_bytes(first[:4], "big")
        rest = bytearray(first[4:])
        while len(rest) < length:
            piece = slow.socket.recv(1 << 20)
            assert piece
            rest += piece
    (entry,) = fetch.decode_response(12, bytes(rest)).topics[0][2]
    records = bytes(entry.records or b"")
    assert sum(header.record_count for _, header in iterate_batches(records)) == 60
    assert all(value in records for value in values[:: len(values) // 6])


@pytest.mark.row("L6")
def test_a_reader_at_the_young_end_notices_nothing_while_the_old_end_leaves(broker: mansio.Broker) -> None:
    world = World(broker.address, retention_bytes="4000")
    consumer = Consumer(
        {"bootstrap.servers": broker.address, "group.id": "tail", "auto.offset.reset": "error"}
    )
    seen: list[int] = []
    try:
        consumer.assign([TopicPartition(world.topic, 0, 0)])
        for _ in range(30):
            world.write(1)
            message = consumer.poll(scaled(10))
            assert message is not None
            assert message.error() is None
            seen.append(present(message.offset()))
    finally:
        consumer.close()
    assert seen == list(range(30))
    wait_until(lambda: world.bounds()[0] > 20)


def offsets_of(records: Sequence[tuple[int, str | None]]) -> list[int]:
    return [index for index, _ in records]


@pytest.mark.row("P5")
def test_a_keyless_record_for_a_compacted_topic_is_named_and_its_neighbours_are_stored(
    broker: mansio.Broker,
) -> None:
    compacted = World(broker.address, cleanup_policy="compact")
    plain = World(broker.address)
    now = int(time.time() * 1000)
    mixed = build_batch([(now, key, b"v", ()) for key in (b"k", None, b"k", None)])
    keyed = build_batch([(now, b"k", b"v", ())])
    port = int(broker.address.rpartition(":")[2])
    with RawPeer(port) as peer:
        for version in (7, 8, 9, 11):
            peer.send(
                produce_frame(
                    [(compacted.topic, None, [(0, mixed)]), (plain.topic, None, [(0, mixed)])],
                    version=version,
                )
            )
            answer = peer.frame()
            assert answer is not None
            refused, stored = (
                entries[0] for _, _, entries in produce.decode_response(version, answer).topics
            )
            assert refused.error_code == KafkaError.INVALID_RECORD
            assert offsets_of(refused.record_errors) == ([1, 3] if version >= 8 else [])
            assert ("needs a key" in str(refused.error_message)) == (version >= 8)
            assert stored.error_code == 0
        assert peer.produce(compacted.topic, keyed).base_offset == 0
    assert (compacted.bounds(), plain.bounds()) == ((0, 1), (0, 16))
    errors: list[Any] = []
    compacted.producer.produce(compacted.topic, b"no key", callback=lambda error, _: errors.append(error))
    compacted.producer.produce(compacted.topic, b"v", key=b"k", partition=0)
    compacted.producer.flush(scaled(10))
    assert errors[0].code() == KafkaError.INVALID_RECORD


@pytest.mark.row("P5")
def test_records_out_of_the_accepted_time_are_named(broker: mansio.Broker) -> None:
    world = World(broker.address, message_timestamp_before_max_ms=str(HOUR_MS))
    now = int(time.time() * 1000)
    batch = build_batch([(when, None, b"v", ()) for when in (now - 2 * HOUR_MS, now, now - 3 * HOUR_MS)])
    with RawPeer(int(broker.address.rpartition(":")[2])) as peer:
        result = peer.produce(world.topic, batch)
    assert result.error_code == KafkaError.INVALID_TIMESTAMP
    assert offsets_of(result.record_errors) == [0, 2]


@pytest.mark.row("L6")
def test_log_append_time_counts_for_retention_and_is_returned_to_the_producer(broker: mansio.Broker) -> None:
    world = World(broker.address, message_timestamp_type="LogAppendTime", retention_ms=str(HOUR_MS))
    reported: list[tuple[int, int]] = []
    before = int(time.time() * 1000)
    for _ in range(3):
        world.producer.produce(
            world.topic,
            VALUE,
            partition=0,
            timestamp=before - 5 * HOUR_MS,
            callback=lambda _, message: reported.append(message.timestamp()),
        )
        world.producer.flush(scaled(10))
    assert all(kind == 2 and when >= before for kind, when in reported)
    let_it_check(broker)
    assert world.bounds() == (0, 3), "the producer's clock does not make them old"


@pytest.mark.row("L3")
def test_a_segment_is_left_at_the_first_append_after_segment_ms(broker: mansio.Broker, data: Path) -> None:
    world = World(broker.address, segment_bytes="1000000", segment_ms="150")
    world.write(1)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + 0.2)
    assert len(segment_names(data, world.topic)) == 1, "an idle log does not roll, as in Kafka"
    world.write(1)
    assert len(segment_names(data, world.topic)) == 2
    assert world.bounds() == (0, 2)
