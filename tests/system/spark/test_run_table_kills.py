"""`mansio pipeline run --to-table` is killed as a real process, while it appends and while it upserts; the same command
goes on by itself. Kills at every step of a commit are in `tests/unit/spark`, without a JVM.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from mansio.iceberg.result_table.table import TableTarget
from mansio.pipelines.run import PipelineJob, run_pipeline
from support.iceberg import checksum
from system.spark.test_kills import TIMEOUT_S, Job
from system.spark.test_run_table import table_of
from system.spark.topics import contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

FILE = """
def transform(frame):
    return frame.selectExpr(
        "cast(key as string) as id", "partition", "offset as at", "cast(value as string) as value"
    )
"""
TABLE = "ns.rows"


class IntoTable(Job):
    """A pipeline into a table of its own. `key`: the key of its upserts; empty: it appends."""

    def __init__(self, broker: ServedBroker, topic: str, place: Path, key: tuple[str, ...] = ()) -> None:
        super().__init__(broker, topic, place)
        (place / "rows.py").write_text(FILE)
        self.key = key

    @property
    def job(self) -> PipelineJob:
        """The same pipeline as a function."""
        return PipelineJob(
            file=str(self.place / "rows.py"),
            name="rows",
            bootstrap_servers=self.broker.bootstrap_servers,
            checkpoint=str(self.place / "checkpoints" / "rows"),
            inputs=(self.source,),
            table=TableTarget(TABLE, str(self.place / "lake"), key=self.key),
            stops_when_caught_up=True,
            output_mode="update" if self.key else "append",
        )

    def words(self) -> list[str]:
        words = ["run", "rows.py", "--topic", self.source, "--to-table", TABLE, "--warehouse", "lake"]
        return [*words, "--mode", "update", "--key", ",".join(self.key)] if self.key else words

    def rows(self) -> list[tuple[str, int, int, str]]:
        """The rows of the table, sorted by their places in the log."""
        found = table_of(self.job).scan().to_arrow()
        columns = (found[name].to_pylist() for name in ("id", "partition", "at", "value"))
        return sorted(zip(*columns, strict=True), key=lambda row: row[1:3])

    def expected(self) -> list[tuple[str, int, int, str]]:
        """What the table has to hold, from the log."""
        log = sorted(
            contents(self.broker.bootstrap_servers, self.source), key=lambda one: (one.partition, one.offset)
        )
        rows = [
            ((one.key or b"").decode(), one.partition, one.offset, (one.value or b"").decode()) for one in log
        ]
        return sorted({row[0]: row for row in rows}.values(), key=lambda row: row[1:3]) if self.key else rows

    def finish(self, spark: SparkSession) -> None:
        """The last start goes to the end; then the table holds what the log has."""
        run_pipeline(spark, self.job)
        found, expected = self.rows(), self.expected()
        assert len(found) == len(expected)
        assert checksum(found) == checksum(expected)


@pytest.fixture
def jobs(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> Iterator[tuple[IntoTable, IntoTable]]:
    append = IntoTable(broker_process, topic_name("appended"), tmp_path / "append")
    upsert = IntoTable(broker_process, topic_name("upserted"), tmp_path / "upsert", ("id",))
    yield append, upsert
    for process in append.started + upsert.started:
        process.kill()


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT_S)
def test_run_into_a_table_killed_in_the_middle_goes_on_with_the_same_command(
    spark: SparkSession, jobs: tuple[IntoTable, IntoTable]
) -> None:
    for job in jobs:
        job.publish(4_000)
        job.start()
    for job in jobs:
        job.started[0].wait_for_batches(1)
        time.sleep(random.uniform(0, 1))  # the point of the kill, not a wait for anything
        job.started[0].kill()
        rows = job.rows()
        assert len(rows) > 0, "killed after a batch"
        assert set(rows) != set(job.expected()), "killed in the middle"
    for job in jobs:
        job.finish(spark)
