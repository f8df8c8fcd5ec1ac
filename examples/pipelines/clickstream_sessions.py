"""Sessions of visitors: clicks with pauses of at most half an hour, by `transformWithState` with event-time timers.

    mansio pipeline run examples/pipelines/clickstream_sessions.py --topic clicks --to-table sessions --warehouse lake

In: JSON such as {"page": "/cart", "at": "2024-05-01T10:00:00Z"}, keyed by visitor. Out: one row per session, when it
is final: the watermark is half an hour beyond its last click, so no click that may still arrive extends it. Clicks may
arrive in any order and up to ten minutes late; later ones are dropped, and counted as `late_rows` by `mansio pipeline
lag --output json`. The state of a visitor is the clicks of sessions that are not final.
"""

from collections.abc import Iterator

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

CLICK = "page string, at timestamp"
OUTPUT = "visitor string, first_ms bigint, last_ms bigint, clicks int, pages array<string>"
LATENESS = "10 minutes"
PAUSE_MS = 30 * 60 * 1000


class Visitor(StatefulProcessor):
    """The clicks of one visitor that belong to no final session."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Called before the first rows of a partition."""
        self.handle = handle
        self.clicks = handle.getListState("clicks", "at_ms bigint, page string")

    def handleInputRows(  # noqa: N802  # Spark's names
        self,
        key: tuple[str],  # noqa: ARG002
        rows: Iterator[Row],
        timerValues: TimerValues,  # noqa: ARG002, N803
    ) -> Iterator[Row]:
        """New clicks of one visitor; nothing is final before a timer expires."""
        new = [(row.at_ms, row.page) for row in rows]
        self.clicks.appendList(new)
        for session in sessions_of(list(self.clicks.get())):
            self.handle.registerTimer(session[-1][0] + PAUSE_MS)
        return iter(())

    def handleExpiredTimer(  # noqa: N802
        self,
        key: tuple[str],
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: ARG002, N803
    ) -> Iterator[Row]:
        """The sessions that the watermark has passed."""
        watermark_ms = timerValues.getCurrentWatermarkInMs()
        open_clicks = []
        for session in sessions_of(list(self.clicks.get())):
            if session[-1][0] + PAUSE_MS > watermark_ms:
                open_clicks += session
                continue
            yield Row(
                visitor=key[0],
                first_ms=session[0][0],
                last_ms=session[-1][0],
                clicks=len(session),
                pages=[page for _, page in session],
            )
        self.clicks.clear()
        if open_clicks:
            self.clicks.put(open_clicks)

    def close(self) -> None:
        """Nothing is open."""


def sessions_of(clicks: list[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    """The clicks (time in milliseconds, page) in order of time, divided where the pause is longer than half an hour."""
    sessions: list[list[tuple[int, str]]] = []
    for at_ms, page in sorted((one[0], one[1]) for one in clicks):
        if not sessions or at_ms - sessions[-1][-1][0] > PAUSE_MS:
            sessions.append([])
        sessions[-1].append((at_ms, page))
    return sessions


def transform(frame: DataFrame) -> DataFrame:
    """Final sessions."""
    click = f.from_json(frame.value.cast("string"), CLICK)
    clicks = frame.select(frame.key.cast("string").alias("visitor"), click.alias("click")).select(
        "visitor", "click.page", "click.at", f.unix_millis("click.at").alias("at_ms")
    )
    sessions = (
        clicks.where("visitor is not null and at is not null")
        .withWatermark("at", LATENESS)
        .groupBy("visitor")
        .transformWithState(
            statefulProcessor=Visitor(), outputStructType=OUTPUT, outputMode="append", timeMode="eventTime"
        )
    )
    return sessions.select(
        "visitor",
        f.timestamp_millis("first_ms").alias("started"),
        f.timestamp_millis("last_ms").alias("ended"),
        "clicks",
        "pages",
    )
