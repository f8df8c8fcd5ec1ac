"""Deliveries of a topic as a table of Spark: those of the timelines that the broker reports, and they join with the
records; and the report of waits."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from mansio.cli.main import app
from mansio.pipelines.trace_report import report_topics, summarize
from mansio.spark.topic_views import register_topics
from support.handled_records import as_timelines, handle, of_timelines, prepare

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from support.process import ServedBroker


def read(spark: SparkSession, servers: str, topic: str, **options: str) -> DataFrame:
    reader = spark.read.format("mansio").option("kafka.bootstrap.servers", servers)
    return reader.option("deliveries", "true").options(**{"subscribe": topic, **options}).load()


@pytest.mark.full
def test_deliveries_are_those_of_the_timelines_and_join_with_the_topic(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    servers, topic, group = broker_process.bootstrap_servers, topic_name("in"), topic_name("group")
    prepare(servers, topic, group)
    expected = of_timelines(servers, topic)
    assert as_timelines(row.asDict() for row in read(spark, servers, topic).collect()) == expected
    assert len(expected) >= 11
    assert all(row[-1] for row in expected)

    names = register_topics(spark, [topic], servers, deliveries=True)
    deliveries = f"`{names[topic]}$deliveries`"
    joined = spark.sql(
        f"select cast(r.value as string) as value, d.attempt, d.end from {names[topic]} r join {deliveries} d"
        f" using (topic, partition, offset) where d.group = '{group}-2' order by value"
    ).collect()
    assert [(row["attempt"], row["end"]) for row in joined] == [(1, "acknowledged")] * 2
    handle(servers, topic, f"{group}-2", ["ack"])  # seen by the next query
    count = spark.sql(f"select count(*) from {deliveries} where group = '{group}-2'").collect()[0][0]
    assert count == 3

    some = read(spark, servers, topic, startingOffsets=f'{{"{topic}": {{"0": 1, "1": 3}}}}')
    assert {(row["partition"], row["offset"]) for row in some.collect()} <= {(0, 1), (0, 2)}
    assert read(spark, servers, topic, startingTimestamp="4000000000000").count() == 0
    for name in (names[topic], deliveries):
        spark.catalog.dropTempView(name.strip("`"))


@pytest.mark.full
@pytest.mark.row("S7")
def test_report_has_the_percentiles_of_a_known_distribution_and_names_what_is_uncertain(
    spark: SparkSession,
) -> None:
    waits = spark.range(100_000).selectExpr(
        "'orders' as topic",
        "if(id % 2 = 0, 'even', 'odd') as group",
        "if(id % 10 = 9, 2, 1) as attempt",
        "timestamp_millis(1790000000000 + id * 72) as delivered_at",
        "cast(null as timestamp) as ended_at",
        "cast(null as timestamp) as dead_lettered_at",
        # Shuffled, 1 to 100,000 ms; every thousandth is not known.
        "if(id % 1000 = 7, null, (id * 7919) % 100000 + 1) as wait_ms",
        "id >= 10 as certain",
        "if(id < 10, array('a gap'), cast(array() as array<string>)) as uncertainties",
    )
    report = summarize(waits)
    (whole,) = report.rows("topic")
    assert (whole.deliveries, whole.waits, whole.uncertain) == (100_000, 99_900, 10)
    for found, wanted in ((whole.p50_ms, 50_000), (whole.p95_ms, 95_000), (whole.p99_ms, 99_000)):
        assert found == pytest.approx(wanted, rel=0.01)
    assert [(each.group, each.deliveries) for each in report.rows("group")] == [
        ("even", 50_000),
        ("odd", 50_000),
    ]
    attempts = {(each.group, each.attempt): each.deliveries for each in report.rows("attempt")}
    assert attempts == {("even", 1): 50_000, ("odd", 1): 40_000, ("odd", 2): 10_000}
    hours = report.rows("hour")
    assert [each.hour and each.hour.minute for each in hours] == [0] * len(hours)
    assert sum(each.deliveries for each in hours) == 100_000
    assert [(each.topic, each.reason, each.deliveries) for each in report.uncertainties] == [
        ("orders", "a gap", 10)
    ]
    assert not report.is_truncated


@pytest.mark.full
@pytest.mark.row("S7")
def test_report_of_a_topic_has_its_groups_and_attempts(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers, topic, group = broker_process.bootstrap_servers, topic_name("in"), topic_name("group")
    prepare(servers, topic, group)
    report = report_topics(spark, [topic], servers)
    expected = of_timelines(servers, topic)
    (whole,) = report.rows("topic")
    assert (whole.deliveries, whole.waits, whole.uncertain) == (len(expected), len(expected), 0)
    assert whole.max_ms == max(row[9] for row in expected)
    found = {(each.group, each.attempt): each.deliveries for each in report.rows("attempt")}
    assert found == {
        (each, attempt): count
        for each in (group, f"{group}-2")
        for attempt in (1, 2)
        if (count := sum(row[2:4] == (each, attempt) for row in expected))
    }
    assert not report_topics(spark, [topic], servers, until_ms=1_790_000_000_000).waits

    plot = tmp_path / "waits.svg"
    words = [
        "pipeline",
        "trace-report",
        "--topic",
        topic,
        "--since",
        "-1h",
        "--plot",
        str(plot),
        "-o",
        "json",
    ]
    done = CliRunner().invoke(app, [*words, "--bootstrap-servers", servers])
    assert not done.exit_code, done.output
    shown = json.loads(done.stdout)
    assert shown["waits"][0]["deliveries"] == whole.deliveries
    assert shown["uncertainties"] == []
    drawn = ElementTree.fromstring(plot.read_text())
    assert f"p50 {whole.p50_ms:,}, p95" in "".join(drawn.itertext())
