"""Pipelines into Iceberg tables killed at random, MANSIO_NIGHTLY_PIPELINE_KILLS times each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nightly.spark.test_kills import NIGHTLY_KILLS, NIGHTLY_TIMEOUT_S, kill_at_random
from support.iceberg import checksum
from system.spark import test_run_table_kills

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from system.spark.test_run_table_kills import IntoTable

jobs = test_run_table_kills.jobs


@pytest.mark.timeout(NIGHTLY_TIMEOUT_S)
@pytest.mark.parametrize("which", [0, 1], ids=["append", "upsert"])
def test_run_into_a_table_killed_twenty_times_has_every_row_once(
    spark: SparkSession, jobs: tuple[IntoTable, IntoTable], which: int
) -> None:
    job = jobs[which]
    kill_at_random(job)
    job.finish(spark)
    rows = job.rows()
    print(f"{NIGHTLY_KILLS} kills, {job.published} records, {len(rows)} rows, {checksum(rows)}")
