"""Refused requests leave nothing behind: no error object is alive after them, although the cyclic collector is off.

An error that is stored as a value with its traceback refers to the frames that raised it, and those to the value: such
a cycle holds the request's memory until the collector runs, which a broker does rarely. Requests of every API, route,
method and action are repeated, and the errors alive are counted after each round.
"""

from __future__ import annotations

import gc
import http.client
import json
import logging
import re
import time
from collections import Counter
from contextlib import closing, suppress
from random import Random
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode, urlsplit

import grpc
import pytest

from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.http.v1.routes import OPERATIONS
from mansio.api.sqs.shapes import REQUESTS
from mansio.testing import TestBroker
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.codec import messages
from mansio.wire.codec.schema_compiler import schema_fields
from mansio.wire.headers import request_header
from support.machine import scaled
from support.raw_peer import RawPeer
from unit.wire.kio_oracle import kio_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.wire.batch.record_batch import NewRecord

WARM_UP_ROUNDS: Final = 2
ROUNDS: Final = 3
WAIT_MS: Final = 5
TOPICS: Final = {
    "plain": {},
    "delayed": {"mansio.delay.enable": "true"},
    "once": {"mansio.dedup.ms": "60000"},
    "compacted": {"cleanup.policy": "compact"},
    "prioritized": {"mansio.priority.enable": "true"},
    "created-time": {"message.timestamp.before.max.ms": "1000"},
    "small": {"max.message.bytes": "200"},
}
GOOD: Final[NewRecord] = (1_700_000_000_000, b"key", b"value", [])
BAD_RECORDS: Final = {
    "delay": (0, b"k", b"v", [("mansio-delay-ms", b"soon")]),
    "no key": (0, None, b"v", []),
    "priority": (0, b"k", b"v", [("mansio-priority", b"urgent")]),
    "deduplication id": (0, b"k", b"v", [("mansio-dedup-id", b"x" * 2000)]),
    "large": (0, b"k", bytes(1000), []),
}
NAMES: Final = ("plain", "none", "", "no/such name")


class Clients:
    """Connections to one broker: a request on a connection that the broker closed is made on another."""

    def __init__(self, broker: TestBroker) -> None:
        self._broker = broker
        self._port = int(broker.bootstrap_servers.rpartition(":")[2])

    def kafka(self, frame: bytes) -> None:
        with RawPeer(self._port) as peer:
            peer.send(len(frame).to_bytes(4, "big") + frame)
            peer.socket.shutdown(1)  # a request that waits for members ends with its connection
            with suppress(TimeoutError, OSError):
                while peer.frame() is not None:
                    pass

    def http(self, url: str, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> None:
        line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=scaled(30))
        with closing(line):
            line.request(method, path, body, {"X-Mansio-Request": "1", **headers})
            response = line.getresponse()
            if response.status != 200 or "event-stream" not in response.headers.get("Content-Type", ""):
                response.read()


def errors_alive() -> Counter[str]:
    """Errors that this process holds, by class and message, without those of the test's own clients."""
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        if isinstance(one, BaseException) and not isinstance(one, grpc.RpcError):
            found[f"{type(one).__name__}: {str(one)[:200]}"] += 1
    return found


def settled() -> Counter[str]:
    """Errors alive when what the last requests left running has ended: their number no longer falls."""
    fewest = errors_alive()
    for _ in range(5):
        time.sleep(0.05)
        found = errors_alive()
        if found.total() < fewest.total():
            fewest = found
    return fewest


def assert_leaves_nothing(one_round: Callable[[], object]) -> None:
    """Repeat requests with the collector off; no error may be alive afterwards for each round."""
    for _ in range(WARM_UP_ROUNDS):
        one_round()
    gc.collect()
    gc.disable()
    logging.disable()  # pytest keeps log records, with their errors
    try:
        # The last error of a connection or a log is kept, once. On a loaded machine several connections may end in the
        # same rounds: errors that are kept for each round are there after further rounds, too.
        kept = _left_by_each_round(one_round)
        if kept:
            kept = {name: count for name, count in _left_by_each_round(one_round).items() if name in kept}
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
    assert not kept, kept


def _left_by_each_round(one_round: Callable[[], object]) -> dict[str, int]:
    before = settled()
    for _ in range(ROUNDS):
        one_round()
    return {name: count for name, count in (settled() - before).items() if count >= ROUNDS}


# Requests


def kafka_field(random: Random, field: Any) -> Any:
    if field.is_nullable and random.random() < 0.15 and field.kafka_type not in ("uuid", "datetime_i64"):
        return None
    if field.is_array:
        return [kafka_item(random, field) for _ in range(random.choice((0, 1, 1, 2)))]
    return kafka_item(random, field)


def kafka_item(random: Random, field: Any) -> Any:
    kind = field.kafka_type
    if field.entity is not None:
        return {one.name: kafka_field(random, one) for one in schema_fields(field.entity) if one.tag is None}
    if kind == "bool":
        return random.random() < 0.5
    if kind == "string":
        return random.choice(NAMES)
    if kind in ("bytes", "records"):
        return random.choice((b"", b"\0\0", random.randbytes(80)))
    if kind == "uuid":
        return random.choice((None, random.randbytes(16)))
    if kind == "float64":
        return 0.5
    if kind == "error_code":
        return 0
    if "_ms" in field.name or "timeout" in field.name or kind.startswith(("timedelta", "datetime")):
        return WAIT_MS
    return random.choice((0, 1, -1, 7))


def kafka_requests(amount: int) -> Iterator[bytes]:
    """Requests of every API in its newest version with arbitrary fields, most of them refused."""
    for api in SUPPORTED_APIS.values():
        random = Random(int(api.key))
        for number in range(amount):
            version = api.max_version if number % 2 == 0 else api.min_version
            entity = messages._schema(api.key, version, messages.REQUEST)
            fields = {one.name: kafka_field(random, one) for one in schema_fields(entity) if one.tag is None}
            if api.key in (ApiKey.CREATE_TOPICS, ApiKey.CREATE_PARTITIONS):
                fields["validate_only"] = True
            head = request_header(api.key, version, number, "refused")
            try:
                yield head + kio_bytes(entity, fields)
            except Exception:  # noqa: BLE001 - Mansio's own APIs are not kio's
                out = bytearray()
                messages._writer(api.key, version, messages.REQUEST)(out, fields)
                yield head + bytes(out)


def refused_batches() -> Iterator[tuple[str, bytes]]:
    """Batches that their topic, or every topic, refuses."""
    sound = build_batch([GOOD])
    for topic in TOPICS:
        for record in BAD_RECORDS.values():
            yield topic, build_batch([record] * 3)
        yield topic, sound[:-1]
        yield topic, sound[:-1] + b"?"
        yield topic, sound[:16] + b"\1" + sound[17:]
    yield "none", sound


def http_requests() -> Iterator[tuple[str, str, bytes | None, dict[str, str]]]:
    """Every method on every path, with names that exist and that do not, and bodies of several kinds."""
    bodies = (
        None,
        b"{",
        b"{}",
        b'{"unknown": 1}',
        b'{"records": [{"value": "v", "delay_ms": 1}], "partitions": 0}',
    )
    for operation in OPERATIONS:
        for name in ("plain", "none"):
            path = operation.path
            for variable in ("topic", "group", "name", "id", "transactional_id"):
                path = path.replace(f"{{{variable}}}", quote(name, safe=""))
            path = re.sub(r"{[a-z_]+(:[a-z]+)?}", "7", path)
            for body in bodies if operation.method not in ("GET", "DELETE") else (None,):
                for query in ("", "?wait_ms=5", "?unknown=1"):
                    if operation.method == "DELETE" and name == "plain":
                        continue
                    yield operation.method, f"/v1{path}{query}", body, {"Content-Type": "application/json"}


def sqs_requests(url: str) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Every action of both protocols, without parameters and with a queue that does not exist."""
    for action in REQUESTS:
        for parameters in (
            {},
            {"QueueUrl": f"{url}/000000000000/none", "QueueName": "no/such name", "ReceiptHandle": "?"},
            {"QueueUrl": f"{url}/000000000000/plain", "ReceiptHandle": "?", "MessageBody": "", "Entries": []},
        ):
            head = {"X-Amz-Target": f"AmazonSQS.{action}", "Content-Type": "application/x-amz-json-1.0"}
            yield json.dumps(parameters).encode(), head
            form = urlencode(
                {"Action": action, **{k: v for k, v in parameters.items() if isinstance(v, str)}}
            )
            yield form.encode(), {"Content-Type": "application/x-www-form-urlencoded"}


def grpc_requests() -> Iterator[tuple[Any, bytes]]:
    """Every method with an empty request, one with names that do not exist, and bytes that cannot be decoded."""
    for method in pb.DESCRIPTOR.services_by_name["Mansio"].methods:
        yield method, b""
        yield method, b"\xff"
        filled = method.input_type._concrete_class()
        for field in method.input_type.fields:
            if field.type == field.TYPE_STRING and not field.is_repeated:
                setattr(filled, field.name, "none")
        yield method, filled.SerializeToString()


# Tests


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(auto_create_topics_enable=False) as started:
        client = started.client()
        for name, config in TOPICS.items():
            client.admin.create_topic(name, partitions=1, config=config)
        client.close()
        yield started


@pytest.fixture
def clients(broker: TestBroker) -> Clients:
    return Clients(broker)


@pytest.mark.full
def test_refused_batches_leave_no_error_alive(broker: TestBroker, clients: Clients) -> None:
    batches = list(refused_batches())

    def one_round() -> None:
        with RawPeer(clients._port) as peer:
            for topic, batch in batches:
                assert peer.produce(topic, batch) is not None

    assert_leaves_nothing(one_round)


@pytest.mark.full
def test_refused_kafka_requests_leave_no_error_alive(clients: Clients) -> None:
    frames = list(kafka_requests(8))
    assert_leaves_nothing(lambda: [clients.kafka(frame) for frame in frames])


@pytest.mark.full
def test_refused_http_requests_leave_no_error_alive(broker: TestBroker, clients: Clients) -> None:
    requests = list(http_requests())
    url = broker.http_url
    assert_leaves_nothing(lambda: [clients.http(url, *request) for request in requests])


@pytest.mark.full
def test_refused_sqs_requests_leave_no_error_alive(broker: TestBroker, clients: Clients) -> None:
    url = broker.sqs_url
    requests = list(sqs_requests(url))
    assert_leaves_nothing(lambda: [clients.http(url, "POST", "/", *request) for request in requests])


@pytest.mark.full
def test_refused_grpc_calls_leave_no_error_alive(broker: TestBroker) -> None:
    requests = list(grpc_requests())
    with grpc.insecure_channel(broker.grpc_address) as channel:

        def one_round() -> None:
            for method, data in requests:
                path = f"/{method.containing_service.full_name}/{method.name}"
                with suppress(grpc.RpcError):
                    if method.client_streaming:
                        for _ in channel.stream_stream(path)(iter([data]), timeout=scaled(1)):
                            pass
                    else:
                        channel.unary_unary(path)(data, timeout=scaled(30))

        assert_leaves_nothing(one_round)
