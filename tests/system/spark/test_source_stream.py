"""`spark.readStream.format("mansio")` in a real session: batches as Spark drives them, restarts, a growing topic."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from mansio.net.offsets import fetch_offsets
from mansio.spark.sync_client import sync_client
from support.machine import scaled
from support.spark_source import Topic
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from support.process import ServedBroker

DEADLINE_S = 60


class Streams:
    """Queries of one test over one checkpoint; what they read is in `batches`: by batch id, the offsets."""

    def __init__(self, spark: SparkSession, checkpoint: Path) -> None:
        self._spark = spark
        self.checkpoint = checkpoint
        self.batches: dict[int, list[tuple[int, int]]] = {}
        self.again: list[int] = []
        self.running: list[StreamingQuery] = []

    def start(self, topic: Topic, trigger: dict[str, Any], **options: str) -> StreamingQuery:
        options = {
            "kafka.bootstrap.servers": topic.bootstrap_servers,
            "subscribe": topic.name,
            "startingOffsets": "earliest",
            **options,
        }
        frame = self._spark.readStream.format("mansio").options(**options).load()
        query = (
            frame.select("partition", "offset")
            .writeStream.foreachBatch(self._take)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(**trigger)
            .start()
        )
        self.running.append(query)
        return query

    def to_end(self, topic: Topic, **options: str) -> StreamingQuery:
        query = self.start(topic, {"availableNow": True}, **options)
        assert query.awaitTermination(scaled(DEADLINE_S))
        return query

    def read(self) -> list[tuple[int, int]]:
        return sorted(pair for pairs in self.batches.values() for pair in pairs)

    def _take(self, frame: DataFrame, batch: int) -> None:
        if batch in self.batches:
            self.again.append(batch)
        self.batches[batch] = sorted((row.partition, row.offset) for row in frame.collect())


@pytest.fixture
def streams(spark: SparkSession, tmp_path: Path) -> Any:
    made = Streams(spark, tmp_path / "checkpoint")
    yield made
    for query in made.running:
        query.stop()


def pairs(*counts: int) -> list[tuple[int, int]]:
    """(partition, offset) of partitions with that many records."""
    return [(partition, offset) for partition, count in enumerate(counts) for offset in range(count)]


def test_available_now_reads_what_is_there_in_bounded_batches_and_a_lost_commit_is_read_again_alike(
    streams: Streams, broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    topic = Topic(broker_process, topic_name("in"), 2)
    topic.fill(900)
    topic.fill(100, partition=1)
    query = streams.to_end(topic, maxOffsetsPerTrigger="400")
    assert [len(batch) for batch in streams.batches.values()] == [400, 400, 200]
    assert streams.read() == pairs(900, 100)
    # Shares follow the backlog: both partitions come to their end together.
    assert [sum(1 for partition, _ in batch if partition) for batch in streams.batches.values()] == [
        40,
        40,
        20,
    ]
    source = json.loads(query.lastProgress.json)["sources"][0]
    assert source["latestOffset"] == {topic.name: {"0": 900, "1": 100}}

    before = dict(streams.batches)
    for entry in (streams.checkpoint / "commits").glob("*2*"):
        entry.unlink()
    topic.fill(50)
    streams.to_end(topic)
    assert streams.again == [2]
    assert {batch: streams.batches[batch] for batch in before} == before
    assert streams.read() == pairs(950, 100)

    # The first batch begins where it began, though the log begins elsewhere now: its lost records are missed.
    for entry in [*streams.checkpoint.glob("commits/*"), *streams.checkpoint.glob("offsets/[1-9]*")]:
        entry.unlink()
    topic.trim(5)
    with pytest.raises(StreamingQueryException, match="the log begins at 5"):
        streams.to_end(topic)


@pytest.mark.full
def test_a_running_stream_finds_new_partitions_and_shows_its_lag_as_a_group(
    streams: Streams, broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    topic = Topic(broker_process, topic_name("in"))
    topic.fill(10)
    query = streams.start(topic, {"processingTime": "0 seconds"}, pipeline=topic.name)
    wait_until(lambda: streams.read() == pairs(10), DEADLINE_S, "the first records")
    topic.grow(3)
    topic.fill(5, partition=2)
    topic.fill(1)
    wait_until(lambda: streams.read() == pairs(11, 0, 5), DEADLINE_S, "the records of a new partition")

    way = sync_client(topic.bootstrap_servers)

    def published() -> dict[int, int]:
        found = way.run(fetch_offsets(way.cluster, f"mansio.pipeline.{topic.name}"))
        return {partition.partition: committed.offset for partition, committed in found.items()}

    wait_until(lambda: published() == {0: 11, 1: 0, 2: 5}, DEADLINE_S, "progress at the broker")
    assert query.exception() is None

    topic.delete()
    wait_until(lambda: not query.isActive, DEADLINE_S, "the end of a query whose topic is gone")
    assert "the topic was deleted, or is not subscribed to any more. Create it again" in str(
        query.exception()
    )
