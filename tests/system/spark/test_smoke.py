"""One small case of each job that no other test of `make test` runs. The modules named after the jobs have more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.pipelines.compact import compact
from mansio.pipelines.dlq import DeadLetterAnalysis
from mansio.pipelines.hot_keys import assess_skew, count_topic
from mansio.pipelines.run import PipelineJob, run_pipeline
from mansio.pipelines.schema_check import check_topic
from support.archive_tables import Archive, row
from system.spark.test_dlq import GOOD, TEMPLATES, plant
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

HOT, COLD = 90, 30
DOUBLED = """
def transform(frame):
    return frame.selectExpr("key", "concat(value, value) as value")
"""


@pytest.mark.row("S0", "S1", "S8", "S12")
def test_topic_is_read_counted_checked_and_transformed(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers = broker_process.bootstrap_servers
    topic = create(servers, topic_name("in"), 2)
    keys = [b"hot"] * HOT + [b"%d" % number for number in range(COLD)]
    publish(servers, topic, [(key, b"%d" % number) for number, key in enumerate(keys)])

    counted = count_topic(spark, topic, servers, 2)
    assert (counted.records, counted.keys) == (HOT + COLD, 1 + COLD)
    assert [one.key for one in assess_skew(counted).hot] == [b"hot"]

    checked = check_topic(spark, topic, servers, {"type": "integer", "minimum": COLD})
    assert (checked.records, checked.invalid) == (HOT + COLD, COLD)
    assert [(one.rule, one.records) for one in checked.groups] == [("minimum", COLD)]

    (tmp_path / "doubled.py").write_text(DOUBLED)
    job = PipelineJob(
        file=str(tmp_path / "doubled.py"),
        name=topic_name("pipeline"),
        bootstrap_servers=servers,
        checkpoint=str(tmp_path / "checkpoint"),
        inputs=(topic,),
        topic=topic_name("out"),
        stops_when_caught_up=True,
    )
    assert run_pipeline(spark, job).records == HOT + COLD
    assert sorted((one.key, one.value) for one in contents(servers, job.topic or "")) == sorted(
        (key, b"%d" % number * 2) for number, key in enumerate(keys)
    )


@pytest.mark.row("S6")
def test_causes_of_dead_letters_are_counted_and_one_of_them_is_redriven(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    servers = broker_process.bootstrap_servers
    topic, group = create(servers, topic_name("in")), topic_name("group")
    plant(servers, topic, group, {"amount": 3, "field": 2})
    with DeadLetterAnalysis(spark, [f"dlq.{topic}"], servers) as analysis:
        causes = {one.template: one for one in analysis.report(samples=1).causes}
    assert {template: one.dead_letters for template, one in causes.items()} == {
        TEMPLATES["amount"]: 3,
        TEMPLATES["field"]: 2,
    }
    chosen = [causes[TEMPLATES["field"]].cause]
    with DeadLetterAnalysis(spark, [f"dlq.{topic}"], servers, group=group, causes=chosen) as analysis:
        assert sum(one.redriven for one in analysis.redrive("once")) == 2
    assert len(contents(servers, topic)) == 5 + GOOD


@pytest.mark.row("S9")
def test_latest_record_of_each_key_of_an_archive_is_in_the_compacted_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    archive = Archive(tmp_path / "warehouse")
    source = archive.open()
    rows = [row(0, offset, key=b"%d" % (offset % 3), value=b"%d" % offset) for offset in range(12)]
    archive.add(source, {0: rows})
    report = compact(spark, source, "latest")
    assert (report.records, report.keys) == (12, 3)
    table = source.iceberg.catalog.load_table(("mansio", "latest")).scan().to_arrow()
    assert sorted(table["value"].to_pylist()) == [b"10", b"11", b"9"]
