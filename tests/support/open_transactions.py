"""Transactions for tests of administration: open ones of a producer, and hanging ones, which no coordinator knows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka import Producer

from mansio.wire.batch.record_batch import build_batch
from support.machine import scaled

if TYPE_CHECKING:
    from mansio.testing.broker import TestBroker

CALL_S = 30
HANGING_PRODUCER_ID = 4242


def open_transaction(
    bootstrap_servers: str,
    transactional_id: str,
    topic: str,
    values: list[str],
    partition: int = 0,
    timeout_ms: int = 60_000,
) -> Producer:
    """A producer with an open transaction that has written these values."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            "log_level": 0,
        }
    )
    producer.init_transactions(scaled(CALL_S))
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=partition)
    producer.flush(scaled(CALL_S))
    return producer


def hang(
    broker: TestBroker,
    topic: str,
    partition: int = 0,
    *,
    value: str = "hanging",
    producer_id: int = HANGING_PRODUCER_ID,
    producer_epoch: int = 3,
) -> int:
    """Append a transactional batch without the coordinator; return its offset."""
    batch = build_batch(
        [(time.time_ns() // 1_000_000, None, value.encode(), ())],
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=0,
        transactional=True,
    )

    async def append() -> int:
        found = broker._running().service.partitions.find(topic, None, partition)
        appended = found.append(bytearray(batch), transactional=True)
        await found.commit_promise(appended.end_offset)
        return appended.end_offset - 1

    return broker._run_on_loop(append())
