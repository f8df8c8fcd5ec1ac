"""`mansio pipeline run` as a function: checkpoint, restart, lag, target, and what is reported when something is
wrong."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

import mansio
from mansio.errors import TopicRecreated
from mansio.pipelines import progress_listener, run
from mansio.pipelines.checkpoint import (
    CheckpointBinding,
    CheckpointMismatch,
    HadoopDirectory,
    bind_checkpoint,
)
from mansio.pipelines.lag import pipeline_lag
from mansio.pipelines.pipeline_metrics import PipelineMetrics
from mansio.pipelines.pipeline_progress import NO_BATCH, BatchProgress
from mansio.pipelines.progress_listener import OffsetPublisher
from mansio.pipelines.run import PipelineFailed, PipelineJob, run_pipeline
from mansio.spark.sync_client import sync_client
from mansio.telemetry.jobs import job_span
from mansio.wire.internal_records.hold_metadata import parse_hold_metadata, pipeline_group_id
from mansio.wire.topic_partition import TopicPartition
from support.present import present
from support.spans import Spans, id_of
from support.waiting import wait_until
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from mansio.pipelines.pipeline_progress import PipelineProgress
    from support.process import ServedBroker

    TopicName = Callable[[str], str]

SHOUT = """
from pyspark.sql import functions as f

def transform(frame):
    shout = f.udf(lambda value: bytes(value).decode().upper() + MARK)
    return frame.select("key", shout("value").alias("said"), "partition")

MARK = "!"
"""
FAIL = """
from pyspark.sql import functions as f

def transform(frame):
    return frame.select(f.udf(lambda value: str(1 / 0))("value").alias("value"))
"""


COUNT = """
def transform(frame):
    return frame.groupBy("key").count()
"""


@pytest.fixture
def job(broker_process: ServedBroker, topic_name: TopicName, tmp_path: Path) -> PipelineJob:
    """The pipeline SHOUT from a topic of two partitions to one that is not there yet."""
    source = create(broker_process.bootstrap_servers, topic_name("in"), 2)
    file = tmp_path / "shout.py"
    file.write_text(SHOUT)
    return PipelineJob(
        file=str(file),
        name=topic_name("pipeline"),
        bootstrap_servers=broker_process.bootstrap_servers,
        checkpoint=str(tmp_path / "checkpoint"),
        inputs=(source,),
        topic=topic_name("out"),
        stops_when_caught_up=True,
        records_max=60,
    )


def fill(job: PipelineJob, begin: int, end: int) -> None:
    publish(
        job.bootstrap_servers,
        job.inputs[0],
        [(b"%d" % place, b"no %d" % place) for place in range(begin, end)],
    )


@pytest.mark.full
@pytest.mark.row("S2")
def test_a_repeated_batch_of_changed_rows_is_in_the_topic_once(
    spark: SparkSession, job: PipelineJob, tmp_path: Path
) -> None:
    (tmp_path / "count.py").write_text(COUNT)
    counting = dataclasses.replace(job, file=str(tmp_path / "count.py"), output_mode="update")
    assert counting.topic is not None
    fill(counting, 0, 100)
    run_pipeline(spark, counting)
    before = contents(counting.bootstrap_servers, counting.topic)
    assert sorted(present(one.key) for one in before) == sorted(b"%d" % place for place in range(100))
    commits = tmp_path / "checkpoint" / "commits"
    last = max(commits.glob("[0-9]*"), key=lambda path: int(path.name))
    for path in (last, commits / f".{last.name}.crc"):
        path.unlink(missing_ok=True)
    run_pipeline(spark, counting)
    assert contents(counting.bootstrap_servers, counting.topic) == before
    fill(counting, 100, 101)
    run_pipeline(spark, counting)
    assert len(contents(counting.bootstrap_servers, counting.topic)) == 101


@pytest.mark.full
@pytest.mark.row("T5")
@pytest.mark.parametrize("mode", ["append", "update"])
def test_records_of_a_traced_job_carry_its_context_and_each_batch_has_a_span(
    spark: SparkSession, job: PipelineJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("MANSIO_TRACING", "true")
    spans = Spans()
    if mode == "update":
        (tmp_path / "count.py").write_text(COUNT)
        job = dataclasses.replace(job, file=str(tmp_path / "count.py"), output_mode="update")
    assert job.topic is not None
    fill(job, 0, 100)
    with job_span("pipeline run"):
        done = run_pipeline(spark, job)
    (ended,) = spans.named("pipeline run")
    batches = spans.named(f"batch {job.name}")
    assert len(batches) == done.batches > 0
    counts: list[Any] = [dict(batch.attributes or {})["mansio.pipeline.batch.records"] for batch in batches]
    assert sum(counts) == 100
    assert all(batch.parent is not None and batch.parent.span_id == id_of(ended) for batch in batches)
    records = contents(job.bootstrap_servers, job.topic)
    assert len(records) == 100
    contexts = {record.header("traceparent") for record in records}
    assert [int((one or b"").split(b"-")[2], 16) for one in contexts] == [id_of(ended)]


@pytest.mark.full
def test_pipeline_goes_on_where_it_ended_and_shows_as_a_group_without_lag(
    spark: SparkSession, job: PipelineJob
) -> None:
    fill(job, 0, 100)
    batches: list[BatchProgress] = []
    done = run_pipeline(spark, job, batches.append)
    assert (done.records, done.lag) == (100, 0)
    assert [progress.batch for progress in batches] == list(range(len(batches)))
    assert len(batches) > 1
    assert batches[0].lag == 100 - batches[0].records, "what was not read when the first batch was planned"
    fill(job, 100, 130)
    assert run_pipeline(spark, job).records == 30
    again = run_pipeline(spark, job)
    assert (again.records, again.lag) == (0, 0)
    assert job.topic is not None
    found = contents(job.bootstrap_servers, job.topic)
    assert sorted(json.loads(one.value or b"")["said"] for one in found) == sorted(
        f"NO {n}!" for n in range(130)
    )
    assert {one.partition for one in found} == {0, 1}, "the target has as many partitions as the input"
    with mansio.blocking.connect(job.bootstrap_servers) as client:
        lags = client.admin.group_lag(pipeline_group_id(job.name))
        committed = client.admin.group_offsets(pipeline_group_id(job.name))
    assert sum(lag.committed_offset or 0 for lag in lags.values()) == 130
    assert [lag.lag for lag in lags.values()] == [0, 0]
    assert all(parse_hold_metadata(offset.metadata) is not None for offset in committed.values())
    assert set(committed) == {TopicPartition(job.inputs[0], index) for index in (0, 1)}


@pytest.mark.full
def test_stream_runs_until_it_is_stopped_and_into_a_directory_it_writes_exactly_once(
    spark: SparkSession, job: PipelineJob, tmp_path: Path
) -> None:
    fill(job, 0, 100)
    table = str(tmp_path / "table")
    into_table = dataclasses.replace(job, topic=None, path=table, stops_when_caught_up=False, trigger_s=0.1)
    batches: list[BatchProgress] = []
    done = run_pipeline(spark, into_table, batches.append, lambda: bool(batches) and batches[-1].lag == 0)
    assert done.records == 100
    last = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for path in (last, last.with_name(f".{last.name}.crc")):
        path.unlink(missing_ok=True)
    repeated = run_pipeline(spark, dataclasses.replace(into_table, stops_when_caught_up=True))
    assert repeated.lag == 0, "also of a batch that is only repeated"
    rows = spark.read.parquet(table).collect()
    assert sorted(row.said for row in rows) == sorted(f"NO {n}!" for n in range(100))


@pytest.mark.full
def test_run_killed_between_its_last_batch_and_the_commit_of_offsets_leaves_no_lag_after_the_next_start(
    spark: SparkSession, job: PipelineJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start corrects the group before its query reads."""
    fill(job, 0, 20)
    run_pipeline(spark, job)
    group = pipeline_group_id(job.name)
    publisher = OffsetPublisher(job.name, job.bootstrap_servers)
    publisher.publish({TopicPartition(job.inputs[0], index): 0 for index in (0, 1)})  # as the kill leaves it
    publisher.close()
    with mansio.blocking.connect(job.bootstrap_servers) as client:
        assert sum(lag.lag or 0 for lag in client.admin.group_lag(group).values()) == 20
        monkeypatch.setattr(run._PipelineOutput, "start", Mock(side_effect=PipelineFailed("not started")))
        with pytest.raises(PipelineFailed):
            run_pipeline(spark, job)
        assert [lag.lag for lag in client.admin.group_lag(group).values()] == [0, 0]
        committed = client.admin.group_offsets(group)
    holds = [parse_hold_metadata(offset.metadata) for offset in committed.values()]
    assert all(hold is not None and hold.query for hold in holds), "the mark names the query"


@pytest.mark.full
def test_start_that_was_killed_while_it_bound_its_checkpoint_is_repeated(
    spark: SparkSession, job: PipelineJob, tmp_path: Path
) -> None:
    """Files of that name are all it can have left."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in (".mansio.json.partial", "..mansio.json.partial.crc"):
        (checkpoint / name).write_bytes(b"{")
    own = CheckpointBinding(job.name, {job.inputs[0]: "aa"}, job.target)
    directory = HadoopDirectory(spark, str(checkpoint))
    for _ in range(2):
        bind_checkpoint(directory, own)
    assert json.loads((checkpoint / "mansio.json").read_text())["topics"] == own.topics
    with pytest.raises(CheckpointMismatch):
        bind_checkpoint(directory, dataclasses.replace(own, topics={"other": "bb"}))


@pytest.mark.full
def test_checkpoint_of_something_else_is_refused_and_a_topic_made_again_is_noticed(
    spark: SparkSession, job: PipelineJob, broker_process: ServedBroker, topic_name: TopicName
) -> None:
    fill(job, 0, 10)
    run_pipeline(spark, job)
    other = create(broker_process.bootstrap_servers, topic_name("other"))
    with pytest.raises(
        CheckpointMismatch, match=f"is of {job.inputs[0]}, not of {other}: give another checkpoint"
    ):
        run_pipeline(spark, dataclasses.replace(job, inputs=(other,)))
    with pytest.raises(CheckpointMismatch, match="is of writing topic"):
        run_pipeline(spark, dataclasses.replace(job, topic=other))
    with mansio.blocking.connect(job.bootstrap_servers) as client:
        client.admin.delete_topic(job.inputs[0])
    create(job.bootstrap_servers, job.inputs[0], 2)
    with pytest.raises(TopicRecreated, match="was deleted and created again"):
        run_pipeline(spark, job)


@pytest.mark.full
def test_what_fails_in_the_users_function_is_one_line(
    spark: SparkSession, job: PipelineJob, tmp_path: Path
) -> None:
    fill(job, 0, 10)
    file = tmp_path / "fail.py"
    file.write_text(FAIL)
    with pytest.raises(PipelineFailed, match="ZeroDivisionError: division by zero") as caught:
        run_pipeline(spark, dataclasses.replace(job, file=str(file)))
    assert "\n" not in str(caught.value)
    shown = pipeline_lag(sync_client(job.bootstrap_servers), job.name)
    assert sum(one.lag for one in shown) == 10, "nothing is processed"
    assert shown[0].progress is not None
    assert (shown[0].progress.ended, shown[0].progress.batch) == ("failed", NO_BATCH)
    assert "ZeroDivisionError" in (shown[0].progress.error or "")
    file.write_text("def transform(frame):\n    return frame.select('no_such_column')\n")
    with pytest.raises(Exception, match="no_such_column") as refused:
        run_pipeline(spark, dataclasses.replace(job, file=str(file), checkpoint=str(tmp_path / "other")))
    assert "\n" not in str(refused.value)


COUNT_BY_KEY = """
from pyspark.sql import functions as f

def transform(frame):
    times = frame.withWatermark("timestamp", "10 seconds")
    return times.groupBy("key", f.window("timestamp", "30 seconds")).count()
"""


@pytest.mark.full
def test_progress_is_exported_and_kept_with_the_offsets_until_the_pipeline_fails(
    spark: SparkSession, job: PipelineJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "count.py"
    file.write_text(COUNT_BY_KEY)
    counting = dataclasses.replace(job, file=str(file))
    fill(job, 0, 100)
    metrics = PipelineMetrics(job.name)
    run_pipeline(spark, counting, metrics=metrics)

    def stored() -> PipelineProgress:
        (found, *others) = pipeline_lag(sync_client(job.bootstrap_servers), job.name)
        assert all(one.progress == found.progress for one in others)
        assert found.progress is not None
        return found.progress

    first = stored()
    assert (first.ended, first.error, first.state_rows) == ("stopped", None, 100)
    assert first.state_bytes > 0
    assert first.watermark_ms is not None
    assert abs(first.watermark_ms + 10_000 - time.time() * 1000) < 600_000

    def exported() -> dict[str, float]:
        return {sample.name: sample.value for one in metrics.collect() for sample in one.samples}

    wait_until(lambda: exported()["mansio_pipeline_records_total"] == 100, 60)  # Spark reports batches late
    assert exported()["mansio_pipeline_state_rows"] == 100
    assert exported()["mansio_pipeline_lag_records"] == 0

    monkeypatch.setattr(progress_listener, "REPORT_INTERVAL_S", 0.0)
    reports: set[int | None] = set()

    def has_reported_twice() -> bool:
        reports.add(stored().reported_ms)
        return len(reports) > 2

    run_pipeline(
        spark,
        dataclasses.replace(counting, stops_when_caught_up=False, trigger_s=0.1),
        is_stopping=has_reported_twice,
    )
    assert stored().batch >= first.batch
    fill(job, 100, 110)
    file.write_text(COUNT_BY_KEY.replace("count()", "agg(f.sum(f.udf(lambda key: 1 // 0, 'int')('key')))"))
    with pytest.raises(PipelineFailed):
        run_pipeline(spark, counting)
    failed = stored()
    assert failed.ended == "failed"
    assert failed.error
    assert failed.at_ms >= first.at_ms
