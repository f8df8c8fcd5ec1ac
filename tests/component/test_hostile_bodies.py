"""Hostile bodies of every protocol: no request keeps the others waiting, and what holds the event loop is named.

The time for which a request holds the loop is measured on the processor time of the broker's thread, because a busy
machine lengthens every other time.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import socket
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest
from crc32c import crc32c

import mansio
from mansio.api.asgi.json_bodies import PART_BYTES, PIECE_BYTES
from mansio.api.http.monitors import EventLoopMonitor
from mansio.broker.services.publish_records import RECORDS_PER_STEP
from mansio.broker.services.statistics import LoopHolds
from mansio.errors import MessageTooLarge
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.clock import HostClock
from mansio.host.item_turns import ITEMS_PER_LOOK, ItemTurns
from mansio.node.embedded import EmbeddedBroker
from mansio.testing import TestBroker
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.record_reader import read_records
from support.hostile_bodies import (
    ALL,
    GRPC,
    HTTP,
    KAFKA,
    PRODUCE,
    SQS,
    Addresses,
    HostileBody,
    kafka_request,
    kafka_text,
    send,
)
from support.loop_watch import HOLD_S_MAX, LoopWatch, frozen_garbage
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.testing.broker import TestBroker as Broker

JSON: Final = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with TestBroker() as started:
        started.client().admin.create_topic("hostile")
        yield started


@pytest.fixture(scope="module")
def addresses(broker: Broker) -> Addresses:
    return Addresses.of(broker)


@pytest.fixture
def http(broker: Broker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.http_url, timeout=scaled(20)) as client:
        yield client


def check(broker: Broker, addresses: Addresses, hostile: HostileBody) -> None:
    body = hostile.make()
    gc.collect()
    watch = LoopWatch(broker)
    try:
        answer = send(addresses, hostile, body)
    finally:
        watch.stop()
    if hostile.is_refused:
        assert re.fullmatch("4..|closed|[A-Z_]+", answer), answer
        assert answer not in ("OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN"), answer
    else:
        assert answer in ("200", "OK", "NOT_FOUND", "answered", "closed"), answer
    assert watch.held_s_max < scaled(HOLD_S_MAX), f"{watch.held_s_max:.3f} s"


def named(bodies: tuple[HostileBody, ...], *names: str) -> list[HostileBody]:
    return [each for each in bodies if each.name in names]


@pytest.mark.parametrize(
    "hostile",
    [
        *named(HTTP, "empty records in gzip", "announced and not sent"),
        *named(SQS, "empty entries"),
        *named(GRPC, "many empty records"),
        *named(KAFKA, "unknown tagged fields"),
    ],
    ids=lambda each: f"{each.protocol} {each.name}",
)
def test_a_hostile_body_keeps_no_client_waiting(
    broker: Broker, addresses: Addresses, hostile: HostileBody
) -> None:
    check(broker, addresses, hostile)


@pytest.mark.full
@pytest.mark.parametrize(
    "hostile",
    ALL,
    ids=lambda each: f"{each.protocol} {each.name}",
)
def test_each_hostile_body_keeps_no_client_waiting(
    broker: Broker, addresses: Addresses, hostile: HostileBody
) -> None:
    check(broker, addresses, hostile)


FEATURES: Final = {
    "compaction": {"cleanup.policy": "compact"},
    "delays": {"mansio.delay.enable": "true"},
    "priorities": {"mansio.priority.enable": "true"},
    "deduplication": {"mansio.dedup.ms": "60000"},
}
FEATURE_HEADERS: Final = {
    "compaction": ("h", b"%d"),
    "delays": ("mansio-delay-ms", b"%d"),
    "priorities": ("mansio-priority", b"high"),
    "deduplication": ("mansio-dedup-id", b"%d"),
}


def produced(topic: str, batch: bytes) -> bytes:
    """Return a Produce request with one batch for partition 0."""
    body = b"\xff\xff" + struct.pack(">hii", -1, 60_000, 1) + kafka_text(topic.encode())
    return kafka_request(PRODUCE, 7, body + struct.pack(">iii", 1, 0, len(batch)) + batch, is_flexible=False)


def many_records(feature: str, count: int, codec: Codec) -> bytes:
    name, value = FEATURE_HEADERS[feature]
    values = [value % each if b"%" in value else value for each in range(count)]
    return build_batch([(0, b"k", b"v", [(name, each)]) for each in values], codec=codec)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker with threads of its own: in `TestBroker` all work is on the event loop."""
    with EmbeddedBroker(tmp_path_factory.mktemp("hostile") / "data") as started, frozen_garbage():
        yield started


def produce_watched(broker: EmbeddedBroker, feature: str, batch: bytes) -> tuple[int, float]:
    """Produce a batch to a topic with the feature; return the error code, and how long the loop was held."""
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic(feature, partitions=1, config=FEATURES[feature], exist_ok=True)
    request = produced(feature, batch)
    gc.collect()
    watch = LoopWatch(broker)
    try:
        host, _, port = broker.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=scaled(60)) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            answer = connection.makefile("rb").read(4 + 4 + 4 + 2 + len(feature) + 4 + 4 + 2)
    finally:
        watch.stop()
    return struct.unpack(">h", answer[-2:])[0], watch.held_s_max


def test_a_batch_of_too_many_records_for_a_feature_is_refused_before_it_is_decompressed(
    embedded: EmbeddedBroker,
) -> None:
    batch = bytearray(build_batch([(0, b"k", bytes(16 << 20), ())], codec=Codec.ZSTD))
    struct.pack_into(">i", batch, 23, 100_000)  # the last offset delta
    struct.pack_into(">i", batch, 57, 100_001)  # the number of records
    struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
    for feature in FEATURES:
        code, held_s = produce_watched(embedded, feature, bytes(batch))
        assert code == MessageTooLarge.kafka_code
        assert held_s < scaled(HOLD_S_MAX), f"{feature}: {held_s:.3f} s"


@pytest.mark.parametrize("feature", FEATURES)
def test_a_small_batch_that_decompresses_to_much_does_not_hold_the_loop(
    embedded: EmbeddedBroker, feature: str
) -> None:
    batch = build_batch([(0, b"k", bytes(40 << 20), ())], codec=Codec.ZSTD)
    code, held_s = produce_watched(embedded, feature, batch)
    assert code == 0
    assert held_s < scaled(HOLD_S_MAX), f"{held_s:.3f} s"


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
def test_a_batch_with_all_that_a_feature_accepts_does_not_hold_the_loop(
    embedded: EmbeddedBroker, feature: str
) -> None:
    is_limited = feature in ("delays", "deduplication")
    for batch, expected in (
        (build_batch([(0, b"k", bytes((128 << 20) - 200), ())], codec=Codec.GZIP), 0),
        (many_records(feature, 100_000, Codec.ZSTD), MessageTooLarge.kafka_code if is_limited else 0),
        (many_records(feature, 10_000, Codec.GZIP), 0),
        (build_batch([(0, b"k", b"", [("mansio-de", b"")] * 2_000_000)], codec=Codec.ZSTD), None),
    ):
        code, held_s = produce_watched(embedded, feature, batch)
        assert expected in (code, None)
        assert held_s < scaled(HOLD_S_MAX), f"{held_s:.3f} s"


@pytest.mark.parametrize(
    ("count", "value_bytes"),
    [
        (2, 20 << 20),
        pytest.param(2, 60 << 20, marks=pytest.mark.full),
        pytest.param(10_000, 1, marks=pytest.mark.full),
    ],
)
def test_a_batch_that_is_rebuilt_without_its_repeats_does_not_hold_the_loop(
    embedded: EmbeddedBroker, count: int, value_bytes: int
) -> None:
    def new_batch(records: int) -> bytes:
        ids = [b"%d-%d-%d" % (count, value_bytes, each) for each in range(records)]
        value = bytes(value_bytes)
        return build_batch([(0, None, value, [("mansio-dedup-id", each)]) for each in ids], codec=Codec.ZSTD)

    batch = new_batch(count)
    assert produce_watched(embedded, "deduplication", new_batch(count // 2))[0] == 0
    code, held_s = produce_watched(embedded, "deduplication", batch)
    assert code == 0
    assert held_s < scaled(HOLD_S_MAX), f"{held_s:.3f} s"
    if value_bytes > 1:  # otherwise the comparison of many ids takes a part of this time
        began = time.thread_time()
        build_batch([record[1:] for record in read_records(batch)[: count // 2]], codec=Codec.ZSTD)
        assert held_s < (time.thread_time() - began) / 2


def test_eleven_and_five_million_entries_have_the_same_error(broker: Broker, addresses: Addresses) -> None:
    headers = {"content-type": "application/x-amz-json-1.0", "x-amz-target": "AmazonSQS.DeleteMessageBatch"}
    start = b'{"QueueUrl":"http://localhost/q","Entries":['
    with httpx.Client(base_url=broker.sqs_url, timeout=scaled(20)) as sqs:
        for count in (1_001, 80_000, 300_000):
            answer = sqs.post("/", content=start + b"{}," * count + b"{}]}", headers=headers)
            assert answer.json()["__type"].endswith("TooManyEntriesInBatchRequest"), answer.text
        form = {"authorization": "x", "content-type": "application/x-www-form-urlencoded"}
        answer = sqs.post("/", content=b"Action=DeleteMessageBatch" + b"&a=1" * 100_000, headers=form)
        assert "TooManyEntriesInBatchRequest" in answer.text, answer.text


@pytest.mark.parametrize("count", [3, 999, 9_999])
def test_a_repeated_key_is_refused_and_named(http: httpx.Client, count: int) -> None:
    records = b'{"value":"' + b"x" * 50 + b'"},'
    for last in (b'{"value":"a","value":"b"}', b'{"value":"a","headers":{"h":"1","h":"2"}}'):
        answer = http.post(
            "/v1/topics/hostile/records/batch",
            content=b'{"records":[' + records * count + last + b"]}",
            headers=JSON,
        )
        assert answer.status_code == 400
        assert "twice" in answer.json()["detail"], answer.text
    answer = http.post("/v1/topics", content=b'{"name":"a","name":"b"}', headers=JSON)
    assert answer.status_code == 400
    assert "'name'" in answer.json()["detail"]


@pytest.mark.parametrize("count", [1_000, 4_000])  # parsed in parts; element by element
def test_large_batches_have_the_results_of_small_ones(http: httpx.Client, broker: Broker, count: int) -> None:
    topic = f"large-batches-{count}"
    path = f"/v1/topics/{topic}/records/batch"
    broker.client().admin.create_topic(topic, partitions=1)
    values = [{"value": f"{number:0100}"} for number in range(count)]
    others = [{"json": [number, {"},{": 1}], "key": "k", "headers": {"a": "b"}} for number in range(count)]
    half = count // 2
    sent: list[dict[str, Any]] = []
    for records in (values, others, values[:half] + others[:half]):
        answer = http.post(path, json={"records": records}, headers={"user-agent": "test"}).json()
        assert answer["failed"] == 0
        assert [each["offset"] for each in answer["records"]] == [*range(len(sent), len(sent) + count)]
        sent += records
    with broker.client().consume(topic, from_="earliest") as consumer:
        found = [next(consumer).value or b"" for _ in sent]
    assert [json.loads(value) if value[:1] == b"[" else value.decode() for value in found] == [
        each.get("json", each.get("value")) for each in sent
    ]
    bad = [*values[: count - 100], {"value": 7}, {"no": 1}]
    answer = http.post(path, json={"records": bad})
    assert answer.status_code == 400
    assert [each["pointer"] for each in answer.json()["errors"]] == [
        f"/records/{count - 100}/value",
        f"/records/{count - 99}/no",
    ]


def test_other_requests_run_between_the_parts_of_a_batch(
    http: httpx.Client, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is parsed in parts, and built and encoded in turns: a clock that is over at each look shows all of them."""
    broker.client().admin.create_topic("in-turns", partitions=1)
    turns = 0
    pause = ItemTurns.pause

    async def counted(self: ItemTurns) -> None:
        nonlocal turns
        turns += 1
        await pause(self)

    monkeypatch.setattr(ItemTurns, "pause", counted)
    monkeypatch.setattr("mansio.host.item_turns.TURN_S", 0.0)
    records = [{"value": f"{number:0100}", "key": "k", "headers": {"a": "b"}} for number in range(1_000)]
    body = json.dumps({"records": records}).encode()
    assert PART_BYTES < len(body) < PIECE_BYTES
    answer = http.post("/v1/topics/in-turns/records/batch", content=body, headers=JSON).json()
    assert answer["failed"] == 0
    steps = len(records) // ITEMS_PER_LOOK + len(records) // RECORDS_PER_STEP + len(body) // PART_BYTES
    assert turns >= steps


def exchange(broker: Broker, sent: bytes, *, url: str = "") -> bytes:
    """Send bytes; return the first answer."""
    host, _, port = (url or broker.http_url).removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=scaled(20)) as connection:
        connection.sendall(sent)
        found = b""
        while part := connection.recv(65_536):
            found += part
            head, _, rest = found.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if length is not None and len(rest) >= int(length[1]):
                break
        return found


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (413, b"POST /v1/topics/hostile/records HTTP/1.1\r\nHost: localhost\r\nContent-Type: a/b\r\n"
              b"Content-Length: 200000000\r\n\r\nx"),
        (404, b"GET /v1/no/such/path HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (404, b"GET /v1/ HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (405, b"PUT /v1/topics HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (400, b"GET /v1/%ff HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (400, b"no HTTP at all\r\n\r\n"),
        (431, b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 100_000 + b"\r\n\r\n"),
        (431, b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 4_000 + b"\r\n"),
    ],
    ids=["body announced", "path", "root", "method", "encoding", "not HTTP", "header", "headers"],
)  # fmt: skip
def test_every_refusal_is_problem_details(broker: Broker, status: int, sent: bytes) -> None:
    answer = exchange(broker, sent)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"content-type: application/problem+json" in answer.lower()
    assert b'"status":%d' % status in answer


def test_a_client_that_ends_within_a_body_leaves_no_traceback_and_lines_name_it(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.ListQueues\r\nContent-Length: 1000\r\n\r\n{"
    with caplog.at_level(logging.INFO):
        host, _, port = broker.sqs_url.removeprefix("http://").rpartition(":")
        peers = set()
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=scaled(20)) as connection:
                peers.add(f"127.0.0.1:{connection.getsockname()[1]}")
                connection.sendall(head)
        with socket.create_connection((host, int(port)), timeout=scaled(20)) as connection:
            peers.add(f"127.0.0.1:{connection.getsockname()[1]}")
            connection.sendall(b"no HTTP\r\n\r\n")
            assert connection.recv(1_000).startswith(b"HTTP/1.1 400")
        wait_until(
            lambda: b"200" in exchange(broker, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        )
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR], caplog.text
    (refused,) = [each for each in caplog.records if each.getMessage() == "invalid_http_request"]
    assert refused.mansio_fields["peer"] in peers  # type: ignore[attr-defined]


def test_the_line_of_a_stall_names_the_request_and_its_peer(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> tuple[EventLoopMonitor, LoopHolds]:
        scheduler, holds = AsyncioScheduler(asyncio.get_running_loop()), LoopHolds(HostClock())
        watch = EventLoopMonitor(scheduler, HostClock(), lambda: holds, stall_lag_ms_min=100)
        watch.start()

        async def request(busy_s: float) -> None:
            await asyncio.sleep(0)
            time.sleep(busy_s)  # noqa: ASYNC251 - it holds the loop

        await holds.measured(partial(request, 0.02), "http", lambda: ("GET /quick", "192.0.2.1:1"))
        await holds.measured(partial(request, 1.0), "grpc", lambda: ("Publish", "192.0.2.7:41000"))
        while not watch.stalls_total:  # noqa: ASYNC110 - a heartbeat counts it
            await asyncio.sleep(0.01)
        watch.stop()
        return watch, holds

    with caplog.at_level(logging.WARNING):
        watch, holds = asyncio.run(run())
    (line,) = [each for each in caplog.records if each.getMessage() == "event_loop_stalled"]
    known = line.mansio_fields  # type: ignore[attr-defined]
    assert (known["protocol"], known["request"], known["peer"]) == ("grpc", "Publish", "192.0.2.7:41000")
    assert watch.hold_ms_max == holds.hold_ms_max >= 1_000
    assert holds.take_recent() is None


def test_what_holds_the_loop_is_noted_with_request_and_peer(
    broker: Broker, addresses: Addresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mansio.broker.services.statistics.HOLD_S_MIN", 0.0)
    monkeypatch.setattr("mansio.api.kafka.connections.connection.HOLD_S_MIN", 0.0)
    noted: list[tuple[str, str, str]] = []
    monkeypatch.setattr(LoopHolds, "note", lambda _, _held_s, *what: noted.append(what))
    for hostile in (HTTP[-3], SQS[1], GRPC[2], KAFKA[0]):
        send(addresses, hostile, hostile.make())
    wait_until(lambda: len({protocol for protocol, _, _ in noted}) == 4)
    found = {protocol: (request, peer) for protocol, request, peer in noted}
    assert found["http"][0].startswith("POST /v1/topics/hostile/records")
    assert found["sqs"][0] == "AmazonSQS.DeleteMessageBatch"
    assert found["grpc"][0] == "Publish"
    assert found["kafka"][0] == "metadata"
    assert all("127.0.0.1" in peer for _, peer in found.values()), found


def test_a_measured_coroutine_returns_raises_and_is_cancelled_as_without(broker: Broker) -> None:
    async def run() -> None:
        holds = LoopHolds(HostClock())
        seen: list[str] = []

        async def work(how: str) -> str:
            try:
                await asyncio.sleep(0.001 if how != "wait" else 60)
            except asyncio.CancelledError:
                seen.append("cancelled")
                if how == "wait":
                    return "ended"
                raise
            if how == "raise":
                raise KeyError(how)
            return how

        def label() -> tuple[str, str]:
            return "r", "p"

        assert await holds.measured(partial(work, "return"), "http", label) == "return"
        with pytest.raises(KeyError):
            await holds.measured(partial(work, "raise"), "http", label)
        task = asyncio.ensure_future(holds.measured(partial(work, "wait"), "http", label))
        await asyncio.sleep(0.001)
        task.cancel()
        assert await task == "ended"
        assert seen == ["cancelled"]
        unstarted = asyncio.ensure_future(holds.measured(partial(work, "wait"), "http", label))
        unstarted.cancel()  # before its first step: no coroutine is left over, which Python would report
        with pytest.raises(asyncio.CancelledError):
            await unstarted

    asyncio.run(run())
