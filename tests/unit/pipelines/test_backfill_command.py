"""`mansio pipeline backfill` over a table that has ranges: refused, or accepted, before Spark starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField
from typer.testing import CliRunner, Result

from mansio.cli.main import app
from mansio.cli.pipeline import backfill as command
from mansio.iceberg.result_table.backfill_ranges import (
    RANGES_PROPERTY,
    BackfilledRange,
    TimeRange,
    format_ranges,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


FIRST_MS = 1_356_998_400_000
"""2013-01-01T00:00:00Z"""
DAY_MS = 86_400_000
OF_JANUARY = BackfilledRange("mine", ("flights",), TimeRange(FIRST_MS, FIRST_MS + 31 * DAY_MS))


class SparkStarts(Exception):
    """In place of a session."""


@pytest.fixture
def backfill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command into a table that has the records of January."""
    warehouse, file = tmp_path / "lake", tmp_path / "mine.py"
    warehouse.mkdir()
    file.write_text("def transform(frame):\n    return frame\n")
    catalog = load_catalog(
        "mansio", type="sql", uri=f"sqlite:///{warehouse}/catalog.db", warehouse=f"file://{warehouse}"
    )
    catalog.create_namespace("mansio")
    catalog.create_table(
        "mansio.late",
        Schema(NestedField(1, "number", LongType(), required=False)),
        properties={RANGES_PROPERTY: format_ranges([OF_JANUARY])},
    )
    catalog.close()

    def start(*_given: Any, **_named: Any) -> None:
        raise SparkStarts

    monkeypatch.setattr(command, "start_session", start)

    def run(begin: str, end: str, *options: str, topic: str = "flights") -> Result:
        times = ("--from-time", begin, "--to-time", end)
        place = ("--to-table", "late", "--warehouse", str(warehouse), "--topic", topic)
        return CliRunner().invoke(app, ["pipeline", "backfill", str(file), *times, *place, *options])

    return run


BEGIN, END, LATER = "2013-01-01T00:00:00Z", "2013-02-01T00:00:00Z", "2013-03-01T00:00:00Z"


@pytest.mark.parametrize(
    ("begin", "end", "options"),
    [(BEGIN, END, ()), (END, LATER, ()), (BEGIN, LATER, ("--extend",))],
    ids=["repeated", "next", "extended"],
)
def test_range_that_can_be_added_starts_spark(
    backfill: Callable[..., Result], begin: str, end: str, options: tuple[str, ...]
) -> None:
    assert isinstance(backfill(begin, end, *options).exception, SparkStarts)


@pytest.mark.full
def test_range_that_cannot_be_added_is_refused_before_spark_starts(backfill: Callable[..., Result]) -> None:
    done = backfill(BEGIN, "now")
    assert not isinstance(done.exception, SparkStarts)
    assert "--extend to replace them by those of the longer time" in str(done.exception)
    done = backfill("2013-01-10T00:00:00Z", LATER, "--extend")
    assert "already has the records of 2013-01-01T00:00:00Z" in str(done.exception)
    done = backfill(END, LATER, topic="others")
    assert "has rows of pipeline mine over flights" in str(done.exception)
