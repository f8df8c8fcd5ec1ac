"""A disk that does not answer delays acknowledgements and nothing that users would lose: liveness checks are answered,
and no group loses its session, whether logs are flushed on a thread or on the event loop."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import httpx
import pytest
from confluent_kafka import Consumer, KafkaError, Producer

import mansio
from support.machine import scaled
from support.process import ServedBroker, served
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

SESSION_PER_HANG = 1.5
"""A client ends its session itself when its coordinator is silent for longer: Kafka's default of 45 s stands 30 s."""

HANGING_FLUSHES = """
import os, time
import mansio.host.disk as disk
sync = disk._sync_descriptor
control = os.environ["HANG_CONTROL"]
def delayed(descriptor):
    while os.path.exists(control):
        open(control + ".waiting", "w").close()
        time.sleep(0.02)
    sync(descriptor)
disk._sync_descriptor = delayed
"""
"""Executed by each interpreter of the broker at its start (`sitecustomize`)."""


class HangingDisk:
    """Flushes of the broker's process wait while `hang` is in effect."""

    def __init__(self, directory: Path) -> None:
        (directory / "sitecustomize.py").write_text(HANGING_FLUSHES)
        self._control = directory / "hang"
        self._waiting = directory / "hang.waiting"
        path = os.pathsep.join(part for part in (str(directory), os.environ.get("PYTHONPATH", "")) if part)
        self.environment = {"HANG_CONTROL": str(self._control), "PYTHONPATH": path}

    def hang(self) -> None:
        self._control.touch()

    def is_awaited(self) -> bool:
        return self._waiting.exists()

    def end(self) -> None:
        self._control.unlink(missing_ok=True)


def live(broker: ServedBroker) -> int:
    return httpx.get(f"{broker.http_url}/health/live", timeout=scaled(5)).status_code


@pytest.mark.parametrize(
    ("mode", "hang_s"),
    [
        ("auto", 1),
        pytest.param("always", 5, marks=pytest.mark.full),
        pytest.param("auto", 5, marks=pytest.mark.full),
        pytest.param("auto", 30, marks=pytest.mark.full),
    ],
)
def test_flush_that_hangs_costs_no_group_its_session(mode: str, hang_s: float, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    disk = HangingDisk(tmp_path / "site")
    changes: list[str] = []
    acknowledged: list[KafkaError | None] = []
    session_ms = int(scaled(1000 * hang_s * SESSION_PER_HANG))
    settings = [
        f"log_flush_thread={mode}",
        f"group_min_session_timeout_ms={session_ms}",
        "group_initial_rebalance_delay_ms=0",
    ]
    arguments = [part for setting in settings for part in ("--set", setting)]
    with served(tmp_path / "data", arguments=arguments, environment=disk.environment) as broker:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic("t", partitions=1)
        consumer = Consumer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "group.id": "g",
                "session.timeout.ms": session_ms,
                "heartbeat.interval.ms": session_ms // 8,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all", "linger.ms": 0})
        try:
            consumer.subscribe(["t"], on_revoke=lambda *_: changes.append("revoked"))
            for value in (
                b"first",
                b"second",
            ):  # the first begins the leader epoch, which is written on the thread
                producer.produce("t", value)
                assert producer.flush(scaled(20)) == 0
                got = wait_until(lambda: consumer.poll(0.1), 30, "the consumer receives the record")
                assert got.value() == value
            disk.hang()
            producer.produce("t", b"third", on_delivery=lambda error, _: acknowledged.append(error))

            def hangs() -> bool:
                producer.poll(0)
                return disk.is_awaited()

            wait_until(hangs, 20, "the flush hangs")
            wait_until(lambda: live(broker) == 200, 20, "liveness checks are answered")
            end = time.monotonic() + hang_s
            while time.monotonic() < end:
                assert live(broker) == 200
                producer.poll(0)
                assert not acknowledged, "nothing is acknowledged before it is flushed"
                assert consumer.poll(0.1) is None, "nothing is delivered before it is flushed"
            disk.end()
            got = wait_until(lambda: consumer.poll(0.1), 30, "the consumer receives the record")
            assert (got.value(), got.offset()) == (b"third", 2)
            assert producer.flush(scaled(20)) == 0
            assert acknowledged == [None]
            assert not changes, "no partition was revoked"
            assert live(broker) == 200
        finally:
            disk.end()
            consumer.close()
