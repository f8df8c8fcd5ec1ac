"""Apache Kafka's `kafka-transactions.sh` (KIP-664): list, describe, describe-producers, find-hanging, abort.

Nightly: needs Java and Maven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.testing.broker import TestBroker
from nightly.interop.test_admin_java import TRANSACTIONS, Java, fetch_tools
from support.open_transactions import HANGING_PRODUCER_ID, hang, open_transaction
from support.present import present
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL_S = 30


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    fetch_tools()
    with TestBroker(transaction_state_log_num_partitions=2, auto_create_topics_enable=False) as one:
        yield one


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its headings."""
    return [line.split() for line in text.strip().splitlines()[1:]]


@pytest.mark.row("O3", "P4")
def test_the_tool_of_kafka_shows_transactions_and_finds_and_ends_a_hanging_one(broker: TestBroker) -> None:
    java = Java(broker.bootstrap_servers)
    client = broker.client()
    client.admin.create_topic("orders", partitions=2)
    producer = open_transaction(broker.bootstrap_servers, "orders-1", "orders", ["a"], timeout_ms=900_000)
    start = hang(broker, "orders", 1)
    client.publish("orders", b"after", partition=1)

    (listed,) = rows(java(TRANSACTIONS, "list"))
    assert (listed[0], listed[3]) == ("orders-1", "Ongoing")
    assert "orders-1" in java(TRANSACTIONS, "list", "--transactional-id-pattern", "orders.*")
    assert rows(java(TRANSACTIONS, "list", "--duration-filter", "3600000")) == []
    described = java(TRANSACTIONS, "describe", "--transactional-id", "orders-1")
    assert "Ongoing" in described
    assert "orders-0" in described
    producers = rows(java(TRANSACTIONS, "describe-producers", "--topic", "orders", "--partition", "1"))
    starts = {row[0]: row[-1] for row in producers}
    assert starts[str(HANGING_PRODUCER_ID)] == str(start)
    assert sorted(starts.values()) == sorted([str(start), "None"]), "the other one has no transaction"
    find = (TRANSACTIONS, "find-hanging", "--max-transaction-timeout", "0")
    for where in (("--broker-id", "1"), ("--topic", "orders"), ("--topic", "orders", "--partition", "1")):
        (hanging,) = rows(java(*find, *where))
        assert hanging[:3] == ["orders", "1", str(HANGING_PRODUCER_ID)]
        assert str(start) in hanging

    java(TRANSACTIONS, "abort", "--topic", "orders", "--partition", "1", "--start-offset", str(start))
    assert rows(java(*find, "--topic", "orders")) == []
    producer.commit_transaction(CALL_S)
    wait_until(lambda: not client.admin.transactions.describe("orders-1").is_open, CALL_S)
    with client.consume("orders", from_="earliest", to_end=True) as consumer:
        assert sorted(present(each.value) for each in consumer) == [b"a", b"after"]


@pytest.mark.row("O3")
def test_the_tool_of_kafka_is_refused_as_by_kafka(broker: TestBroker) -> None:
    java = Java(broker.bootstrap_servers)
    broker.client().admin.create_topic("refused", partitions=1)
    refused = java(
        *(TRANSACTIONS, "abort", "--topic", "refused", "--partition", "0", "--start-offset", "0"), code=None
    )
    assert "Could not find any open transactions starting at offset 0" in refused
    unknown = java(TRANSACTIONS, "describe", "--transactional-id", "nobody", code=None)
    assert "the ID could not be found" in unknown
    hang(broker, "refused")
    java(
        *(TRANSACTIONS, "abort", "--topic", "refused", "--partition", "0", "--producer-id"),
        *(str(HANGING_PRODUCER_ID), "--producer-epoch", "9", "--coordinator-epoch", "0"),
        code=1,
    )
    assert (
        len(rows(java(TRANSACTIONS, "find-hanging", "--topic", "refused", "--max-transaction-timeout", "0")))
        == 1
    )
