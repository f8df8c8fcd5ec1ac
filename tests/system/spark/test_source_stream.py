"""`spark.readStream.format("mansio")` in a real session: batches as Spark drives them, restarts, a growing topic."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

from mansio.net.offsets import fetch_offsets
from mansio.spark.spark_versions import (
    HAS_ADMISSION_CONTROL,
    PROGRESS_HAS_LATEST_OFFSETS,
)
from mansio.spark.sync_client import sync_client
from support.machine import scaled
from support.present import present
from support.spark_source import Topic
from support.waiting import wait_until
from system.spark.streams import DEADLINE_S, pairs

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.process import ServedBroker
    from system.spark.streams import Streams


@pytest.mark.row("S1")
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
    if PROGRESS_HAS_LATEST_OFFSETS:
        source = json.loads(present(query.lastProgress).json)["sources"][0]
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


@pytest.mark.full
def test_no_batch_exceeds_the_limit_whatever_the_trigger_and_the_version(
    streams: Streams, broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    """Spark 4.1 runs one batch of a Python source with Trigger.AvailableNow, and passes no limit."""
    topic = Topic(broker_process, topic_name("in"), 2)
    topic.fill(900)
    runs = 0
    while streams.read() != pairs(900):
        query = streams.start(topic, {"availableNow": True}, maxOffsetsPerTrigger="400")
        assert query.awaitTermination(int(scaled(DEADLINE_S)))
        runs += 1
        assert len(streams.batches) >= runs, "a query that reads nothing"
    assert [len(batch) for batch in streams.batches.values()] == [400, 400, 100]
    assert runs == (1 if HAS_ADMISSION_CONTROL else 3)
