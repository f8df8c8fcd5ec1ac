"""`Serde` and the serializers of confluent-kafka read what the other one writes, with a registry on a real socket."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from mansio.errors import ConfigError
from mansio.serde import (
    BlockingSerde,
    MalformedValue,
    NotFramed,
    RegisteredSchema,
    SchemaDefinition,
    SchemaNotFound,
    SchemaReference,
    SchemaRegistryError,
    SchemaType,
    Serde,
    SubjectNames,
    SubjectVersion,
)
from mansio.serde import schema_cache as cache_module
from mansio.serde.schema_cache import SchemaCache
from support.protobuf_files import FLIGHT_PROTO, flight_class, serialized_file
from support.schema_registry import RegistryServer

if TYPE_CHECKING:
    from collections.abc import Iterator

AVRO_TEXT = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": [{"name": "id", "type": "long"}, {"name": "note", "type": ["null", "string"]}],
    }
)
JSON_TEXT = json.dumps({"title": "Order", "type": "object", "properties": {"id": {"type": "integer"}}})
AVRO = SchemaDefinition(SchemaType.AVRO, AVRO_TEXT)
JSON = SchemaDefinition(SchemaType.JSON, JSON_TEXT)
ORDER = {"id": 7, "note": "fragile"}


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with RegistryServer() as running:
        yield running


@pytest.fixture
def serde(server: RegistryServer) -> Iterator[BlockingSerde]:
    with BlockingSerde(server.url) as one:
        yield one


def value_context(headers: Any = None) -> SerializationContext:
    return SerializationContext("orders", MessageField.VALUE, headers)


def test_confluents_avro_clients_read_and_are_read(server: RegistryServer, serde: BlockingSerde) -> None:
    client = SchemaRegistryClient({"url": server.url})
    written = AvroSerializer(client, AVRO_TEXT)(ORDER, value_context())
    assert serde.decode("orders", written) == ORDER
    encoded = serde.encode("orders", ORDER, schema=AVRO)
    assert encoded == written
    assert AvroDeserializer(client)(encoded, value_context()) == ORDER


def test_confluents_clients_read_and_write_the_schema_in_a_header(
    server: RegistryServer, serde: BlockingSerde
) -> None:
    client = SchemaRegistryClient({"url": server.url})
    encoded = serde.encode_with_headers("orders", ORDER, schema=AVRO)
    assert AvroDeserializer(client)(encoded.data, value_context(list(encoded.headers))) == ORDER
    assert serde.decode("orders", encoded.data, encoded.headers) == ORDER
    headers: list[Any] = []
    serializer = AvroSerializer(client, AVRO_TEXT, conf={"schema.id.serializer": header_schema_id_serializer})
    guid = uuid.UUID(bytes=encoded.headers[0][1][1:])
    written = serializer(ORDER, value_context(headers))
    assert (written, headers) == (encoded.data, [("__value_schema_id", b"\1" + guid.bytes)])


@pytest.mark.full
def test_confluents_json_clients_read_and_are_read(server: RegistryServer, serde: BlockingSerde) -> None:
    client = SchemaRegistryClient({"url": server.url})
    written = JSONSerializer(JSON_TEXT, client)({"id": 7}, value_context())
    assert serde.decode("orders", written) == {"id": 7}
    encoded = serde.encode("orders", {"id": 8}, schema=JSON)
    assert JSONDeserializer(JSON_TEXT, schema_registry_client=client)(encoded, value_context()) == {"id": 8}


@pytest.mark.full
def test_confluents_protobuf_clients_read_and_are_read(server: RegistryServer, serde: BlockingSerde) -> None:
    client, kind = SchemaRegistryClient({"url": server.url}), flight_class()
    conf = {"use.deprecated.format": False}
    message = kind(carrier="AA", delay=-3)
    written = ProtobufSerializer(kind, client, conf)(message, value_context())
    assert serde.decode("orders", written) == {"carrier": "AA", "delay": -3}
    encoded = serde.encode("orders", message)
    assert encoded == written == serde.encode("orders", {"carrier": "AA", "delay": -3})
    assert ProtobufDeserializer(kind, conf, client)(encoded, value_context()) == message


@pytest.mark.full
def test_a_nested_message_is_named_by_its_indexes(server: RegistryServer, serde: BlockingSerde) -> None:
    server.register("orders-value", serialized_file(FLIGHT_PROTO), "PROTOBUF")
    encoded = serde.encode("orders", {"tail": "N1"}, message="example.Flight.Plane")
    assert encoded is not None
    assert encoded[5:].startswith(b"\4\0\2") or encoded[5:].startswith(b"\4\0")
    assert serde.decode("orders", encoded) == {"tail": "N1"}
    framed = serde.encode_with_headers("orders", {"tail": "N1"}, message="example.Flight.Plane")
    assert serde.decode("orders", framed.data, framed.headers) == {"tail": "N1"}


def test_plain_json_is_encoded_and_decoded(serde: BlockingSerde) -> None:
    encoded = serde.encode("orders", {"id": 7, "note": {"string": "x"}}, schema=AVRO, is_json=True)
    assert serde.decode("orders", encoded, as_json=True) == {"id": 7, "note": "x"}
    with pytest.raises(MalformedValue, match=r"^\$\.id is a string, not a long"):
        serde.encode("orders", {"id": "7", "note": None}, is_json=True)


def test_a_value_is_read_as_the_latest_version(server: RegistryServer, serde: BlockingSerde) -> None:
    encoded = serde.encode("orders", ORDER, schema=AVRO)
    later = json.loads(AVRO_TEXT)
    later["fields"] = [{"name": "id", "type": "double"}, {"name": "more", "type": "int", "default": 5}]
    server.register("orders-value", later)
    assert serde.decode("orders", encoded) == ORDER
    assert serde.decode("orders", encoded, reader="latest") == {"id": 7.0, "more": 5}
    json_value = serde.encode("documents", {"id": 1}, schema=JSON)
    with pytest.raises(MalformedValue, match="written as JSON, and cannot be read as AVRO"):
        serde.decode("orders", json_value, reader="latest")


def test_null_stays_null_and_needs_no_registry() -> None:
    with BlockingSerde("http://127.0.0.1:1") as serde:
        assert serde.encode("orders", None) is None
        assert serde.decode("orders", None) is None


@pytest.mark.parametrize("data", [b"", b"{}", b"\0\0\0", b"\2" * 30])
def test_a_value_that_names_no_schema_is_a_typed_error(data: bytes, serde: BlockingSerde) -> None:
    with pytest.raises(NotFramed):
        serde.decode("orders", data)


def test_subjects_are_named_after_topic_or_record(server: RegistryServer) -> None:
    for names, subject in (
        (SubjectNames.TOPIC, "orders-key"),
        (SubjectNames.RECORD, "shop.Order"),
        (SubjectNames.TOPIC_RECORD, "orders-shop.Order"),
    ):
        with BlockingSerde(server.url, subject_names=names) as serde:
            assert serde.encode("orders", ORDER, is_key=True, schema=AVRO)
            assert server.requests[-2] == f"POST /subjects/{subject}/versions"
            if names is not SubjectNames.TOPIC:
                with pytest.raises(ConfigError, match="need the name of the record"):
                    serde.encode("orders", ORDER)
                assert serde.encode("orders", ORDER, subject=subject)


def test_a_definition_is_registered_only_if_that_is_allowed(server: RegistryServer) -> None:
    with BlockingSerde(server.url, auto_register=False) as serde:
        with pytest.raises(SchemaNotFound):
            serde.encode("orders", ORDER, schema=AVRO)
        server.register("other-value", AVRO_TEXT)
        assert serde.encode("other", ORDER, schema=AVRO) == serde.encode("other", ORDER)
    assert not any(one.endswith("/versions") for one in server.requests)


def test_the_definition_of_a_message_is_registered_with_its_references(
    server: RegistryServer, serde: BlockingSerde
) -> None:
    server.register("item", {"type": "record", "name": "shop.Item", "fields": []})
    text = json.dumps({"type": "array", "items": "shop.Item"})
    definition = SchemaDefinition(SchemaType.AVRO, text, (SchemaReference("shop.Item", "item", 1),))
    assert serde.decode("orders", serde.encode("orders", [{}, {}], schema=definition)) == [{}, {}]


# -- caches --------


class Source:
    """A source that counts requests, and answers when `may_answer` is set."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.may_answer = asyncio.Event()

    async def schema_by_id(self, schema_id: int) -> RegisteredSchema:
        self.requests.append(schema_id)
        await self.may_answer.wait()
        if schema_id >= 100:
            raise SchemaNotFound(f"there is no schema {schema_id}")
        return RegisteredSchema(SchemaType.AVRO, '"int"', schema_id=schema_id)

    async def schema_by_guid(self, guid: uuid.UUID) -> RegisteredSchema:
        raise SchemaRegistryError("it does not answer")

    async def latest(self, subject: str) -> SubjectVersion:
        self.requests.append(subject)
        return SubjectVersion(subject, 1, 5, RegisteredSchema(SchemaType.AVRO, '"int"', schema_id=5))

    async def register(self, subject: str, definition: SchemaDefinition) -> int:
        raise AssertionError

    async def look_up(self, subject: str, definition: SchemaDefinition) -> int:
        raise AssertionError


def test_many_that_wait_for_a_schema_cost_one_request() -> None:
    async def run() -> None:
        source = Source()
        async with Serde(source) as serde:
            known = [asyncio.create_task(serde.decode("t", b"\0\0\0\0\7\2")) for _ in range(50)]
            unknown = [asyncio.create_task(serde.decode("t", b"\0\0\0\0\x64\2")) for _ in range(50)]
            await asyncio.sleep(0)
            known[0].cancel()
            unknown[0].cancel()
            source.may_answer.set()
            assert await asyncio.gather(*known[1:]) == [1] * 49
            found = await asyncio.gather(*unknown[1:], return_exceptions=True)
            assert {type(one) for one in found} == {SchemaNotFound}
            with pytest.raises(SchemaNotFound):
                await serde.decode("t", b"\0\0\0\0\x64\2")
            assert await serde.encode("t", 1) == await serde.encode("t", 1) == b"\0\0\0\0\5\2"
            with pytest.raises(SchemaRegistryError, match="no GUID"):
                await serde.encode_with_headers("t", 1)
        assert sorted(map(str, source.requests)) == ["100", "5", "7", "t-value"]

    asyncio.run(run())


def test_the_cache_is_bounded_and_forgets_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "ENTRIES_MAX", 2)

    async def run() -> None:
        now, asked = 0.0, []
        cache: SchemaCache[int] = SchemaCache(kept_s=5.0, clock=lambda: now)

        async def get(key: int) -> int:
            async def request() -> int:
                asked.append(key)
                if key < 0:
                    raise SchemaNotFound
                return key

            return await cache.get(key, request)

        for key in (1, 2, 1, 3, 1, 2):
            assert await get(key) == key
        assert asked == [1, 2, 3, 2]
        now = 5.0
        assert await get(2) == 2
        assert asked.pop() == 2
        for at, count in ((5.0, 1), (14.0, 1), (15.0, 2)):
            now = at
            with pytest.raises(SchemaNotFound):
                await get(-1)
            assert asked.count(-1) == count
        assert len(cache._entries) == 2

    asyncio.run(run())
