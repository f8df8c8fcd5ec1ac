"""Archives of real topics: made in the session of the tests, and compared with the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from mansio.iceberg.archive.table import open_table
from mansio.pipelines.archive import ArchiveJob, ArchiveResult, archive
from system.spark.topics import contents

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from mansio.pipelines.pipeline_progress import BatchProgress
    from support.process import ServedBroker


def archive_once(
    spark: SparkSession,
    broker: ServedBroker,
    topic: str,
    warehouse: Path,
    records_max: int = 1_000_000,
    report: Callable[[BatchProgress], None] | None = None,
) -> ArchiveResult:
    """What `mansio pipeline archive TOPIC --once` does, under the name `archive-TOPIC`."""
    job = ArchiveJob(
        topic,
        str(warehouse),
        broker.bootstrap_servers,
        f"archive-{topic}",
        stops_when_caught_up=True,
        records_max=records_max,
    )
    return archive(spark, job, report)


def archived(warehouse: Path, topic: str) -> pa.Table:
    """All rows of the table's data files, by partition and offset."""
    table = open_table(None, str(warehouse), topic)
    files = [
        pq.read_table(file.path.removeprefix("file://"), partitioning=None) for file in table.live_files()
    ]
    return pa.concat_tables(files).sort_by([("__partition", "ascending"), ("__offset", "ascending")])


def assert_archived(broker: ServedBroker, warehouse: Path, topic: str) -> None:
    """The table has what the log has, field by field."""
    rows = archived(warehouse, topic)
    log = contents(broker.bootstrap_servers, topic)
    assert rows["__partition"].to_pylist() == [message.partition for message in log]
    assert rows["__offset"].to_pylist() == [message.offset for message in log]
    assert rows["key"].to_pylist() == [message.key for message in log]
    assert rows["value"].to_pylist() == [message.value for message in log]
    assert rows["__timestamp"].cast(pa.int64()).to_pylist() == [
        message.timestamp_ms * 1000 for message in log
    ]
    headers = [[(one["key"], one["value"]) for one in many or ()] for many in rows["headers"].to_pylist()]
    assert headers == [list(message.headers) for message in log]
