"""`mansio pipeline run --share-group`: results once in a topic, a table and a directory, failed rows as dead letters,
through crashes between any two steps of a batch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.errors import ConfigError
from mansio.iceberg.result_table.table import TableTarget
from mansio.pipelines.run import PipelineFailed, PipelineJob, run_pipeline
from mansio.pipelines.work_sink import StoredFailures, results_of
from mansio.spark.share import failures
from mansio.wire.topic_partition import TopicPartition
from support.waiting import wait_until
from system.spark.streams import DEADLINE_S
from system.spark.test_run_table import table_of
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from support.process import ServedBroker

RECORDS = 40

ONCE = """
from pathlib import Path
from mansio.spark import work

PLACE = Path({place!r})

def once(row):
    number = int(row.value)
    if number % 10 == 7:
        raise work.Reject("seven")
    mark = PLACE / str(row.offset)
    if mark.exists():
        raise ValueError("called again")
    mark.touch()
    return {{"value": b"done %d" % number}} if "value" in {schema!r} else {{"number": number}}

def transform(frame):
    return work.apply(frame, once, schema={schema!r})
"""
"""A function that succeeds once for each record: a second call would fail."""


def prepare(broker: ServedBroker, topic: str, records: int, limit: int = 5) -> None:
    """A topic with so many records, and a group of the same name that begins at its start."""
    create(broker.bootstrap_servers, topic)
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        configs = {
            "share.auto.offset.reset": "earliest",
            "mansio.retry.backoff.ms": "0",
            "share.delivery.count.limit": str(limit),
        }
        client.admin.alter_group_config(topic, configs)
    values = [(b"key", b"%d" % number) for number in range(records)]
    publish(broker.bootstrap_servers, topic, values, partition=0)


def state(broker: ServedBroker, topic: str) -> Any:
    place = TopicPartition(topic, 0)
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        return client.admin.shares.leases(topic, [place])[place]


def into(job: PipelineJob, target: str, name: str, tmp_path: Path) -> PipelineJob:
    schema = "value binary" if target == "topic" else "number int"
    (tmp_path / "once.py").write_text(ONCE.format(place=str(tmp_path / "marks"), schema=schema))
    if target == "topic":
        return dataclasses.replace(job, topic=name)
    if target == "table":
        return dataclasses.replace(job, table=TableTarget("ns.done", str(tmp_path / "lake")))
    return dataclasses.replace(job, path=str(tmp_path / "files"))


def numbers_in(spark: SparkSession, job: PipelineJob) -> list[int]:
    """The numbers of the results, from the target of a job."""
    if job.topic is not None:
        return sorted(
            int((one.value or b"").split()[1]) for one in contents(job.bootstrap_servers, job.topic)
        )
    if job.table is not None:
        return sorted(table_of(job).scan().to_arrow()["number"].to_pylist())
    assert job.path is not None
    return sorted(row.number for row in spark.read.parquet(job.path).collect())


@pytest.fixture
def job(broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path) -> PipelineJob:
    topic = topic_name("in")
    prepare(broker_process, topic, RECORDS)
    (tmp_path / "marks").mkdir()
    return PipelineJob(
        file=str(tmp_path / "once.py"),
        name=topic_name("pipeline"),
        bootstrap_servers=broker_process.bootstrap_servers,
        checkpoint=str(tmp_path / "checkpoint"),
        inputs=(topic,),
        share_group=topic,
        stops_when_caught_up=True,
    )


CRASHES = ("before the mark", "before failures are sent", "after failures are sent")


@pytest.mark.full
@pytest.mark.row("S13")
@pytest.mark.parametrize("target", ["topic", "table", "directory"])
def test_a_batch_whose_results_are_written_is_not_processed_again_after_a_crash(
    spark: SparkSession,
    broker_process: ServedBroker,
    job: PipelineJob,
    topic_name: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
) -> None:
    job = into(job, target, topic_name("out"), tmp_path)
    (topic,) = job.inputs
    # A directory replaces the files of a batch that is not marked, so the function is called again.
    for number, crash in enumerate(CRASHES[target == "directory" :]):
        if number:
            values = [(b"key", b"%d" % value) for value in range(number * RECORDS, (number + 1) * RECORDS)]
            publish(broker_process.bootstrap_servers, topic, values, partition=0)
        with monkeypatch.context() as patched:
            store, send = StoredFailures.store, failures.send_failures

            def crashing_store(self: StoredFailures, checkpoint: Any, store: Any = store) -> None:
                if self.is_written:
                    raise RuntimeError("crash")
                store(self, checkpoint)

            def crashing_send(*arguments: Any, crash: str = crash, send: Any = send) -> int:
                if crash == CRASHES[2]:
                    send(*arguments)
                raise RuntimeError("crash")

            if crash == CRASHES[0]:
                patched.setattr(StoredFailures, "store", crashing_store)
            else:
                patched.setattr(failures, "send_failures", crashing_send)
            with pytest.raises(PipelineFailed, match="crash"):
                run_pipeline(spark, job)
        run_pipeline(spark, job)
        expected = [value for value in range((number + 1) * RECORDS) if value % 10 != 7]
        assert numbers_in(spark, job) == expected
    wait_until(
        lambda: state(broker_process, topic).dead == (number + 1) * RECORDS // 10, DEADLINE_S, "dead letters"
    )
    assert state(broker_process, topic).lag == 0
    if job.topic is not None:
        assert {one.key for one in contents(job.bootstrap_servers, job.topic)} == {b"key"}


CHANGING = """
from pathlib import Path
from mansio.spark import work

PLACE = Path({place!r})

def change(row):
    number = int(row.value)
    mark = PLACE / f"{{row.offset}}-{{row.delivery_count}}"
    calls = 1 if not mark.exists() else 1 + int(mark.read_text())
    mark.write_text(str(calls))
    if number % 10 == 7 and calls in (1, 3) and row.delivery_count == 1:
        raise ValueError("the first call of an evaluation fails")
    if number % 10 == 3 and calls == 2:
        raise ValueError("the second call fails")
    return {{"value": b"done %d" % number}} if "value" in {schema!r} else {{"number": number}}

def transform(frame):
    return work.apply(frame, change, schema={schema!r})
"""
"""A function with another outcome in its second call for the same delivery."""


@pytest.mark.full
@pytest.mark.row("S13")
@pytest.mark.parametrize("target", ["topic", "table", "directory"])
def test_rows_that_spark_processes_again_while_results_are_written_have_one_result_and_none_is_lost(
    spark: SparkSession,
    broker_process: ServedBroker,
    job: PipelineJob,
    topic_name: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
) -> None:
    """Spark processes rows of a persisted DataFrame again if it has lost an executor, or ran a task twice."""
    job = into(job, target, topic_name("out"), tmp_path)
    schema = "value binary" if target == "topic" else "number int"
    (tmp_path / "once.py").write_text(CHANGING.format(place=str(tmp_path / "marks"), schema=schema))
    lost: list[DataFrame] = []

    def results_after_a_loss(done: DataFrame, *given: Any, **named: Any) -> DataFrame:
        if len(lost) < 2:
            lost.append(done.unpersist())
        return results_of(done, *given, **named)

    monkeypatch.setattr("mansio.pipelines.work_sink.results_of", results_after_a_loss)
    run_pipeline(spark, job)
    assert len(lost) == 2, "the batch was processed again, because some rows failed only in the second call"
    run_pipeline(spark, job)
    assert numbers_in(spark, job) == [*range(RECORDS)]
    found = state(broker_process, job.inputs[0])
    assert (found.lag, found.dead) == (0, 0)


@pytest.mark.full
def test_a_second_input_and_a_result_without_its_columns_are_refused(
    spark: SparkSession, job: PipelineJob, tmp_path: Path
) -> None:
    job = into(job, "directory", "", tmp_path)
    (tmp_path / "two.py").write_text(
        "def pipeline(spark, read):\n    return read({0!r}).union(read({0!r}))\n".format(job.inputs[0])
    )
    with pytest.raises(ConfigError, match="reads a share group once"):
        run_pipeline(spark, dataclasses.replace(job, file=str(tmp_path / "two.py"), inputs=()))
    (tmp_path / "less.py").write_text(
        (tmp_path / "once.py")
        .read_text()
        .replace("schema='number int')", "schema='number int').drop('offset')")
    )
    with pytest.raises(ConfigError, match="no column offset"):
        run_pipeline(spark, dataclasses.replace(job, file=str(tmp_path / "less.py")))
