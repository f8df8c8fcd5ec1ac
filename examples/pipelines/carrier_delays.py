"""Mean departure delay by carrier and day, beside the weather it had: two streams, joined and then counted in windows.

    mansio pipeline run examples/pipelines/carrier_delays.py --to carrier-delays

Reads the topics `flights` and `weather` (lines of CSV). The watermark says how late a record may come: a day is written
when both streams are six hours beyond it, and then it is final.
"""

from collections.abc import Callable

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

FLIGHT = (
    "line int, year int, month int, day int, dep_time int, sched_dep_time int, dep_delay double, arr_time int, "
    "sched_arr_time int, arr_delay double, carrier string, flight int, tailnum string, origin string, dest string, "
    "air_time double, distance double, hour int, minute int, time_hour timestamp"
)
WEATHER = (
    "origin string, year int, month int, day int, hour int, temp double, dewp double, humid double, wind_dir double, "
    "wind_speed double, wind_gust double, precip double, pressure double, visib double, time_hour timestamp"
)
LATENESS = "6 hours"


def parsed(frame: DataFrame, schema: str) -> DataFrame:
    """Lines of CSV as columns, with a watermark on the hour they are of."""
    row = f.from_csv(frame.value.cast("string"), schema, {"nullValue": "NA"})
    return frame.select(row.alias("row")).select("row.*").withWatermark("time_hour", LATENESS)


def pipeline(_spark: SparkSession, read: Callable[..., DataFrame]) -> DataFrame:
    """Flights and weather, joined by place and hour; then one row for each carrier and day."""
    flights = parsed(read("flights"), FLIGHT).where("dep_delay is not null")
    weather = parsed(read("weather"), WEATHER).select("origin", "time_hour", "wind_speed", "precip")
    together = flights.join(weather, ["origin", "time_hour"])
    return (
        together.groupBy(f.window("time_hour", "1 day").alias("day"), "carrier")
        .agg(
            f.count("*").alias("flights"),
            f.round(f.avg("dep_delay"), 3).alias("mean_delay_minutes"),
            f.round(f.avg("wind_speed"), 3).alias("mean_wind_mph"),
            f.max("precip").alias("most_rain_inches"),
        )
        .select(
            f.col("carrier").alias("key"),
            f.date_format("day.start", "yyyy-MM-dd").alias("day"),
            "carrier",
            "flights",
            "mean_delay_minutes",
            "mean_wind_mph",
            "most_rain_inches",
        )
    )
