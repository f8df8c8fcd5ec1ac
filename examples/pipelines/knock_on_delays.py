"""Aircraft that left late again after they had arrived late: state for each aircraft, by `transformWithState`.

    mansio pipeline run examples/pipelines/knock_on_delays.py --topic flights --to knock-on-delays

In: lines of CSV, keyed by aircraft. Out: one JSON record for each flight that left late on the day on which the same
aircraft's flight before it had arrived late. What is remembered of an aircraft is that last arrival; Spark keeps it in
RocksDB and in the checkpoint, so it survives a restart.
"""

from collections.abc import Iterator

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

FLIGHT = (
    "line int, year int, month int, day int, dep_time int, sched_dep_time int, dep_delay double, arr_time int, "
    "sched_arr_time int, arr_delay double, carrier string, flight int, tailnum string, origin string, dest string, "
    "air_time double, distance double, hour int, minute int, time_hour timestamp"
)
OUTPUT = "key string, day string, flight string, minutes_late int, arrived_late_before int"
LATE_MINUTES = 15


class Aircraft(StatefulProcessor):
    """One aircraft's last arrival."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Called before the first rows of a partition."""
        self.last_arrival = handle.getValueState("last_arrival", "day string, minutes_late double")

    def handleInputRows(  # noqa: N802  # Spark's names
        self,
        key: tuple[str],
        rows: Iterator[Row],
        timerValues: TimerValues,  # noqa: ARG002, N803
    ) -> Iterator[Row]:
        """The flights of one aircraft that came in this batch."""
        last_day, arrived_late = self.last_arrival.get() or ("", 0.0)
        for row in sorted(rows, key=lambda row: row.line):
            day = f"{row.year}-{row.month:02}-{row.day:02}"
            if day == last_day and arrived_late >= LATE_MINUTES and row.dep_delay >= LATE_MINUTES:
                yield Row(
                    key=key[0],
                    day=day,
                    flight=f"{row.carrier}{row.flight}",
                    minutes_late=int(row.dep_delay),
                    arrived_late_before=int(arrived_late),
                )
            last_day, arrived_late = day, row.arr_delay
        self.last_arrival.update((last_day, arrived_late))

    def close(self) -> None:
        """Nothing is open."""


def transform(frame: DataFrame) -> DataFrame:
    """Flights that left late after a late arrival."""
    flight = f.from_csv(frame.value.cast("string"), FLIGHT, {"nullValue": "NA"})
    flown = (
        frame.select(flight.alias("flight"))
        .select("flight.*")
        .where("tailnum is not null and arr_delay is not null")
    )
    return flown.groupBy("tailnum").transformWithState(
        statefulProcessor=Aircraft(), outputStructType=OUTPUT, outputMode="append", timeMode="none"
    )
