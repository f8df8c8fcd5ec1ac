"""The parts of `mansio pipeline run` that need no JVM: the user's file, the checkpoint's binding, lag and reasons."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mansio.errors import TopicRecreated
from mansio.pipelines import progress_listener, run
from mansio.pipelines.checkpoint import (
    CheckpointBinding,
    CheckpointMismatch,
    CompletedBatch,
    check_binding,
    completed_batch,
    start_of_first_batch,
)
from mansio.pipelines.pipeline_file import PipelineFileError, dataframe_builder, load_pipeline_file
from mansio.pipelines.pipeline_progress import NO_BATCH, PipelineProgress
from mansio.pipelines.progress_listener import offsets_in
from mansio.pipelines.run import batch_lag, failure_reason
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.listener import StreamingQueryProgress

KNOWN = CheckpointBinding("p", {"a": "01", "b": "02"}, "topic out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def transform(frame):\n    return frame +\n", r"line 2: SyntaxError"),
        ("import json\n\njson.loads('')\n", r"line 3: JSONDecodeError"),
        ("x = 1\n", r"either transform\(frame\) or pipeline\(spark, read\)"),
        ("def transform(f): ...\ndef pipeline(s, r): ...\n", "has to define either"),
    ],
)
def test_file_that_is_no_pipeline_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(PipelineFileError, match=message) as caught:
        load_pipeline_file(str(file))
    assert str(file) in str(caught.value)


def test_transform_needs_topics_and_what_it_raises_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def transform(frame):\n    # nothing\n    return frame.nothing\n")
    with pytest.raises(PipelineFileError, match="the topics have to be given"):
        dataframe_builder(str(file), ())
    spark: Any = object()
    with pytest.raises(PipelineFileError, match=r"mine\.py, line 3: AttributeError: 'int' object"):
        dataframe_builder(str(file), ("a", "b"))(spark, cast("Callable[..., DataFrame]", len))
    file.write_text("def transform(frame):\n    return 7\n")
    with pytest.raises(PipelineFileError, match="returned int, not a DataFrame"):
        dataframe_builder(str(file), ("a",))(spark, lambda topic: topic)
    with pytest.raises(PipelineFileError, match="there is no file"):
        load_pipeline_file(str(tmp_path / "other.py"))


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (KNOWN, None),
        (CheckpointBinding("renamed", KNOWN.topics, KNOWN.target), None),
        (CheckpointBinding("p", {"a": "01"}, KNOWN.target), CheckpointMismatch),
        (CheckpointBinding("p", KNOWN.topics, "topic other"), CheckpointMismatch),
        (CheckpointBinding("p", {"a": "01", "b": "03"}, KNOWN.target), TopicRecreated),
    ],
)
def test_checkpoint_serves_the_pipeline_it_was_begun_for(
    wanted: CheckpointBinding, error: type[Exception] | None
) -> None:
    if error is None:
        check_binding(KNOWN, wanted, "dir")
    else:
        with pytest.raises(error, match="give another checkpoint, or remove this one to start again"):
            check_binding(KNOWN, wanted, "dir")


class LocalCheckpoint:
    """A checkpoint in a local directory."""

    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)

    def has_entries(self) -> bool:
        return any(self.path.iterdir())

    def names(self, directory: str) -> list[str]:
        found = self.path / directory
        return [one.name for one in found.iterdir()] if found.is_dir() else []

    def read(self, name: str) -> str | None:
        found = self.path / name
        return found.read_text() if found.is_file() else None

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def replace(self, name: str, text: str) -> None:
        self.write(name, text)


def test_last_complete_batch_is_the_newest_in_the_commit_log_not_the_newest_planned(tmp_path: Path) -> None:
    checkpoint = LocalCheckpoint(tmp_path)
    assert completed_batch(checkpoint) is None
    for name in ("offsets", "commits"):
        (tmp_path / name).mkdir()
    checkpoint.write("metadata", '{"id":"q"}')
    for batch in (9, 10, 11):
        checkpoint.write(f"offsets/{batch}", f'v1\n{{"batchWatermarkMs":0}}\n{{"t":{{"0":{batch}}}}}\n-')
    assert completed_batch(checkpoint) is None, "no batch is complete"
    for batch in (9, 10):
        checkpoint.write(f"commits/{batch}", "v1\n{}")
        checkpoint.write(f"commits/.{batch + 1}.crc", "")
    assert completed_batch(checkpoint) == CompletedBatch("q", 10, ('{"t":{"0":10}}', "-"))
    checkpoint.write("offsets/10", "v9\n{}\n{}")
    assert completed_batch(checkpoint) is None, "a format of a later Spark"


def test_start_of_the_first_batch_is_known_until_this_batch_is_complete(tmp_path: Path) -> None:
    checkpoint = LocalCheckpoint(tmp_path)
    assert start_of_first_batch(checkpoint) is None
    for name in ("offsets", "commits"):
        (tmp_path / name).mkdir()
    checkpoint.write("metadata", '{"id":"q"}')
    planned = '{"t":{"0":9},"":{"t":{"0":3}}}'
    checkpoint.write("offsets/0", f'v1\n{{"batchWatermarkMs":0}}\n{planned}\n-\n{{"u":{{"0":4}}}}')
    found = start_of_first_batch(checkpoint)
    assert found == CompletedBatch("q", NO_BATCH, ('{"t": {"0": 3}}',))
    assert offsets_in(found.sources[0]) == {("t", 0): 3}
    checkpoint.write("commits/0", "v1\n{}")
    assert start_of_first_batch(checkpoint) is None
    (tmp_path / "commits" / "0").unlink()
    checkpoint.write("offsets/0", "v1\n{}\n-\n7")
    assert start_of_first_batch(checkpoint) is None, "sources that do not store their start"


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ('{"t": {"0": 5, "1": 0}, "u": {"0": 1}}', {("t", 0): 5, ("t", 1): 0, ("u", 0): 1}),
        (None, {}),
        ("null", {}),
        ("17", {}),
        ("not JSON", {}),
        ('{"logOffset": 3}', {}),
        ('{"t": {"0": "5"}}', {}),
        ('{"t": {"x": 5}}', {}),
        ('{"t": {"0": -1}}', {}),
        ('{"t": {"0": true}}', {}),
    ],
)
def test_only_offsets_of_topics_are_taken_for_such(
    text: str | None, offsets: dict[tuple[str, int], int]
) -> None:
    assert offsets_in(text) == {TopicPartition(*place): offset for place, offset in offsets.items()}


def progress(*sources: tuple[str | None, str | None]) -> StreamingQueryProgress:
    made: Any = SimpleNamespace(
        sources=[SimpleNamespace(endOffset=end, latestOffset=latest) for end, latest in sources]
    )
    return made


@pytest.mark.parametrize("reported", [True, False], ids=["from the progress", "from the brokers"])
def test_lag_is_what_was_there_and_not_read_over_all_sources(
    monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    """The progress of Spark 4.1 has the end of the batch where later versions have the end of the topics."""
    monkeypatch.setattr(run, "PROGRESS_HAS_LATEST_OFFSETS", reported)
    ends = {("t", 0): 9, ("t", 1): 4, ("u", 0): 1}

    def latest(partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        assert not reported
        return {partition: ends[partition] for partition in partitions}

    done = '{"t": {"0": 5, "1": 0}}'
    seen = '{"t": {"0": 9, "1": 4}}' if reported else done
    assert batch_lag(progress((done, seen), ('{"u": {"0": 1}}', '{"u": {"0": 1}}')), latest) == 8
    assert batch_lag(progress(("3", "4")), latest) is None, "some other source"


def test_lag_of_a_repeated_batch_comes_from_the_brokers() -> None:
    """Spark repeats a batch of its checkpoint without asking the source for its end."""
    repeated = progress(('{"t": {"0": 5}}', None))
    assert batch_lag(repeated, lambda partitions: dict.fromkeys(partitions, 7)) == 2
    assert batch_lag(repeated, lambda _partitions: {}) is None, "the brokers do not answer"


def test_pipeline_that_waits_for_records_reports_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[PipelineProgress | None] = []
    publisher = SimpleNamespace(publish=lambda _offsets, _query, progress: published.append(progress))
    monkeypatch.setattr(progress_listener, "OffsetPublisher", lambda _name, _bootstrap: publisher)
    listener = progress_listener.ProgressListener("p", "127.0.0.1:9")
    monkeypatch.setattr(progress_listener, "REPORT_INTERVAL_S", 0.0)
    listener.publish_running()
    assert published == [], "there is no batch yet"
    last = PipelineProgress(3, 1_000, late_rows=2)
    listener.publish_offsets(['{"t": {"0": 5}}'], "query", last)
    listener.publish_running()
    assert published[1] is not None
    assert published[1].reported_ms is not None
    assert published[1] == replace(last, reported_ms=published[1].reported_ms)
    monkeypatch.setattr(progress_listener, "REPORT_INTERVAL_S", 3_600.0)
    listener.publish_running()
    assert len(published) == 2, "no more often"


def test_of_a_topic_that_is_read_twice_what_the_slower_source_needs_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: list[dict[TopicPartition, int]] = []
    publisher = SimpleNamespace(publish=lambda offsets, _query, _progress: published.append(dict(offsets)))
    monkeypatch.setattr(progress_listener, "OffsetPublisher", lambda _name, _bootstrap: publisher)
    made = progress(('{"t": {"0": 50, "1": 9}}', None), ('{"t": {"0": 70, "1": 3}}', None))
    made.id, made.json = "query", '{"batchId": 1}'  # type: ignore[misc, assignment]
    made.durationMs = {"addBatch": 1}  # type: ignore[misc]
    progress_listener.ProgressListener("p", "127.0.0.1:9").publish(made)
    assert published == [{TopicPartition("t", 0): 50, TopicPartition("t", 1): 3}]


def test_late_event_of_an_earlier_batch_does_not_move_the_committed_offsets_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: list[dict[TopicPartition, int]] = []
    publisher = SimpleNamespace(publish=lambda offsets, _query, _progress: published.append(dict(offsets)))
    monkeypatch.setattr(progress_listener, "OffsetPublisher", lambda _name, _bootstrap: publisher)
    listener = progress_listener.ProgressListener("p", "127.0.0.1:9")
    for text in ('{"t": {"0": 50}}', '{"t": {"0": 40, "1": 7}}'):
        listener.publish_offsets([text], "query")
    assert published[-1] == {TopicPartition("t", 0): 50, TopicPartition("t", 1): 7}


def test_reason_is_our_own_line_else_the_innermost_error() -> None:
    trace = "Something was thrown\n  File x\nmansio.errors.DataLoss: records 3 to 5 are gone: do this\n\nJVM stack\n"
    assert failure_reason(trace) == "records 3 to 5 are gone: do this"
    assert failure_reason(
        "Traceback\n  File x\nZeroDivisionError: division by zero\n\nJVM stacktrace:\njava.X: y"
    ) == ("ZeroDivisionError: division by zero")
    assert failure_reason("[NO_COLUMN] a column\n is missing") == "[NO_COLUMN] a column is missing"
