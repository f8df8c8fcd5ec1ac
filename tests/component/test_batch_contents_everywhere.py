"""Batches with any content, stored as an earlier version could have or sent by a producer, read over each protocol."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from mansio.api.grpc import mansio_pb2 as pb
from mansio.testing import TestBroker
from mansio.wire.batch.record_batch import iterate_batches
from support.batch_contents import random_case, store
from support.machine import scaled
from support.raw_peer import RawPeer
from support.seeds import chosen_seed
from support.tiers import examples
from unit.fuzz.batch_contents import Found, check, log_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mansio.blocking
    from unit.fuzz.batch_contents import Log

OFFSETS_MAX = 1_100
"""Offsets of a case: a member of a share group rejects each of them."""


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started


def stored_log(broker: TestBroker, topic: str, count: int) -> tuple[mansio.blocking.Client, Log]:
    random = Random(chosen_seed())
    cases: list[Any] = []
    while len(cases) < count:
        case = random_case(random)
        if case.offsets <= OFFSETS_MAX:
            cases.append(case)
    log = log_of(cases)
    client = broker.client()
    client.admin.create_topic(topic, partitions=1)
    store(
        broker,
        topic,
        [bytes(log.records[at : at + header.size]) for at, header in iterate_batches(log.records)],
    )
    return client, log


def test_whatever_is_stored_each_protocol_delivers_everything_else(broker: TestBroker) -> None:
    client, log = stored_log(broker, "stored", examples(60, 400))
    for reader, read in (
        ("consumer", read_as_consumer(client, "stored")),
        ("http", read_over_http(broker, "stored", log.end)),
        ("events", read_events(broker, "stored", log.end)),
        ("grpc", read_over_grpc(broker, "stored", log.end)),
        ("share", read_as_share_member(client, "stored", log)),
        ("share", receive_over_http(broker, "stored", log)),
    ):
        check(log, read, reader)


def read_as_consumer(client: mansio.blocking.Client, topic: str) -> Found:
    found = Found({}, [])

    def note(error: Any) -> None:
        found.unreadable.append((error.first_offset, error.last_offset))

    for message in client.consume(topic, to_end=True, on_unreadable=note):
        found.values[message.offset] = message.value
    return found


def decoded(record: dict[str, Any]) -> bytes:
    return base64.b64decode(record["base64"])


def read_over_http(broker: TestBroker, topic: str, end: int) -> Found:
    found, offset = Found({}, []), 0
    with httpx.Client(base_url=f"{broker.http_url}/v1", timeout=scaled(30)) as http:
        while offset < end:
            query: dict[str, Any] = {"offset": offset, "limit": 1_000, "values": "base64"}
            answer = http.get(f"/topics/{topic}/partitions/0/records", params=query).json()
            assert answer["next_offset"] > offset
            offset = answer["next_offset"]
            found.values.update({each["offset"]: decoded(each) for each in answer["records"]})
            found.unreadable.extend(
                (each["first_offset"], each["last_offset"]) for each in answer["unreadable"]
            )
    return found


def read_events(broker: TestBroker, topic: str, end: int) -> Found:
    found, kind = Found({}, []), ""
    query = {"from": "earliest", "values": "base64"}
    url = f"{broker.http_url}/v1/topics/{topic}/events"
    with httpx.stream("GET", url, params=query, timeout=scaled(30)) as response:
        for line in response.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                if kind:
                    found.unreadable.append((data["first_offset"], data["last_offset"]))
                else:
                    found.values[data["offset"]] = decoded(data)
                kind = ""
            if end - 1 in found.values:
                break
    return found


def read_over_grpc(broker: TestBroker, topic: str, end: int) -> Found:
    found, offset = Found({}, []), 0
    with grpc.insecure_channel(broker.grpc_address) as channel:
        fetch = channel.unary_unary(
            "/mansio.v1.Mansio/Fetch", pb.FetchRequest.SerializeToString, pb.FetchResponse.FromString
        )
        while offset < end:
            request = pb.FetchRequest(topic=topic, offset=offset, max_records=1_000)
            answer = fetch(request, timeout=scaled(30))
            assert answer.next_offset > offset
            offset = answer.next_offset
            found.values.update({each.offset: each.value for each in answer.records})
            found.unreadable.extend((each.first, each.last) for each in answer.unreadable)
    return found


def read_as_share_member(client: mansio.blocking.Client, topic: str, log: Log) -> Found:
    """Values only: what is rejected is in no answer."""
    found = Found({}, [])
    client.admin.alter_group_config("contents", {"share.auto.offset.reset": "earliest"})
    with client.receive(topic, group="contents") as receiver:
        while log.end - 1 not in found.values:
            messages = receiver.poll()
            for message in messages:
                assert message.delivery_count == 1
                found.values[message.offset] = message.value
            receiver.ack(messages)
    return found


def receive_over_http(broker: TestBroker, topic: str, log: Log) -> Found:
    """As a client of a share group over HTTP, whose broker decodes the batches; gRPC and SQS use the same service."""
    found = Found({}, [])
    with httpx.Client(base_url=f"{broker.http_url}/v1", timeout=scaled(30)) as http:
        config = {"share.auto.offset.reset": "earliest"}
        assert http.patch("/groups/over-http/config", json={"config": config}).is_success
        while log.end - 1 not in found.values:
            body = {"topics": [topic], "max_records": 500, "wait_ms": 1_000, "values": "base64"}
            answer = http.post("/groups/over-http/receive", json=body)
            assert answer.is_success, answer.text
            records = answer.json()["records"]
            assert all(each["delivery_count"] == 1 for each in records)
            found.values.update({each["offset"]: decoded(each) for each in records})
            receipts = [each["receipt"] for each in records]
            assert not receipts or http.post("/groups/over-http/ack", json={"receipts": receipts}).is_success
    return found


def test_whatever_is_sent_each_record_that_was_accepted_is_delivered(broker: TestBroker) -> None:
    random = Random(chosen_seed())
    client = broker.client()
    client.admin.create_topic("sent", partitions=1)
    good: dict[int, bytes] = {}
    sound: dict[int, int] = {}
    port = int(broker.bootstrap_servers.rpartition(":")[2])
    with RawPeer(port) as peer:
        for _ in range(examples(60, 400)):
            case = random_case(random)
            if case.offsets > OFFSETS_MAX:
                continue
            result = peer.produce("sent", case.batch)
            if case.is_readable:
                assert result.error_code == 0, case
                sound[result.base_offset] = case.offsets
            good[client.publish("sent", b"good").offset] = b"good"
    end = max(good) + 1
    for read in (
        read_as_consumer(client, "sent"),
        read_over_http(broker, "sent", end),
        read_over_grpc(broker, "sent", end),
    ):
        assert good.items() <= read.values.items()
        for offset, count in sound.items():
            assert read.values.keys() >= set(range(offset, offset + count))
