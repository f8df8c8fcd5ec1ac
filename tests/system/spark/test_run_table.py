"""`mansio pipeline run --to-table` as a function: exactly once into an Iceberg table, which follows the result."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from pyiceberg.catalog import load_catalog

from mansio.iceberg.errors import IncompatibleSchema
from mansio.iceberg.result_table.partition_spec import parse_partition_by, parse_sort_by
from mansio.iceberg.result_table.table import TableTarget
from mansio.pipelines.checkpoint import CheckpointMismatch
from mansio.pipelines.run import PipelineFailed, PipelineJob, run_pipeline
from system.spark.topics import create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyiceberg.table import Table
    from pyspark.sql import SparkSession

    from support.process import ServedBroker

NUMBERS = """
def transform(frame):
    number = "cast(cast(value as string) as int)"
    return frame.selectExpr(
        f"{number} as number",
        "cast(key as string) as key",
        f"timestamp_seconds({number} * 3600) as at",
        "named_struct('partition', partition, 'half', cast(1.5 as float)) as origin",
        f"array({number}, null) as list",
    )
"""
EVOLVED = """
def transform(frame):
    number = "cast(cast(value as string) as bigint)"
    return frame.selectExpr(
        f"{number} as number",
        "cast(key as string) as name",
        f"timestamp_seconds({number} * 3600) as at",
        "named_struct('partition', partition, 'half', 2.5D, 'new', true) as origin",
        "map('offset', offset) as extra",
    )
"""


@pytest.fixture
def job(broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path) -> PipelineJob:
    """The pipeline NUMBERS from a topic of two partitions into a table that is not there yet."""
    source = create(broker_process.bootstrap_servers, topic_name("in"), 2)
    file = tmp_path / "numbers.py"
    file.write_text(NUMBERS)
    target = TableTarget(
        "ns.numbers",
        str(tmp_path / "lake"),
        partition_by=parse_partition_by("day(at), bucket(2, key)"),
        sort_by=parse_sort_by("number desc"),
    )
    return PipelineJob(
        file=str(file),
        name=topic_name("pipeline"),
        bootstrap_servers=broker_process.bootstrap_servers,
        checkpoint=str(tmp_path / "checkpoint"),
        inputs=(source,),
        table=target,
        stops_when_caught_up=True,
        records_max=60,
    )


def fill(job: PipelineJob, begin: int, end: int) -> None:
    records = [(b"k%d" % (number % 7), b"%d" % number) for number in range(begin, end)]
    publish(job.bootstrap_servers, job.inputs[0], records)


def forget_last_batch(checkpoint: Path) -> None:
    """What a kill between the table's commit and Spark's leaves."""
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for path in (last, last.with_name(f".{last.name}.crc")):
        path.unlink(missing_ok=True)


def table_of(job: PipelineJob) -> Table:
    """The table as another program opens it."""
    assert job.table is not None
    lake = job.table.warehouse
    catalog = load_catalog(
        "mansio", type="sql", uri=f"sqlite:///{lake}/catalog.db", warehouse=f"file://{lake}"
    )
    return catalog.load_table(job.table.name)


@pytest.mark.full
@pytest.mark.row("S0")
def test_rows_are_in_the_table_once_after_a_batch_is_repeated_and_its_columns_follow_the_result(
    spark: SparkSession, job: PipelineJob, tmp_path: Path
) -> None:
    fill(job, 0, 100)
    assert run_pipeline(spark, job).records == 100
    forget_last_batch(tmp_path / "checkpoint")
    fill(job, 100, 120)
    done = run_pipeline(spark, job)
    assert done.lag == 0
    table = table_of(job)
    rows = sorted(table.scan().to_arrow().to_pylist(), key=lambda row: row["number"])
    assert [row["number"] for row in rows] == list(range(120))
    assert rows[9]["key"] == "k2"
    assert rows[9]["list"] == [9, None]
    assert rows[9]["origin"]["half"] == 1.5
    assert {row["origin"]["partition"] for row in rows} == {0, 1}
    found = table.scan(row_filter="key == 'k2' and at < '1970-01-02T00:00:00+00:00'")
    assert sorted(found.to_arrow()["number"].to_pylist()) == [2, 9, 16, 23]
    files = list(found.plan_files())
    assert len(files) < len(list(table.scan().plan_files()))
    for one in files:
        numbers = table.io.new_input(one.file.file_path)
        assert one.file.sort_order_id == table.sort_order().order_id, numbers
    _evolve(spark, job, tmp_path)


def _evolve(spark: SparkSession, job: PipelineJob, tmp_path: Path) -> None:
    """The next version of the function has another set of columns."""
    assert job.table is not None
    (tmp_path / "numbers.py").write_text(EVOLVED)
    fill(job, 120, 130)
    with pytest.raises(IncompatibleSchema, match="no column name to rename to other"):
        run_pipeline(spark, dataclasses.replace(job, table=_renaming(job, {"name": "other"})))
    done = run_pipeline(spark, dataclasses.replace(job, table=_renaming(job, {"key": "name"})))
    assert done.table is not None
    assert str(done.table.changes) == "key renamed to name, extra added, number widened, origin widened"
    assert done.records == 10
    rows = sorted(table_of(job).scan().to_arrow().to_pylist(), key=lambda row: row["number"])
    assert [row["number"] for row in rows] == list(range(130))
    assert rows[9]["name"] == "k2"
    assert rows[9]["extra"] is None
    assert dict(rows[129]["extra"]).keys() == {"offset"}
    assert rows[129]["list"] is None
    assert (rows[129]["origin"]["half"], rows[129]["origin"]["new"]) == (2.5, True)
    assert run_pipeline(spark, dataclasses.replace(job, table=_renaming(job, {"key": "name"}))).records == 0
    (tmp_path / "numbers.py").write_text(
        "def transform(frame):\n    return frame.selectExpr('value as number')\n"
    )
    with pytest.raises(
        IncompatibleSchema, match="column number is long in the table and binary in the result"
    ):
        run_pipeline(spark, dataclasses.replace(job, table=TableTarget("ns.numbers", str(tmp_path / "lake"))))


def _renaming(job: PipelineJob, renames: dict[str, str]) -> TableTarget:
    assert job.table is not None
    return TableTarget(job.table.name, job.table.warehouse, renames=renames)


@pytest.mark.full
def test_error_of_the_function_is_one_line_and_a_table_made_again_is_noticed(
    spark: SparkSession, job: PipelineJob, tmp_path: Path
) -> None:
    fill(job, 0, 10)
    run_pipeline(spark, job)
    table = table_of(job)
    fill(job, 10, 20)
    text = NUMBERS.replace("cast(key as string) as key", "cast(raise_error('no key') as string) as key")
    (tmp_path / "numbers.py").write_text(text)
    with pytest.raises(PipelineFailed, match="no key") as caught:
        run_pipeline(spark, job)
    assert "\n" not in str(caught.value)
    assert len(table_of(job).scan().to_arrow()) == 10
    table.catalog.drop_table(table.name())
    with pytest.raises(CheckpointMismatch, match="is of writing table mansio"):
        run_pipeline(spark, job)
