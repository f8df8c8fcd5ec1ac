"""A pipeline into a table of a real REST catalog, into which another program writes at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pyiceberg.catalog import load_catalog

from mansio.iceberg.result_table.table import TableTarget
from mansio.pipelines.run import PipelineJob, run_pipeline
from support.iceberg_server import IcebergServer
from support.machine import scaled
from support.paths import ROOT
from support.process import inherited
from system.spark.topics import create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

FUNCTION = """
def transform(frame):
    return frame.selectExpr("cast(cast(value as string) as bigint) as id", "cast(key as string) as name")
"""
TABLE = "lab.ns.numbers"
RECORDS = 40
OTHERS = range(1_000, 1_020)
DEADLINE_S = 120


@pytest.mark.full
def test_rows_of_a_pipeline_and_of_another_program_are_in_a_table_of_a_rest_catalog_once(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create(broker_process.bootstrap_servers, topic_name("in"), 2)
    (tmp_path / "numbers.py").write_text(FUNCTION)
    job = PipelineJob(
        file=str(tmp_path / "numbers.py"),
        name=topic_name("pipeline"),
        bootstrap_servers=broker_process.bootstrap_servers,
        checkpoint=str(tmp_path / "checkpoint"),
        inputs=(topic,),
        table=TableTarget(TABLE, None),
        stops_when_caught_up=True,
        records_max=5,
    )

    def run_from(begin: int) -> None:
        numbers = range(begin, begin + RECORDS)
        publish(broker_process.bootstrap_servers, topic, [(b"k", b"%d" % number) for number in numbers])
        assert run_pipeline(spark, job).lag == 0

    with IcebergServer(tmp_path / "server") as server:
        settings = server.settings("lab")
        for name, value in settings.items():
            spark.conf.set(name, value)
        try:
            run_from(0)
            catalog = {"type": "rest", "uri": server.address}
            with subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "support.other_writer",
                    "ns.numbers",
                    *map(str, (OTHERS[0], OTHERS[-1] + 1)),
                ],
                stdin=subprocess.PIPE,
                text=True,
                env={**inherited(), "PYTHONPATH": str(ROOT / "tests")},
            ) as other:
                try:
                    assert other.stdin is not None
                    other.stdin.write(json.dumps(["lab", catalog]) + "\ngo\n")
                    other.stdin.flush()
                    run_from(RECORDS)
                    assert other.wait(scaled(DEADLINE_S)) == 0
                finally:
                    other.kill()
            found = load_catalog("lab", **catalog).load_table("ns.numbers").scan().to_arrow()
        finally:
            for name in settings:
                spark.conf.unset(name)
    assert sorted(found["id"].to_pylist()) == [*range(2 * RECORDS), *OTHERS]
