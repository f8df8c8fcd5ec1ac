"""Charts of the report on waits: the longest waits, the last hours, and what is uncertain."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from mansio.pipelines.bar_charts import render_text
from mansio.pipelines.trace_report import TraceReport, WaitRow, wait_charts

HOUR = datetime(2026, 11, 30, 20, tzinfo=UTC)


def row(
    by: str,
    p99_ms: int | None,
    group: str | None = None,
    attempt: int | None = None,
    hour: datetime | None = None,
    uncertain: int = 0,
) -> WaitRow:
    waits = 0 if p99_ms is None else 10
    return WaitRow(by, "orders", group, attempt, hour, 10, uncertain, waits, p99_ms, p99_ms, p99_ms, p99_ms)


def test_charts_have_the_longest_waits_and_the_last_hours() -> None:
    groups = [row("group", 10 * number, f"g{number}") for number in range(5)]
    unnamed = row("group", 1_500, None, uncertain=1)
    attempts = [row("attempt", 7, "g1", 1), row("attempt", None, "g1", 2)]
    hours = [row("hour", number, hour=HOUR + timedelta(hours=number)) for number in range(5)]
    report = TraceReport((row("topic", 9), *groups, unnamed, *attempts, *hours), (), is_truncated=False)
    by_group, by_attempt, by_hour = wait_charts(report, bars=3)
    assert [each.label for each in by_group.bars] == ["(no name)", "g4", "g3"]
    assert [each.is_highlighted for each in by_group.bars] == [True, False, False]
    assert [each.label for each in by_attempt.bars] == ["g1, 1"]
    assert [each.label for each in by_hour.bars] == [
        "2026-11-30 22:00", "2026-11-30 23:00", "2026-12-01 00:00"
    ]  # fmt: skip
    assert "p99 1,500 ms" in render_text(by_group)[1]
    assert not wait_charts(TraceReport((), (), is_truncated=False))
