"""`mansio pipeline maintain --table` beside a running pipeline: in tasks of Spark, as a command, and killed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from mansio.iceberg.result_table.partition_spec import parse_partition_by
from mansio.iceberg.result_table.table import open_existing_table
from mansio.pipelines.run import run_pipeline
from mansio.pipelines.table_maintenance import maintain_table
from support.machine import scaled
from support.paths import mansio_command
from support.waiting import wait_until
from system.spark.test_kills import TIMEOUT_S
from system.spark.test_run_table_kills import TABLE, IntoTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from mansio.iceberg.result_table.table import ResultTable
    from mansio.pipelines.pipeline_progress import BatchProgress
    from support.process import ServedBroker

RECORDS = 900
BATCH = 100
COMMAND_S = 120.0


@pytest.fixture
def job(broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path) -> IntoTable:
    return IntoTable(broker_process, topic_name("upserted"), tmp_path / "upsert", ("id",))


def table_of(job: IntoTable) -> ResultTable:
    return open_existing_table(TABLE, str(job.place / "lake"), {})


def maintaining(job: IntoTable, *words: str) -> subprocess.Popen[bytes]:
    """The command, started."""
    command = [*mansio_command(), "pipeline", "maintain", "--table", TABLE, "--warehouse", "lake", *words]
    return subprocess.Popen(command, cwd=job.place, stdin=subprocess.DEVNULL)


def merged_files(job: IntoTable) -> set[str]:
    """The files that maintenance has written, whether the table refers to them or not."""
    return {path.name for path in (job.place / "lake").rglob("merged-*.parquet")}


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT_S)
def test_maintenance_beside_a_running_pipeline_also_when_it_is_killed_changes_no_row(
    spark: SparkSession, job: IntoTable
) -> None:
    job.publish(RECORDS)
    assert job.job.table is not None
    pipeline = dataclasses.replace(
        job.job,
        table=dataclasses.replace(job.job.table, partition_by=parse_partition_by("bucket(2, id)")),
        stops_when_caught_up=False,
        trigger_s=0.1,
        records_max=BATCH,
    )

    def in_tasks() -> None:
        assert maintain_table(table_of(job), spark=spark).rows > 0

    def killed() -> None:
        before = merged_files(job)
        process = maintaining(job)
        try:
            wait_until(
                lambda: merged_files(job) != before or process.poll() is not None,
                COMMAND_S,
                "it has begun to write a merged file",
            )
        finally:
            process.kill()
            process.wait(scaled(COMMAND_S))

    def as_command() -> None:
        assert maintaining(job, "--keep", "2").wait(scaled(COMMAND_S)) == 0

    moves = {2: in_tasks, 4: killed, 6: as_command}
    lags: list[int | None] = []

    def between_batches(progress: BatchProgress) -> None:
        """Called while the pipeline's next batch runs."""
        move = moves.pop(progress.batch, None)
        if move is not None:
            move()
        lags.append(progress.lag)

    run_pipeline(spark, pipeline, between_batches, lambda: bool(lags) and lags[-1] == 0)
    assert not moves, "all were made"
    job.finish(spark)
    before = job.rows()
    report = maintain_table(table_of(job), snapshots_kept=1, grace_s=0)
    assert job.rows() == before
    assert report.rows == len(before)
    live = {os.path.basename(file.file_path) for file in table_of(job).files().data_files()}
    assert {path.name for path in (job.place / "lake").rglob("*.parquet")} == live
