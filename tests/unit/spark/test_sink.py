"""What the sink takes and what it refuses, before any task runs; and how rows are divided among topics. No JVM."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from mansio.errors import ConfigError, InvalidRecord
from mansio.spark.sink.task_sender import EMPTY_TASK_REPORT, TaskReport, WrittenRange
from mansio.spark.sink.writers import (
    BatchWriter,
    SinkCommitMessage,
    StreamWriter,
    check_columns,
    split_by_topic,
)

VALUE = {"value": "binary"}
OPTIONS = {"kafka.bootstrap.servers": "127.0.0.1:9092", "topic": "t"}
SCHEMA = StructType([StructField("value", StringType())])


@pytest.mark.parametrize(
    ("types", "topic", "expected"),
    [
        ({}, "t", "needs the column value, and there are only none"),
        ({"key": "string"}, "t", "needs the column value, and there are only key"),
        ({"value": "int"}, "t", "column value is int, and has to be string or binary: cast it"),
        ({**VALUE, "partition": "bigint"}, "t", "column partition is bigint, and has to be int"),
        ({**VALUE, "headers": "map<string,binary>"}, "t", "headers is map"),
        ({**VALUE, "delay": "int"}, "t", r"column 'delay' cannot be written.*to_json"),
        (VALUE, None, "give the option topic, or a column of that name"),
    ],
)
def test_columns_that_would_be_lost_or_misread_are_refused(
    types: dict[str, str], topic: str | None, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_columns(types, topic)


def test_what_was_read_from_a_topic_can_be_written_as_it_is() -> None:
    read = {"key": "binary", **VALUE, "topic": "string", "partition": "int", "offset": "bigint"}
    check_columns({**read, "timestamp": "timestamp", "timestampType": "int", "lane": "string"}, None)


@pytest.mark.parametrize("sink", [BatchWriter, StreamWriter])
@pytest.mark.parametrize(
    ("options", "overwrite", "expected"),
    [
        (OPTIONS, True, "cannot be overwritten"),
        ({**OPTIONS, "acks": "0"}, False, "option acks is 0"),
        ({**OPTIONS, "kafka.transactional.id": "a"}, False, "names its transactions itself"),
        ({"topic": "t"}, False, "option kafka.bootstrap.servers is missing"),
    ],
)
def test_writers_refuse_modes_and_options_on_the_driver(
    sink: type[BatchWriter | StreamWriter], options: dict[str, str], overwrite: bool, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        sink(options, SCHEMA, overwrite)


def test_writers_and_messages_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(BatchWriter(OPTIONS, SCHEMA, False))).options.topic == "t"
    message = SinkCommitMessage(TaskReport(7, 0, (WrittenRange("t", 1, 5, 9, 4),)), "query")
    assert pickle.loads(pickle.dumps(message)) == message
    at_least_once = {**OPTIONS, "exactlyOnce": "false"}
    BatchWriter(at_least_once, SCHEMA, False).abort([None, message, SinkCommitMessage(EMPTY_TASK_REPORT)])
    StreamWriter(at_least_once, SCHEMA, False).commit([message], 3)


def test_the_name_of_a_query_is_no_option_of_ours() -> None:
    assert StreamWriter({**OPTIONS, "queryname": "mine"}, SCHEMA, False).options.topic == "t"


def test_rows_of_several_topics_keep_their_order_within_each() -> None:
    rows = pa.RecordBatch.from_pydict(
        {
            "topic": ["a", "b", "a", "b", "a"],
            "value": [b"0", b"1", b"2", b"3", b"4"],
            "offset": [9, 9, 9, 9, 9],
        }
    )
    divided = {topic: part.to_pydict() for topic, part in split_by_topic(rows, None)}
    assert divided == {"a": {"value": [b"0", b"2", b"4"]}, "b": {"value": [b"1", b"3"]}}
    assert [topic for topic, _ in split_by_topic(rows, "c")] == ["c"], (
        "the option counts more than the column"
    )
    assert list(split_by_topic(rows.slice(0, 0), "c")) == []


def test_row_without_a_topic_is_an_error() -> None:
    rows = pa.RecordBatch.from_pydict({"topic": ["a", None], "value": [b"0", b"1"]})
    with pytest.raises(InvalidRecord, match="1 rows have no topic"):
        list(split_by_topic(rows, None))
