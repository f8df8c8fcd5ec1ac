"""Micro-batches of the sink without end, MANSIO_NIGHTLY_SINK_BATCHES of them, without a JVM: they leave the
transactional ids and producers of one batch, and evict no other producer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from mansio.net.cluster import check_top_level_error
from mansio.spark.options import SinkOptions
from mansio.spark.sink.sink_transaction import SinkTransaction, SinkTransactionOptions
from mansio.spark.sink.task_sender import TaskReport, TaskSender
from mansio.spark.sink.writers import SinkCommitMessage, commit_tasks
from mansio.spark.sync_client import SyncClient, close_sync_clients
from mansio.wire.api_versions import ApiKey
from support.present import present
from support.process import ServedBroker
from system.spark.topics import contents, create

if TYPE_CHECKING:
    from pathlib import Path

BATCHES = int(os.environ.get("MANSIO_NIGHTLY_SINK_BATCHES", "20000"))
"""By default more than the epochs of one producer id."""
TIMEOUT_S = 7_200
OTHERS = 20
"""Producers that write once, before all batches, and once again after them."""
EPOCHS_OF_A_BATCH = 2
EPOCHS_OF_A_PRODUCER = 1 << 15


@pytest.mark.timeout(TIMEOUT_S)
def test_batches_without_end_leave_as_many_ids_and_producers_as_one(tmp_path: Path) -> None:
    broker = ServedBroker(tmp_path / "data", arguments=["--dev"])
    broker.start()
    try:
        servers = broker.bootstrap_servers
        topic = create(servers, "out", 1, retention_ms="-1")
        options = SinkOptions.parse({"kafka.bootstrap.servers": servers, "topic": topic})
        client = SyncClient(servers)
        others = [TaskSender(client, SinkOptions(servers, topic=topic)) for _ in range(OTHERS)]
        for number, other in enumerate(others):
            other.send(topic, row(f"other {number}"))
        for batch in range(BATCHES):
            commit_tasks(options, batch, [SinkCommitMessage(write(client, options, batch), "q")])
        for number, other in enumerate(others):
            other.send(topic, row(f"other {number} again"))
        values = [present(message.value).decode() for message in contents(servers, topic)]
        assert values[OTHERS : OTHERS + BATCHES] == [str(batch) for batch in range(BATCHES)]
        assert len(values) == BATCHES + 2 * OTHERS, "each batch and each record of the others is there once"
        listed = client.run(
            client.cluster.request(
                ApiKey.LIST_TRANSACTIONS,
                {"state_filters": [], "producer_id_filters": []},
                check=check_top_level_error,
            )
        )
        names = [each.transactional_id for each in listed.transaction_states]
        asked = {"topics": [{"name": topic, "partition_indexes": [0]}]}
        found: Any = client.run(client.cluster.request(ApiKey.DESCRIBE_PRODUCERS, asked))
        producers = found.topics[0].partitions[0].active_producers
        client.close()
    finally:
        close_sync_clients()
        broker.kill()
    print(f"{BATCHES} batches, transactional ids {names}, {len(producers)} producers")
    assert names == ["mansio-spark:q:0:0"]
    assert len(producers) <= OTHERS + 1 + BATCHES * EPOCHS_OF_A_BATCH // EPOCHS_OF_A_PRODUCER


def write(client: SyncClient, options: SinkOptions, batch: int) -> TaskReport:
    transaction = SinkTransaction(client, SinkTransactionOptions("q", 0, 0, 60_000))
    sender = TaskSender(client, options, transaction=transaction)
    sender.send("out", row(str(batch)))
    return sender.finish()


def row(value: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": [value.encode()]})
