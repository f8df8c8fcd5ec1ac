"""What one task of the sink does, without a JVM: its rows reach a real broker once and in order, whatever gets lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from mansio.errors import InvalidRequest, MessageTooLarge, UnknownTopicOrPartition
from mansio.spark.options import SinkOptions
from mansio.spark.sink.task_sender import EMPTY_TASK_REPORT, TaskSender
from mansio.spark.sync_client import SyncClient
from mansio.wire.api_versions import ApiKey
from mansio.wire.murmur2 import partition_for_key
from support.paths import free_port
from support.present import present
from support.process import ServedBroker
from system.spark.disconnecting_proxy import losing_answers
from system.spark.topics import contents, create

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    TopicName = Callable[[str], str]

ROWS = 5_000
PARTITIONS = 3


def rows(count: int = ROWS) -> pa.RecordBatch:
    """Keys for all partitions; the value has the place of the row."""
    return pa.RecordBatch.from_pydict(
        {
            "key": [b"key %d" % (row % 97) for row in range(count)],
            "value": [b"%d" % row for row in range(count)],
        }
    )


@pytest.fixture
def opened(broker_process: ServedBroker) -> Iterator[SyncClient]:
    sync_client = SyncClient(broker_process.bootstrap_servers)
    yield sync_client
    sync_client.close()


def options(bootstrap_servers: str, **more: str) -> SinkOptions:
    return SinkOptions.parse({"kafka.bootstrap.servers": bootstrap_servers, "topic": "x", **more})


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_rows_go_where_every_kafka_client_puts_their_keys_in_order_and_the_report_states_where(
    broker_process: ServedBroker, opened: SyncClient, topic_name: TopicName, compression: str
) -> None:
    topic = create(broker_process.bootstrap_servers, topic_name("out"), PARTITIONS)
    sender = TaskSender(
        opened, options(broker_process.bootstrap_servers, compression=compression, batchBytes="4096")
    )
    sender.send(topic, rows())
    sender.send(topic, rows())
    report = sender.finish()
    found = contents(broker_process.bootstrap_servers, topic)
    assert len(found) == report.rows == 2 * ROWS
    for written in report.ranges:
        here = [message for message in found if message.partition == written.partition]
        assert (written.first_offset, written.last_offset, written.rows) == (0, len(here) - 1, len(here))
        assert all(
            partition_for_key(present(message.key), PARTITIONS) == written.partition for message in here
        )
        places = [int(present(message.value)) for message in here]
        assert places == sorted(places[: len(places) // 2]) * 2
    assert report.producer_id >= 0


def test_lost_answers_neither_lose_nor_double_nor_reorder_records(tmp_path: Path) -> None:
    port = free_port()
    broker = ServedBroker(tmp_path / "data", arguments=["--set", f"advertised_listeners=127.0.0.1:{port}"])
    lost = frozenset({1, 3, 4, 8})
    try:
        broker.start()
        with losing_answers(port, broker.kafka_port, ApiKey.PRODUCE, lost) as proxy:
            address = f"127.0.0.1:{port}"
            topic = create(address, "out", PARTITIONS)
            sync_client = SyncClient(address)
            sender = TaskSender(sync_client, options(address, batchBytes="4096"))
            sender.send(topic, rows())
            report = sender.finish()
            sync_client.close()
            found = contents(address, topic)
            assert proxy.seen > max(lost), "all planned losses have happened"
    finally:
        broker.kill()
    assert report.rows == len(found) == ROWS
    for partition in range(PARTITIONS):
        places = [int(present(message.value)) for message in found if message.partition == partition]
        assert places == sorted(set(places))


def test_row_that_no_retry_can_store_fails_the_task_at_once(
    broker_process: ServedBroker, opened: SyncClient, topic_name: TopicName
) -> None:
    topic = create(broker_process.bootstrap_servers, topic_name("out"), 2, max_message_bytes="2000")
    sender = TaskSender(opened, options(broker_process.bootstrap_servers))
    with pytest.raises(MessageTooLarge, match=topic):
        sender.send(topic, pa.RecordBatch.from_pydict({"value": [b"x" * 5_000]}))
    sender.abort()
    with pytest.raises(InvalidRequest, match="partition 2 of a topic that has 2"):
        sender.send(
            topic, pa.RecordBatch.from_pydict({"value": [b"x"], "partition": pa.array([2], pa.int32())})
        )
    with pytest.raises(UnknownTopicOrPartition, match="no such topic"):
        sender.send(topic_name("absent"), rows(1))
    assert sender.finish() == EMPTY_TASK_REPORT
