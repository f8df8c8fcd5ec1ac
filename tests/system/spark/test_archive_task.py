"""Tasks of an archive from planned ranges to the commit, with a real broker and no JVM."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import pytest
from pyspark import TaskContext

from mansio.errors import TopicRecreated
from mansio.iceberg.archive.table import open_table
from mansio.spark.sink import iceberg_sink
from mansio.spark.sink.iceberg_sink import IcebergStreamWriter, sink_options
from mansio.spark.source.readers import RangeSource, range_to_row, ranges_from_rows
from system.spark.archives import assert_archived
from system.spark.topics import create, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pyarrow as pa

    from mansio.spark.source.read_plan import TaskRange
    from support.process import ServedBroker

RECORDS = 40
ENDS = {0: RECORDS, 1: RECORDS}


class Context:
    """In place of Spark's."""

    def getLocalProperty(self, name: str) -> str:  # noqa: N802  # as Spark calls it
        return {iceberg_sink.BATCH_ID_PROPERTY: "0", iceberg_sink.QUERY_ID_PROPERTY: "q"}[name]


class Task:
    """The archive of a topic of two partitions, without Spark."""

    def __init__(self, broker: ServedBroker, topic: str, place: Path) -> None:
        self.topic = create(broker.bootstrap_servers, topic, partitions=2)
        for partition in ENDS:
            publish(
                broker.bootstrap_servers,
                topic,
                [(b"k", b"%d" % n) for n in range(RECORDS)],
                partition=partition,
            )
        self.warehouse = place / "lake"
        table = open_table(None, str(self.warehouse), topic, create=True)
        source = {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "subscribe": topic,
            "startingOffsets": "earliest",
        }
        self.reader = RangeSource(source).streamReader(None)  # type: ignore[arg-type]  # asks for no schema
        options = sink_options(table, str(self.warehouse), None, dict.fromkeys(ENDS, 0), source)
        self.checkpoint = place / "checkpoint"
        self.writer = IcebergStreamWriter({**options, "checkpointLocation": f"file://{self.checkpoint}"})
        (self.checkpoint / "offsets").mkdir(parents=True)
        (self.checkpoint / "metadata").write_text(json.dumps({"id": "q"}))
        noted = json.dumps({topic: {str(partition): end for partition, end in ENDS.items()}})
        (self.checkpoint / "offsets" / "0").write_text(f"v1\n{{}}\n{noted}")

    def planned(self) -> list[TaskRange]:
        """The first batch, of all there is."""
        start = self.reader.initialOffset()
        end = self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
        return list(self.reader.partitions(start, end))  # type: ignore[arg-type]  # that is what they are

    def rows(self, task_ranges: list[TaskRange]) -> list[pa.RecordBatch]:
        """What Spark gets for them, in tasks."""
        return [row for one in task_ranges for row in pickle.loads(pickle.dumps(self.reader)).read(one)]

    def files(self) -> list[Path]:
        return list(self.warehouse.rglob("*.parquet"))


@pytest.fixture
def task(
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Task]:
    monkeypatch.setattr(TaskContext, "get", Context)
    one = Task(broker_process, topic_name("in"), tmp_path)
    yield one
    one.reader.stop()


def test_records_of_the_ranges_that_are_planned_are_in_the_table_once(
    task: Task, broker_process: ServedBroker
) -> None:
    task_ranges = task.planned()
    assert [(one.partition, one.start, one.end) for one in task_ranges] == [(0, 0, RECORDS), (1, 0, RECORDS)]
    rows = task.rows(task_ranges)
    assert [one for row in rows for one in ranges_from_rows(row)] == task_ranges
    for _ in range(2):  # Spark runs a task or a batch again after a crash
        messages = [task.writer.write(iter([row])) for row in rows]
        task.writer.commit(pickle.loads(pickle.dumps(messages)), 0)
    assert_archived(broker_process, task.warehouse, task.topic)
    table = open_table(None, str(task.warehouse), task.topic)
    assert table.added_records("q") == {0: 2 * RECORDS}


def test_a_task_that_fails_leaves_no_file(task: Task) -> None:
    first, second = task.planned()
    other = range_to_row(type(second)(task.topic, 1, 0, RECORDS, b"another topic id"))
    with pytest.raises(TopicRecreated):
        task.writer.write(iter([*task.rows([first]), other]))
    assert task.files() == []
