"""`spark.read.format("mansio")` in a real session: rows, types, splitting, and errors as people see them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql.functions import col, lit

import mansio
from mansio.client.types import OutgoingRecord
from support.spark_source import Topic

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from support.process import ServedBroker


@pytest.fixture
def read(spark: SparkSession, broker_process: ServedBroker) -> Callable[..., DataFrame]:
    def reading(topic: Topic, schema: str = "", **options: str) -> DataFrame:
        reader = spark.read.format("mansio").option(
            "kafka.bootstrap.servers", broker_process.bootstrap_servers
        )
        if schema:
            reader = reader.schema(schema)
        return reader.option("subscribe", topic.name).options(**options).load()

    return reading


@pytest.mark.full
def test_all_that_a_record_holds_arrives_in_sparks_types(
    read: Callable[..., DataFrame], broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    topic = Topic(broker_process, topic_name("in"), 2)
    with mansio.blocking.connect(topic.bootstrap_servers) as client:
        client.publish_many(
            topic.name,
            [
                OutgoingRecord(b"v", b"k", (("a", b"1"), ("a", None), ("ä", b"")), 1, 1_700_000_000_123),
                OutgoingRecord(None, None, (), 1, 1_700_000_000_124),
                OutgoingRecord(b"", b"", (), 0, 0),
            ],
        )
    kafka = read(topic)
    assert kafka.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,timestampType:int>"
    )
    frame = read(
        topic, includeHeaders="true", columns="key,value,topic,partition,offset,timestamp,timestampType,lane"
    )
    found = sorted(frame.collect(), key=lambda row: (row.partition, row.offset))
    rows: list[dict[str, Any]] = [row.asDict(recursive=True) for row in found]
    lanes = {row.pop("lane") for row in rows}
    assert lanes == {None}
    moments = [row.pop("timestamp").timestamp() for row in rows]
    assert moments == [0, 1_700_000_000.123, 1_700_000_000.124]
    headers = [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "ä", "value": b""}]
    same = {"topic": topic.name, "timestampType": 0}
    assert rows == [
        {"key": b"", "value": b"", "partition": 0, "offset": 0, "headers": None, **same},
        {"key": b"k", "value": b"v", "partition": 1, "offset": 0, "headers": headers, **same},
        {"key": None, "value": None, "partition": 1, "offset": 1, "headers": None, **same},
    ]
    assert [field.name for field in read(topic, "value binary, offset bigint").schema] == ["value", "offset"]
    assert {bytes(row.value) for row in read(topic, "value binary").dropna().collect()} == {b"v", b""}


@pytest.mark.full
def test_a_large_partition_is_read_by_several_tasks_and_filters_are_sparks_own(
    read: Callable[..., DataFrame], broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    topic = Topic(broker_process, topic_name("in"), 2)
    second = 1_700_000_000_000
    topic.fill(20_000, size=50, times=[second + number for number in range(20_000)])
    topic.fill(100, partition=1, first=50_000, times=[second] * 100)
    split = read(topic, minPartitions="5", maxRecordsPerPartition="6000")
    tasks = split.selectExpr("spark_partition_id() as task", "partition", "offset")
    counted = tasks.selectExpr(
        "count(distinct task)", "count(*)", "count(distinct partition, offset)", "sum(offset)"
    )
    assert counted.first() == (5, 20_100, 20_100, sum(range(20_000)) + sum(range(100)))
    from_time = lit(datetime.fromtimestamp((second + 15_000) / 1000, UTC))
    found = read(topic, columns="partition,offset,timestamp").where(
        (col("partition") == 0) & (col("timestamp") >= from_time) & (col("offset") < 15_003)
    )
    assert [row.offset for row in found.collect()] == [15_000, 15_001, 15_002]
    with pytest.raises(AnalysisException, match="option pushdown is refused"):
        read(topic, pushdown="true").count()


@pytest.mark.full
def test_what_is_wrong_is_reported_in_one_line(
    read: Callable[..., DataFrame],
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
) -> None:
    """On the driver for what the options say, from a task for what the log holds; never a mere traceback."""
    topic = Topic(broker_process, topic_name("in"))
    topic.fill(10, first=7_000_000, together=10)  # numbers that no other topic of this broker has
    with pytest.raises(
        AnalysisException, match=r"no option 'startingofsets': did you mean startingOffsets\?"
    ):
        read(topic, startingOfsets="earliest").count()
    with pytest.raises(AnalysisException, match="ends at offset 10, but offset 55 was requested"):
        read(topic, startingOffsets=f'{{"{topic.name}": {{"0": 55}}}}').count()
    topic.damage(b"7000005 ...", b"7000005 .X.")
    with pytest.raises(PythonException, match=r"cannot be read: .* Set onUnreadable to skip"):
        read(topic).count()
    dead = read(topic, onUnreadable="dead-letter").where("error is not null").collect()
    assert [(row.offset, row.topic) for row in dead] == [(0, topic.name)]
