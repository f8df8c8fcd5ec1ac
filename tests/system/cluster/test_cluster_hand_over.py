"""The leader of a partition is killed: its session ends before its lease, and a stock producer goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from support.cluster import cluster
from support.waiting import wait_until
from system.cluster.load import create_topic
from system.crash.kill_load import QUIET

if TYPE_CHECKING:
    from pathlib import Path

    from confluent_kafka import KafkaError, Message

pytestmark = pytest.mark.full

TOPIC = "handed-over"


@pytest.mark.row("C1")
@pytest.mark.timeout(360)
def test_session_of_a_killed_leader_ends_early_and_the_producer_is_acknowledged_by_the_next_one(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as one:
        formed = time.monotonic()
        create_topic(one, TOPIC)
        producer = Producer({"bootstrap.servers": one.bootstrap_servers, "linger.ms": 0, **QUIET})

        def acknowledge() -> None:
            done: list[KafkaError | None] = []

            def report(error: KafkaError | None, _: Message) -> None:
                done.append(error)

            def is_done() -> bool:
                producer.poll(0.05)
                return bool(done)

            producer.produce(TOPIC, b"value", partition=0, on_delivery=report)
            one.wait(is_done, "the record is acknowledged")
            assert done == [None]

        acknowledge()
        wait_until(
            lambda: time.monotonic() - formed > 1.5 * one.session_s,
            10 * one.session_s,
            "the sessions are older than a lease",
        )
        victim = one.leader(TOPIC)
        epoch = one.epoch(victim)
        one.kill(victim)
        acknowledge()
        assert one.leader(TOPIC) != victim
        # The line says that a transaction deleted the key of this epoch, which the end of the lease would have deleted.
        ended = f"session_ended_early broker={victim} epoch={epoch} "
        one.wait(
            lambda: any(ended in one.brokers[node_id].text() for node_id in one.running), "a broker says so"
        )
        one.start(victim)
        one.wait_in_sync(TOPIC)
        assert one.epoch(victim) > epoch
        one.check_logs()
