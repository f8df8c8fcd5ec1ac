"""Spark's own Kafka connector in a process of its own: `python kafka_connector.py JARS BOOTSTRAP PREFIX CHECKPOINT`.

Nothing of Mansio is used here. Writes a batch, reads it back whole and by time, copies it as a stream in three batches
and as a stream of what is new, and prints what it saw as one line of JSON.
"""

from __future__ import annotations

import glob
import json
import sys

from pyspark.sql import DataFrame, SparkSession

from support.machine import scaled

ROWS = 300
BEGIN_MS = 1_700_000_000_000
HEADERS = "array(named_struct('key', 'n', 'value', cast(cast(id as string) as binary)))"


def copy(spark: SparkSession, options: dict[str, str], source: str, target: str, checkpoint: str) -> int:
    """One stream from topic to topic, to its end; how many rows it read."""
    rows = (
        spark.readStream.format("kafka")
        .options(**options, subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger="120")
        .load()
    )
    query = (
        rows.select("key", "value")
        .writeStream.format("kafka")
        .options(**options, topic=target, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(int(scaled(120)))
    return sum(progress.numInputRows for progress in query.recentProgress)


def session(jars: str) -> SparkSession:
    """A local session with the jars of a directory."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", ",".join(glob.glob(f"{jars}/*.jar")))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def main(jars: str, bootstrap_servers: str, prefix: str, checkpoint: str) -> None:
    spark = session(jars)
    options = {"kafka.bootstrap.servers": bootstrap_servers}
    source, target = f"{prefix}in", f"{prefix}out"
    made = spark.range(ROWS).selectExpr(
        "concat('key ', id % 7) key",
        "concat('value ', id) value",
        f"{HEADERS} headers",
        "cast(id % 2 as int) partition",
    )
    made.write.format("kafka").options(**options, topic=source).save()

    def read(**more: str) -> DataFrame:
        return spark.read.format("kafka").options(**options, subscribe=source, **more).load()

    found = {
        "numbers": read(includeHeaders="true")
        .selectExpr("sum(int(string(headers[0].value)))")
        .collect()[0][0],
        "by_time": read(startingTimestamp=str(BEGIN_MS)).count(),
        "ranges": read(startingOffsets=json.dumps({source: {"0": 10, "1": -2}}), minPartitions="4").count(),
        "copied": copy(spark, options, source, target, checkpoint),
    }
    made.write.format("kafka").options(**options, topic=source).save()
    found["copied_again"] = copy(spark, options, source, target, checkpoint)
    out = spark.read.format("kafka").options(**options, subscribePattern=f"{prefix}o.*").load()
    found["written"] = out.count()
    found["distinct"] = out.select("value").distinct().count()
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
