"""Spark sink: the topic contains the rows of the DataFrame, and a row that cannot be written is refused with one
line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from mansio.spark import start_available_now
from mansio.wire.murmur2 import partition_for_key
from support.machine import scaled
from support.present import present
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from support.process import ServedBroker

    TopicName = Callable[[str], str]

HEADERS = "array(named_struct('key', 'from', 'value', cast('spark' as binary)))"
DEADLINE_S = 120


def last_line(error: BaseException) -> str:
    """The message of our own code: the last line of the worker's traceback."""
    lines = [
        line for line in str(error).split("\n\nJVM")[0].splitlines() if re.match(r"mansio\.[\w.]+: ", line)
    ]
    return lines[-1] if lines else str(error)


def test_every_column_of_a_dataframe_arrives_in_its_record(
    spark: SparkSession, broker_process: ServedBroker, topic_name: TopicName
) -> None:
    first, second = (create(broker_process.bootstrap_servers, topic_name(role), 3) for role in ("a", "b"))
    frame = spark.range(3_000).selectExpr(
        f"if(id % 2 = 0, '{first}', '{second}') topic",
        "if(id % 10 = 0, null, concat('key ', id)) key",
        "cast(id as string) value",
        "if(id % 5 = 0, 2, null) partition",
        "timestamp_millis(1384992000000 + id) timestamp",
        f"if(id % 3 = 0, {HEADERS}, null) headers",
        "id offset",
    )
    frame.repartition(2).write.format("mansio").option(
        "kafka.bootstrap.servers", broker_process.bootstrap_servers
    ).mode("append").save()
    found = {
        int(present(message.value)): message
        for topic in (first, second)
        for message in contents(broker_process.bootstrap_servers, topic)
    }
    assert sorted(found) == list(range(3_000))
    for place, message in found.items():
        assert message.topic == (second if place % 2 else first)
        assert message.key == (None if place % 10 == 0 else b"key %d" % place)
        assert message.timestamp_ms == 1384992000000 + place
        assert message.headers == ((("from", b"spark"),) if place % 3 == 0 else ())
        assert message.partition == (2 if place % 5 == 0 else partition_for_key(message.key or b"", 3))


def run_once(
    frame: DataFrame, bootstrap_servers: str, topic: str, checkpoint: Path, **options: str
) -> StreamingQuery:
    query = start_available_now(
        frame.select("key", "value", "timestamp")
        .writeStream.format("mansio")
        .options(
            **{"kafka.bootstrap.servers": bootstrap_servers},
            topic=topic,
            checkpointLocation=str(checkpoint),
            **options,
        )
    )
    assert query.awaitTermination(int(scaled(DEADLINE_S)))
    return query


@pytest.mark.full
@pytest.mark.row("S2")
@pytest.mark.parametrize("exactly_once", [True, False])
def test_a_stream_whose_batch_is_repeated_after_its_commit_writes_each_record_once_unless_configured_otherwise(
    spark: SparkSession,
    broker_process: ServedBroker,
    topic_name: TopicName,
    tmp_path: Path,
    exactly_once: bool,
) -> None:
    bootstrap_servers, checkpoint = broker_process.bootstrap_servers, tmp_path / "checkpoint"
    source, target = (
        create(bootstrap_servers, topic_name("in"), 2),
        create(bootstrap_servers, topic_name("out"), 2),
    )
    publish(bootstrap_servers, source, [(b"%d" % place, b"%d" % place) for place in range(500)])
    frame = (
        spark.readStream.format("mansio")
        .options(
            **{"kafka.bootstrap.servers": bootstrap_servers},
            subscribe=source,
            startingOffsets="earliest",
            maxOffsetsPerTrigger="200",
            stopAtLatest="true",
        )
        .load()
    )
    more = {} if exactly_once else {"exactlyOnce": "false"}
    run_once(frame, bootstrap_servers, target, checkpoint, **more)
    assert sorted(int(present(message.value)) for message in contents(bootstrap_servers, target)) == list(
        range(500)
    )
    query = run_once(frame, bootstrap_servers, target, checkpoint, **more)
    assert len(contents(bootstrap_servers, target)) == 500, "a restart without news writes nothing"
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for path in (last, checkpoint / "commits" / f".{last.name}.crc"):
        path.unlink(missing_ok=True)
    publish(bootstrap_servers, source, [(b"500", b"500")])
    run_once(frame, bootstrap_servers, target, checkpoint, **more)
    after = sorted(int(present(message.value)) for message in contents(bootstrap_servers, target))
    if exactly_once:
        assert after == list(range(501))
    else:
        assert set(after) == set(range(501))
        assert 501 < len(after) <= 701, "the last batch, and only that, is there twice"
    assert query.exception() is None


@pytest.mark.full
def test_a_write_with_a_task_that_fails_leaves_nothing(
    spark: SparkSession, broker_process: ServedBroker, topic_name: TopicName
) -> None:
    target = create(broker_process.bootstrap_servers, topic_name("out"), 1)
    options = {"kafka.bootstrap.servers": broker_process.bootstrap_servers, "topic": target}
    frame = spark.range(2_000).repartition(2).selectExpr("cast(id as string) value")
    failing = frame.selectExpr("if(value = '1999', raise_error('planted'), value) value")
    with pytest.raises(Exception, match="planted"):
        failing.write.format("mansio").mode("append").options(**options).save()
    assert contents(broker_process.bootstrap_servers, target) == []
    frame.write.format("mansio").mode("append").options(**options).save()
    found = sorted(
        int(present(message.value)) for message in contents(broker_process.bootstrap_servers, target)
    )
    assert found == list(range(2_000))


@pytest.mark.full
def test_a_write_of_a_batch_that_foreach_batch_repeats_is_there_once(
    spark: SparkSession, broker_process: ServedBroker, topic_name: TopicName
) -> None:
    target = create(broker_process.bootstrap_servers, topic_name("out"), 1)
    options = {"kafka.bootstrap.servers": broker_process.bootstrap_servers, "topic": target}
    for batch in ("0", "0", "1"):
        frame = spark.range(10).selectExpr(f"concat('{batch}/', id) value")
        writer = frame.write.format("mansio").mode("append").options(**options)
        writer.options(queryId=topic_name("query")[-60:].strip("-"), batchId=batch).save()
    found = [
        present(message.value).decode() for message in contents(broker_process.bootstrap_servers, target)
    ]
    assert sorted(found) == sorted(f"{batch}/{place}" for batch in (0, 1) for place in range(10))


@pytest.mark.full
@pytest.mark.parametrize(
    ("columns", "topic", "expected"),
    [
        (["'x' value", "1 delay"], "t", "column 'delay' cannot be written.*to_json"),
        (["'x' value"], "no-such-topic", "no-such-topic: there is no such topic"),
    ],
    ids=["on the driver", "in a task"],
)
def test_what_cannot_be_written_is_refused_in_one_line_that_states_what_to_do(
    spark: SparkSession, broker_process: ServedBroker, columns: list[str], topic: str, expected: str
) -> None:
    writer = spark.range(1).selectExpr(*columns).write.format("mansio").mode("append")
    with pytest.raises(Exception, match="mansio") as caught:
        writer.options(**{"kafka.bootstrap.servers": broker_process.bootstrap_servers}, topic=topic).save()
    assert re.search(expected, last_line(caught.value)), last_line(caught.value)
