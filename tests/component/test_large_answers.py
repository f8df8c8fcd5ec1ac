"""Large answers with records: no read or receive keeps the other clients of a broker waiting.

The time for which a request holds the loop is measured on the processor time of the broker's thread, because a busy
machine lengthens every other time.
"""

from __future__ import annotations

import base64
import gc
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

import mansio
from mansio.api.asgi.server import HttpServer
from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.grpc.server import GrpcServer
from mansio.api.http.app import build_app
from mansio.api.http.broker_stats import RunningBroker
from mansio.node.embedded import EmbeddedBroker
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch
from support.hostile_bodies import PRODUCE, kafka_request, kafka_text, send_kafka
from support.loop_watch import HOLD_S_MAX, LoopWatch, frozen_garbage
from support.machine import scaled
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE: Final = 60 << 20


class Content(NamedTuple):
    """A batch with large content. `make` returns its records: keys, values and headers."""

    name: str
    make: Callable[[], list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]]]


CONTENTS: Final = (
    Content("ASCII", lambda: [(b"k", b"x" * SIZE, [])]),
    Content("text", lambda: [(b"k", "ä€\U0001f600".encode() * (SIZE // 9), [])]),
    Content("bytes", lambda: [(b"k", b"\xff" * SIZE, [])]),
    Content("text with a wrong end", lambda: [(b"k", b"x" * SIZE + b"\xff", [])]),
    Content("escapes", lambda: [(b"k", b'\x01"\\' * (SIZE // 6), [])]),
    Content("JSON", lambda: [(b"k", b"[" + b"[]," * (SIZE // 3) + b"1]", [])]),
    Content("a key", lambda: [(b"k" * SIZE, b"v", [])]),
    Content("a header", lambda: [(None, None, [("name", b"\xff" * SIZE)])]),
    Content("headers", lambda: [(b"k", b"v", [(str(each), b"v") for each in range(900_000)])]),
    Content("headers of one name", lambda: [(b"k", b"v", [("name", None)] * 1_000_000)]),
    Content("small records", lambda: [(b"k", b"v", [("h", b"1")])] * 300_000),
    Content("records of 200 KiB", lambda: [(b"k", bytes(200 << 10), [])] * 300),
)


class Addresses(NamedTuple):
    kafka: str
    http: str
    grpc: str


async def in_loop(make: Callable[..., Any], *arguments: Any) -> Any:
    return make(*arguments)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedBroker, Addresses]]:
    """A broker with threads of its own: in `TestBroker` all work is on the event loop."""
    with EmbeddedBroker(tmp_path_factory.mktemp("answers") / "data") as started:
        broker = started._broker
        assert broker is not None
        running = RunningBroker(
            broker.service, broker.server, broker.clients, broker.listener_address, lambda: broker.is_ready
        )
        app = started._call(in_loop(build_app, running), scaled(20))
        http = HttpServer(app, "127.0.0.1", 0)
        rpc = GrpcServer(broker.service, broker.clients, "127.0.0.1", 0)
        host, port = started._call(http.start(), scaled(20))
        _, rpc_port = started._call(rpc.start(), scaled(20))
        with frozen_garbage():
            yield started, Addresses(started.address, f"http://{host}:{port}", f"{host}:{rpc_port}")
        for server in (http, rpc):
            started._call(server.stop(), scaled(20))


def stored(at: Addresses, content: Content) -> str:
    """Return the topic with a batch of this content."""
    topic = content.name.replace(" ", "-")
    with mansio.blocking.connect(at.kafka) as client:
        if topic in client.admin.list_topics():
            return topic
        client.admin.create_topic(topic, partitions=1)
    now_ms = int(time.time() * 1000)  # old records would expire while a test looks at them
    batch = build_batch([(now_ms, *each) for each in content.make()], codec=Codec.ZSTD)
    body = b"\xff\xff" + kafka_produce(topic, batch)
    assert send_kafka(at.kafka, kafka_request(PRODUCE, 7, body, is_flexible=False)) == "answered"
    return topic


def kafka_produce(topic: str, batch: bytes) -> bytes:
    head = (-1).to_bytes(2, "big", signed=True) + (60_000).to_bytes(4, "big") + (1).to_bytes(4, "big")
    return (
        head
        + kafka_text(topic.encode())
        + (1).to_bytes(4, "big")
        + bytes(4)
        + len(batch).to_bytes(4, "big")
        + batch
    )


def http_read(at: Addresses, topic: str, values: str) -> list[dict[str, Any]]:
    answer = httpx.get(
        f"{at.http}/v1/topics/{topic}/partitions/0/records",
        params={"values": values, "limit": 10_000},
        timeout=scaled(60),
    )
    assert answer.status_code == 200, answer.text[:500]
    found: list[dict[str, Any]] = answer.json()["records"]
    return found


def http_events(at: Addresses, topic: str, values: str) -> list[dict[str, Any]]:
    params = {"values": values, "from": "earliest"}
    with httpx.stream(
        "GET", f"{at.http}/v1/topics/{topic}/events", params=params, timeout=scaled(60)
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                return [json.loads(line[6:])]
    return []


def http_receive(at: Addresses, topic: str, values: str) -> list[dict[str, Any]]:
    group = f"{topic}-{values}"
    with mansio.blocking.connect(at.kafka) as client:
        client.admin.alter_group_config(group, {"share.auto.offset.reset": "earliest"})
    answer = httpx.post(
        f"{at.http}/v1/groups/{group}/receive",
        json={"topics": [topic], "values": values, "wait_ms": 20_000, "max_records": 1_000},
        timeout=scaled(60),
    )
    assert answer.status_code == 200, answer.text[:500]
    found: list[dict[str, Any]] = answer.json()["records"]
    return found


def channel_of(at: Addresses) -> grpc.Channel:
    return grpc.insecure_channel(at.grpc, [("grpc.max_receive_message_length", -1)])


def grpc_fetch(at: Addresses, topic: str, _values: str) -> list[Any]:
    with channel_of(at) as channel:
        call = channel.unary_unary("/mansio.v1.Mansio/Fetch")
        request = pb.FetchRequest(topic=topic, max_records=10_000)
        answer = pb.FetchResponse.FromString(call(request.SerializeToString(), timeout=scaled(60)))
    return list(answer.records)


def grpc_receive(at: Addresses, topic: str, _values: str) -> list[Any]:
    group = f"{topic}-grpc"
    with mansio.blocking.connect(at.kafka) as client:
        client.admin.alter_group_config(group, {"share.auto.offset.reset": "earliest"})
    with channel_of(at) as channel:
        call = channel.stream_stream("/mansio.v1.Mansio/Receive")
        opening = pb.ReceiveRequest(
            open=pb.ReceiveOpen(group=group, topics=[topic], max_records=10_000), credits=10_000
        )
        done = threading.Event()

        def requests() -> Iterator[bytes]:
            yield opening.SerializeToString()
            done.wait(scaled(60))

        answers = call(requests(), timeout=scaled(60))
        found = list(pb.ReceiveResponse.FromString(next(answers)).records)
        done.set()
        answers.cancel()
    return found


def check(broker: EmbeddedBroker, at: Addresses, content: Content, read: Any, values: str) -> None:
    topic = stored(at, content)
    gc.collect()
    watch = LoopWatch(broker)
    try:
        found = read(at, topic, values)
    finally:
        watch.stop()
    key, value, headers = content.make()[0]
    first = found[0]
    if isinstance(first, dict):
        given = first.get("value")
        if given is None and value is not None:
            given = base64.b64decode(first["base64"]) if "base64" in first else json.dumps(first["json"])
        is_same = (given.encode() if isinstance(given, str) else given) == value
        assert is_same, len(present(given))  # without a comparison of so many bytes in the report
        assert len(first["headers"]) == len({name for name, _ in headers})
    else:
        is_same = (first.value if first.HasField("value") else None) == value
        is_same = is_same and (first.key if first.HasField("key") else None) == key
        assert is_same, len(first.value)
        assert len(first.headers) == len(headers)
    assert watch.held_s_max < scaled(HOLD_S_MAX), f"{watch.held_s_max:.3f} s"


def test_a_read_of_a_large_record_keeps_no_client_waiting(
    addresses: tuple[EmbeddedBroker, Addresses],
) -> None:
    check(*addresses, CONTENTS[2], http_read, "auto")


@pytest.mark.full
@pytest.mark.parametrize("content", CONTENTS, ids=lambda each: each.name)
def test_a_read_of_each_content_keeps_no_client_waiting(
    addresses: tuple[EmbeddedBroker, Addresses], content: Content
) -> None:
    check(*addresses, content, http_read, "json" if content.name == "JSON" else "auto")


@pytest.mark.full
@pytest.mark.parametrize("content", [CONTENTS[2], CONTENTS[8]], ids=lambda each: each.name)
@pytest.mark.parametrize("read", [http_events, http_receive, grpc_fetch, grpc_receive])
def test_each_read_of_large_records_keeps_no_client_waiting(
    addresses: tuple[EmbeddedBroker, Addresses], content: Content, read: Any
) -> None:
    check(*addresses, content, read, "auto")


@pytest.mark.full
def test_a_client_of_http_1_0_gets_a_large_answer_without_chunks(
    addresses: tuple[EmbeddedBroker, Addresses],
) -> None:
    _, at = addresses
    topic = stored(at, CONTENTS[2])
    url = urlsplit(at.http)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=scaled(60)) as connection:
        connection.sendall(
            b"GET /v1/topics/%s/partitions/0/records?limit=10 HTTP/1.0\r\nHost: localhost\r\n\r\n"
            % topic.encode()
        )
        with connection.makefile("rb") as answer:
            head = b"".join(iter(answer.readline, b"\r\n")).lower()
            content = answer.read()
    assert b"transfer-encoding" not in head
    assert b"content-length: %d\r\n" % len(content) in head
    assert head.startswith(b"http/1.1 200"), content[:500]
    assert len(json.loads(content)["records"]) == 1


@pytest.mark.full
def test_a_client_that_accepts_a_large_answer_slowly_gets_all_of_it(
    addresses: tuple[EmbeddedBroker, Addresses], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, at = addresses
    topic = stored(at, CONTENTS[2])
    deadline_s = scaled(3)
    monkeypatch.setattr("mansio.api.asgi.connection.UNANSWERED_S_MAX", deadline_s)
    url = urlsplit(at.http)
    began = time.monotonic()
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=scaled(60)) as connection:
        connection.sendall(
            b"GET /v1/topics/%s/partitions/0/records?limit=10 HTTP/1.1\r\nHost: localhost\r\n\r\n"
            % topic.encode()
        )
        size, end = 0, b""
        while not end.endswith(b"\r\n0\r\n\r\n"):
            part = connection.recv(1 << 20)
            assert part, "the answer ends early"
            size += len(part)
            end = (end + part)[-16:]
            if time.monotonic() - began < 3 * deadline_s:
                time.sleep(deadline_s / 20)  # as a slow network does
    assert size > SIZE
    assert time.monotonic() - began > 2 * deadline_s
