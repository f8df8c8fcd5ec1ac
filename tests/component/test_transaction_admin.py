"""Administration of transactions by the client and `mansio txn`: open ones are shown, hanging ones found and ended."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaException

import mansio
import mansio.blocking
from mansio.broker.routing.caller import ANONYMOUS
from mansio.errors import (
    ClusterAuthorizationFailed,
    InvalidProducerEpoch,
    InvalidRegularExpression,
    InvalidRequest,
    InvalidTxnState,
    TransactionalIdNotFound,
    TransactionCoordinatorFenced,
    UnknownTopicOrPartition,
)
from mansio.net.retry import raise_for_code
from mansio.state.transactions.batch_decision import TaskTransaction
from mansio.testing.broker import TestBroker
from mansio.wire.api_versions import ApiKey
from mansio.wire.query_transactional_ids import task_transactional_id
from mansio.wire.topic_partition import TopicPartition
from support.client_fixtures import run
from support.open_transactions import HANGING_PRODUCER_ID, hang, open_transaction
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(transaction_state_log_num_partitions=2, auto_create_topics_enable=False) as one:
        yield one


@pytest.fixture
def client(broker: TestBroker) -> Iterator[mansio.blocking.Client]:
    with mansio.blocking.connect(broker.bootstrap_servers) as one:
        yield one


def committed(client: mansio.blocking.Client, topic: str) -> list[bytes | None]:
    with client.consume(topic, from_="earliest", to_end=True) as consumer:
        return [each.value for each in consumer]


@pytest.mark.row("O3")
def test_an_open_transaction_is_listed_and_described_and_terminated_as_a_whole(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    admin = client.admin.transactions
    client.admin.create_topic("orders", partitions=2)
    producer = open_transaction(broker.bootstrap_servers, "orders-1", "orders", ["a", "b"])
    (listed,) = admin.list(pattern="orders-.*")
    assert (listed.transactional_id, listed.state, listed.coordinator_id) == ("orders-1", "Ongoing", 1)
    assert admin.list(states=["Ongoing"], producer_ids=[listed.producer_id]) == [listed]
    assert admin.list(states=["Empty"], pattern="orders-.*") == []
    assert admin.list(open_ms_min=3_600_000, pattern="orders-.*") == []
    assert admin.list().is_complete
    described = admin.describe("orders-1")
    assert described.is_open
    assert described.partitions == (TopicPartition("orders", 0),)
    assert described.started_ms is not None
    assert abs(time.time() * 1000 - described.started_ms) < 600_000
    (at,) = admin.describe_producers([TopicPartition("orders", 0)])[TopicPartition("orders", 0)]
    assert (at.producer_id, at.producer_epoch) == (described.producer_id, described.producer_epoch)
    assert (at.transaction_start_offset, at.last_sequence, at.coordinator_epoch) == (0, 1, None)
    assert admin.find_hanging(["orders"], open_ms_min=0) == ()
    with pytest.raises(InvalidTxnState, match="orders-1"):
        admin.abort(TopicPartition("orders", 0), 0)

    assert admin.terminate("orders-1").state == "Ongoing"
    with pytest.raises(KafkaException):
        producer.commit_transaction(30)
    wait_until(lambda: not admin.describe("orders-1").is_open, 30)
    (at,) = admin.describe_producers([TopicPartition("orders", 0)])[TopicPartition("orders", 0)]
    assert at.transaction_start_offset is None
    assert at.coordinator_epoch is not None
    assert committed(client, "orders") == []
    with pytest.raises(InvalidTxnState):
        admin.terminate("orders-1")


@pytest.mark.row("O3")
def test_a_hanging_transaction_is_found_and_aborted_and_readers_go_on(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    admin = client.admin.transactions
    client.admin.create_topic("stuck", partitions=3)
    client.publish("stuck", b"before", partition=1)
    start = hang(broker, "stuck", 1)
    client.publish("stuck", b"after", partition=1)
    assert committed(client, "stuck") == [b"before"]
    producer = open_transaction(broker.bootstrap_servers, "stuck-1", "stuck", ["open"], partition=2)
    assert admin.find_hanging(["stuck"]) == (), "it is not old enough"
    (found,) = admin.find_hanging(["stuck"], open_ms_min=0)
    assert (found.topic, found.partition, found.start_offset) == ("stuck", 1, start)
    assert (found.producer_id, found.producer_epoch) == (HANGING_PRODUCER_ID, 3)
    assert found.transactional_id is None
    (again,) = admin.find_hanging(open_ms_min=0)
    assert replace(again, open_ms=found.open_ms) == found
    assert admin.find_hanging([TopicPartition("stuck", 0)], open_ms_min=0) == ()
    assert admin.find_hanging(node_id=7, open_ms_min=0) == ()

    assert admin.abort(TopicPartition("stuck", 1), start).producer_id == HANGING_PRODUCER_ID
    assert admin.find_hanging(open_ms_min=0) == ()
    assert committed(client, "stuck") == [b"before", b"after"]
    with pytest.raises(InvalidTxnState):
        admin.abort(TopicPartition("stuck", 1), start)
    producer.commit_transaction(30)
    wait_until(lambda: not admin.describe("stuck-1").is_open, 30)
    assert sorted(map(str, committed(client, "stuck"))) == ["b'after'", "b'before'", "b'open'"]


@pytest.mark.row("O3")
def test_a_transaction_whose_coordinator_knows_the_producer_but_not_the_partition_hangs(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    admin = client.admin.transactions
    client.admin.create_topic("mixed", partitions=2)
    producer = open_transaction(broker.bootstrap_servers, "mixed-1", "mixed", ["a"])
    known = admin.describe("mixed-1")
    hang(broker, "mixed", 1, producer_id=known.producer_id, producer_epoch=known.producer_epoch)
    (found,) = admin.find_hanging(["mixed"], open_ms_min=0)
    assert (found.partition, found.transactional_id) == (1, "mixed-1")
    admin.abort(TopicPartition("mixed", 1), 0)
    assert admin.find_hanging(["mixed"], open_ms_min=0) == ()
    admin.abort(TopicPartition("mixed", 0), 0, force=True)
    producer.abort_transaction(30)


@pytest.mark.row("O3")
def test_a_transaction_that_has_ended_has_neither_a_begin_nor_partitions(
    client: mansio.blocking.Client,
) -> None:
    client.admin.create_topic("ended")
    with client.transaction("ended-1") as txn:
        txn.publish("ended", b"a")
    admin = client.admin.transactions
    wait_until(lambda: admin.describe("ended-1").state == "CompleteCommit", 30)
    described = admin.describe("ended-1")
    assert (described.is_open, described.started_ms, described.partitions) == (False, None, ())


@pytest.mark.row("O3")
def test_unknown_ids_partitions_and_expressions_have_typed_errors(client: mansio.blocking.Client) -> None:
    admin = client.admin.transactions
    client.admin.create_topic("errors")
    with pytest.raises(TransactionalIdNotFound, match="nobody"):
        admin.describe("nobody")
    with pytest.raises(TransactionalIdNotFound):
        admin.terminate("nobody")
    with pytest.raises(InvalidRegularExpression):
        admin.list(pattern="(")
    with pytest.raises(InvalidRequest, match="no state 'ongoing'; the states are Empty, Ongoing"):
        admin.list(states=["Empty", "ongoing"])
    for call in (
        lambda: admin.describe_producers([TopicPartition("errors", 9)]),
        lambda: admin.describe_producers([TopicPartition("none", 0)]),
        lambda: admin.find_hanging(["none"]),
        lambda: admin.find_hanging([TopicPartition("errors", 9)]),
        lambda: admin.abort(TopicPartition("none", 0), 0),
    ):
        with pytest.raises(UnknownTopicOrPartition):
            call()
    with pytest.raises(InvalidTxnState):
        admin.abort(TopicPartition("errors", 0), 0)


@pytest.mark.row("O3", "P4")
def test_a_client_can_neither_commit_nor_fence_with_a_marker(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    client.admin.create_topic("forged")
    hang(broker, "forged")

    async def scenario() -> None:
        async with mansio.connect(broker.bootstrap_servers) as asyncio_client:

            async def write(**changes: Any) -> None:
                marker = {
                    "producer_id": HANGING_PRODUCER_ID,
                    "producer_epoch": 3,
                    "transaction_result": False,
                    "coordinator_epoch": 0,
                    "topics": [{"name": "forged", "partition_indexes": [0]}],
                    **changes,
                }
                cluster = asyncio_client.admin._cluster
                answer = await cluster.request(ApiKey.WRITE_TXN_MARKERS, {"markers": [marker]})
                raise_for_code(answer.markers[0].topics[0].partitions[0].error_code)

            for changes, error in (
                ({"transaction_result": True}, ClusterAuthorizationFailed),
                ({"producer_epoch": 4}, InvalidProducerEpoch),
                ({"producer_epoch": 2}, InvalidProducerEpoch),
                ({"coordinator_epoch": 1}, TransactionCoordinatorFenced),
                ({"producer_id": 1}, InvalidTxnState),
            ):
                with pytest.raises(error):
                    await write(**changes)
            await write()
            with pytest.raises(InvalidTxnState):
                await write()

    run(scenario)
    (at,) = client.admin.transactions.describe_producers([TopicPartition("forged", 0)])[
        TopicPartition("forged", 0)
    ]
    assert (at.producer_epoch, at.coordinator_epoch) == (3, 0)


@pytest.mark.row("O3")
def test_a_transaction_that_waits_for_the_decision_about_its_batch_is_shown_and_not_terminated(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    admin = client.admin.transactions
    client.admin.create_topic("held")
    open_transaction(broker.bootstrap_servers, "held-1", "held", ["a"])
    known = admin.describe("held-1")
    services = broker._running().service
    hold = services.transactions.prepare("held-1", known.producer_id, known.producer_epoch, caller=ANONYMOUS)
    broker._run_on_loop(hold)
    held = admin.describe("held-1")
    assert (held.state, held.timeout_ms) == ("Ongoing", 2**31 - 1)
    assert admin.find_hanging(["held"], open_ms_min=0) == ()
    with pytest.raises(InvalidTxnState, match="waits for the decision"):
        admin.terminate("held-1")
    assert admin.describe("held-1").is_open


@pytest.mark.row("O3")
def test_a_prepared_transaction_of_a_query_that_is_gone_is_terminated_and_its_batch_cannot_be_committed(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    """The query was killed and its checkpoint is deleted: without this, readers wait for 24 hours."""
    admin, services = client.admin.transactions, broker._running().service
    client.admin.create_topic("gone", partitions=1)
    name = task_transactional_id("q-7", 3, 0)
    open_transaction(broker.bootstrap_servers, name, "gone", ["a"])
    client.publish("gone", b"behind it")
    known = admin.describe(name)
    broker._run_on_loop(
        services.transactions.prepare(name, known.producer_id, known.producer_epoch, caller=ANONYMOUS)
    )
    assert committed(client, "gone") == []
    assert admin.terminate(name).state == "Ongoing"
    wait_until(lambda: committed(client, "gone") == [b"behind it"])
    batch = [TaskTransaction(name, known.producer_id, known.producer_epoch)]
    with pytest.raises(InvalidTxnState, match="batch 0 is not committed"):
        broker._run_on_loop(
            services.transactions.commit_batch("q-7", 0, batch, is_commit=True, caller=ANONYMOUS)
        )
    assert committed(client, "gone") == [b"behind it"]


# The command line


@pytest.mark.row("O3")
def test_the_command_shows_transactions_and_ends_them(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    shell = Shell(broker.bootstrap_servers)
    client.admin.create_topic("cli", partitions=2)
    open_transaction(broker.bootstrap_servers, "cli-1", "cli", ["a"])
    start = hang(broker, "cli", 1, producer_id=77)
    (row,) = shell.json("txn", "list", "--pattern", "cli-.*", "--state", "Ongoing", "--durations")
    assert (row["transactional_id"], row["state"]) == ("cli-1", "Ongoing")
    assert row["open_ms"] >= 0
    assert shell.json("txn", "list", "--open-for", "1h") == []
    assert "TRANSACTIONAL ID" in shell("txn", "list")
    described = shell.json("txn", "describe", "cli-1")
    assert (described["partitions"], described["state"]) == (["cli-0"], "Ongoing")
    assert "cli-0" in shell("txn", "describe", "cli-1")
    (at,) = shell.json("txn", "describe-producers", "--topic", "cli", "--partition", "1")
    assert (at["producer_id"], at["transaction_start"]) == (77, start)
    assert (
        shell.json("txn", "describe-producers", "-t", "cli", "-p", "1", "--broker-id", "1")[0]["producer_id"]
        == 77
    )
    assert shell.json("txn", "find-hanging") == []
    (hanging,) = shell.json("txn", "find-hanging", "--topic", "cli", "--open-for", "0s")
    assert (hanging["partition"], hanging["start_offset"]) == (1, start)
    assert shell.json("txn", "find-hanging", "-t", "cli", "-p", "0", "--open-for", "0s") == []

    abort = ("txn", "abort", "--topic", "cli", "--partition", "1", "--start-offset", str(start))
    shell(*abort, code=2)
    assert "--yes" in shell.errors
    assert shell.json(*abort, "--yes")["producer_id"] == 77
    assert "never delivered" in shell.errors
    shell(*abort, "--yes", code=1)
    assert "no open transaction" in shell.errors
    shell("txn", "terminate", "cli-1", "--yes")
    wait_until(lambda: shell.json("txn", "describe", "cli-1")["state"] == "Empty", 30)


@pytest.mark.row("O3")
def test_the_command_refuses_what_is_not_known(broker: TestBroker, client: mansio.blocking.Client) -> None:
    shell = Shell(broker.bootstrap_servers)
    client.admin.create_topic("refused")
    open_transaction(broker.bootstrap_servers, "refused-1", "refused", ["a"])
    shell("txn", "describe", "nobody", code=1)
    assert "there is no transactional id 'nobody'" in shell.errors
    shell("txn", "list", "--state", "open", code=1)
    assert "no state 'open'" in shell.errors
    shell("txn", "find-hanging", "--partition", "0", code=2)
    shell("txn", "abort", "-t", "refused", "-p", "0", "--start-offset", "0", "--yes", code=1)
    assert "refused-1" in shell.errors
