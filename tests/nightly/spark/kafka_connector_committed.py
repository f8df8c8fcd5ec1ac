"""Spark's own Kafka connector over a topic of transactions: `kafka_connector_committed.py JARS BOOTSTRAP TOPIC PLACE`.

Nothing of Mansio is used here. Reads the topic in both isolation levels, as a batch and as a stream in small
micro-batches, and prints what it saw as one line of JSON. A missing offset fails the query (`failOnDataLoss`, Spark's
default).
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from nightly.spark.kafka_connector import session
from support.machine import scaled

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SPLIT = 8


def values(frame: DataFrame) -> list[str]:
    return sorted(row.value for row in frame.selectExpr("string(value) value").collect())


def main(jars: str, bootstrap_servers: str, topic: str, place: str) -> None:
    spark = session(jars)

    def options(isolation: str) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": bootstrap_servers,
            "kafka.isolation.level": isolation,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "failOnDataLoss": "true",
        }

    def read(isolation: str, **more: str) -> DataFrame:
        return spark.read.format("kafka").options(**options(isolation), **more).load()

    def streamed(isolation: str) -> list[str]:
        """What a stream writes in micro-batches of a few offsets, some of which have control records only."""
        target = f"{place}/{isolation}"
        query = (
            spark.readStream.format("kafka")
            .options(**options(isolation), maxOffsetsPerTrigger="7")
            .load()
            .selectExpr("string(value) value")
            .writeStream.format("json")
            .options(path=target, checkpointLocation=f"{target}.checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(int(scaled(200)))
        return values(spark.read.schema("value string").json(target))

    committed = read("read_committed")
    found = {
        "batch": values(committed),
        "split": values(read("read_committed", minPartitions=str(SPLIT))),
        "count": committed.count(),
        "uncommitted": values(read("read_uncommitted")),
        "stream": streamed("read_committed"),
    }
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
