"""A batch that runs for long is reported, and warnings of jobs are lines for people."""

from __future__ import annotations

import logging
from unittest.mock import Mock

import pytest

from mansio.cli.support.pipeline_options import print_running_batch
from mansio.cli.support.warning_lines import WarningLines, warning_line
from mansio.logs import fields
from mansio.pipelines.batch_watch import INTERVAL_S, BatchWatch, RunningBatch


def test_a_long_batch_is_reported_every_half_minute_and_a_short_one_is_not() -> None:
    now, reports = [0.0], list[RunningBatch]()
    stage = Mock(numCompletedTasks=3, numTasks=8)
    tracker = Mock(getActiveStageIds=lambda: [7], getStageInfo=lambda _: stage)
    spark = Mock(spec=["sparkContext"])
    spark.sparkContext.statusTracker.return_value = tracker
    watch = BatchWatch(spark, reports.append, lambda: now[0])
    for second in range(200):
        now[0] = float(second)
        last = -1 if second < 100 else second // 20
        watch.look(last, is_active=second < 150)
    assert reports == [RunningBatch(0, seconds, 3, 8) for seconds in (30.0, 60.0, 90.0)]
    assert INTERVAL_S == 30


def test_the_line_of_a_long_batch(capsys: pytest.CaptureFixture[str]) -> None:
    print_running_batch(RunningBatch(4, 61.2, 3, 8))
    print_running_batch(RunningBatch(4, 91.2))
    assert capsys.readouterr().err == "batch 4 runs for 61 s: 3 of 8 tasks are done\nbatch 4 runs for 91 s\n"


@pytest.mark.parametrize(
    ("message", "values", "expected"),
    [
        (
            "pipeline_progress_not_published",
            {"pipeline": "copy", "error": "timed out"},
            "mansio: pipeline progress not published (pipeline copy): timed out",
        ),
        ("rows_without_key", {"rows": 3}, "mansio: rows without key (rows 3)"),
        ("plain words\nwith a line", {}, "mansio: plain words\\nwith a line"),
    ],
)
def test_a_warning_is_one_line_for_people(
    message: str, values: dict[str, object], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = fields(**values) if values else {}
    record = logging.getLogger("mansio.x").makeRecord(
        "mansio.x", logging.WARNING, "f", 1, message, (), None, extra=extra
    )
    assert warning_line(record) == expected
    WarningLines().emit(record)
    assert capsys.readouterr().err == expected + "\n"
