"""Report on the deliveries of share groups: how long records wait, by topic, group, attempt and hour.

Spark reads the deliveries of each topic once, from the trace, and keeps them on disk for two aggregations. Percentiles
are values that occur, whose rank differs by at most one in `PERCENTILE_ACCURACY` from the exact one, so memory does not
depend on the number of deliveries.

Invariants:
* Each delivery counts in one row of each kind (topic, group, attempt, hour), also if its wait is not known.
* A delivery of which something may be missing counts as uncertain, and for each reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark import StorageLevel
from pyspark.sql import functions

from mansio.pipelines.bar_charts import Bar, Chart, short_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

PERCENTILES: Final = (0.5, 0.95, 0.99)
PERCENTILE_ACCURACY: Final = 10_000
ROWS_MAX: Final = 10_000
"""Number of rows of a report: those with the most deliveries."""
REASONS_MAX: Final = 100
"""Number of reasons in a report: those of the most deliveries."""
HOUR_MS: Final = 3_600_000

_KEYS: Final = ("topic", "group", "attempt", "hour")
_SETS: Final = {
    "topic": ("topic",),
    "group": ("topic", "group"),
    "attempt": ("topic", "group", "attempt"),
    "hour": ("topic", "hour"),
}


@dataclass(frozen=True, slots=True)
class WaitRow:
    """Waits of some deliveries, `by` topic, group, attempt or hour (its begin); the other attributes are None.

    `deliveries`: number of deliveries. `uncertain`: those of them of which something may be missing. `waits`: those
    whose wait is known, of which `p50_ms`, `p95_ms`, `p99_ms` and `max_ms` are, None without any. The wait of a first
    delivery begins with the publication, that of another one with the event before it, such as the release.
    """

    by: str
    topic: str
    group: str | None
    attempt: int | None
    hour: datetime | None
    deliveries: int
    uncertain: int
    waits: int
    p50_ms: int | None
    p95_ms: int | None
    p99_ms: int | None
    max_ms: int | None


@dataclass(frozen=True, slots=True)
class UncertaintyRow:
    """Why something may be missing of `deliveries` deliveries of a topic."""

    topic: str
    reason: str
    deliveries: int


@dataclass(frozen=True, slots=True)
class TraceReport:
    """`waits`: by topic, then kind. `uncertainties`: the most frequent first. `is_truncated`: there are more waits."""

    waits: tuple[WaitRow, ...]
    uncertainties: tuple[UncertaintyRow, ...]
    is_truncated: bool

    def rows(self, by: str) -> list[WaitRow]:
        """Return the rows of one kind: `topic`, `group`, `attempt` or `hour`."""
        return [each for each in self.waits if each.by == by]


def report_topics(
    spark: SparkSession,
    topics: Iterable[str],
    bootstrap_servers: str,
    *,
    since_ms: int | None = None,
    until_ms: int | None = None,
) -> TraceReport:
    """Report on the deliveries of topics, those that began from `since_ms` to below `until_ms` (ms since the Unix
    epoch). Needs READ on the topics and on `__mansio_trace`. Raises the errors of the data source."""
    bounds = {"startingTimestamp": since_ms, "endingTimestamp": until_ms}
    chosen = {name: str(value) for name, value in bounds.items() if value is not None}
    frames = [
        _read_deliveries(spark, topic, {"kafka.bootstrap.servers": bootstrap_servers, **chosen})
        for topic in dict.fromkeys(topics)
    ]
    return summarize(reduce(lambda one, other: one.unionByName(other), frames))


def _read_deliveries(spark: SparkSession, topic: str, options: Mapping[str, str]) -> DataFrame:
    reader = spark.read.format("mansio").options(**options)
    return reader.option("subscribe", topic).option("deliveries", "true").load()


def summarize(deliveries: DataFrame) -> TraceReport:
    """Return the report on deliveries (columns as of `format("mansio")` with the option `deliveries`)."""
    began_ms = functions.unix_millis(functions.coalesce("delivered_at", "ended_at", "dead_lettered_at"))
    hour = functions.floor(began_ms / HOUR_MS).alias("hour")
    rows = deliveries.select("topic", "group", "attempt", hour, "wait_ms", "certain", "uncertainties")
    rows = rows.persist(StorageLevel.DISK_ONLY)
    try:
        waits = _waits(rows)
        reasons = (
            rows.select("topic", functions.explode("uncertainties").alias("reason"))
            .groupBy("topic", "reason")
            .agg(functions.count(functions.lit(1)).alias("deliveries"))
            .orderBy(functions.desc("deliveries"), "topic", "reason")
            .limit(REASONS_MAX)
            .collect()
        )
    finally:
        rows.unpersist()
    kinds = list(_SETS)
    waits.sort(key=lambda each: (each.topic, kinds.index(each.by), *map(_sortable, _key(each))))
    return TraceReport(
        waits=tuple(waits[:ROWS_MAX]),
        uncertainties=tuple(UncertaintyRow(**row.asDict()) for row in reasons),
        is_truncated=len(waits) > ROWS_MAX,
    )


def _waits(rows: DataFrame) -> list[WaitRow]:
    """Return the waits of all kinds, at most one more than `ROWS_MAX`."""
    percentile = functions.percentile_approx("wait_ms", list(PERCENTILES), PERCENTILE_ACCURACY)
    found = (
        rows.groupingSets([[functions.col(name) for name in names] for names in _SETS.values()], *_KEYS)
        .agg(
            functions.grouping_id().alias("kind"),
            functions.count(functions.lit(1)).alias("deliveries"),
            functions.count_if(~functions.col("certain")).alias("uncertain"),
            functions.count("wait_ms").alias("waits"),
            percentile.alias("percentiles"),
            functions.max("wait_ms").alias("max_ms"),
        )
        .orderBy(functions.desc("deliveries"))
        .limit(ROWS_MAX + 1)
        .collect()
    )
    by = {_grouping_id(names): kind for kind, names in _SETS.items()}
    waits = []
    for row in found:
        p50_ms, p95_ms, p99_ms = row["percentiles"] or (None, None, None)
        waits.append(
            WaitRow(
                by=by[row["kind"]],
                topic=row["topic"],
                group=row["group"],
                attempt=row["attempt"],
                hour=None
                if row["hour"] is None
                else datetime.fromtimestamp(row["hour"] * HOUR_MS // 1000, UTC),
                deliveries=row["deliveries"],
                uncertain=row["uncertain"],
                waits=row["waits"],
                p50_ms=p50_ms,
                p95_ms=p95_ms,
                p99_ms=p99_ms,
                max_ms=row["max_ms"],
            )
        )
    return waits


def _grouping_id(names: Sequence[str]) -> int:
    """Return what Spark calls the grouping id: a bit for each key that a row is not grouped by."""
    return sum(1 << place for place, name in enumerate(reversed(_KEYS)) if name not in names)


def _key(row: WaitRow) -> tuple[str | None, int | None, datetime | None]:
    return row.group, row.attempt, row.hour


def _sortable(value: object) -> tuple[bool, object]:
    """Return a key that sorts None before the others."""
    return (value is not None, value)


def wait_charts(report: TraceReport, bars: int = 30) -> list[Chart]:
    """Return a chart of p99 for the groups, the attempts and the hours of each topic; with more than `bars` bars, of
    the longest waits, and of the last hours."""
    charts = []
    for topic in dict.fromkeys(each.topic for each in report.waits):
        for by, title in (("group", "groups"), ("attempt", "groups and attempts"), ("hour", "hours (UTC)")):
            rows = [each for each in report.rows(by) if each.topic == topic and each.p99_ms is not None]
            if by == "hour":
                rows = rows[-bars:]
            else:
                rows = sorted(rows, key=lambda each: each.p99_ms or 0, reverse=True)[:bars]
            if rows:
                chart = [
                    Bar(_label(each), each.p99_ms or 0, _note(each), each.uncertain > 0) for each in rows
                ]
                charts.append(Chart(f"{short_label(topic)}: p99 of waits by {title}", chart))
    return charts


def _label(row: WaitRow) -> str:
    if row.hour is not None:
        return f"{row.hour:%Y-%m-%d %H:00}"
    group = row.group or "(no name)"
    return short_label(group if row.attempt is None else f"{group}, {row.attempt}")


def _note(row: WaitRow) -> str:
    return f"p50 {row.p50_ms:,}, p95 {row.p95_ms:,}, p99 {row.p99_ms:,} ms"
