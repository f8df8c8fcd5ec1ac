"""`mansio pipeline lag` and the offsets behind it, over a real broker and without a JVM."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from mansio.pipelines.pipeline_progress import PipelineProgress
from mansio.pipelines.progress_listener import OffsetPublisher
from mansio.wire.topic_partition import TopicPartition
from support.forked_serve import run_command
from system.spark.topics import create, publish

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.process import ServedBroker


def command(broker: ServedBroker, *words: str, output: str = "json") -> subprocess.CompletedProcess[str]:
    arguments = [*words, "--bootstrap-servers", broker.bootstrap_servers, "--output", output]
    done = run_command(arguments, os.environ)
    return subprocess.CompletedProcess(words, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.row("S11")
def test_lag_is_what_was_published_against_the_end_of_the_log_and_the_group_reports_the_same(
    broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    topic, name = create(broker_process.bootstrap_servers, topic_name("in"), 2), topic_name("pipeline")
    publish(broker_process.bootstrap_servers, topic, [(None, b"x")] * 10, partition=1)
    publisher = OffsetPublisher(name, broker_process.bootstrap_servers)
    publisher.publish({TopicPartition(topic, 0): 0, TopicPartition(topic, 1): 3}, "query")
    publisher.publish({TopicPartition(topic, 1): 4}, "query")
    publisher.close()
    publisher.close()
    publisher.publish(
        {TopicPartition(topic, 1): 5}, "query"
    )  # Spark tells of the last batch when it finds the time
    shown = json.loads(command(broker_process, "pipeline", "lag", name).stdout)
    (one,) = shown
    partitions = one["partitions"]
    assert one["lag"] == 6
    assert [(row["partition"], row["committed"], row["end"], row["lag"]) for row in partitions] == [
        (0, 0, 0, 0),
        (1, 4, 10, 6),
    ]
    assert all(row["holds"] for row in partitions)
    everything = json.loads(command(broker_process, "pipeline", "lag").stdout)
    assert [row for row in everything if row["pipeline"] == name] == shown
    group = json.loads(command(broker_process, "group", "describe", f"mansio.pipeline.{name}").stdout)
    assert [row["lag"] for row in group["offsets"]] == [0, 6]
    wrong = command(broker_process, "pipeline", "lag", "no-such")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("mansio: there is no pipeline 'no-such'; there are ")


def test_pipeline_that_no_longer_reports_is_not_shown_as_running(
    broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    servers = broker_process.bootstrap_servers
    topic, name = create(servers, topic_name("in")), topic_name("pipeline")
    publisher = OffsetPublisher(name, servers)

    def report(ago_s: int, *, is_over: bool) -> None:
        progress = PipelineProgress(3, int(time.time() - ago_s) * 1000)
        publisher.publish(
            {TopicPartition(topic, 0): 0}, "query", progress.with_end(None) if is_over else progress
        )

    def state_after(ago_s: int, *, is_over: bool = False) -> tuple[str, str]:
        """In JSON, and in the table; each command may take seconds, so the report before it is a new one."""
        report(ago_s, is_over=is_over)
        (row,) = json.loads(command(broker_process, "pipeline", "lag", name).stdout)
        report(ago_s, is_over=is_over)
        table = command(broker_process, "pipeline", "lag", name, output="table").stdout
        line = table.splitlines()[-1].removeprefix(name)
        return row["progress"]["state"], line.partition(" 0 ")[0].strip()

    try:
        assert state_after(4 * 3600) == ("no report", "no report for 4 h")
        assert state_after(0) == ("running", "running")
        assert state_after(5 * 60) == ("no report", "no report for 5 min")
        assert state_after(5 * 60, is_over=True) == ("stopped", "stopped")
    finally:
        publisher.close()


def test_ended_pipeline_shows_its_last_commit_and_why_it_failed(
    broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    servers = broker_process.bootstrap_servers
    topic, name = create(servers, topic_name("in"), 2), topic_name("pipeline")
    progress = PipelineProgress(
        7, 1_357_034_400_000, 40, 2.0, 30.0, 20.0, state_rows=5, watermark_ms=1_357_032_600_000
    )
    publisher = OffsetPublisher(name, servers)
    places = {TopicPartition(topic, index): 0 for index in range(2)}
    publisher.publish(places, "query", progress)
    assert publisher.stored_progress() == progress
    publisher.publish(places, "query", progress.with_end("division by zero"))
    publisher.close()
    shown = json.loads(command(broker_process, "pipeline", "lag", name).stdout)
    (row,) = shown
    assert len(row["partitions"]) == 2
    assert row["progress"] == {
        "state": "failed",
        "last_commit": "2013-01-01T10:00:00Z",
        "last_report": "2013-01-01T10:00:00Z",
        "batch": 7,
        "records": 40,
        "seconds": 2.0,
        "input_records_per_second": 30.0,
        "processed_records_per_second": 20.0,
        "state_rows": 5,
        "state_bytes": 0,
        "late_rows": 0,
        "watermark": "2013-01-01T09:30:00Z",
        "error": "division by zero",
    }
    table = command(broker_process, "pipeline", "lag", name, output="table").stdout
    (line,) = (line for line in table.splitlines() if "division by zero" in line)
    assert line.split()[:6] == [name, "failed", "0", "2013-01-01T10:00:00Z", "7", "20"]
