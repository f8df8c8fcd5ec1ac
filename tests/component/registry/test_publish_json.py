"""Plain JSON that is published with a schema of the registry: over HTTP and gRPC, and read with `mansio.serde`."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

import mansio
from mansio.api.grpc import mansio_pb2 as pb
from mansio.errors import InvalidRecord
from mansio.serde import Serde
from mansio.testing import TestBroker
from support.machine import scaled
from support.schema_ids import framed

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.row("A7"), pytest.mark.full]

AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "tags", "type": {"type": "array", "items": "string"}},
        ],
    }
)
JSON_SCHEMA = json.dumps({"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]})
PROTOBUF = (
    'syntax = "proto3"; package shop; import "item.proto"; message Order { int64 id = 1; Item item = 2; }'
)
ITEM = 'syntax = "proto3"; package shop; message Item { string name = 1; }'


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        client = running.client()
        schemas = client.admin.schemas
        schemas.register("avro-value", AVRO)
        schemas.register("json-value", JSON_SCHEMA, kind="JSON")
        schemas.register("item", ITEM, kind="PROTOBUF")
        reference = mansio.SchemaReference("item.proto", "item", 1)
        schemas.register("protobuf-value", PROTOBUF, kind="PROTOBUF", references=[reference])
        for topic in ("avro", "json", "protobuf"):
            config = {"mansio.value.schema.validation": "true"}
            client.admin.create_topic(topic, partitions=1, config=config)
        yield running


def post(broker: TestBroker, path: str, body: Any) -> tuple[int, Any]:
    answer = httpx.post(f"{broker.http_url}/v1/topics/{path}", json=body, timeout=scaled(30), trust_env=False)
    return answer.status_code, answer.json()


def read(broker: TestBroker, topic: str, count: int) -> list[Any]:
    """The values of a topic, decoded with the schemas that the brokers have."""

    async def work() -> list[Any]:
        async with (
            mansio.connect(broker.bootstrap_servers) as client,
            Serde(client.admin.schemas.source) as serde,
        ):
            found = []
            async for message in client.consume(topic, from_="earliest", max_records=count):
                value = message.value
                found.append(
                    None if value is None else await serde.decode(topic, value, message.headers, as_json=True)
                )
            return found

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("topic", "value", "invalid", "path"),
    [
        ("avro", {"id": 7, "tags": ["a", "b"]}, {"id": 7, "tags": ["a", 3]}, "$.tags[1]"),
        ("json", {"id": 7}, {"id": "seven"}, "$.id"),
        ("protobuf", {"id": "7", "item": {"name": "x"}}, {"id": "7", "item": {"name": 3}}, "$.item.name"),
    ],
)
def test_json_is_encoded_with_the_latest_schema_and_an_error_names_the_path(
    broker: TestBroker, topic: str, value: Any, invalid: Any, path: str
) -> None:
    assert post(broker, f"{topic}/records?schema=latest", value)[0] == 200
    schema_id = broker.client().admin.schemas.version(f"{topic}-value").schema_id
    records = {"records": [{"json": value}, {"value": None, "key": "k"}, {"json": value}]}
    status, found = post(broker, f"{topic}/records/batch?schema={schema_id}", records)
    assert (status, found["failed"]) == (200, 0)
    assert read(broker, topic, 4) == [value, value, None, value]
    records = {"records": [{"json": value}, {"json": invalid}]}
    status, found = post(broker, f"{topic}/records/batch?schema=latest", records)
    assert (status, found["title"]) == (400, "InvalidRecord")
    assert "record 1: " in found["detail"]
    assert path in found["detail"]


def test_json_is_encoded_over_grpc(broker: TestBroker) -> None:
    broker.client().admin.create_topic("over-grpc", partitions=1)
    schema_id = broker.client().admin.schemas.version("avro-value").schema_id
    values = [{"id": number, "tags": []} for number in range(3)]
    with grpc.insecure_channel(broker.grpc_address) as channel:
        publish = channel.unary_unary(
            "/mansio.v1.Mansio/Publish",
            request_serializer=pb.PublishRequest.SerializeToString,
            response_deserializer=pb.PublishResponse.FromString,
        )
        records = [pb.NewRecord(value=json.dumps(each).encode()) for each in values]
        request = pb.PublishRequest(topic="over-grpc", records=records, schema=str(schema_id))
        assert sum(each.count for each in publish(request, timeout=scaled(30)).ranges) == 3
        invalid = pb.PublishRequest(
            topic="over-grpc", records=[pb.NewRecord(value=b"{}")], schema=str(schema_id)
        )
        with pytest.raises(grpc.RpcError) as refused:
            publish(invalid, timeout=scaled(30))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert read(broker, "over-grpc", 3) == values


def test_a_schema_is_accepted_from_the_answer_to_its_registration_on(broker: TestBroker) -> None:
    client = broker.client()
    schema_id = client.admin.schemas.version("avro-value").schema_id
    for number in range(3):
        topic = f"late-{number}"
        config = {"mansio.value.schema.validation": "true"}
        client.admin.create_topic(topic, partitions=1, config=config)
        for _ in range(2):
            with pytest.raises(InvalidRecord, match=f"not in the subject {topic}-value"):
                client.publish_many(topic, [framed(schema_id, b"a"), framed(schema_id, b"b")])
        assert client.admin.schemas.register(f"{topic}-value", AVRO).schema_id == schema_id
        client.publish_many(topic, [framed(schema_id, b"a"), framed(schema_id, b"b")])


def test_a_schema_that_is_not_there_or_not_json_is_refused(broker: TestBroker) -> None:
    assert post(broker, "avro/records?schema=99999", {})[1]["title"] == "SchemaRegistryRefusal"
    assert post(broker, "avro/records?schema=oldest", {})[0] == 400
    url = f"{broker.http_url}/v1/topics/avro/records?schema=latest"
    headers = {"content-type": "application/json"}
    answer = httpx.post(url, content=b"{", headers=headers, timeout=scaled(30), trust_env=False)
    assert answer.status_code == 400
    assert "record 0: the value is not JSON" in answer.json()["detail"]
