"""A share group as a source in a real session: more tasks than partitions, failing rows, restarts, one-off work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, PySparkException

import mansio
import mansio.spark
from mansio.spark import start_available_now, work
from mansio.spark.share.failures import failures_of, send_failures
from mansio.spark.sync_client import sync_client
from mansio.wire.topic_partition import TopicPartition
from support.machine import scaled
from support.waiting import wait_until
from system.spark.streams import DEADLINE_S
from system.spark.topics import create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from support.process import ServedBroker


def prepare(broker: ServedBroker, topic: str, records: int, **settings: str) -> dict[str, str]:
    """A topic with one partition, and a group of the same name that begins at its start; returns the options."""
    create(broker.bootstrap_servers, topic)
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        configs = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "0"}
        names = {name.replace("__", "."): value for name, value in settings.items()}
        client.admin.alter_group_config(topic, {**configs, **names})
    publish(
        broker.bootstrap_servers, topic, [(None, b"%d" % number) for number in range(records)], partition=0
    )
    return {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "subscribe": topic,
        "shareGroup": topic,
    }


def state(broker: ServedBroker, topic: str) -> Any:
    place = TopicPartition(topic, 0)
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        return client.admin.shares.leases(topic, [place])[place]


def halving() -> Callable[[Any], int]:
    """A function of its own, because tasks cannot import this module."""

    def halve(row: Any) -> int:
        number = int(row.value)
        if number % 10 == 7:
            raise ValueError(f"{number} is not for me")
        if number % 10 == 8:
            raise work.Reject("never")
        return number // 2

    return halve


@pytest.mark.row("S13")
def test_a_partition_has_many_tasks_and_failed_rows_are_retried_and_dead_lettered(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = topic_name("in")
    options = prepare(broker_process, topic, 40, share__delivery__count__limit="3")
    results: dict[int, int] = {}
    tasks: list[int] = []

    def take(frame: DataFrame, _: int) -> None:
        done = work.apply(frame, halving(), schema="half int").persist()
        tasks.append(frame.rdd.getNumPartitions())
        rows = done.where("error IS NULL").select("offset", "result.half").collect()
        for row in rows:
            assert row.offset not in results
            results[row.offset] = row.half
        client = sync_client(broker_process.bootstrap_servers)
        member = done.select("lease").first()
        assert member is not None
        assert send_failures(client, topic, member.lease, failures_of(done)) == 0
        done.unpersist()

    def run_to_end() -> None:
        stream = spark.readStream.format("mansio").options(**options, recordsPerTask="5", stopAtLatest="true")
        writer = stream.load().writeStream.foreachBatch(take)
        query = start_available_now(writer.option("checkpointLocation", str(tmp_path / "checkpoint")))
        assert query.awaitTermination(int(scaled(DEADLINE_S)))

    for _ in range(3):
        run_to_end()
    assert tasks[0] == 8
    assert results == {number: number // 2 for number in range(40) if number % 10 not in (7, 8)}
    wait_until(lambda: state(broker_process, topic).dead == 8, DEADLINE_S, "dead letters")
    assert state(broker_process, topic).lag == 0


@pytest.mark.full
def test_records_are_leased_once_for_several_actions(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = topic_name("in")
    options = prepare(broker_process, topic, 20)
    with mansio.spark.lease(spark, topic, topic, options, max_records=12) as leased:
        assert leased.records == 12
        assert leased.frame.count() == leased.frame.count() == 12
        name = mansio.spark.register_topics(
            spark, [topic], broker_process.bootstrap_servers, states_of=topic
        )[topic]
        joined = spark.sql(
            f"SELECT s.state, count(*) AS n, min(t.offset) AS first FROM `{name}$states` s"
            f" JOIN `{name}` t USING (partition, offset) GROUP BY s.state"
        ).collect()
        assert [tuple(row) for row in joined] == [("leased", 12, 0)]
        stamped = work.apply(leased.frame, lambda row: row.timestamp, schema="at timestamp")
        assert stamped.where("error IS NULL AND result.at = timestamp").count() == 12
        work.apply(leased.frame, halving(), schema="half int").write.parquet(str(tmp_path / "done"))
        done = spark.read.parquet(str(tmp_path / "done"))
        assert done.where("error IS NULL").count() == 10
        assert leased.acknowledge(failed=done) == 10
    with mansio.spark.lease(spark, topic, topic, options) as leased:
        offsets = sorted(row.offset for row in leased.frame.collect())
        assert offsets == [7, *range(12, 20)]
    assert state(broker_process, topic).leased == 0, "they are released without acknowledge"
    with mansio.spark.lease(spark, topic, topic, options) as leased:
        counts = {row.offset: row.delivery_count for row in leased.frame.collect()}
        assert counts == {7: 3, **dict.fromkeys(range(12, 20), 2)}
        assert leased.acknowledge() == 9


@pytest.mark.full
def test_tasks_run_at_the_same_time_when_failures_are_collected(spark: SparkSession, tmp_path: Path) -> None:
    place, deadline_s = tmp_path, scaled(DEADLINE_S)

    def wait_for_the_other(row: Any) -> int:
        (place / str(row.partition)).touch()
        end = time.monotonic() + deadline_s
        while not (place / str(1 - row.partition)).exists():
            if time.monotonic() > end:
                raise TimeoutError("the other task has not begun")
            time.sleep(0.05)
        raise work.Reject("both have begun")

    frame = spark.range(2, numPartitions=2).selectExpr(
        "'t' AS topic", "cast(id AS int) AS partition", "id AS offset"
    )
    done = work.apply(frame, wait_for_the_other, schema="n int").persist()
    try:
        assert {one.reason for one in failures_of(done)} == {"Reject: both have begun"}
    finally:
        done.unpersist()


@pytest.mark.full
def test_a_batch_read_of_a_group_is_refused(spark: SparkSession, broker_process: ServedBroker) -> None:
    reader = spark.read.format("mansio").options(
        **{"kafka.bootstrap.servers": broker_process.bootstrap_servers, "subscribe": "t", "shareGroup": "g"}
    )
    with pytest.raises((AnalysisException, PySparkException), match=r"mansio\.spark\.lease"):
        reader.load().count()
