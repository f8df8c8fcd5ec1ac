"""Each flight that left late as one readable record: the smallest pipeline there is.

    mansio pipeline run examples/pipelines/late_flights.py --topic flights --to late-flights

In: lines of CSV as `mansio demo broker` streams them. Out: JSON, keyed by the aircraft as before. A result without a
column `value` is written as JSON of its columns; `key` stays the key.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

FLIGHT = (
    "line int, year int, month int, day int, dep_time int, sched_dep_time int, dep_delay double, arr_time int, "
    "sched_arr_time int, arr_delay double, carrier string, flight int, tailnum string, origin string, dest string, "
    "air_time double, distance double, hour int, minute int, time_hour timestamp"
)
LATE_MINUTES = 15


def transform(frame: DataFrame) -> DataFrame:
    """Flights that left at least a quarter of an hour late."""
    flight = f.from_csv(frame.value.cast("string"), FLIGHT, {"nullValue": "NA"})
    return (
        frame.select("key", flight.alias("flight"))
        .select("key", "flight.*")
        .where(f.col("dep_delay") >= LATE_MINUTES)
        .select(
            "key",
            f.concat("carrier", "flight").alias("flight"),
            "origin",
            "dest",
            f.col("dep_delay").cast("int").alias("minutes_late"),
            f.when(f.col("arr_delay") <= 0, "made up").otherwise("arrived late").alias("outcome"),
        )
    )
