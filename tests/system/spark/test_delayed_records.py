"""Delayed records in Spark: batch and streaming reads have them when they were delivered, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import mansio
from support.waiting import wait_until
from system.spark.topics import contents, create

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker


@pytest.mark.full
@pytest.mark.row("D6")
def test_spark_reads_delayed_records_when_they_are_due(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers = broker_process.bootstrap_servers
    topic = create(servers, topic_name("delayed"), mansio_delay_enable="true")
    source = {"kafka.bootstrap.servers": servers, "subscribe": topic}
    with mansio.blocking.connect(servers) as client:
        for number in range(20):
            client.publish(topic, b"later%d" % number, delay=3_600)
            client.publish(topic, b"soon%d" % number, delay=0.5)
            client.publish(topic, b"now%d" % number)
    wait_until(lambda: len(contents(servers, topic)) == 40, 30, "the delivery of what is due")
    expected = sorted(b"%b%d" % (word, number) for word in (b"soon", b"now") for number in range(20))
    batch = spark.read.format("mansio").options(**source).load()
    assert sorted(bytes(row.value) for row in batch.collect()) == expected
    stream = spark.readStream.format("mansio").options(**source, startingOffsets="earliest").load()
    query = (
        stream.writeStream.format("memory")
        .queryName("due")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert sorted(bytes(row.value) for row in spark.table("due").collect()) == expected
