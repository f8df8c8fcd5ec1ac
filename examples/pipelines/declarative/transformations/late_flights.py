"""Flights that left late, from the topic `flights` to the topic `late-flights`, declared instead of run.

The sink is at-least-once: a flow whose process died writes its last batch again.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()
bootstrap_servers = spark.conf.get("spark.mansio.bootstrap.servers")
FLIGHT = (
    "line int, year int, month int, day int, dep_time int, sched_dep_time int, dep_delay double, rest string"
)

dp.create_sink(
    "late_flights_topic",
    "mansio",
    {"kafka.bootstrap.servers": bootstrap_servers, "topic": spark.conf.get("spark.mansio.to")},
)


@dp.temporary_view
def flights() -> DataFrame:
    """The lines of CSV as columns; the topic is read from its beginning."""
    records = (
        spark.readStream.format("mansio")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", spark.conf.get("spark.mansio.from"))
        .option("startingOffsets", "earliest")
        .load()
    )
    # A column by its name: `records.value` would ask Spark for the columns, which Spark 4.1 refuses here.
    flight = f.from_csv(f.col("value").cast("string"), FLIGHT, {"nullValue": "NA"})
    return records.select("key", "value", flight.alias("flight")).select("key", "value", "flight.*")


@dp.append_flow(target="late_flights_topic")
def late_flights() -> DataFrame:
    """What left at least a quarter of an hour late, as it came."""
    return spark.readStream.table("flights").where("dep_delay >= 15").select("key", "value")
