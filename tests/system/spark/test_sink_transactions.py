"""Exactly once of the sink against a real broker, without a JVM: tasks and their repeated attempts, repeated commits,
and restarts of the broker between them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from mansio.errors import ConfigError, InvalidTxnState, MansioError, ProducerFenced
from mansio.spark.options import SinkOptions
from mansio.spark.sink import sink_transaction
from mansio.spark.sink.sink_transaction import (
    ProducerEpoch,
    SinkTransaction,
    SinkTransactionOptions,
    abort_batch,
    commit_batch,
    open_transactions,
)
from mansio.spark.sink.task_sender import EMPTY_TASK_REPORT, TaskReport, TaskSender
from mansio.spark.sink.writers import SinkCommitMessage, abort_tasks, commit_tasks
from mansio.spark.sync_client import SyncClient, close_sync_clients
from mansio.wire.api_versions import ApiKey
from support.cluster import cluster
from support.paths import free_port
from support.present import present
from support.process import ServedBroker
from support.waiting import wait_until
from system.spark.disconnecting_proxy import losing_answers
from system.spark.topics import contents, create

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    TopicName = Callable[[str], str]

TASKS = 3
TIMEOUT_MS = 60_000


class Query:
    """A query that writes to a topic: each batch has one value for each task."""

    def __init__(self, bootstrap_servers: str, topic: str, query_id: str) -> None:
        self.bootstrap_servers, self.topic, self.query_id = bootstrap_servers, topic, query_id
        self.options = SinkOptions.parse({"kafka.bootstrap.servers": bootstrap_servers, "topic": topic})
        self.clients: list[SyncClient] = []

    def sender(self, task: int, attempt: int = 0, timeout_ms: int = TIMEOUT_MS) -> TaskSender:
        client = SyncClient(self.bootstrap_servers)
        self.clients.append(client)
        transaction = SinkTransaction(
            client, SinkTransactionOptions(self.query_id, task, attempt, timeout_ms)
        )
        return TaskSender(client, self.options, transaction=transaction)

    def run_task(self, batch: int, task: int, attempt: int = 0) -> SinkCommitMessage:
        sender = self.sender(task, attempt)
        sender.send(self.topic, rows_of(batch, task))
        return SinkCommitMessage(sender.finish(), self.query_id)

    def run_tasks(self, batch: int) -> list[SinkCommitMessage]:
        return [self.run_task(batch, task) for task in range(TASKS)]

    def commit(self, batch: int, messages: list[SinkCommitMessage]) -> None:
        commit_tasks(self.options, batch, messages)

    def values(self) -> list[str]:
        """What readers of committed records see now."""
        return sorted(
            present(message.value).decode() for message in contents(self.bootstrap_servers, self.topic)
        )

    def check(self, *batches: int) -> None:
        """Readers see exactly these batches, as soon as the markers are written."""
        assert open_transactions(self.client(), self.query_id) == []
        expected = sorted(f"{batch}/{task}" for batch in batches for task in range(TASKS))
        wait_until(lambda: len(self.values()) >= len(expected))
        assert self.values() == expected

    def client(self) -> SyncClient:
        client = SyncClient(self.bootstrap_servers)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        close_sync_clients()


def rows_of(batch: int, task: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"value": [f"{batch}/{task}".encode()], "partition": pa.array([task], pa.int32())}
    )


def transactions(messages: list[SinkCommitMessage]) -> list[ProducerEpoch]:
    return [ProducerEpoch(one.report.transactional_id, *_identity(one.report)) for one in messages]


def _identity(report: TaskReport) -> tuple[int, int]:
    return report.producer_id, report.producer_epoch


@pytest.fixture
def query(broker_process: ServedBroker, topic_name: TopicName) -> Iterator[Query]:
    topic = create(broker_process.bootstrap_servers, topic_name("out"), TASKS)
    made = Query(broker_process.bootstrap_servers, topic, topic_name("query"))
    yield made
    made.close()


@pytest.mark.row("S2")
def test_readers_see_a_batch_when_it_is_committed_and_not_before(query: Query) -> None:
    messages = query.run_tasks(0)
    assert query.values() == []
    query.commit(0, messages)
    query.check(0)
    query.commit(1, query.run_tasks(1))
    query.check(0, 1)


@pytest.mark.row("S2")
def test_a_batch_that_is_repeated_after_its_commit_is_there_once(query: Query) -> None:
    query.commit(0, query.run_tasks(0))
    repeated = query.run_tasks(0)
    query.commit(0, repeated)
    query.check(0)
    query.commit(1, query.run_tasks(1))
    query.check(0, 1)


def test_a_batch_that_is_repeated_before_its_commit_is_there_once(query: Query) -> None:
    """The driver died when its tasks had ended: their transactions are prepared, and no other ends them."""
    lost = query.run_tasks(0)
    repeated = query.run_tasks(0)
    taken = {one.report.transactional_id for one in repeated}
    assert taken.isdisjoint(one.report.transactional_id for one in lost), "a prepared slot was taken"
    query.commit(0, repeated)
    query.check(0)


def test_more_abandoned_transactions_than_one_request_names_are_all_aborted(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = sink_transaction._request_batch

    def request(*named: Any, is_commit: bool) -> None:
        *_, committed, aborted = named
        asked.append(len(aborted) if is_commit else len(committed))
        real(*named, is_commit=is_commit)

    monkeypatch.setattr(sink_transaction, "ABORTS_PER_REQUEST", TASKS - 1)
    monkeypatch.setattr(sink_transaction, "_request_batch", request)
    lost = query.run_tasks(0)
    query.commit(0, query.run_tasks(0))
    assert asked == [len(lost) - TASKS + 1, TASKS - 1]  # the last ones with the commit
    query.check(0)


def test_a_commit_of_a_replaced_driver_and_that_of_its_successor_are_one(query: Query) -> None:
    old, new = query.run_tasks(0), query.run_tasks(0)
    commit_batch(query.client(), query.query_id, 0, transactions(old))
    query.commit(0, new)
    query.check(0)
    with pytest.raises(InvalidTxnState):
        commit_batch(query.client(), query.query_id, -1, transactions(old))


@pytest.mark.row("S2")
def test_an_attempt_that_died_while_it_wrote_is_aborted_by_the_commit(query: Query) -> None:
    dead = query.sender(0)
    dead.send(query.topic, rows_of(0, 0))
    messages = [query.run_task(0, 0, attempt=1), query.run_task(0, 1), query.run_task(0, 2)]
    query.commit(0, messages)
    query.check(0)
    with pytest.raises(MansioError):
        dead.finish()


def test_both_attempts_of_a_task_write_and_one_counts(query: Query) -> None:
    query.run_task(0, 0, attempt=0)
    messages = [query.run_task(0, task, attempt=1) for task in range(TASKS)]
    query.commit(0, messages)
    query.check(0)


def test_a_repeated_attempt_with_the_same_number_fences_the_one_that_writes(query: Query) -> None:
    """As after a repeated stage, whose attempts are counted from 0 again."""
    zombie = query.sender(0)
    zombie.send(query.topic, rows_of(0, 0))
    messages = query.run_tasks(0)
    with pytest.raises(ProducerFenced):
        zombie.finish()
    query.commit(0, messages)
    query.check(0)


def test_a_task_that_fails_leaves_nothing(query: Query) -> None:
    sender = query.sender(0)
    sender.send(query.topic, rows_of(0, 0))
    sender.abort()
    assert open_transactions(query.client(), query.query_id) == []
    query.commit(0, query.run_tasks(0))
    query.check(0)


def test_a_batch_that_fails_leaves_nothing_and_an_abort_after_the_commit_changes_nothing(
    query: Query,
) -> None:
    failed = query.run_tasks(0)
    abort_tasks(query.options, 0, [*failed[:1], None])
    query.check()
    with pytest.raises(InvalidTxnState, match="batch 0 is not committed"):
        query.commit(0, failed)
    messages = query.run_tasks(0)
    query.commit(0, messages)
    abort_batch(query.client(), query.query_id, transactions(messages))
    query.check(0)


def test_a_cancelled_task_that_goes_on_after_the_abort_leaves_nothing(query: Query) -> None:
    """Spark aborts a batch while tasks that it has cancelled still run: readers would wait at what they prepare."""
    failed = [query.run_task(0, 0), None]
    late: list[SinkCommitMessage] = []

    def go_on() -> None:
        client = SyncClient(query.bootstrap_servers)
        query.clients.append(client)
        wait_until(
            lambda: not open_transactions(client, query.query_id)
        )  # the driver has aborted what it found
        late.append(query.run_task(0, 1))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(go_on)
        abort_tasks(query.options, 0, failed)
        running.result()
    assert late
    query.check()
    (task,) = transactions(late)
    with pytest.raises((InvalidTxnState, ProducerFenced)):
        commit_batch(query.clients[0], query.query_id, 0, [task])


def test_a_task_without_rows_has_no_transaction(query: Query) -> None:
    sender = query.sender(0)
    assert sender.finish() == EMPTY_TASK_REPORT
    query.commit(0, [SinkCommitMessage(EMPTY_TASK_REPORT, query.query_id)])
    query.commit(1, query.run_tasks(1))
    query.check(1)


def test_a_batch_without_rows_aborts_what_an_earlier_run_has_left(query: Query) -> None:
    query.run_tasks(0)
    query.commit(0, [SinkCommitMessage(EMPTY_TASK_REPORT, query.query_id)])
    query.check()


def test_a_commit_asks_for_no_transaction_that_its_tasks_have_named(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of many tasks would need a request for each."""
    asked: list[str] = []
    describe = sink_transaction._Coordinator._describe

    async def counting(self: Any, transactional_id: str) -> ProducerEpoch | None:
        asked.append(transactional_id)
        return await describe(self, transactional_id)

    monkeypatch.setattr(sink_transaction._Coordinator, "_describe", counting)
    query.commit(0, query.run_tasks(0))
    assert asked == []
    lost = query.run_task(1, 0)
    messages = [query.run_task(1, task, attempt=1) for task in range(TASKS)]
    asked.clear()
    query.commit(1, messages)
    assert asked == [lost.report.transactional_id]
    query.check(0, 1)


def test_a_driver_that_dies_again_and_again_before_its_commit_does_not_use_up_the_slots(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_transaction, "SLOTS_MAX", 3)
    query.commit(0, query.run_tasks(0))
    for _ in range(5):
        messages = query.run_tasks(1)
    query.commit(1, messages)
    query.check(0, 1)


def test_a_timeout_that_the_brokers_refuse_is_named(query: Query) -> None:
    with pytest.raises(ConfigError, match="option transactionTimeout is 7200000 ms"):
        query.sender(0, timeout_ms=7_200_000).send(query.topic, rows_of(0, 0))


def test_many_batches_use_the_same_transactional_ids(query: Query) -> None:
    names = set()
    for batch in range(20):
        messages = query.run_tasks(batch)
        query.commit(batch, messages)
        names |= {one.report.transactional_id for one in messages}
        for client in query.clients:
            client.close()
        query.clients.clear()
    assert len(names) == TASKS
    query.check(*range(20))


@pytest.mark.parametrize("killed_before", ["commit", "repeat"])
def test_prepared_transactions_and_decisions_outlive_a_kill_of_the_broker(
    tmp_path: Path, killed_before: str
) -> None:
    broker = ServedBroker(tmp_path / "data")
    broker.start()
    query = None
    try:
        topic = create(broker.bootstrap_servers, "out", TASKS)
        query = Query(broker.bootstrap_servers, topic, "q")
        query.commit(0, query.run_tasks(0))
        messages = query.run_tasks(1)
        if killed_before == "repeat":
            query.commit(1, messages)
            messages = query.run_tasks(1)
        broker.kill()
        broker.start()
        query.commit(1, messages)
        query.check(0, 1)
    finally:
        if query is not None:
            query.close()
        broker.kill()


@pytest.mark.full
def test_lost_answers_to_the_requests_of_a_batch_neither_lose_nor_double_it(tmp_path: Path) -> None:
    port = free_port()
    broker = ServedBroker(tmp_path / "data", arguments=["--set", f"advertised_listeners=127.0.0.1:{port}"])
    keys = (ApiKey.INIT_PRODUCER_ID, ApiKey.PRODUCE, ApiKey.PREPARE_TRANSACTION, ApiKey.COMMIT_BATCH)
    broker.start()
    try:
        with losing_answers(port, broker.kafka_port, keys[0], frozenset()) as proxy:
            query = Query(f"127.0.0.1:{port}", create(f"127.0.0.1:{port}", "out", TASKS), "q")
            for batch, key in enumerate(keys):
                lost = frozenset({1} if key is ApiKey.COMMIT_BATCH else {1, 3})
                proxy.lose(key, lost)
                query.commit(batch, query.run_tasks(batch))
                assert proxy.seen > max(lost), f"all planned losses of {key.name} have happened"
                query.check(*range(batch + 1))
            query.close()
    finally:
        broker.kill()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_batches_are_there_once_while_each_broker_of_a_cluster_dies_before_or_after_a_decision(
    tmp_path: Path,
) -> None:
    """Tasks, query and partitions have coordinators and leaders on all brokers, and a repeated batch follows each."""
    with cluster(tmp_path, broker_session_timeout_ms=3000) as one:
        topic = create(one.bootstrap_servers, "out", TASKS)
        queries = [Query(one.bootstrap_servers, topic, f"q-{number}") for number in range(2)]
        batch = 0
        for node_id in (1, 2, 3):
            first, second = (query.run_tasks(batch) for query in queries)
            queries[0].commit(batch, first)
            one.kill(node_id)
            queries[1].commit(batch, second)
            for query in queries:
                query.commit(batch, query.run_tasks(batch))
            one.start(node_id)
            one.wait_in_sync(topic)
            batch += 1
        expected = sorted(f"{number}/{task}" for number in range(batch) for task in range(TASKS)) * 2
        wait_until(lambda: len(queries[0].values()) >= len(expected))
        assert queries[0].values() == sorted(expected)
        for query in queries:
            assert open_transactions(query.client(), query.query_id) == []
            query.close()
