"""Decoded keys and values of a topic: in the source, in the archive while schemas change, and in the union of both."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from typer.testing import CliRunner

import mansio
from mansio.cli.main import app
from mansio.client.types import OutgoingRecord
from mansio.errors import ConfigError, UnreadableRecords
from mansio.iceberg.archive.rewrite_data_files import rewrite_data_files
from mansio.iceberg.archive.table import open_table
from mansio.pipelines.archive import ArchiveJob, archive
from mansio.schemas.avro import AvroSchema
from mansio.serde.errors import UnsupportedSchema
from mansio.serde.frames import schema_key_bytes
from mansio.spark.topic_table import read_topic_as_table
from support.schema_registry import RegistryServer
from system.spark.topics import contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from mansio.pipelines.archive import ArchiveResult
    from mansio.pipelines.pipeline_progress import BatchProgress
    from support.process import ServedBroker

Rows = list[dict[str, Any]]


def schema(**fields: str) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "Flight",
        "fields": [{"name": name, "type": kind} for name, kind in fields.items()],
    }


ONE = schema(carrier="string", delay="int")
TWO = schema(carrier="string", delay="long", gate="string")
INCOMPATIBLE = schema(carrier="bytes", delay="int")
MALFORMED = b"\x00\x00\x00\x00\x01\xff"


class Producer:
    """Publishes values of registered schemas to a topic of one partition."""

    def __init__(self, broker: ServedBroker, registry: RegistryServer, topic: str) -> None:
        self.servers, self.registry, self.topic = broker.bootstrap_servers, registry, topic
        with mansio.blocking.connect(self.servers) as client:
            client.admin.create_topic(topic, partitions=1)

    def publish(self, kind: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
        header = schema_key_bytes(self.registry.register(f"{self.topic}-value", kind))
        encode = AvroSchema(json.dumps(kind)).encode
        self.publish_bytes([header + encode(row) for row in rows])

    def publish_bytes(self, values: Sequence[bytes | None]) -> None:
        with mansio.blocking.connect(self.servers) as client:
            client.publish_many(self.topic, [OutgoingRecord(one, key=b"k") for one in values])

    def options(self, **more: str) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self.servers,
            "valueFormat": "avro",
            "schemaRegistry": self.registry.url,
            **more,
        }

    def job(self, warehouse: Path, **more: Any) -> ArchiveJob:
        return ArchiveJob(
            self.topic,
            str(warehouse),
            self.servers,
            f"archive-{self.topic}",
            stops_when_caught_up=True,
            decode={"valueFormat": "avro", "schemaRegistry": self.registry.url},
            **more,
        )


@pytest.fixture
def producer(broker_process: ServedBroker, topic_name: Callable[[str], str]) -> Iterator[Producer]:
    with RegistryServer() as registry:
        yield Producer(broker_process, registry, topic_name("in"))


def decoded(frame: DataFrame) -> Rows:
    rows = frame.select("offset", "decoded_value").orderBy("offset").collect()
    return [row["decoded_value"] and row["decoded_value"].asDict() for row in rows]


def read(spark: SparkSession, producer: Producer, **more: str) -> DataFrame:
    options = producer.options(subscribe=producer.topic, **more)
    return spark.read.format("mansio").options(**options).load()


@pytest.mark.full
def test_archive_and_union_have_typed_columns_that_grow_with_the_schema(
    spark: SparkSession, producer: Producer, tmp_path: Path
) -> None:
    producer.publish(ONE, [{"carrier": "UA", "delay": 1}])
    archive(spark, producer.job(tmp_path))
    producer.publish(TWO, [{"carrier": "AA", "delay": 1 << 40, "gate": "B4"}])
    producer.publish_bytes([None])
    result = archive(spark, producer.job(tmp_path))
    assert result.records == 2
    producer.publish(ONE, [{"carrier": "DL", "delay": 3}])
    table = open_table(None, str(tmp_path), producer.topic)
    union = read_topic_as_table(spark, producer.topic, table, producer.options())
    expected: Rows = [
        {"carrier": "UA", "delay": 1, "gate": None},
        {"carrier": "AA", "delay": 1 << 40, "gate": "B4"},
        None,  # type: ignore[list-item]
        {"carrier": "DL", "delay": 3, "gate": None},
    ]
    assert decoded(union) == expected
    assert decoded(read(spark, producer)) == expected
    assert (
        union.schema["decoded_value"].dataType.simpleString()
        == "struct<carrier:string,delay:bigint,gate:string>"
    )
    assert rewrite_data_files(table).files_replaced == 2
    archived = open_table(None, str(tmp_path), producer.topic).iceberg.scan().to_arrow()
    rows = archived.sort_by("__offset")["decoded_value"].to_pylist()
    assert rows == expected[:3]


@pytest.mark.full
def test_schema_evolves_while_the_archive_runs(
    spark: SparkSession, producer: Producer, tmp_path: Path
) -> None:
    """The second schema is registered after the first batch of a running query, the table changes with its data."""
    producer.publish(ONE, [{"carrier": "UA", "delay": 1}])
    batches: list[BatchProgress] = []

    def after_batch(progress: BatchProgress) -> None:
        batches.append(progress)
        if len(batches) == 1:
            columns = open_table(None, str(tmp_path), producer.topic).decoded_columns()
            assert columns.field("decoded_value").type.get_field_index("gate") < 0
            producer.publish(TWO, [{"carrier": "AA", "delay": 2, "gate": "B4"}])

    job = ArchiveJob(
        producer.topic,
        str(tmp_path),
        producer.servers,
        "evolving",
        trigger_s=0.2,
        decode={"valueFormat": "avro", "schemaRegistry": producer.registry.url},
    )
    result = archive(spark, job, after_batch, lambda: len(batches) >= 2)
    assert result.records == 2
    table = open_table(None, str(tmp_path), producer.topic)
    snapshots = {one.snapshot_id: one.schema_id for one in table.iceberg.metadata.snapshots}
    assert len(set(snapshots.values())) == len(snapshots) == 2
    assert table.decoded_columns().field("decoded_value").type.get_field_index("gate") == 2


@pytest.mark.full
@pytest.mark.parametrize("mode", ["suspend", "skip", "dead-letter"])
def test_malformed_and_incompatible_values_go_by_the_error_mode(
    spark: SparkSession, producer: Producer, tmp_path: Path, mode: str
) -> None:
    producer.publish(ONE, [{"carrier": "UA", "delay": 1}])
    producer.publish_bytes([MALFORMED])
    producer.publish(INCOMPATIBLE, [{"carrier": b"AA", "delay": 2}])
    producer.publish(TWO, [{"carrier": "DL", "delay": 3, "gate": "C"}])
    if mode == "suspend":
        with pytest.raises(UnreadableRecords, match=r"offsets 1 to 1 .* Avro schema.*--on-unreadable"):
            archive(spark, producer.job(tmp_path, on_unreadable=mode))
        with pytest.raises(PySparkException, match="UnreadableRecords: offsets 1 to 1"):
            read(spark, producer).collect()
        return
    result: ArchiveResult = archive(spark, producer.job(tmp_path, on_unreadable=mode))
    assert (result.records, result.offsets) == (2, {0: 4})
    table = open_table(None, str(tmp_path), producer.topic)
    assert [(one.start, one.end) for one in table.lost_ranges()] == [(1, 3)]
    assert table.iceberg.scan().to_arrow().sort_by("__offset")["__offset"].to_pylist() == [0, 3]
    rows = read(spark, producer, onUnreadable=mode).orderBy("offset").collect()
    if mode == "skip":
        assert [row["offset"] for row in rows] == [0, 3]
        return
    assert [row["decoded_value"] is None for row in rows] == [False, True, True, False]
    assert rows[1]["value"] == MALFORMED
    assert "carrier changes from string to binary" in rows[2]["error"]
    dead_letters = table.iceberg.catalog.load_table(("mansio_dead_letters", producer.topic)).scan().to_arrow()
    assert dead_letters.sort_by("__offset")["__offset"].to_pylist() == [1, 2]
    assert dead_letters.sort_by("__offset")["value"].to_pylist()[0] == MALFORMED
    assert set(dead_letters["kind"].to_pylist()) == {"record"}


@pytest.mark.full
def test_table_with_records_keeps_its_decoded_columns(
    spark: SparkSession, producer: Producer, tmp_path: Path
) -> None:
    producer.publish(ONE, [{"carrier": "UA", "delay": 1}])
    plain = ArchiveJob(producer.topic, str(tmp_path), producer.servers, "plain", stops_when_caught_up=True)
    archive(spark, plain)
    with pytest.raises(ConfigError, match="has records with no decoded columns"):
        archive(spark, producer.job(tmp_path))
    table = open_table(None, str(tmp_path), producer.topic)
    with pytest.raises(ConfigError, match="has no column decoded_value"):
        read_topic_as_table(spark, producer.topic, table, producer.options())


@pytest.mark.full
def test_running_stream_reads_a_later_schema_into_its_columns(
    spark: SparkSession, producer: Producer, tmp_path: Path
) -> None:
    producer.publish(ONE, [{"carrier": "UA", "delay": 1}])
    options = producer.options(subscribe=producer.topic, startingOffsets="earliest")
    stream = spark.readStream.format("mansio").options(**options).load().select("decoded_value.*")
    producer.publish(
        schema(carrier="string", delay="int", gate="string"), [{"carrier": "AA", "delay": 2, "gate": "B"}]
    )
    target = str(tmp_path / "out")
    query = (
        stream.writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(target)
    )
    assert query.awaitTermination(120)
    rows = spark.read.parquet(target).orderBy("delay").collect()
    assert [row.asDict() for row in rows] == [{"carrier": "UA", "delay": 1}, {"carrier": "AA", "delay": 2}]


@pytest.mark.full
def test_keys_and_values_with_schemas_of_files(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    topic, servers = topic_name("json"), broker_process.bootstrap_servers
    with mansio.blocking.connect(servers) as client:
        client.admin.create_topic(topic, partitions=1)
        client.publish_many(
            topic, [OutgoingRecord(b'{"delay": 5}', key=b'"UA"'), OutgoingRecord(b"{}", key=b"1")]
        )
    options = {
        "kafka.bootstrap.servers": servers,
        "subscribe": topic,
        "keyFormat": "json",
        "keySchema": '{"type": "string"}',
        "valueFormat": "json",
        "valueSchema": '{"type": "object", "properties": {"delay": {"type": "integer"}}}',
        "columns": "offset,decoded_key,decoded_value",
        "onUnreadable": "dead-letter",
    }
    rows = spark.read.format("mansio").options(**options).load().orderBy("offset").collect()
    assert (rows[0]["decoded_key"], rows[0]["decoded_value"]["delay"], rows[0]["error"]) == ("UA", 5, None)
    assert rows[1]["error"] == "offsets 1 to 1 cannot be read: key: $ is 1, not a string"


@pytest.mark.full
def test_commands_decode_values_of_a_registry(
    spark: SparkSession, producer: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Avro from a registry into a typed Iceberg table, with a malformed value, and through a function of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANSIO_BOOTSTRAP_SERVERS", producer.servers)
    producer.publish(ONE, [{"carrier": "UA", "delay": 1}, {"carrier": "AA", "delay": 50}])
    producer.publish_bytes([MALFORMED])
    decode = ["--value-format", "avro", "--schema-registry", producer.registry.url]
    archived = command(
        "pipeline",
        "archive",
        producer.topic,
        "--warehouse",
        str(tmp_path / "lake"),
        "--once",
        "--on-unreadable",
        "dead-letter",
        "--output",
        "json",
        *decode,
    )
    assert json.loads(archived)["records"] == 2
    table = open_table(None, str(tmp_path / "lake"), producer.topic)
    rows = table.iceberg.scan(selected_fields=("decoded_value.delay",)).to_arrow()
    assert sorted(row["decoded_value"]["delay"] for row in rows.to_pylist()) == [1, 50]
    (tmp_path / "late.py").write_text(
        "def transform(frame):\n"
        "    return frame.where('decoded_value.delay > 30').selectExpr('decoded_value.carrier as value')\n"
    )
    late = f"{producer.topic}-late"
    command(
        "pipeline", "run", "late.py", "--topic", producer.topic, "--to", late, "--once",
        "--name", late, "--option", "onUnreadable=skip", *decode,
    )  # fmt: skip
    assert [message.value for message in contents(producer.servers, late)] == [b"AA"]


@pytest.mark.full
def test_invalid_schema_is_one_line_before_spark_starts(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"$ref": "#"}')
    done = CliRunner().invoke(
        app,
        ["pipeline", "archive", "t", "--warehouse", str(tmp_path), "--value-format", "json",
         "--value-schema", str(tmp_path / "schema.json")],
    )  # fmt: skip
    assert isinstance(done.exception, UnsupportedSchema)
    assert "contains itself" in str(done.exception)


def command(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    if done.exit_code:
        raise AssertionError(f"{words}: {done.exit_code}: {done.output}") from done.exception
    return str(done.stdout)
