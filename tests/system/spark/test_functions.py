"""Columns of Avro, Protobuf and JSON in Spark: decoded, encoded, and credentials that appear nowhere."""

from __future__ import annotations

import contextlib
import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions

from mansio.schemas.avro import AvroSchema
from mansio.serde.frames import schema_key_bytes
from mansio.spark.functions import from_avro, from_json_schema, from_protobuf, to_avro
from support.protobuf_files import FLIGHT_PROTO, descriptor_set, flight_class, serialized_file
from support.schema_registry import RegistryServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

FLIGHT: dict[str, Any] = {
    "type": "record",
    "name": "Flight",
    "namespace": "example",
    "fields": [
        {"name": "carrier", "type": "string"},
        {"name": "delay", "type": ["null", "int"], "default": None},
        {"name": "leaves", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "fares", "type": {"type": "map", "values": "double"}},
    ],
}
WIDER: dict[str, Any] = {
    **FLIGHT,
    "fields": [*FLIGHT["fields"], {"name": "gate", "type": "string", "default": "unknown"}],
}
ROW = {"carrier": "UA", "delay": 3, "leaves": 1_700_000_000_000_000, "fares": [("Y", 1.5)]}
PASSWORD = "s3cret-of-the-registry"  # nothing else has this text


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    with RegistryServer() as server:
        yield server


def values(spark: SparkSession, encoded: Sequence[Any]) -> DataFrame:
    return spark.createDataFrame([(one,) for one in encoded], "value binary")


def avro(schema: dict[str, Any], row: dict[str, Any]) -> bytes:
    return AvroSchema(json.dumps(schema)).encode(row)


def test_avro_column_encoded_and_decoded_again(spark: SparkSession) -> None:
    rows = spark.sql(
        "select named_struct('id', id, 'name', concat('n', id), 'tags', array('a', null),"
        " 'day', date'2026-01-31', 'price', cast(id as decimal(10,2))) as value from range(10)"
    )
    text = json.dumps(
        {
            "type": "record",
            "name": "topLevelRecord",
            "fields": [
                {"name": "id", "type": ["null", "long"]},
                {"name": "name", "type": ["null", "string"]},
                {"name": "tags", "type": ["null", {"type": "array", "items": ["null", "string"]}]},
                {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}]},
                {
                    "name": "price",
                    "type": [
                        "null",
                        {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
                    ],
                },
            ],
        }
    )
    again = rows.select("value", from_avro(to_avro("value"), text).alias("again"))
    assert again.where("value = again").count() == 10
    assert again.schema["again"].dataType.simpleString() == rows.schema["value"].dataType.simpleString()


@pytest.mark.full
def test_malformed_avro_fails_the_query_or_becomes_null(spark: SparkSession) -> None:
    frame = values(spark, [avro(FLIGHT, ROW), b"\x01", None])
    decoded = from_avro("value", json.dumps(FLIGHT), {"mode": "permissive"})
    found = [one["f"] for one in frame.select(decoded.alias("f")).collect()]
    assert found[0]["carrier"] == "UA"
    assert found[1:] == [None, None]
    with pytest.raises(PySparkException, match=r"MalformedValue: the value does not match its Avro schema"):
        frame.select(from_avro("value", json.dumps(FLIGHT))).collect()


@pytest.mark.full
def test_values_of_two_writer_schemas_are_read_as_the_latest(
    spark: SparkSession, registry: RegistryServer
) -> None:
    old, new = registry.register("f-value", FLIGHT), registry.register("f-value", WIDER)
    frame = values(
        spark,
        [
            schema_key_bytes(old) + avro(FLIGHT, ROW),
            schema_key_bytes(new) + avro(WIDER, {**ROW, "gate": "B4"}),
        ],
    )
    decoded = from_avro("value", subject="f-value", schemaRegistryAddress=registry.url)
    found = frame.select(decoded.alias("f")).select("f.gate", "f.fares").collect()
    assert [one["gate"] for one in found] == ["unknown", "B4"]
    assert found[0]["fares"] == {"Y": 1.5}
    encoded = frame.select(
        to_avro(decoded, subject="f-value", schemaRegistryAddress=registry.url).alias("value")
    )
    assert encoded.collect()[1]["value"] == schema_key_bytes(new) + avro(WIDER, {**ROW, "gate": "B4"})


@pytest.mark.full
def test_protobuf_from_a_descriptor_set_and_from_a_registry(
    spark: SparkSession, registry: RegistryServer, tmp_path: Any
) -> None:
    message = flight_class()(carrier="AA", delay=-4, seats=2**63, legs=["JFK", "MIA"]).SerializeToString()
    content = descriptor_set(FLIGHT_PROTO)
    (tmp_path / "flight.desc").write_bytes(content)
    plain = values(spark, [message])
    for decoded in (
        from_protobuf("value", "example.Flight", str(tmp_path / "flight.desc")),
        from_protobuf("value", "example.Flight", binaryDescriptorSet=content),
    ):
        (found,) = plain.select(decoded.alias("f")).select("f.*").collect()
        assert (found["carrier"], found["delay"], int(found["seats"])) == ("AA", -4, 2**63)
        assert found["legs"] == ["JFK", "MIA"]
    schema_id = registry.register("p-value", serialized_file(FLIGHT_PROTO), "PROTOBUF")
    framed = values(spark, [schema_key_bytes(schema_id) + b"\x00" + message])
    decoded = from_protobuf("value", subject="p-value", schemaRegistryAddress=registry.url)
    assert framed.select(decoded.alias("f")).collect()[0]["f"]["carrier"] == "AA"


@pytest.mark.full
def test_json_text_to_columns_of_a_json_schema(spark: SparkSession) -> None:
    schema = {
        "type": "object",
        "required": ["id"],
        "properties": {
            "id": {"type": "integer"},
            "at": {"type": "string", "format": "date-time"},
            "more": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
        },
    }
    frame = spark.createDataFrame(
        [('{"id": 1, "at": "2026-01-31T12:00:00+01:00", "more": {"a": 1}}',), ('{"at": null}',)],
        "value string",
    )
    decoded = from_json_schema("value", json.dumps(schema), {"mode": "PERMISSIVE"})
    found = frame.select(decoded.alias("v"), functions.date_format("v.at", "HH:mm").alias("utc")).collect()
    assert (found[0]["v"]["id"], found[0]["utc"], found[0]["v"]["more"]) == (1, "11:00", {"a": 1.0})
    assert found[1]["v"] is None


@pytest.mark.full
def test_credentials_of_a_registry_are_in_no_plan_and_no_error(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    with RegistryServer(f"reader:{PASSWORD}") as server:
        schema_id = server.register("f-value", FLIGHT)
        frame = values(spark, [schema_key_bytes(schema_id) + avro(FLIGHT, ROW), b"\x00\x00\x00\x00\x63"])
        options = {
            "confluent.schema.registry.basic.auth.credentials.source": "USER_INFO",
            "confluent.schema.registry.basic.auth.user.info": f"reader:{PASSWORD}",
        }
        decoded = frame.select(from_avro("value", None, options, "f-value", server.url))
        with contextlib.redirect_stdout(io.StringIO()) as plan:
            decoded.explain("extended")
        with pytest.raises(PySparkException) as failed:
            decoded.collect()
    shown = plan.getvalue() + str(failed.value) + "".join(capfd.readouterr())
    assert "from_avro" in shown
    assert "schema registry" in shown
    assert PASSWORD not in shown
