"""A disk that does not answer delays acknowledgements and nothing else: flushes run on a thread of their own."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaError, Producer

import mansio
from mansio.host import disk
from support.machine import scaled
from support.tiers import repetitions
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

SESSION_MS = 1_000


class HangingFlush:
    """Flushes wait while `hang` is in effect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_go = threading.Event()
        self._may_go.set()
        self.waiting = threading.Event()
        sync = disk.sync_descriptor

        def delayed(descriptor: int) -> None:
            if not self._may_go.is_set():
                self.waiting.set()
            self._may_go.wait()
            sync(descriptor)

        monkeypatch.setattr(disk, "sync_descriptor", delayed)

    def hang(self) -> None:
        self._may_go.clear()

    def end(self) -> None:
        self._may_go.set()


@pytest.mark.parametrize(
    "hang_s", [2, pytest.param(repetitions(5, 30), marks=pytest.mark.full)], ids=["short", "long"]
)
def test_flush_that_hangs_costs_no_group_its_session(
    hang_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = HangingFlush(monkeypatch)
    lost: list[object] = []
    session_ms = int(scaled(SESSION_MS))
    with mansio.Broker(
        tmp_path / "data",
        group_min_session_timeout_ms=session_ms,
        group_initial_rebalance_delay_ms=0,
    ) as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("t", partitions=1)
        consumer = Consumer(
            {
                "bootstrap.servers": broker.address,
                "group.id": "g",
                "session.timeout.ms": session_ms,
                "heartbeat.interval.ms": session_ms // 4,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        producer = Producer({"bootstrap.servers": broker.address, "acks": "all", "linger.ms": 0})
        acknowledged: list[KafkaError | None] = []
        try:
            consumer.subscribe(["t"], on_revoke=lambda *_: lost.append("revoked"))
            producer.produce("t", b"before")
            assert producer.flush(scaled(20)) == 0
            first = wait_until(lambda: consumer.poll(0.1), 20, "the consumer receives the first record")
            assert first.value() == b"before"
            flush.hang()
            producer.produce("t", b"during", on_delivery=lambda error, _: acknowledged.append(error))
            wait_until(lambda: producer.poll(0) is not None and flush.waiting.is_set(), 20, "the flush hangs")
            end = time.monotonic() + max(hang_s, 2 * session_ms / 1000)
            while time.monotonic() < end:
                assert "t" in consumer.list_topics(timeout=scaled(5)).topics, "other requests are answered"
                producer.poll(0)
                assert not acknowledged, "nothing is acknowledged before it is flushed"
                assert consumer.poll(0.1) is None, "nothing is delivered before it is flushed"
            flush.end()
            second = wait_until(lambda: consumer.poll(0.1), 20, "the consumer receives the second record")
            assert (second.value(), second.offset()) == (b"during", 1)
            assert producer.flush(scaled(20)) == 0
            assert acknowledged == [None]
            assert not lost
        finally:
            flush.end()
            consumer.close()
