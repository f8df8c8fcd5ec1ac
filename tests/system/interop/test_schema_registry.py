"""Clients of Confluent's schema registry, unchanged: each registers, writes and reads with the registry of a broker."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.schema_registry import (
    AsyncSchemaRegistryClient,
    Schema,
    SchemaReference,
    SchemaRegistryClient,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from schema_registry.client import SchemaRegistryClient as OtherClient
from schema_registry.client.errors import ClientError

from mansio.testing import TestBroker
from support.machine import scaled
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.row("A7")

AVRO = json.dumps({"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]})
EVOLVED = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "id", "type": "long"}, {"name": "note", "type": "string", "default": "none"}],
    }
)
BREAKING = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "id", "type": "long"}, {"name": "price", "type": "double"}],
    }
)
JSON_SCHEMA = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Order",
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
    }
)


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


@pytest.fixture
def registry(broker: TestBroker) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": broker.registry_url}) as client:
        yield client


def exchanged(broker: TestBroker, topic: str, value: bytes) -> bytes:
    """A value after it was published and consumed with confluent-kafka."""
    broker.client().admin.create_topic(topic, partitions=1)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    producer.produce(topic, value)
    assert producer.flush(scaled(30)) == 0
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": topic,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.subscribe([topic])
        message = consumer.poll(scaled(60))
        assert message is not None
        assert message.error() is None
        return present(message.value())
    finally:
        consumer.close()


def message_class() -> Any:
    """The class of a message, as protoc generates it."""
    field = descriptor_pb2.FieldDescriptorProto(name="id", number=1, type=3, label=1)
    order = descriptor_pb2.DescriptorProto(name="Order", field=[field])
    file = descriptor_pb2.FileDescriptorProto(
        name="shop/order.proto", package="shop", syntax="proto3", message_type=[order]
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


def value_of(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


def test_avro_is_written_evolved_and_read_with_confluents_serializers(
    broker: TestBroker, registry: SchemaRegistryClient
) -> None:
    topic = "avro"
    written = AvroSerializer(registry, AVRO)({"id": 7}, value_of(topic))
    AvroSerializer(registry, EVOLVED)({"id": 8, "note": "x"}, value_of(topic))
    assert registry.get_versions(f"{topic}-value") == [1, 2]
    read = AvroDeserializer(registry, EVOLVED)(exchanged(broker, topic, written), value_of(topic))
    assert read == {"id": 7, "note": "none"}
    with pytest.raises(SchemaRegistryError) as refused:
        registry.register_schema(f"{topic}-value", Schema(BREAKING, "AVRO"))
    assert refused.value.http_status_code == refused.value.error_code == 409
    assert not registry.test_compatibility(f"{topic}-value", Schema(BREAKING, "AVRO"))


@pytest.mark.full
def test_json_schema_is_written_and_read_with_confluents_serializers(
    broker: TestBroker, registry: SchemaRegistryClient
) -> None:
    topic = "json"
    written = JSONSerializer(JSON_SCHEMA, registry)({"id": 7}, value_of(topic))
    read = JSONDeserializer(JSON_SCHEMA, schema_registry_client=registry)
    assert read(exchanged(broker, topic, written), value_of(topic)) == {"id": 7}


@pytest.mark.full
def test_protobuf_is_written_and_read_with_confluents_serializers(
    broker: TestBroker, registry: SchemaRegistryClient
) -> None:
    """The serializer registers a serialized descriptor; what is returned is the text of a file."""
    topic, kind = "protobuf", message_class()
    serializer = ProtobufSerializer(kind, registry, {"use.deprecated.format": False})
    written = serializer(kind(id=7), value_of(topic))
    read = ProtobufDeserializer(kind, {"use.deprecated.format": False}, registry)
    assert read(exchanged(broker, topic, written), value_of(topic)) == kind(id=7)
    latest = registry.get_latest_version(f"{topic}-value").schema
    assert "message Order" in present(latest.schema_str)


@pytest.mark.full
def test_confluents_client_finds_its_way_through_all_of_the_api(registry: SchemaRegistryClient) -> None:
    subject = "client"
    first = registry.register_schema(subject, Schema(AVRO, "AVRO"))
    assert registry.get_schema(first).schema_str == json.dumps(json.loads(AVRO), separators=(",", ":"))
    found = registry.lookup_schema(subject, Schema(AVRO, "AVRO"))
    assert (found.schema_id, found.version, found.subject) == (first, 1, subject)
    full = registry.register_schema_full_response(subject, Schema(EVOLVED, "AVRO"))
    assert json.loads(present(registry.get_schema_by_guid(present(full.guid)).schema_str)) == json.loads(
        EVOLVED
    )
    assert registry.get_versions(subject) == [1, 2]
    assert subject in registry.get_subjects()
    assert registry.get_version(subject, 2).schema_id == full.schema_id
    reference = SchemaReference("Order", subject, 2)
    referring = Schema(
        '{"type":"record","name":"Bill","fields":[{"name":"order","type":"Order"}]}', "AVRO", [reference]
    )
    bill = registry.register_schema("bills", referring)
    assert present(registry.get_schema(bill).references)[0].subject == subject
    registry.set_compatibility(subject, "FULL")
    assert registry.get_compatibility(subject) == "FULL"
    with pytest.raises(SchemaRegistryError) as refused:
        registry.delete_version(subject, 2)
    assert refused.value.error_code == 42206
    assert registry.delete_version(subject, 1) == 1
    assert registry.delete_version(subject, 1, True) == 1
    with pytest.raises(SchemaRegistryError) as missing:
        registry.get_version("none", 1)
    assert (missing.value.http_status_code, missing.value.error_code) == (404, 40401)


@pytest.mark.full
def test_confluents_asynchronous_client_registers_and_finds(broker: TestBroker) -> None:
    async def work() -> Any:
        async with AsyncSchemaRegistryClient({"url": broker.registry_url}) as client:
            schema_id = await client.register_schema("asynchronous", Schema(AVRO, "AVRO"))
            return await client.get_schema(schema_id)

    assert json.loads(asyncio.run(work()).schema_str) == json.loads(AVRO)


@pytest.mark.full
def test_python_schema_registry_client_registers_checks_and_deletes(broker: TestBroker) -> None:
    client = OtherClient({"url": broker.registry_url})
    schema_id = client.register("other", AVRO, schema_type="AVRO")
    assert present(client.check_version("other", AVRO)).version == 1
    assert "Order" in str(present(client.get_by_id(schema_id)).raw_schema)
    assert client.test_compatibility("other", EVOLVED)
    assert not client.test_compatibility("other", BREAKING)
    with pytest.raises(ClientError):
        client.register("other", BREAKING)
    assert client.update_compatibility("NONE", "other")
    assert client.get_compatibility("other") == "NONE"
    assert client.delete_subject("other") == [1]
