"""Reading of topics with transactions: committed records once, aborted ones and markers never."""

from __future__ import annotations

import json
import pickle
import random
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark import TaskContext

from mansio.iceberg.archive.table import open_table
from mansio.spark.options import SinkOptions
from mansio.spark.sink.sink_transaction import DirectTransaction
from mansio.spark.sink.task_sender import TaskSender
from mansio.spark.sync_client import SyncClient
from support.markers import wait_for_markers
from support.spark_source import Topic, numbers_of, offsets_of, read_all
from system.spark.archives import assert_archived
from system.spark.test_archive_task import Context, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.process import ServedBroker

    TopicName = Callable[[str], str]

ROWS = 10
"""Records of one batch."""


class Writer:
    """A producer of transactions in partition 0 of a topic; `written`: the numbers of its records by outcome."""

    def __init__(self, client: SyncClient, topic: str, name: str) -> None:
        self.topic = topic
        self.sender = TaskSender(
            client,
            SinkOptions("", topic=topic, batch_bytes=1 << 20),
            transaction=DirectTransaction(client, name, 60_000),
        )

    def write(self, first: int) -> list[int]:
        numbers = list(range(first, first + ROWS))
        rows = {
            "key": [b"k%d" % number for number in numbers],
            "value": [b"%d " % number for number in numbers],
            "partition": pa.array([0] * ROWS, pa.int32()),
        }
        self.sender.send(self.topic, pa.RecordBatch.from_pydict(rows))
        return numbers

    def commit(self) -> None:
        self.sender.commit()

    def abort(self) -> None:
        self.sender.abort()
        self.sender._identity = None
        self.sender._producers.clear()


def write_transactions(servers: str, client: SyncClient, topic: str, name: str) -> list[int]:
    """Write interleaved transactions of three producers, of one or two batches each; returns the committed numbers in
    the order of the log."""
    dice = random.Random(5)
    writers = [Writer(client, topic, f"{name}-{number}") for number in range(3)]
    waiting: dict[int, list[int]] = {}
    log: list[int] = []
    committed: set[int] = set()
    first = 0
    for _ in range(24):
        number = dice.randrange(3)
        numbers = writers[number].write(first)
        first += ROWS
        log += numbers
        waiting.setdefault(number, []).extend(numbers)
        if dice.random() < 0.6:
            ended = waiting.pop(number)
            if dice.random() < 0.5:
                writers[number].commit()
                committed.update(ended)
            else:
                writers[number].abort()
    for number in waiting:
        writers[number].abort()
    wait_for_markers(servers)
    assert 0 < len(committed) < len(log)
    return [number for number in log if number in committed]


@pytest.fixture
def client(broker_process: ServedBroker) -> Iterator[SyncClient]:
    opened = SyncClient(broker_process.bootstrap_servers)
    yield opened
    opened.close()


def test_a_read_has_the_committed_records_however_it_is_divided_into_ranges(
    broker_process: ServedBroker, client: SyncClient, topic_name: TopicName
) -> None:
    topic = Topic(broker_process, topic_name("in"))
    committed = write_transactions(broker_process.bootstrap_servers, client, topic.name, topic_name("w"))
    rows = topic.rows()
    assert numbers_of(rows) == committed
    assert offsets_of(rows) == sorted(set(offsets_of(rows)))
    for ranges in ("3", "7", "50"):
        assert numbers_of(topic.rows(minPartitions=ranges)) == committed
    assert numbers_of(topic.rows(fetchBytes="1024")) == committed
    everything = topic.rows(**{"isolation.level": "read_uncommitted"})
    assert len(everything) == 24 * ROWS, "aborted records, and no marker"


def test_a_stream_reads_up_to_an_open_transaction_and_goes_on_when_it_has_ended(
    broker_process: ServedBroker, client: SyncClient, topic_name: TopicName
) -> None:
    topic = Topic(broker_process, topic_name("in"))
    first, other = (Writer(client, topic.name, topic_name(role)) for role in ("a", "b"))
    numbers = first.write(0)
    first.commit()
    wait_for_markers(broker_process.bootstrap_servers)
    other.write(100)
    later = first.write(200)
    first.commit()
    wait_for_markers(broker_process.bootstrap_servers)
    reader = topic.stream()
    start = reader.initialOffset()
    middle = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert numbers_of(read_all(reader, reader.partitions(start, middle))) == numbers
    other.abort()
    wait_for_markers(broker_process.bootstrap_servers)
    end = reader.latestOffset(middle, reader.getDefaultReadLimit())
    assert numbers_of(read_all(reader, reader.partitions(middle, end))) == later
    assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end


def test_a_range_of_nothing_but_aborted_records_and_markers_is_read_without_rows_or_loss(
    broker_process: ServedBroker, client: SyncClient, topic_name: TopicName
) -> None:
    topic = Topic(broker_process, topic_name("in"))
    writer = Writer(client, topic.name, topic_name("w"))
    for first in (0, 100):
        writer.write(first)
        writer.abort()
    wait_for_markers(broker_process.bootstrap_servers)
    assert topic.rows() == []
    assert topic.rows(minPartitions="9") == []


def test_an_archive_has_the_committed_records_once(
    broker_process: ServedBroker,
    client: SyncClient,
    topic_name: TopicName,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TaskContext, "get", Context)
    task = Task(broker_process, topic_name("in"), tmp_path)
    committed = write_transactions(broker_process.bootstrap_servers, client, task.topic, topic_name("w"))
    start = task.reader.initialOffset()
    end = task.reader.latestOffset(start, task.reader.getDefaultReadLimit())
    offsets = json.dumps({task.topic: end[task.topic]})
    (task.checkpoint / "offsets" / "0").write_text(f"v1\n{{}}\n{offsets}")
    rows = task.rows(task.planned())
    for _ in range(2):
        messages = [task.writer.write(iter([row])) for row in rows]
        task.writer.commit(pickle.loads(pickle.dumps(messages)), 0)
    assert_archived(broker_process, task.warehouse, task.topic)
    table = open_table(None, str(task.warehouse), task.topic)
    assert sum(table.added_records("q").values()) == 2 * 40 + len(committed)
    task.reader.stop()
