"""`mansio pipeline run --mode update`: upserts into an Iceberg table exactly once, changed rows into a topic."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from mansio.iceberg.result_table.table import TableTarget
from mansio.pipelines.run import PipelineFailed, PipelineJob, run_pipeline
from mansio.spark import session
from system.spark.test_run_table import forget_last_batch, table_of
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

LATEST = """
def transform(frame):
    return frame.selectExpr("cast(key as string) as id", "cast(value as string) as value")
"""
COUNTS = """
from pyspark.sql import functions as f

def transform(frame):
    return frame.groupBy(f.col("key").cast("string").alias("key")).agg(f.count("*").alias("rows"))
"""
KEYS = 20


@pytest.fixture
def job(broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path) -> PipelineJob:
    """The pipeline LATEST from a topic of two partitions into a table that is not there yet."""
    source = create(broker_process.bootstrap_servers, topic_name("in"), 2)
    file = tmp_path / "latest.py"
    file.write_text(LATEST)
    return PipelineJob(
        file=str(file),
        name=topic_name("pipeline"),
        bootstrap_servers=broker_process.bootstrap_servers,
        checkpoint=str(tmp_path / "checkpoint"),
        inputs=(source,),
        table=TableTarget("ns.latest", str(tmp_path / "lake"), key=("id",)),
        stops_when_caught_up=True,
        records_max=60,
        output_mode="update",
    )


def fill(job: PipelineJob, records: list[tuple[bytes | None, bytes | None]]) -> None:
    publish(job.bootstrap_servers, job.inputs[0], records)


def held(job: PipelineJob) -> dict[str, str]:
    """The rows of the table; a key that is there twice is an error."""
    rows = table_of(job).scan().to_arrow().to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["value"] for row in rows}


@pytest.mark.full
@pytest.mark.row("S0")
def test_table_has_the_last_value_of_each_key_also_after_a_batch_is_repeated(
    spark: SparkSession, job: PipelineJob, tmp_path: Path
) -> None:
    records: list[tuple[bytes | None, bytes | None]] = [
        (b"k%d" % (n % KEYS), None if n % 7 == 3 else b"v%d" % n) for n in range(150)
    ]
    fill(job, records)
    assert run_pipeline(spark, job).records == 150
    expected: dict[str, str] = {}

    def fold() -> None:
        for key, value in records:
            if value is None:
                expected.pop((key or b"").decode(), None)
            else:
                expected[(key or b"").decode()] = value.decode()

    fold()
    assert held(job) == expected
    before = table_of(job).metadata.current_snapshot_id
    forget_last_batch(tmp_path / "checkpoint")
    assert run_pipeline(spark, job).records == 30
    assert table_of(job).metadata.current_snapshot_id == before, "the repeated batch changes nothing"
    records = [(b"k1", b"new"), (b"k100", b"first"), (b"k2", None), (b"k200", None)]
    fill(job, records)
    run_pipeline(spark, job)
    fold()
    assert held(job) == expected
    _rows_without_a_key(spark, job, tmp_path, expected)


def _rows_without_a_key(
    spark: SparkSession, job: PipelineJob, tmp_path: Path, expected: dict[str, str]
) -> None:
    fill(job, [(b"k3", b"beside"), (None, b"lost")])
    with pytest.raises(PipelineFailed, match=r"batch \d+ contains 1 row without a key \(id is null\)"):
        run_pipeline(spark, job)
    assert job.table is not None
    lenient = dataclasses.replace(job.table, on_null_key="dead-letter")
    run_pipeline(spark, dataclasses.replace(job, table=lenient))
    assert held(job) == expected | {"k3": "beside"}
    dead_letters = dataclasses.replace(job, table=TableTarget("ns.latest_dead_letters", job.table.warehouse))
    (letter,) = table_of(dead_letters).scan().to_arrow().to_pylist()
    assert json.loads(letter["row"]) == {"value": "lost"}
    assert letter["reason"] == "the key (id) is null"
    staged = [path for path in (tmp_path / "lake").rglob("*.parquet") if "-staged-" in path.name]
    assert staged == [], "staged files are removed"
    assert session() is spark, "a batch does not change the active session of the process"


@pytest.mark.full
def test_update_mode_writes_the_changed_rows_of_each_batch_to_a_topic(
    spark: SparkSession, job: PipelineJob, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "latest.py").write_text(COUNTS)
    into_topic = dataclasses.replace(job, table=None, topic=topic_name("out"))
    assert into_topic.topic is not None
    for keys in (("a", "a", "b"), ("b", "c")):
        fill(job, [(key.encode(), b"") for key in keys])
        run_pipeline(spark, into_topic)
    found = contents(job.bootstrap_servers, into_topic.topic)
    changes = sorted((record.key or b"", json.loads(record.value or b"")["rows"]) for record in found)
    assert changes == [(b"a", 2), (b"b", 1), (b"b", 2), (b"c", 1)], (
        "a is written once: it did not change again"
    )
