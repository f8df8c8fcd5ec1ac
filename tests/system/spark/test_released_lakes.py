"""Pipelines that a release has begun go on with this source: from its checkpoints, over its broker's data, into its
tables, each record once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from pyspark import __version__ as spark_version

from mansio.iceberg.result_table.table import TableTarget
from mansio.pipelines.run import PipelineJob, run_pipeline
from support.process import ServedBroker
from support.released_lakes import (
    APPENDED,
    BATCH_RECORDS,
    BATCHES,
    LAKES,
    TOPIC,
    UPSERTED,
    appended_rows,
    archive_of,
    archived,
    publish_records,
    read_result,
    records,
    unpack,
    upserted_rows,
)
from system.spark.archives import archive_once

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


COUNT: Final = BATCHES * BATCH_RECORDS
MADE_WITH_SPARK: Final = (4, 3)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        tuple(map(int, spark_version.split(".")[:2])) < MADE_WITH_SPARK,
        reason="the checkpoints are those of Spark 4.3, which does not promise that older versions read them",
    ),
]


@pytest.mark.parametrize(
    "lake", sorted(LAKES.glob("*.tar.gz")), ids=lambda path: path.name.removesuffix(".tar.gz")
)
def test_pipelines_of_a_release_go_on_and_each_record_is_in_their_tables_once(
    spark: SparkSession, lake: Path, tmp_path: Path
) -> None:
    unpack(lake, tmp_path)
    warehouse = tmp_path / "warehouse"
    broker = ServedBroker(tmp_path / "data", http=False).start()
    try:
        assert run_all(spark, broker, tmp_path) == [0, 0, 0], "the release has processed all"
        publish_records(broker.bootstrap_servers, COUNT, COUNT + BATCH_RECORDS)
        assert run_all(spark, broker, tmp_path) == [BATCH_RECORDS] * 3
        assert broker.stop() == 0
    finally:
        broker.kill()
    count = COUNT + BATCH_RECORDS
    assert archived(archive_of(warehouse)) == records(count)
    assert read_result(warehouse, "ns.appended", "number") == appended_rows(count)
    assert read_result(warehouse, "ns.upserted", "key") == upserted_rows(count)


def run_all(spark: SparkSession, broker: ServedBroker, place: Path) -> list[int]:
    """Run the archive, the pipeline that appends, and the one that upserts, until they have processed all records.
    Return the number of records that each has processed.
    """
    done = [archive_once(spark, broker, TOPIC, place / "warehouse").records]
    for name, function in (("appended", APPENDED), ("upserted", UPSERTED)):
        file = place / f"{name}.py"
        file.write_text(function)
        is_upsert = name == "upserted"
        job = PipelineJob(
            file=str(file),
            name=name,
            bootstrap_servers=broker.bootstrap_servers,
            checkpoint=str(place / "checkpoints" / name),
            inputs=(TOPIC,),
            table=TableTarget(
                f"ns.{name}",
                str(place / "warehouse"),
                key=("key",) if is_upsert else (),
                order_by=("number",) if is_upsert else (),
            ),
            stops_when_caught_up=True,
            output_mode="update" if is_upsert else "append",
        )
        done.append(run_pipeline(spark, job).records)
    return done
