"""The id and the address of a client of HTTP, gRPC and SQS reach the handlers of Kafka requests, and with them quotas
and logs."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc
import httpx
import pytest

from mansio.api.grpc import mansio_pb2 as pb
from mansio.testing.broker import TestBroker
from mansio.wire.api_versions import ApiKey
from mansio.wire.headers import read_request_header
from support.machine import scaled
from support.sqs import sqs_client
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOST: Final = "127.0.0.1"
TIMEOUT_S: Final = 30
READ_RATE: Final = 1_000
READ_BYTES: Final = 10_000

_numbers = itertools.count(1)


class Request(NamedTuple):
    """A Kafka request as its handler gets it."""

    api_key: int
    client_id: str | None
    host: str


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(quota_burst_ms=100) as started:
        yield started


@pytest.fixture
def requests(broker: TestBroker, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that the broker has begun, in their order."""
    server = broker._running().server
    begin, begun = server.begin, []

    def recorded(connection: Any, frame: memoryview) -> Any:
        header = read_request_header(frame)
        begun.append(Request(header.api_key, header.client_id, connection.client_host))
        return begin(connection, frame)

    monkeypatch.setattr(server, "begin", recorded)
    return begun


def create_over_http(broker: TestBroker, name: str, client_id: str) -> None:
    answer = httpx.post(
        f"{broker.http_url}/v1/topics",
        json={"name": name},
        headers={"Mansio-Client-Id": client_id},
        timeout=scaled(TIMEOUT_S),
    )
    assert answer.status_code == 201, answer.text


def create_over_grpc(broker: TestBroker, name: str, client_id: str) -> None:
    with grpc.insecure_channel(broker.grpc_address) as channel:
        create = channel.unary_unary(
            "/mansio.v1.Mansio/CreateTopic", pb.CreateTopicRequest.SerializeToString, pb.Topic.FromString
        )
        create(
            pb.CreateTopicRequest(name=name),
            metadata=[("mansio-client-id", client_id)],
            timeout=scaled(TIMEOUT_S),
        )


def create_over_sqs(broker: TestBroker, name: str, client_id: str) -> None:
    sqs_client(broker.sqs_url, key_id=client_id).create_queue(QueueName=name)


@pytest.mark.row("A3")
@pytest.mark.parametrize("create", [create_over_http, create_over_grpc, create_over_sqs])
def test_the_handler_sees_the_client_that_asked(
    broker: TestBroker, requests: list[Request], create: Callable[[TestBroker, str, str], None]
) -> None:
    client_id = f"client{next(_numbers)}"
    create(broker, f"created-by-{client_id}", client_id)
    created = [each for each in requests if each.api_key == ApiKey.CREATE_TOPICS]
    assert created == [Request(ApiKey.CREATE_TOPICS, client_id, HOST)]
    assert {each.client_id for each in requests} == {client_id}


def test_without_a_stated_id_the_user_agent_is_the_client_id(
    broker: TestBroker, requests: list[Request]
) -> None:
    headers = {"User-Agent": "curl/8"}
    answer = httpx.get(f"{broker.http_url}/v1/topics", headers=headers, timeout=scaled(TIMEOUT_S))
    assert answer.status_code == 200
    assert {each.client_id for each in requests} == {"curl/8"}


@pytest.mark.parametrize("client_id", ["", "x" * 101])
def test_an_invalid_client_id_is_refused(broker: TestBroker, client_id: str) -> None:
    answer = httpx.get(
        f"{broker.http_url}/v1/topics", headers={"Mansio-Client-Id": client_id}, timeout=scaled(TIMEOUT_S)
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["title"] == "InvalidRequest"


@pytest.mark.parametrize("wait_ms", [0, 100])
def test_a_client_over_its_quota_waits_for_its_read_and_others_do_not(
    broker: TestBroker, wait_ms: int
) -> None:
    client = broker.client()
    topic, slow = f"read-over-quota-{wait_ms}", f"client{next(_numbers)}"
    client.admin.create_topic(topic)
    client.publish(topic, b"x" * READ_BYTES)
    client.admin.quotas.set(client_id=slow, values={"consumer_byte_rate": READ_RATE})
    counters = broker._running().service.quotas.counters
    before = counters.fetch_throttled

    def read(client_id: str) -> httpx.Response:
        return httpx.get(
            f"{broker.http_url}/v1/topics/{topic}/partitions/0/records",
            params={"wait_ms": wait_ms},
            headers={"Mansio-Client-Id": client_id},
            timeout=scaled(TIMEOUT_S),
        )

    assert len(read("another").json()["records"]) == 1
    assert counters.fetch_throttled == before
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, slow)
        wait_until(lambda: counters.fetch_throttled > before, TIMEOUT_S)
        assert len(read("another").json()["records"]) == 1
        assert not reading.done()
        broker.clock.advance(seconds=READ_BYTES / READ_RATE + 1)
        assert len(reading.result(scaled(TIMEOUT_S)).json()["records"]) == 1
