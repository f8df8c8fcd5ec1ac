"""Two thousand partitions with three replicas: when a broker dies, all its partitions have new leaders that accept
writes within five seconds after the end of its session."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from support.cluster import cluster, on_same_processors
from support.machine import scaled
from system.cluster.load import create_topic, say
from system.crash.kill_load import IMPATIENT

if TYPE_CHECKING:
    from pathlib import Path

PARTITIONS = 2000
MOVED_S_MAX = 5.0
TOPICS = 4


@pytest.mark.row("C1")
@pytest.mark.timeout(900)
def test_2000_partitions_of_a_dead_broker_have_other_leaders_5_s_after_its_session_ends(
    tmp_path: Path,
) -> None:
    topics = [f"many-{number}" for number in range(TOPICS)]
    with cluster(tmp_path) as one:
        begin = time.monotonic()
        for topic in topics:
            create_topic(one, topic, PARTITIONS // TOPICS)
        made_s = time.monotonic() - begin
        leaders = Counter(place.leader for topic in topics for place in one.places(topic))
        victim = max(leaders, key=lambda node_id: leaders[node_id])
        killed = one.kill(victim)
        one.wait(lambda: victim not in one.sessions(), "its session ends", 3 * one.session_s)
        ended = time.monotonic()
        one.wait_led_by_others(topics, victim, 60)
        moved = time.monotonic()
        refused: list[str] = []
        done = 0

        def answered(error: object, _: object) -> None:
            nonlocal done
            done += 1
            if error is not None:
                refused.append(str(error))

        producer = Producer(
            {
                "bootstrap.servers": one.bootstrap_servers,
                "acks": "all",
                "message.timeout.ms": 60_000,
                **IMPATIENT,
            }
        )
        for topic in topics:
            for index in range(PARTITIONS // TOPICS):
                producer.produce(topic, b"x", partition=index, on_delivery=answered)
                producer.poll(0)
        assert producer.flush(scaled(60)) == 0
        written = time.monotonic()
        say(
            "2,000 partitions",
            created_s=made_s,
            led_by_the_dead=leaders[victim],
            session_ended_s=ended - killed,
            moved_after_session_s=moved - ended,
            all_written_after_session_s=written - ended,
            processors=on_same_processors(),
        )
        assert (done, refused) == (PARTITIONS, [])
        one.start(victim)
        one.wait_in_sync(*topics, deadline_s=120)
        one.check_logs()
        assert moved - ended <= scaled(MOVED_S_MAX)
