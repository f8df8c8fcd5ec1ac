"""Queries of `format("mansio")` over one checkpoint, and what they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.spark import start_available_now
from support.machine import scaled

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from support.spark_source import Topic

DEADLINE_S = 60


class Streams:
    """Queries of one test over one checkpoint; what they read is in `batches`: by batch id, the offsets."""

    def __init__(self, spark: SparkSession, checkpoint: Path) -> None:
        self._spark = spark
        self.checkpoint = checkpoint
        self.batches: dict[int, list[tuple[int, int]]] = {}
        self.again: list[int] = []
        self.running: list[StreamingQuery] = []

    def writer(self, topic: Topic, **options: str) -> DataStreamWriter:
        options = {
            "kafka.bootstrap.servers": topic.bootstrap_servers,
            "subscribe": topic.name,
            "startingOffsets": "earliest",
            **options,
        }
        frame = self._spark.readStream.format("mansio").options(**options).load()
        rows = frame.select("partition", "offset").writeStream.foreachBatch(self._take)
        return rows.option("checkpointLocation", str(self.checkpoint))

    def start(self, topic: Topic, trigger: dict[str, Any], **options: str) -> StreamingQuery:
        query = self.writer(topic, **options).trigger(**trigger).start()
        self.running.append(query)
        return query

    def to_end(self, topic: Topic, **options: str) -> StreamingQuery:
        query = start_available_now(self.writer(topic, stopAtLatest="true", **options))
        self.running.append(query)
        assert query.awaitTermination(int(scaled(DEADLINE_S)))
        return query

    def read(self) -> list[tuple[int, int]]:
        return sorted(pair for pairs in self.batches.values() for pair in pairs)

    def _take(self, frame: DataFrame, batch: int) -> None:
        if batch in self.batches:
            self.again.append(batch)
        self.batches[batch] = sorted((row.partition, row.offset) for row in frame.collect())


def pairs(*counts: int) -> list[tuple[int, int]]:
    """(partition, offset) of partitions with that many records."""
    return [(partition, offset) for partition, count in enumerate(counts) for offset in range(count)]
