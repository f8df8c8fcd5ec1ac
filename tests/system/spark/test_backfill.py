"""`backfill` over a real broker: a time range of log and archive, through the user's function, once in the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.catalog import load_catalog

import mansio
from mansio.errors import DataLoss, InvalidRequest
from mansio.iceberg.errors import NotAnArchiveTable
from mansio.iceberg.result_table.backfill_ranges import TimeRange
from mansio.iceberg.result_table.table import TableTarget
from mansio.pipelines.backfilling import backfill as job_module
from mansio.pipelines.backfilling.backfill import BackfillJob, backfill
from mansio.pipelines.run import PipelineFailed
from system.spark.archives import archive_once
from system.spark.topics import create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from support.process import ServedBroker

FIRST_MS = 1_700_000_000_000
STEP_MS = 1_000
COUNT = 120

EVEN = """
from pyspark.sql import functions as f

def transform(frame):
    number = frame.value.cast("string").cast("int")
    return frame.where(number % 2 == 0).select(
        number.cast("short").alias("number"), "timestamp", f.struct("partition", "offset").alias("place")
    )
"""
SUM = """
from pyspark.sql import functions as f

def transform(frame):
    times = frame.withWatermark("timestamp", "10 seconds")
    number = frame.value.cast("string").cast("int")
    return times.groupBy(f.window("timestamp", "30 seconds")).agg(f.sum(number).alias("total"))
"""
FAIL = """
from pyspark.sql import functions as f

def transform(frame):
    return frame.select(f.udf(lambda value: str(1 / 0))("value").alias("number"))
"""


def at(number: int) -> int:
    return FIRST_MS + number * STEP_MS


def publish_numbers(servers: str, topic: str, begin: int, end: int) -> None:
    """Record `n` has the time `at(n)` and is in partition `n % 2`."""
    for number in range(begin, end):
        publish(servers, topic, [(b"%d" % (number % 5), b"%d" % number)], number % 2, at(number))


def rows(warehouse: Path, table: str) -> list[dict[str, Any]]:
    catalog = load_catalog(
        "mansio", type="sql", uri=f"sqlite:///{warehouse}/catalog.db", warehouse=f"file://{warehouse}"
    )
    found: pa.Table = catalog.load_table(table).scan().to_arrow()
    return found.to_pylist()


def numbers(warehouse: Path, table: str = "mansio.even") -> list[int]:
    return sorted(row["number"] for row in rows(warehouse, table))


@pytest.mark.full
def test_time_range_of_archive_and_log_is_in_the_table_once_however_often_it_is_backfilled(
    spark: SparkSession,
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers, warehouse = broker_process.bootstrap_servers, tmp_path / "lake"
    topic = create(servers, topic_name("in"), 2, retention_ms="-1")
    file = tmp_path / "even.py"
    file.write_text(EVEN)

    def job(begin: int, end: int, table: str = "even", **more: Any) -> BackfillJob:
        times, target = TimeRange(at(begin), at(end)), TableTarget(table, str(warehouse))
        return BackfillJob(str(file), "even", servers, times, target, str(warehouse), inputs=(topic,), **more)

    publish_numbers(servers, topic, 0, 60)
    alone = backfill(spark, job(10, 40))
    assert (alone.sources, alone.rows) == ({topic: "log"}, 15)
    assert numbers(warehouse) == list(range(10, 40, 2))

    archive_once(spark, broker_process, topic, warehouse)
    with mansio.blocking.connect(servers) as client:
        for partition in (0, 1):
            client.admin.delete_records([mansio.TopicPartition(topic, partition)], before=25)
    publish_numbers(servers, topic, 60, COUNT)
    publish(servers, topic, [(None, b"38")], 0, at(38))  # late, and only in the log
    repeated = backfill(spark, job(10, 40))
    assert (repeated.sources, repeated.rows) == ({topic: "archive and log"}, 16)
    assert repeated.replaced_files == alone.files
    assert numbers(warehouse) == sorted([*range(10, 40, 2), 38]), "each once, with what has arrived since"

    with pytest.raises(InvalidRequest, match="overlap"):
        backfill(spark, job(39, 80))

    def killed(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:  # the files are written, the table is not changed
        patched.setattr(job_module, "replace_files", killed)
        with pytest.raises(KeyboardInterrupt):
            backfill(spark, job(40, COUNT))
    assert len(numbers(warehouse)) == 16
    for _ in range(2):
        backfill(spark, job(40, COUNT))
        assert numbers(warehouse) == sorted([*range(10, COUNT, 2), 38])
    places = [(row["place"]["partition"], row["place"]["offset"]) for row in rows(warehouse, "mansio.even")]
    assert len(set(places)) == len(places)

    file.write_text(SUM)
    with pytest.raises(NotAnArchiveTable, match="has rows that `mansio pipeline backfill` has not written"):
        backfill(spark, job(40, COUNT, topic))
    backfill(spark, job(0, COUNT, "reports.sums"))
    sums = rows(warehouse, "reports.sums")
    assert sum(row["total"] for row in sums) == sum(range(COUNT)) + 38
    file.write_text(FAIL)
    with pytest.raises(PipelineFailed, match="ZeroDivisionError"):
        backfill(spark, job(0, COUNT, "failed"))


DECODED = """
def transform(frame):
    return frame.select("decoded_value.n", "timestamp")
"""
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}}'


@pytest.mark.full
def test_pipeline_on_decoded_values_is_backfilled_with_the_options_of_its_source(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers, warehouse = broker_process.bootstrap_servers, tmp_path / "lake"
    topic = create(servers, topic_name("decoded"), retention_ms="-1")
    for number in range(10):
        publish(servers, topic, [(None, b'{"n": %d}' % number)], 0, at(number))
    file = tmp_path / "decoded.py"
    file.write_text(DECODED)
    target = TableTarget("decoded", str(warehouse))
    options = {"valueFormat": "json", "valueSchema": SCHEMA}
    job = BackfillJob(
        str(file), "decoded", servers, TimeRange(at(2), at(7)), target, inputs=(topic,), options=options
    )
    assert backfill(spark, job).rows == 5
    assert sorted(row["n"] for row in rows(warehouse, "mansio.decoded")) == [2, 3, 4, 5, 6]


@pytest.mark.full
def test_deleted_records_of_the_range_are_an_error_and_a_joined_table_is_read_whole(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers, warehouse = broker_process.bootstrap_servers, tmp_path / "lake"
    topic, names = (
        create(servers, topic_name("in"), 2, retention_ms="-1"),
        create(servers, topic_name("names"), 1, retention_ms="-1"),
    )
    publish_numbers(servers, topic, 0, 60)
    publish(servers, names, [(b"%d" % key, b"name %d" % key) for key in range(5)], timestamp_ms=at(-1_000))
    file = tmp_path / "joined.py"
    file.write_text(
        f"""
def pipeline(spark, read):
    names = read("{names}", startingOffsets="earliest").selectExpr("key", "cast(value as string) as name")
    return read("{topic}").selectExpr("key", "cast(value as string) as n").join(names, "key")
"""
    )

    def job(begin: int, end: int, **more: Any) -> BackfillJob:
        target = TableTarget("joined", str(warehouse))
        return BackfillJob(
            str(file), "joined", servers, TimeRange(at(begin), at(end)), target, str(warehouse), **more
        )

    assert backfill(spark, job(30, 50, whole_topics=(names,))).rows == 20
    assert sorted(int(row["n"]) for row in rows(warehouse, "mansio.joined")) == list(range(30, 50))
    assert {row["name"] for row in rows(warehouse, "mansio.joined")} == {f"name {key}" for key in range(5)}
    with mansio.blocking.connect(servers) as client:
        for partition in (0, 1):
            client.admin.delete_records([mansio.TopicPartition(topic, partition)], before=10)
    assert backfill(spark, job(50, 55, whole_topics=(names,))).rows == 5, "what was deleted is older"
    with pytest.raises(DataLoss, match="begins at offset 10 of partition 0"):
        backfill(spark, job(0, 30, whole_topics=(names,)))
    assert backfill(spark, job(0, 30, whole_topics=(names,), accept_loss=True)).rows == 10
