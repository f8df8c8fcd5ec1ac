"""Names in paths over HTTP: a request reaches the object of exactly that name, or none."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import InvalidTopic
from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.blocking import Client

KEY = "share.record.lock.duration.ms"
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.lists(
        st.sampled_from(["a", "/", "..", ".", "%2F", "+", " ", "\0", "é", "config"]), min_size=1, max_size=4
    ).map("".join),
)


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started


@pytest.fixture(scope="module")
def client(broker: TestBroker) -> Iterator[Client]:
    with broker.client() as connected:
        connected.admin.create_topic("t", partitions=1)
        yield connected


def request(broker: TestBroker, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send a request whose path nothing on the way changes; return status and JSON body."""
    connection = http.client.HTTPConnection(urlsplit(broker.http_url).netloc, timeout=scaled(20))
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content) if content else None
    finally:
        connection.close()


@settings(max_examples=examples(10, 30))
@given(name=NAMES, neighbour=NAMES, lease_ms=st.integers(10_000, 20_000))
def test_the_settings_of_any_group_are_those_of_exactly_that_group(
    broker: TestBroker, client: Client, name: str, neighbour: str, lease_ms: int
) -> None:
    others = {neighbour, f"{name}/config", name.strip("/"), name.partition("/")[0]} - {name, ""}
    for other in others:
        client.admin.alter_group_config(other, {KEY: "25000"})
    client.admin.alter_group_config(name, {KEY: str(lease_ms)})
    path = f"/v1/groups/{quote(name, safe='')}/config"
    status, found = request(broker, "GET", path)
    assert (status, found["config"][KEY]) == (200, str(lease_ms))
    status, found = request(broker, "PATCH", path, {"config": {KEY: "21000"}})
    assert (status, found["config"][KEY]) == (200, "21000")
    for other in others:
        assert client.admin.describe_config(other, kind="group")[KEY].value == "25000"


def test_a_group_with_a_slash_is_described_and_deleted_and_no_other(
    broker: TestBroker, client: Client
) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    producer.produce("t", b"1")
    producer.flush()
    names = ["tail", "tail/", "billing", "billing/offsets", "billing/config", "a/../tail"]
    for offset, name in enumerate(names):
        consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": name})
        consumer.commit(offsets=[TopicPartition("t", 0, offset % 2)], asynchronous=False)
        consumer.close()
    for offset, name in enumerate(names):
        path = f"/v1/groups/{quote(name, safe='')}"
        status, found = request(broker, "GET", path)
        assert (status, found["group"]) == (200, name)
        status, found = request(broker, "GET", f"{path}/offsets")
        assert (status, found["offsets"][0]["offset"]) == (200, offset % 2)
    for name in ("tail/", "billing/offsets", "a/../tail"):
        assert request(broker, "DELETE", f"/v1/groups/{quote(name, safe='')}")[0] == 204
    left = {group.group_id for group in client.admin.list_groups()}
    assert set(names) & left == {"tail", "billing", "billing/config"}


def test_a_share_group_with_a_slash_receives(broker: TestBroker, client: Client) -> None:
    path = f"/v1/groups/{quote('team/w', safe='')}"
    status, _ = request(
        broker, "PATCH", f"{path}/config", {"config": {"share.auto.offset.reset": "earliest"}}
    )
    assert status == 200
    client.publish("t", b"work")
    status, found = request(broker, "POST", f"{path}/receive", {"topics": ["t"], "wait_ms": 10_000})
    assert status == 200
    assert found["records"]


def test_a_transactional_id_with_a_slash_is_described(broker: TestBroker, client: Client) -> None:
    for name in ("pay", "pay/terminate"):
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": name})
        producer.init_transactions()
        path = f"/v1/transactions/{quote(name, safe='')}"
        status, found = request(broker, "GET", path)
        assert (status, found["transactional_id"]) == (200, name)


@pytest.mark.parametrize("path", ["/v1/groups/", "/v1/groups//config", "/health/live/", "/health%2Flive"])
def test_an_empty_segment_or_another_spelling_of_the_slash_is_no_path(broker: TestBroker, path: str) -> None:
    assert request(broker, "GET", path)[0] == 404


def test_a_topic_that_collides_with_another_is_refused_over_every_protocol(
    broker: TestBroker, client: Client
) -> None:
    client.admin.create_topic("orders.fifo", partitions=1)
    with pytest.raises(InvalidTopic, match="collides"):
        client.admin.create_topic("orders_fifo")
    for validate_only in (True, False):
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        (result,) = admin.create_topics([NewTopic("orders_fifo", 1)], validate_only=validate_only).values()
        with pytest.raises(KafkaException) as refused:
            result.result()
        assert refused.value.args[0].code() == KafkaError.TOPIC_EXCEPTION
    status, found = request(broker, "POST", "/v1/topics", {"name": "orders_fifo"})
    assert (status, found["code"]) == (400, InvalidTopic.kafka_code)
    sqs = {"X-Amz-Target": "AmazonSQS.CreateQueue", "Content-Type": "application/x-amz-json-1.0"}
    answer = httpx.post(broker.sqs_url, headers=sqs, json={"QueueName": "orders_fifo"}, timeout=scaled(20))
    assert (answer.status_code, answer.json()["__type"].rpartition("#")[2]) == (400, "InvalidParameterValue")
    assert "orders_fifo" not in client.admin.list_topics()
