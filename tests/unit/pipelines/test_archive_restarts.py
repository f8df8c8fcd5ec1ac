"""Errors that end an archive job, and errors after which it restarts its query. Without a JVM: the query is a stub."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from mansio.errors import DataLoss, MansioError
from mansio.iceberg.errors import CatalogLocked, ConcurrentArchive
from mansio.pipelines import archive as archives
from mansio.pipelines.archive import ArchiveFailed, ArchiveJob, ArchiveResult, archive
from mansio.pipelines.restarts import RESTARTS_MAX
from mansio.spark.source.data_loss import offset_deleted_error
from mansio.wire.topic_partition import TopicPartition

JOB = ArchiveJob("t", "/w", "127.0.0.1:9", "n", stops_when_caught_up=True)
DONE = ArchiveResult("mansio.t", 1, 1, {0: 1})


class Runs:
    """In place of the real run: fails so many times."""

    def __init__(self, failures: int, error: MansioError) -> None:
        self.left, self.error, self.started = failures, error, 0
        self.ends: list[str | None] = []

    def __call__(self, *_given: Any) -> Runs:
        return self

    def run_query(self) -> ArchiveResult:
        self.started += 1
        if self.started <= self.left:
            raise self.error
        return DONE

    def publish_end(self, error: str | None = None) -> None:
        self.ends.append(error)


def test_table_that_a_dying_archive_still_moved_on_restarts_the_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs(RESTARTS_MAX, ConcurrentArchive("other"))
    monkeypatch.setattr(archives, "_ArchiveRun", runs)
    assert archive(None, JOB) == DONE  # type: ignore[arg-type]
    assert runs.started == RESTARTS_MAX + 1
    assert runs.ends == [None]


def test_archive_beside_another_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(100, ConcurrentArchive("other"))
    monkeypatch.setattr(archives, "_ArchiveRun", runs)
    with pytest.raises(ConcurrentArchive, match="other"):
        archive(None, JOB)  # type: ignore[arg-type]
    assert runs.started == RESTARTS_MAX + 1


def test_other_errors_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(100, DataLoss("gone"))
    monkeypatch.setattr(archives, "_ArchiveRun", runs)
    with pytest.raises(DataLoss):
        archive(None, JOB)  # type: ignore[arg-type]
    assert runs.started == 1
    assert runs.ends == ["gone"], "committed with the offsets"


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        (
            "mansio.iceberg.errors.ConcurrentArchive: the table ends at 5",
            ConcurrentArchive,
            "the table ends at 5",
        ),
        (
            "mansio.iceberg.errors.CatalogLocked: catalog.db is locked",
            CatalogLocked,
            "catalog.db is locked",
        ),
        ("mansio.errors.DataLoss: offset 5 is gone", DataLoss, "offset 5 is gone"),
        (
            f"mansio.errors.DataLoss: {offset_deleted_error(TopicPartition('t', 0), 5, 9).message}",
            DataLoss,
            f"offset 5 of partition 0 of topic t was deleted: the log begins at 9. {archives.ACCEPT_LOSS_HINT}",
        ),
        ("mansio.spark.source.fetch.Any: odd", ArchiveFailed, "odd"),
        ("Stream closed SQLSTATE: XXKST", ArchiveFailed, "the query ended: Stream closed SQLSTATE: XXKST"),
    ],
)
def test_error_of_the_query_is_one_line_of_our_own(text: str, kind: type[MansioError], line: str) -> None:
    wrapped = (
        f"[STREAM_FAILED] Query [id = 1] terminated with exception: {text}\n=== Streaming Query ===\nId: a"
    )
    error = archives._error_of_query(StreamingQueryException(wrapped))
    assert type(error) is kind
    assert error.message == line
