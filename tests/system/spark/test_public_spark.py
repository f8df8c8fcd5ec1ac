"""Every public name of `mansio.spark`, used by a program that imports only public modules."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tools import public_api

import mansio.spark
import mansio.spark.functions
from support.machine import scaled
from support.present import present
from support.protobuf_files import descriptor_set

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

RECORDS = 4
QUERY_DEADLINE_S = 60


@pytest.mark.full
def test_archive_union_and_replay_with_public_names(
    spark: SparkSession, served_broker: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    warehouse, servers, topic = str(tmp_path), served_broker.bootstrap_servers, topic_name("archived")
    assert mansio.spark.session() is spark
    java: mansio.spark.JavaHome = mansio.spark.find_java()
    assert java.version >= 17
    with pytest.raises(mansio.spark.TableNotFound):
        mansio.spark.open_table(None, warehouse, topic)
    with mansio.blocking.connect(servers) as client:
        client.admin.create_topic(topic, partitions=1)
        client.publish_many(topic, [b"%d" % number for number in range(RECORDS)])
        batches: list[mansio.spark.BatchProgress] = []
        job = mansio.spark.ArchiveJob(topic, warehouse, servers, topic, stops_when_caught_up=True)
        result: mansio.spark.ArchiveResult = mansio.spark.archive(spark, job, batches.append)
        assert result.records == sum(batch.records for batch in batches) == RECORDS
        client.publish(topic, b"not archived")
        table: mansio.spark.ArchiveTable = mansio.spark.open_table(None, warehouse, topic)
        assert (table.topic, table.name) == (topic, f"mansio.{topic}")
        assert table.iceberg.scan().to_arrow().num_rows == RECORDS
        assert bytes.fromhex(table.topic_id) == client.admin.describe_topic(topic).topic_id
    options = {"kafka.bootstrap.servers": servers}
    assert mansio.spark.read_topic_as_table(spark, topic, table, options).count() == RECORDS + 1
    names = mansio.spark.register_topics(spark, [topic], servers, warehouse=warehouse, deliveries=True)
    assert present(spark.sql(f"select count(*) from {names[topic]}").first())[0] == RECORDS + 1
    assert spark.table(f"`{names[topic]}$deliveries`").count() == 0
    spark.catalog.dropTempView(names[topic])
    selection = mansio.spark.Selection(partitions=frozenset([0]), starts={0: 1})
    assert (selection.ends, selection.from_us, selection.to_us) == (None, None, None)
    version: mansio.spark.TableVersion = mansio.spark.find_version(
        table, str(table.iceberg.metadata.current_snapshot_id), int
    )
    assert not version.is_latest
    assert version.ends is None
    with pytest.raises(mansio.spark.SnapshotNotFound):
        mansio.spark.find_version(table, "1", int)
    report: mansio.spark.ReplayReport = mansio.spark.replay(
        table, servers, f"{topic}-again", selection, version=version
    )
    assert report.partitions == (mansio.spark.PartitionReplay(0, 0, RECORDS - 1),)
    assert (report.written, report.already_present) == (RECORDS - 1, 0)
    stream = spark.readStream.format("mansio").options(**options, subscribe=topic, startingOffsets="earliest")
    rows = stream.option("stopAtLatest", "true").load().writeStream.format("noop")
    query = mansio.spark.start_available_now(rows.option("checkpointLocation", str(tmp_path / "checkpoint")))
    assert query.awaitTermination(int(scaled(QUERY_DEADLINE_S)))
    assert sum(progress.numInputRows for progress in query.recentProgress) == RECORDS + 1


@pytest.mark.full
def test_mirror_with_public_names(
    served_broker: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = topic_name("mirrored")
    with mansio.blocking.connect(served_broker.bootstrap_servers) as client:
        client.admin.create_topic(topic, partitions=1)
        client.publish_many(topic, [b"%d" % number for number in range(RECORDS)])
    with mansio.Broker(tmp_path / "target") as target:
        job = mansio.spark.MirrorJob(
            (topic,), served_broker.bootstrap_servers, target.address, stops_when_caught_up=True
        )
        batches: list[mansio.spark.BatchProgress] = []
        result: mansio.spark.MirrorResult = mansio.spark.mirror(job, batches.append)
        assert result.records == sum(batch.records for batch in batches) == RECORDS
        place = mansio.TopicPartition(topic, 0)
        assert mansio.spark.translate_offsets(job, {place: 3}) == {place: 3}


@pytest.mark.full
def test_leased_records_with_public_names(
    spark: SparkSession, served_broker: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    topic = topic_name("leased")
    with mansio.blocking.connect(served_broker.bootstrap_servers) as client:
        client.admin.create_topic(topic, partitions=1)
        client.admin.alter_group_config(topic, {"share.auto.offset.reset": "earliest"})
        client.publish_many(topic, [b"%d" % number for number in range(RECORDS)])
    options = {"kafka.bootstrap.servers": served_broker.bootstrap_servers}
    leased: mansio.spark.LeasedRecords
    with mansio.spark.lease(spark, topic, topic, options) as leased:
        assert leased.records == leased.frame.count() == RECORDS
        failed = mansio.spark.RecordFailure(topic, 0, 1, "reject", reason="bad")
        assert leased.acknowledge(failed=[failed]) == RECORDS - 1


def test_errors_of_spark_jobs_are_mansio_errors() -> None:
    for kind in (
        mansio.spark.ArchiveError,
        mansio.spark.ArchiveFailed,
        mansio.spark.CatalogLocked,
        mansio.spark.CatalogUnavailable,
        mansio.spark.ConcurrentArchive,
        mansio.spark.JavaNotFound,
        mansio.spark.MalformedValue,
        mansio.spark.NotAnArchiveTable,
        mansio.spark.SchemaNotFound,
        mansio.spark.SchemaRegistryError,
        mansio.spark.UnsupportedSchema,
    ):
        assert issubclass(kind, mansio.MansioError)


@pytest.mark.full
def test_columns_are_encoded_and_decoded_with_public_names(spark: SparkSession) -> None:
    schema = '{"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}'
    rows = spark.sql("select named_struct('id', id) as value from range(3)")
    avro = rows.select(mansio.spark.functions.to_avro("value", schema).alias("value"))
    found = avro.select(mansio.spark.functions.from_avro("value", schema).alias("value")).select("value.id")
    assert [row["id"] for row in found.collect()] == [0, 1, 2]
    document = '{"type": "object", "properties": {"id": {"type": "integer"}}}'
    texts = rows.selectExpr("to_json(value) as value")
    decoded = texts.select(mansio.spark.functions.from_json_schema("value", document).alias("value"))
    assert [row["value"]["id"] for row in decoded.collect()] == [0, 1, 2]
    files = descriptor_set('syntax = "proto3"; message R { int64 id = 1; }')
    messages = spark.sql("select unhex('0805') as value")
    message = mansio.spark.functions.from_protobuf("value", "R", binaryDescriptorSet=files)
    assert present(messages.select(message.alias("value")).first())["value"]["id"] == 5


def test_every_public_name_is_used_above() -> None:
    tree = ast.parse(Path(__file__).read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for module in ("mansio.spark", "mansio.spark.functions"):
        assert {f"{module}.{name}" for name in public_api.public_names(module)} <= used
