"""Restarts of Spark jobs after a Python worker that started slowly, in all shapes of Spark's error. Without a JVM."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, StreamingQueryException

from mansio.pipelines import run as run_module
from mansio.pipelines.archive import ArchiveFailed
from mansio.pipelines.pipeline_file import PipelineFileError
from mansio.pipelines.restarts import (
    RESTARTS_MAX,
    WORKER_START_TIMEOUT_TEXT,
    WorkerStartTimeout,
    run_with_restarts,
)
from mansio.pipelines.run import PipelineFailed, PipelineJob, lost_session_errors, run_pipeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LATE = f"org.apache.spark.SparkException: {WORKER_START_TIMEOUT_TEXT}."


def raised(error: Exception, cause: Exception | None = None) -> Callable[[], None]:
    def raise_it() -> None:
        raise error from cause

    return raise_it


def of_lost_session() -> None:
    with lost_session_errors(ArchiveFailed):
        raise PySparkException(LATE)


SHAPES = {
    "of the running query": raised(StreamingQueryException(f"[STREAM_FAILED] Query terminated: {LATE}")),
    "of start or load": raised(Py4JError(f"An error occurred while calling o7.load.\n: {LATE}")),
    "in one line of a pipeline": raised(PipelineFailed("reason"), StreamingQueryException(LATE)),
    "in the user's function": raised(PipelineFileError("mine.py, line 3: Py4JError"), Py4JError(LATE)),
    "of a session": of_lost_session,
}


@pytest.mark.parametrize("fail", SHAPES.values(), ids=SHAPES.keys())
def test_job_restarts_after_a_late_worker_with_a_line_that_states_why(
    fail: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def attempt() -> str:
        calls.append(len(calls))
        if len(calls) <= RESTARTS_MAX:
            fail()
        return "done"

    with caplog.at_level(logging.WARNING):
        assert run_with_restarts(attempt, "pipeline p") == "done"
    assert len(calls) == RESTARTS_MAX + 1
    assert len(caplog.messages) == RESTARTS_MAX
    assert caplog.messages[0] == (
        "pipeline p continues where it was, restart 1 of at most 3: a Python worker of Spark did not start within ten"
        " seconds, because the machine is busy"
    )


def test_restarts_are_bounded_and_other_errors_end_the_job() -> None:
    calls: list[None] = []

    def always_late() -> None:
        calls.append(None)
        SHAPES["of start or load"]()

    with pytest.raises(WorkerStartTimeout, match="because the machine is busy: try again"):
        run_with_restarts(always_late, "archive a")
    assert len(calls) == RESTARTS_MAX + 1

    def broken() -> None:
        calls.append(None)
        raise PipelineFailed("ZeroDivisionError")

    calls.clear()
    with pytest.raises(PipelineFailed, match="ZeroDivisionError"):
        run_with_restarts(broken, "pipeline p")
    assert len(calls) == 1


def test_pipeline_restarts_if_a_worker_is_late_while_its_inputs_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark asks a Python worker for the columns of each input, before there is a query."""
    file = tmp_path / "mine.py"
    file.write_text("def transform(frame):\n    return frame\n")
    loads: list[None] = []

    def load() -> None:
        loads.append(None)
        raise Py4JError(f"An error occurred while calling o7.load.\n: {LATE}")

    reader: Any = SimpleNamespace(load=load)
    reader.format = lambda _name: reader
    reader.options = lambda **_options: reader
    view = SimpleNamespace(topic_id=b"1" * 16, partitions=(0,))
    monkeypatch.setattr(run_module, "sync_client", lambda _servers: None)
    monkeypatch.setattr(run_module, "find_topic", lambda _client, _topic: view)
    spark: Any = SimpleNamespace(readStream=reader)
    restarts: list[None] = []
    metrics: Any = SimpleNamespace(observe_restart=lambda: restarts.append(None))
    job = PipelineJob(str(file), "p", "127.0.0.1:9", "checkpoint", inputs=("t",), topic="out")
    with pytest.raises(WorkerStartTimeout):
        run_pipeline(spark, job, metrics=metrics)
    assert len(loads) == RESTARTS_MAX + 1
    assert len(restarts) == RESTARTS_MAX
