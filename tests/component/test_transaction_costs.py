"""A topic without transactions has no cost of them: the calls that a broker makes per request are counted."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest
from bench import frames
from confluent_kafka import Producer

import mansio
from component.test_delay_costs import REQUESTS, SOURCE, CountedBroker, requests_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce
from mansio.wire.batch.record_batch import build_batch
from support.raw_peer import RawPeer

if TYPE_CHECKING:
    from pathlib import Path

BATCH_CALLS_MAX = 40
"""Calls of a batch for its transaction."""
PRODUCER_ID = 1 << 40
TRANSACTIONAL_ID = "counted"
ADDING_VERSION = 12
"""Version of Produce that adds the partition to the transaction."""
ISOLATION_LEVEL_AT = 4 + 10 + len(frames.CLIENT_ID) + 16
"""Position of the isolation level in a framed Fetch request of `frames`."""


class IdempotentProducer(CountedBroker):
    """Counts the calls of requests with one batch each of an idempotent producer."""

    sequence = 0

    def _ask(self, request: bytes) -> None:
        batch = build_batch(
            [(1, None, b"record", ())],
            producer_id=PRODUCER_ID,
            producer_epoch=0,
            base_sequence=self.sequence,
        )
        self.sequence += 1
        super()._ask(frames.produce_request("plain", 0, -1, batch))


class TransactionalProducer(IdempotentProducer):
    """Counts the calls of requests with one batch each of one transaction."""

    def __init__(self, broker: mansio.Broker) -> None:
        super().__init__(broker)
        with RawPeer(int(broker.address.rpartition(":")[2])) as peer:
            asked = {
                "transactional_id": TRANSACTIONAL_ID,
                "transaction_timeout_ms": 60_000,
                "producer_id": -1,
                "producer_epoch": -1,
            }
            self.producer_id = peer.call(ApiKey.INIT_PRODUCER_ID, 4, asked).producer_id

    def _ask(self, request: bytes) -> None:
        batch = build_batch(
            [(1, None, b"record", ())],
            producer_id=self.producer_id,
            producer_epoch=0,
            base_sequence=self.sequence,
            transactional=True,
        )
        self.sequence += 1
        pieces = produce.encode_request(
            ADDING_VERSION, 1, "c", -1, 30_000, [("plain", None, [(0, batch)])], TRANSACTIONAL_ID
        )
        CountedBroker._ask(self, b"".join(map(bytes, pieces)))


def reading_committed(request: bytes) -> bytes:
    assert request[ISOLATION_LEVEL_AT] == 0
    return request[:ISOLATION_LEVEL_AT] + b"\x01" + request[ISOLATION_LEVEL_AT + 1 :]


def use_transactions(broker: mansio.Broker, stack: ExitStack) -> Producer:
    """Commit and abort transactions in topic `orders`, and leave one open."""
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": "orders-1", "linger.ms": 0})
    producer.init_transactions(30)
    for end in (producer.commit_transaction, producer.abort_transaction, None):
        producer.begin_transaction()
        producer.produce("orders", b"order")
        producer.flush(30)
        if end is not None:
            end(30)
    stack.callback(producer.abort_transaction, 30)
    return producer


def of_transactions(functions: set[str]) -> set[str]:
    """Functions in modules of transactions."""
    own = (name for name in functions if name.startswith(str(SOURCE)))
    return {name for name in own if "transaction" in name.removeprefix(str(SOURCE)).partition(":")[0]}


@pytest.mark.row("P4")
def test_a_topic_without_transactions_takes_no_call_more(tmp_path: Path) -> None:
    found: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for has_transactions, fewest in found.items():
        with mansio.Broker(tmp_path / str(has_transactions)) as broker, ExitStack() as stack:
            with mansio.blocking.connect(broker.address) as client:
                client.admin.create_topic("plain", partitions=1)
                client.admin.create_topic("orders", partitions=1)
            if has_transactions:
                use_transactions(broker, stack)
            counted = stack.enter_context(closing(CountedBroker(broker)))
            requests = requests_for("plain")
            requests["fetch of committed records"] = reading_committed(requests["fetch"])
            for name, request in requests.items():
                fewest[name], _ = counted.calls_of(request)
            idempotent = stack.enter_context(closing(IdempotentProducer(broker)))
            fewest["produce of an idempotent producer"], _ = idempotent.calls_of(b"")
            if has_transactions:  # otherwise no call could be seen
                fetch = reading_committed(requests_for("orders")["fetch"])
                _, functions = counted.calls_of(fetch)
                assert of_transactions(functions)
    assert found[True] == found[False]
    assert min(found[True].values()) > 10 * REQUESTS


@pytest.mark.row("P4")
def test_a_batch_in_an_open_transaction_takes_few_calls_more_than_one_without(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path) as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("plain", partitions=1)
        found = []
        for kind in (IdempotentProducer, TransactionalProducer):
            with closing(kind(broker)) as counted:
                found.append(counted.calls_of(b"")[0])
                written = counted.sequence
        with client.consume("plain", isolation="read_uncommitted", to_end=True) as consumer:
            assert len(list(consumer)) == 2 * written
    plain, transactional = found
    assert plain < transactional <= plain + BATCH_CALLS_MAX * REQUESTS
