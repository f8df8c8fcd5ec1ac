"""Leases of a partition that another broker leads: the leader and the coordinator of the group see id and address of
the client, whichever protocol it speaks."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, Final

import grpc
import httpx
import pytest

import mansio
from mansio.api.grpc import mansio_pb2 as pb
from support.cluster import cluster
from support.fault_proxy import fault_proxy
from support.machine import scaled
from support.paths import ROOT
from support.recording_serve import RecordedRequest, recorded_requests
from support.waiting import wait_until
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.cluster import Cluster

pytestmark = [pytest.mark.full, pytest.mark.row("A3", "C4"), pytest.mark.timeout(240)]

RECORDING_SERVE: Final = str(ROOT / "tests" / "support" / "recording_serve.py")
CLIENT_HOST: Final = "127.0.0.2"
"""Brokers connect from 127.0.0.1."""
TIMEOUT_S: Final = 30
TOPIC: Final = "led"
QUEUE: Final = "queue"
GROUPS_MAX: Final = 30
"""Number of groups of which certainly one is coordinated by the broker that a client does not ask."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("callers")
    commands = {
        node_id: [sys.executable, RECORDING_SERVE, str(requests_file(directory, node_id))]
        for node_id in (1, 2)
    }
    with cluster(directory, brokers=2, commands=commands, http=True, sqs=True, grpc=True) as one:
        create_topic(one, TOPIC, 1, copies=2)
        yield one


def requests_file(directory: Path, node_id: int) -> Path:
    return directory / f"requests-{node_id}"


def other(node_id: int) -> int:
    return 3 - node_id


def client_over_http(client_id: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(local_address=CLIENT_HOST),
        headers={
            "Mansio-Client-Id": client_id,
            "Authorization": f"AWS4-HMAC-SHA256 Credential={client_id}/20300101/eu/sqs/aws4_request",
        },
        timeout=scaled(TIMEOUT_S),
    )


def publish(one: Cluster, topic: str) -> None:
    with mansio.blocking.connect(one.bootstrap_servers) as client:
        client.publish(topic, b"v", partition=0)


def check_seen(one: Cluster, node_id: int, client_id: str, *apis: str) -> None:
    """Check that a broker has run requests of these APIs, and all of the client, with its id and address."""
    expected = {RecordedRequest(api, client_id, CLIENT_HOST) for api in apis}
    found = recorded_requests(requests_file(one.directory, node_id))
    leases = {each for each in found if each.api in apis and client_id == each.client_id}
    assert leases == expected, found


async def over_http(one: Cluster, asked: int) -> None:
    base = f"{one.brokers[asked].http_url}/v1/groups/http"
    async with client_over_http("http-client") as http:
        body = {"topics": [TOPIC], "max_records": 1, "wait_ms": 10_000}
        records: list[dict[str, Any]] = []
        while not records:
            received = await http.post(f"{base}/receive", json=body)
            assert received.status_code == 200, received.text
            records = received.json()["records"]
        (record,) = records
        acknowledged = await http.post(f"{base}/ack", json={"receipts": [record["receipt"]]})
        assert acknowledged.json() == {"acknowledged": 1, "errors": []}


async def over_grpc(one: Cluster, asked: int, is_released: Callable[[], bool]) -> None:
    port = int(one.grpc_addresses[asked].rpartition(":")[2])
    metadata = [("mansio-client-id", "grpc-client")]
    async with (
        fault_proxy(port, source=CLIENT_HOST) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        stream: Any = channel.stream_stream(
            "/mansio.v1.Mansio/Receive",
            pb.ReceiveRequest.SerializeToString,
            pb.ReceiveResponse.FromString,
        )(metadata=metadata, timeout=scaled(TIMEOUT_S))
        opening = pb.ReceiveOpen(group="grpc", topics=[TOPIC], max_records=1)
        await stream.write(pb.ReceiveRequest(open=opening, credits=1))
        (record,) = (await stream.read()).records
        acknowledge = channel.unary_unary(
            "/mansio.v1.Mansio/Ack", pb.AckRequest.SerializeToString, pb.AcknowledgeResponse.FromString
        )
        request = pb.AckRequest(group="grpc", receipts=[record.receipt])
        answer = await acknowledge(request, metadata=metadata, timeout=scaled(TIMEOUT_S))
        assert not answer.failed
        stream.cancel()  # its leases are released
        await asyncio.to_thread(wait_until, is_released, TIMEOUT_S)


async def over_sqs(one: Cluster, asked: int) -> None:
    url = f"{one.sqs_urls[asked]}/000000000000/{QUEUE}"

    async def call(http: httpx.AsyncClient, action: str, **parameters: Any) -> dict[str, Any]:
        headers = {"X-Amz-Target": f"AmazonSQS.{action}", "Content-Type": "application/x-amz-json-1.0"}
        answer = await http.post(one.sqs_urls[asked], json={"QueueUrl": url, **parameters}, headers=headers)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    async with client_over_http("sqs-client") as http:
        received: dict[str, Any] = {}
        while not received:
            received = await call(http, "ReceiveMessage", WaitTimeSeconds=10)
        (message,) = received["Messages"]
        await call(http, "DeleteMessage", ReceiptHandle=message["ReceiptHandle"])


def test_the_leader_sees_the_client_that_receives_and_acknowledges_over_http(two: Cluster) -> None:
    leader = two.leader(TOPIC)
    configure(two, "http")
    publish(two, TOPIC)
    asyncio.run(over_http(two, other(leader)))
    check_seen(two, leader, "http-client", "RECEIVE_RECORDS", "ACKNOWLEDGE_RECORDS")


def test_the_leader_sees_the_client_that_receives_acknowledges_and_releases_over_grpc(two: Cluster) -> None:
    leader = two.leader(TOPIC)
    configure(two, "grpc")
    publish(two, TOPIC)
    release = RecordedRequest("RELEASE_LEASES", "grpc-client", CLIENT_HOST)

    def is_released() -> bool:
        return release in recorded_requests(requests_file(two.directory, leader))

    asyncio.run(over_grpc(two, other(leader), is_released))
    check_seen(two, leader, "grpc-client", "RECEIVE_RECORDS", "ACKNOWLEDGE_RECORDS", "RELEASE_LEASES")


def configure(one: Cluster, group: str) -> None:
    with mansio.blocking.connect(one.bootstrap_servers) as client:
        client.admin.alter_group_config(group, {"share.auto.offset.reset": "earliest"})


def test_the_leader_sees_the_client_that_receives_and_deletes_over_sqs(two: Cluster) -> None:
    answer = httpx.post(
        two.sqs_urls[1],
        json={"QueueName": QUEUE},
        headers={"X-Amz-Target": "AmazonSQS.CreateQueue", "Content-Type": "application/x-amz-json-1.0"},
        timeout=scaled(TIMEOUT_S),
    )
    assert answer.status_code == 200, answer.text
    publish(two, QUEUE)
    leader = two.leader(QUEUE)
    asyncio.run(over_sqs(two, other(leader)))
    check_seen(two, leader, "sqs-client", "RECEIVE_RECORDS", "ACKNOWLEDGE_RECORDS")


def test_the_coordinator_sees_and_logs_the_client_whose_group_it_refuses(two: Cluster) -> None:
    asked = 1

    def refused() -> list[str]:
        lines = two.brokers[other(asked)].text().splitlines()
        return [line for line in lines if "api=register_share_group" in line and "consumers-" in line]

    async def receive(http: httpx.AsyncClient, group: str) -> None:
        url = f"{two.brokers[asked].http_url}/v1/groups/{group}/receive"
        body = {"topics": [TOPIC], "max_records": 1, "wait_ms": 0}
        await http.post(url, json=body)

    async def scenario() -> None:
        async with mansio.connect(two.bootstrap_servers) as client, client_over_http("named") as http:
            for number in range(GROUPS_MAX):
                group = f"consumers-{number}"
                await client.admin.reset_offsets(group, [TOPIC], to="earliest")
                await receive(http, group)
                if refused():
                    return

    asyncio.run(scenario())
    check_seen(two, other(asked), "named", "REGISTER_SHARE_GROUP")
    assert refused()
    assert all(f"client={CLIENT_HOST} client_id=named" in line for line in refused())
