"""compression.type of topics: stored with the topic's codec, read back by every client as it was written."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from mansio.wire.apis import fetch, produce
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import HEADER_BYTES, iterate_batches, read_header
from support.machine import scaled
from support.process import served
from support.raw_peer import RawPeer, batch_of, fetch_frame, produce_frame
from support.waiting import wait_until
from system.interop.clients import (
    CODECS,
    PYTHON_CLIENTS,
    QUIET,
    READERS,
    WRITERS,
    Item,
    as_sent,
    confluent_read,
    confluent_write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mansio.wire.batch.record_batch import BatchHeader

TYPES = {
    "uncompressed": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}
MESSAGE_TOO_LARGE, CORRUPT_MESSAGE, REQUEST_TIMED_OUT = 10, 2, 7


@pytest.fixture
def raw(bootstrap_servers: str) -> Iterator[RawPeer]:
    with RawPeer(int(bootstrap_servers.rpartition(":")[2])) as peer:
        yield peer


def stored(raw: RawPeer, topic: str) -> list[BatchHeader]:
    """The headers of all batches of partition 0."""
    headers: list[BatchHeader] = []
    end = raw.end_offset(topic)
    while not headers or headers[-1].last_offset + 1 < end:
        offset = headers[-1].last_offset + 1 if headers else 0
        raw.send(fetch_frame(topic, offset=offset, max_bytes=4 << 20))
        frame = raw.frame()
        assert frame is not None
        (partition,) = fetch.decode_response(12, frame).topics[0][2]
        assert partition.error_code == 0
        headers += [header for _, header in iterate_batches(bytes(partition.records))]
    return headers


def items(count: int, value_bytes: int, seed: int = 7) -> list[Item]:
    chosen = random.Random(seed)
    words = [chosen.randbytes(4).hex().encode() for _ in range(500)]
    return [
        Item(
            b"key-%d" % number,
            b" ".join(chosen.choices(words, k=value_bytes // 9 + 1)),
            (("trace", b"%d" % number), ("empty", b"")),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "wanted", [pytest.param(name, marks=[] if name == "zstd" else [pytest.mark.full]) for name in TYPES]
)
def test_batches_are_stored_with_the_topics_codec_and_read_as_written(
    bootstrap_servers: str, raw: RawPeer, make_topic: Callable[..., str], wanted: str
) -> None:
    topic = make_topic(compression_type=wanted)
    written: list[Item] = []
    for number, codec in enumerate(CODECS):
        client = PYTHON_CLIENTS[number % len(PYTHON_CLIENTS)]
        sent = [*items(3, 50, number), *items(20, 20_000, number)]
        offsets = WRITERS[client](bootstrap_servers, topic, sent, codec=codec)
        assert offsets == list(range(len(written), len(written) + len(sent)))
        written += sent
    assert {header.codec for header in stored(raw, topic)} == {TYPES[wanted]}
    for client in PYTHON_CLIENTS:
        got = READERS[client](bootstrap_servers, topic, len(written))
        assert as_sent(got) == written
        assert [one.offset for one in got] == list(range(len(written)))


def test_a_changed_codec_applies_to_the_batches_that_follow(
    bootstrap_servers: str, raw: RawPeer, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})
    written: list[Any] = []
    for codec in ("producer", "zstd", "uncompressed", "producer"):
        entry = ConfigEntry("compression.type", codec, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        for future in admin.incremental_alter_configs([resource]).values():
            future.result(scaled(15))
        sent = items(1, 5000, len(written))
        confluent_write(bootstrap_servers, topic, sent, codec="gzip")
        written += sent
    assert [header.codec for header in stored(raw, topic)] == [Codec.GZIP, Codec.ZSTD, Codec.NONE, Codec.GZIP]
    assert as_sent(confluent_read(bootstrap_servers, topic, len(written))) == written


def test_an_idempotent_producer_with_many_requests_in_flight_keeps_its_order(
    bootstrap_servers: str, raw: RawPeer, make_topic: Callable[..., str]
) -> None:
    """Small batches, which are recompressed at once, between large ones, which take longer."""
    topic = make_topic(compression_type="gzip", compression_gzip_level="9")
    chosen = random.Random(3)
    sizes = [chosen.choice((10, 10, 100, 200_000)) for _ in range(300)]
    sent = [Item(b"%d" % number, chosen.randbytes(size // 2) * 2) for number, size in enumerate(sizes)]
    offsets = confluent_write(
        bootstrap_servers,
        topic,
        sent,
        codec="lz4",
        **{"enable.idempotence": True, "batch.num.messages": 1, "linger.ms": 0},
    )
    assert offsets == list(range(len(sent)))
    headers = stored(raw, topic)
    assert {header.codec for header in headers} == {Codec.GZIP}
    assert [header.base_sequence for header in headers] == list(range(len(sent)))
    assert len({(header.producer_id, header.producer_epoch) for header in headers}) == 1
    assert as_sent(confluent_read(bootstrap_servers, topic, len(sent))) == sent


def test_log_append_time_applies_to_recompressed_batches(
    bootstrap_servers: str, raw: RawPeer, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(compression_type="zstd", message_timestamp_type="LogAppendTime")
    confluent_write(bootstrap_servers, topic, [*items(2, 50), *items(2, 100_000)])
    got = confluent_read(bootstrap_servers, topic, 4)
    headers = stored(raw, topic)
    assert {header.codec for header in headers} == {Codec.ZSTD}
    assert all(header.attributes & 8 for header in headers)
    assert {one.timestamp_ms for one in got} == {header.max_timestamp_ms for header in headers}


def test_levels_take_effect(bootstrap_servers: str, raw: RawPeer, make_topic: Callable[..., str]) -> None:
    """KIP-390."""
    for codec, low, high in (("gzip", "1", "9"), ("lz4", "9", "12"), ("zstd", "-50", "19")):
        sizes = []
        for level in (low, high):
            config = {"compression_type": codec, f"compression_{codec}_level": level}
            topic = make_topic(**config)
            confluent_write(bootstrap_servers, topic, items(1, 300_000))
            sizes.append(sum(header.size for header in stored(raw, topic)))
        assert sizes[1] < sizes[0], codec


@pytest.mark.parametrize("acks", [0, 1])
def test_without_waiting_for_a_commit_the_order_is_kept_too(
    bootstrap_servers: str, raw: RawPeer, make_topic: Callable[..., str], acks: int
) -> None:
    topic = make_topic(compression_type="snappy")
    sent = [one for number in range(10) for one in (*items(1, 100_000, number), *items(2, 20, number))]
    confluent_write(
        bootstrap_servers, topic, sent, acks=acks, **dict[str, Any]({"batch.num.messages": 1, "linger.ms": 0})
    )
    wait_until(lambda: raw.end_offset(topic) == len(sent), 30)
    assert as_sent(confluent_read(bootstrap_servers, topic, len(sent))) == sent
    assert {header.codec for header in stored(raw, topic)} == {Codec.SNAPPY}


def test_what_cannot_be_recompressed_is_refused_and_what_follows_is_stored(
    raw: RawPeer, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(compression_type="uncompressed", max_message_bytes="2000000")
    large = batch_of(b"v" * 100_000, codec=Codec.GZIP)
    results = [
        raw.produce(topic, batch).error_code
        for batch in (
            large,
            batch_of(bytes(100 << 20), codec=Codec.ZSTD),
            batch_of(bytes(3_000_000), codec=Codec.GZIP),
            large[:HEADER_BYTES] + large[HEADER_BYTES:-1] + b"x",
            large,
        )
    ]
    assert results == [0, MESSAGE_TOO_LARGE, MESSAGE_TOO_LARGE, CORRUPT_MESSAGE, 0]
    assert [header.codec for header in stored(raw, topic)] == [Codec.NONE] * 2


def test_a_batch_without_acks_that_is_refused_closes_the_connection(
    bootstrap_servers: str, raw: RawPeer, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(compression_type="uncompressed")
    with RawPeer(int(bootstrap_servers.rpartition(":")[2])) as other:
        bomb = batch_of(bytes(100 << 20), codec=Codec.ZSTD)
        other.send(produce_frame([(topic, None, [(0, bomb)])], acks=0))
        assert other.closed()
    assert raw.end_offset(topic) == 0


def test_a_client_that_leaves_loses_nothing_and_leaves_no_queue_behind(tmp_path: Path) -> None:
    with served(tmp_path / "data") as broker:
        port = int(broker.bootstrap_servers.rpartition(":")[2])

        def metric(name: str) -> float:
            text = httpx.get(f"{broker.http_url}/metrics", timeout=scaled(10)).text
            return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " "))

        batch = batch_of(random.Random(1).randbytes(400_000) * 2)
        with RawPeer(port) as raw:
            raw.create_topic("t", compression_type="gzip", compression_gzip_level="9")
            with RawPeer(port) as gone:
                for number in range(8):
                    gone.send(produce_frame([("t", None, [(0, batch)])], acks=-1, correlation_id=number + 1))
                wait_until(lambda: metric("mansio_recompression_queue_bytes") > 0 or raw.end_offset("t"), 30)
            # What the broker had read of the connection is appended; a later batch comes after it.
            assert raw.produce("t", batch_of(b"last")).error_code == 0
            wait_until(lambda: metric("mansio_recompression_queue_bytes") == 0, 30)
            headers = stored(raw, "t")
            assert 2 <= len(headers) <= 9
            assert {header.codec for header in headers} == {Codec.GZIP}
            assert headers[-1].size < 200
            assert metric("mansio_recompressed_batches_total") == len(headers)


def test_batches_of_other_topics_are_not_touched(raw: RawPeer, make_topic: Callable[..., str]) -> None:
    topic = make_topic()
    batch = batch_of(b"v" * 50_000, codec=Codec.LZ4)
    assert raw.produce(topic, batch).error_code == 0
    (header,) = stored(raw, topic)
    sent = read_header(batch)
    assert header._replace(leader_epoch=sent.leader_epoch) == sent


def test_other_connections_are_answered_while_batches_are_recompressed(
    bootstrap_servers: str, raw: RawPeer, make_topic: Callable[..., str]
) -> None:
    """zstd at a high level takes a second for these; the event loop takes part in none of it."""
    slow = make_topic(compression_type="zstd", compression_zstd_level="19", max_message_bytes="2000000")
    quick = make_topic()
    producer = Producer(
        {"bootstrap.servers": bootstrap_servers, "batch.num.messages": 1, "linger.ms": 0, **QUIET}
    )
    for one in items(3, 500_000):
        producer.produce(slow, one.value)
    producer.poll(0)
    answered = 0
    while len(producer) and answered < 200:
        assert raw.produce(quick, batch_of(b"v")).error_code == 0
        producer.poll(0)
        answered += 1
    assert answered > 20, "the slow batches were done before the others"
    assert producer.flush(scaled(60)) == 0


@pytest.mark.full
def test_a_topic_waits_for_few_batches_of_another(tmp_path: Path) -> None:
    """Partitions take turns, whatever waits for one of them."""
    count = 60
    slow = batch_of(random.Random(2).randbytes(200_000) + bytes(300_000))
    with served(tmp_path / "data") as broker:
        port = int(broker.bootstrap_servers.rpartition(":")[2])
        with RawPeer(port) as first, RawPeer(port) as second:
            for topic in ("a", "v"):
                second.create_topic(topic, compression_type="zstd", compression_zstd_level="19")
            first.send(produce_frame([("a", None, [(0, slow)] * count)], acks=1, timeout_ms=120_000))
            wait_until(lambda: second.end_offset("a") > 0, 30)
            before = second.end_offset("a")
            assert second.produce("v", batch_of(random.Random(1).randbytes(20_000)), acks=1).error_code == 0
            passed = second.end_offset("a") - before
            assert passed < count // 2, "the other topic waited for the first"
            answer = first.frame()
            assert answer is not None
            results = produce.decode_response(9, answer).topics[0][2]
            assert [one.error_code for one in results] == [0] * count
            assert [one.base_offset for one in results] == list(range(count))


def test_batches_that_are_large_decompressed_are_refused_at_once_and_never_appended(
    raw: RawPeer, make_topic: Callable[..., str], bootstrap_servers: str
) -> None:
    """A request of a few kilobytes causes the work of 160 MiB at most, and other clients are served meanwhile."""
    bombed = make_topic(compression_type="gzip", compression_gzip_level="1")
    other = make_topic(compression_type="gzip")
    bomb = batch_of(bytes(31 << 20), codec=Codec.ZSTD)
    assert len(bomb) < 10_000
    with RawPeer(int(bootstrap_servers.rpartition(":")[2])) as client:
        client.send(produce_frame([(bombed, None, [(0, bomb)] * 200)], acks=1))
        assert raw.produce(other, batch_of(random.Random(1).randbytes(20_000)), acks=1).error_code == 0
        assert raw.end_offset(bombed) <= 5
        answer = client.frame()
    assert answer is not None
    results = produce.decode_response(9, answer).topics[0][2]
    assert [one.error_code for one in results] == [0] * 5 + [REQUEST_TIMED_OUT] * 195
    assert raw.produce(bombed, batch_of(b"last")).base_offset == 5
    assert raw.end_offset(bombed) == 6


def test_a_client_that_sends_faster_than_its_batches_are_recompressed_is_not_refused(
    raw: RawPeer, make_topic: Callable[..., str], bootstrap_servers: str
) -> None:
    """Its next request waits instead: 40 requests take 640 MiB decompressed, four times its share."""
    topic = make_topic(compression_type="lz4", max_message_bytes="2000000")
    batch = batch_of(bytes(16 << 20), codec=Codec.ZSTD)
    count = 40
    with RawPeer(int(bootstrap_servers.rpartition(":")[2])) as client:
        for number in range(count):
            client.send(produce_frame([(topic, None, [(0, batch)])], acks=1, correlation_id=number + 1))
        for number in range(count):
            answer = client.frame()
            assert answer is not None
            (result,) = produce.decode_response(9, answer).topics[0][2]
            assert (result.error_code, result.base_offset) == (0, number)
