"""Every public name of `mansio.spark`, used by a program that imports only public modules."""

from __future__ import annotations

import ast
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from tools import public_api

import mansio.spark
import mansio.spark.functions
import mansio.spark.work
from support.machine import scaled
from support.present import present
from support.protobuf_files import descriptor_set
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

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


def failing() -> Callable[[Any], int]:
    """A function of its own, because tasks cannot import this module."""
    reject, retry, kill = mansio.spark.work.Reject, mansio.spark.work.Retry, os._exit

    def fail(row: Any) -> int:
        number = int(row.value)
        if number == 1:
            raise reject("one")
        if number == 2:
            raise retry("two", delay_ms=5)
        if number == 3:
            kill(9)
        return number

    return fail


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
    assert issubclass(mansio.spark.work.TimedOut, mansio.spark.work.ProcessDied)
    assert mansio.spark.work.RowErrors({}, []).errors == {}
    leased: mansio.spark.LeasedRecords
    with mansio.spark.lease(spark, topic, topic, options) as leased:
        assert leased.records == leased.frame.count() == RECORDS
        done = mansio.spark.work.apply(
            leased.frame,
            failing(),
            schema="number int",
            on_error=lambda error: "reject" if isinstance(error, mansio.spark.work.ProcessDied) else "retry",
            isolate="always",
        )
        errors = {row.offset: row.error.action for row in done.where("error is not null").collect()}
        assert errors == {1: "reject", 2: "retry", 3: "reject"}
        failed = mansio.spark.RecordFailure(topic, 0, 1, "reject", reason="bad")
        assert leased.acknowledge(failed=[failed]) == RECORDS - 1


@pytest.mark.full
def test_jobs_run_in_a_session_that_is_there_with_public_names(
    spark: SparkSession, served_broker: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers, topic, lake = served_broker.bootstrap_servers, topic_name("jobs"), str(tmp_path / "lake")
    with mansio.blocking.connect(servers) as client:
        client.admin.create_topic(topic, partitions=1)
        client.admin.alter_group_config(topic, {"share.auto.offset.reset": "earliest"})
        for number in range(RECORDS):
            client.publish(topic, b"%d" % number, key=b"%d" % (number % 2), timestamp_ms=number * 1_000)

    def numbers(frame: DataFrame) -> DataFrame:
        return frame.selectExpr(
            "cast(cast(value as string) as int) as number", "cast(key as string) as key", "timestamp"
        )

    def doubled(spark: SparkSession, read: Callable[..., DataFrame]) -> DataFrame:
        assert spark is not None
        return numbers(read(topic)).selectExpr("2 * number as number")

    target = mansio.spark.TableTarget(
        "ns.numbers",
        lake,
        partition_by=mansio.spark.parse_partition_by("key"),
        sort_by=mansio.spark.parse_sort_by("number desc"),
    )
    assert target.partition_by == (mansio.spark.PartitionField("key"),)
    assert target.sort_by == (mansio.spark.SortField("number", descending=True),)
    job = mansio.spark.PipelineJob(
        numbers,
        topic,
        servers,
        str(tmp_path / "checkpoint"),
        inputs=(topic,),
        table=target,
        stops_when_caught_up=True,
    )
    ran: mansio.spark.PipelineResult = mansio.spark.run_pipeline(spark, job)
    assert (ran.records, ran.lag) == (RECORDS, 0)
    table: mansio.spark.ResultTable = mansio.spark.open_existing_table("ns.numbers", lake, {})
    kept: mansio.spark.MaintenanceReport = mansio.spark.maintain_table(table, spark=spark)
    assert kept.rows == table.iceberg.scan().to_arrow().num_rows == RECORDS
    rewritten: mansio.spark.RewriteReport = kept.rewritten
    swept: mansio.spark.CleanupReport = kept.swept
    assert (rewritten.rows, swept.files_deleted) == (0, 0)

    times = mansio.spark.TimeRange(0, 2_000)
    wanted = mansio.spark.BackfillJob(
        doubled, "doubled", servers, times, mansio.spark.TableTarget("ns.doubled", lake)
    )
    filled: mansio.spark.BackfillReport = mansio.spark.backfill(spark, wanted)
    assert (filled.rows, filled.range) == (2, mansio.spark.BackfilledRange("doubled", (topic,), times))
    with pytest.raises(mansio.spark.PipelineFileError, match=r"numbers defines transform\(frame\)"):
        mansio.spark.run_pipeline(spark, replace(job, inputs=()))

    mansio.spark.archive(
        spark, mansio.spark.ArchiveJob(topic, lake, servers, topic, stops_when_caught_up=True)
    )
    archive = mansio.spark.open_table(None, lake, topic)
    compacted: mansio.spark.CompactReport = mansio.spark.compact(spark, archive, f"{topic}-latest")
    assert compacted.keys == 2
    assert mansio.spark.maintain(archive).rows == RECORDS
    erased: mansio.spark.EraseReport = mansio.spark.erase(archive, [b"0"])
    tables: tuple[mansio.spark.ErasureReport, ...] = erased.tables
    assert [one.rows for one in tables] == [2, 1]

    with mansio.spark.lease(spark, topic, topic, {"kafka.bootstrap.servers": servers}) as leased:
        leased.acknowledge(failed=[mansio.spark.RecordFailure(topic, 0, 1, "reject", reason="bad")])
    with mansio.blocking.connect(servers) as client:
        wait_until(
            lambda: f"dlq.{topic}" in client.admin.list_topics(), scaled(QUERY_DEADLINE_S), "a dead letter"
        )
    with mansio.spark.DeadLetterAnalysis(spark, [f"dlq.{topic}"], servers) as analysis:
        found: mansio.spark.DeadLetterReport = analysis.report()
        causes: tuple[mansio.spark.CauseReport, ...] = found.causes
        samples: tuple[mansio.spark.DeadLetterSample, ...] = causes[0].samples
        assert [(one.partition, one.offset, one.reason) for one in samples] == [(0, 1, "bad")]
        redriven: tuple[mansio.spark.SharePartitionRedrive, ...] = analysis.redrive("again")
        assert [one.redriven for one in redriven] == [1]


@pytest.mark.full
def test_one_query_writes_into_several_tables_with_public_names_and_a_repeated_batch_is_there_once(
    spark: SparkSession, served_broker: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers, topic, lake = served_broker.bootstrap_servers, topic_name("tables"), str(tmp_path / "lake")
    checkpoint = str(tmp_path / "checkpoint")
    with mansio.blocking.connect(servers) as client:
        client.admin.create_topic(topic, partitions=1)
        client.publish_many(topic, [b"%d" % number for number in range(RECORDS)])
    options = {
        "kafka.bootstrap.servers": servers,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "stopAtLatest": "true",
    }
    rows = spark.readStream.format("mansio").options(**options).load()
    numbers = rows.selectExpr(
        "cast(cast(value as string) as int) as number", "cast(value as string) % 2 as parity"
    )
    all_rows = mansio.spark.TableTarget("ns.all", lake)
    latest = mansio.spark.TableTarget("ns.latest", lake, key=("parity",), order_by=("number",))
    append = mansio.spark.table_writer(numbers, all_rows, checkpoint)
    upsert = mansio.spark.table_writer(numbers, latest, checkpoint)
    crashes = [True]

    def write(batch: DataFrame, batch_id: int) -> None:
        append(batch, batch_id)
        if crashes:
            crashes.clear()
            raise RuntimeError("crash between two tables")
        upsert(batch, batch_id)

    for is_crashing in (True, False):
        writer = numbers.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
        query = mansio.spark.start_available_now(writer)
        with pytest.raises(StreamingQueryException, match="crash") if is_crashing else nullcontext():
            assert query.awaitTermination(int(scaled(QUERY_DEADLINE_S)))
    for name, expected in (("ns.all", [0, 1, 2, 3]), ("ns.latest", [2, 3])):
        found = mansio.spark.open_existing_table(name, lake, {}).iceberg.scan().to_arrow()
        assert sorted(found["number"].to_pylist()) == expected


def test_errors_of_spark_jobs_are_mansio_errors() -> None:
    for kind in (
        mansio.spark.PipelineFailed,
        mansio.spark.UnknownCause,
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
    for module in ("mansio.spark", "mansio.spark.functions", "mansio.spark.work"):
        assert {f"{module}.{name}" for name in public_api.public_names(module)} <= used
