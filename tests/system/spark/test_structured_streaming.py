"""Semantics of Structured Streaming that a query over topics keeps: triggers, watermarks, checkpoints of earlier
versions, and a checkpoint that moves to another directory and another master."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions

from mansio.pipelines.run import PipelineJob, run_pipeline
from mansio.spark import start_available_now
from mansio.spark.spark_versions import SUPPORTED_VERSIONS
from support.machine import scaled
from support.paths import ROOT
from support.pipeline_process import PipelineProcess
from support.spark_source import Topic
from support.waiting import wait_until
from system.spark.streams import DEADLINE_S, pairs
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker
    from support.spark_cluster import SparkCluster
    from system.spark.streams import Streams

    TopicName = Callable[[str], str]

CHECKPOINTS = ROOT / "tests" / "golden" / "spark_checkpoints"
HOUR_MS = 3_600_000
BEGIN_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS
MOVES_DEADLINE_S = 240

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "trigger", [{"once": True}, {"processingTime": "0 seconds"}, {"availableNow": True}], ids=str
)
def test_every_trigger_reads_each_record_once(
    streams: Streams, broker_process: ServedBroker, topic_name: TopicName, trigger: dict[str, Any]
) -> None:
    topic = Topic(broker_process, topic_name("in"), 2)
    topic.fill(30)
    topic.fill(12, partition=1)
    query = streams.start(topic, trigger)
    wait_until(lambda: streams.read() == pairs(30, 12), DEADLINE_S, "all records")
    if "processingTime" in trigger:
        query.stop()
    assert query.awaitTermination(int(scaled(DEADLINE_S)))
    assert len(streams.batches) == 1
    topic.fill(5)
    query = streams.start(topic, trigger)
    wait_until(lambda: streams.read() == pairs(35, 12), DEADLINE_S, "the records since")
    assert query.exception() is None


def test_continuous_trigger_is_refused_by_name(
    streams: Streams, broker_process: ServedBroker, topic_name: TopicName
) -> None:
    topic = Topic(broker_process, topic_name("in"))
    rows = streams.writer(topic).format("noop")
    with pytest.raises(Exception, match="mansio does not support continuous processing"):
        rows.trigger(continuous="1 second").start()


def test_watermark_of_a_query_is_kept_across_restarts_and_drops_late_records(
    spark: SparkSession, broker_process: ServedBroker, topic_name: TopicName, tmp_path: Path
) -> None:
    topic = Topic(broker_process, topic_name("in"))
    results: dict[int, int] = {}
    dropped = 0
    # Hours of the records of each run. The last one is behind the watermark of the second run.
    for hours in ([0, 0, 1], [5, 1, 4], [0, 6]):
        times = [BEGIN_MS + hour * HOUR_MS for hour in hours]
        topic.fill(len(times), times=times)
        frame = (
            spark.readStream.format("mansio")
            .options(**{"kafka.bootstrap.servers": topic.bootstrap_servers, "subscribe": topic.name})
            .options(startingOffsets="earliest", stopAtLatest="true")
            .load()
        )
        counts = (
            frame.withWatermark("timestamp", "2 hours")
            .groupBy(functions.window("timestamp", "1 hour"))
            .count()
        )
        writer = counts.writeStream.outputMode("append").option(
            "checkpointLocation", str(tmp_path / "checkpoint")
        )

        def take(rows: Any, _batch: int) -> None:
            for row in rows.collect():
                hour = (int(row.window.start.timestamp() * 1000) - BEGIN_MS) // HOUR_MS
                assert hour not in results, "a window is final once"
                results[hour] = row["count"]

        query = start_available_now(writer.foreachBatch(take))
        assert query.awaitTermination(int(scaled(DEADLINE_S)))
        for progress in query.recentProgress:
            dropped += sum(one.numRowsDroppedByWatermark for one in progress.stateOperators)
    assert results == {0: 2, 1: 2}
    assert dropped == 1


@pytest.mark.parametrize("version", [f"{major}.{minor}" for major, minor in SUPPORTED_VERSIONS])
def test_query_of_an_earlier_version_continues_with_the_batch_that_was_not_complete(
    streams: Streams, broker_process: ServedBroker, topic_name: TopicName, version: str
) -> None:
    """Its checkpoint ends with batch 3, offsets 5 to 6 of both partitions, which is not in the commit log."""
    topic = Topic(broker_process, topic_name("in"), 2)
    topic.fill(9)
    topic.fill(7, partition=1)
    shutil.copytree(CHECKPOINTS / version, streams.checkpoint)
    for entry in streams.checkpoint.glob("offsets/*"):
        entry.write_text(entry.read_text().replace('"orders"', f'"{topic.name}"'))
    streams.to_end(topic)
    assert streams.batches == {3: [(0, 5), (1, 5)], 4: [(0, 6), (0, 7), (0, 8), (1, 6)]}


def test_first_batch_of_an_earlier_version_is_repeated_from_its_start(
    streams: Streams, broker_process: ServedBroker, topic_name: TopicName
) -> None:
    topic = Topic(broker_process, topic_name("in"), 2)
    topic.fill(9)
    topic.fill(7, partition=1)
    for name in ("metadata", "offsets/0"):
        (streams.checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        text = (CHECKPOINTS / "4.3" / name).read_text()
        (streams.checkpoint / name).write_text(text.replace('"orders"', f'"{topic.name}"'))
    streams.to_end(topic, startingOffsets="latest")
    assert streams.batches[0] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert streams.read() == pairs(9, 7)


@pytest.mark.timeout(MOVES_DEADLINE_S)
def test_checkpoint_continues_in_another_directory_and_with_another_master(
    spark: SparkSession,
    spark_cluster: SparkCluster,
    broker_process: ServedBroker,
    topic_name: TopicName,
    tmp_path: Path,
) -> None:
    """The second master is that of a cluster, which runs executors in processes of their own."""
    servers = broker_process.bootstrap_servers
    source = create(servers, topic_name("in"), 2)
    file = tmp_path / "copy.py"
    file.write_text("def transform(frame):\n    return frame.select('key', 'value')\n")
    job = PipelineJob(
        file=str(file),
        name=topic_name("pipeline"),
        bootstrap_servers=servers,
        checkpoint=str(tmp_path / "checkpoint"),
        inputs=(source,),
        topic=topic_name("out"),
        stops_when_caught_up=True,
        records_max=40,
    )
    publish(servers, source, [(b"%d" % number, b"%d" % number) for number in range(100)])
    assert run_pipeline(spark, job).records == 100
    publish(servers, source, [(b"%d" % number, b"%d" % number) for number in range(100, 150)])
    moved = shutil.move(job.checkpoint, tmp_path / "elsewhere")
    words = ["run", str(job.file), "--topic", source, "--to", str(job.topic), "--name", job.name, "--once"]
    words += ["--checkpoint", str(moved), "--master", spark_cluster.master, "-b", servers]
    words += ["--skip-check", *spark_cluster.settings(1)]
    process = PipelineProcess(tmp_path, words, {"SPARK_LOCAL_IP": "127.0.0.1"})
    try:
        assert process.process.wait(scaled(MOVES_DEADLINE_S)) == 0, process.errors.read_text()
    finally:
        process.kill()
    assert "50 records" in process.output.read_text()
    values = sorted(int(message.value or b"") for message in contents(servers, str(job.topic)))
    assert values == list(range(150))
