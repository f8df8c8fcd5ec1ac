"""Consumer groups whose coordinator's broker dies: members go on, no committed offset goes back, nothing is skipped."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from mansio import blocking
from mansio.errors import Unavailable
from mansio.wire.api_versions import ApiKey
from support.cluster import cluster
from support.machine import scaled
from support.raw_peer import RawPeer
from support.waiting import wait_until
from system.cluster.load import create_topic, say
from system.crash.kill_load import IMPATIENT, QUIET
from system.interop.members import AiokafkaMember, ConfluentMember

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.cluster import Cluster
    from system.interop.members import Member

PARTITIONS = 4
GOES_ON_S_MAX = 20.0
SESSION_MS = 3000
COMMIT_S = 0.1


class Steady:
    """Numbered values, some hundred a second, until stopped. `sent` has those that were acknowledged."""

    def __init__(self, one: Cluster, topic: str) -> None:
        self.sent: list[bytes] = []
        self.failures: list[str] = []
        self._topic = topic
        self._stopping = threading.Event()
        self._producer = Producer(
            {"bootstrap.servers": one.bootstrap_servers, "enable.idempotence": True, **IMPATIENT}
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for number in itertools.count():
            if self._stopping.is_set():
                break
            self._producer.produce(
                self._topic, b"%d" % number, partition=number % PARTITIONS, on_delivery=self._answered
            )
            self._producer.poll(0.005)
        self._producer.flush(scaled(30))

    def _answered(self, error: object, message: object) -> None:
        if error is not None:
            self.failures.append(str(error))
        else:
            self.sent.append(message.value())  # type: ignore[attr-defined]

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(scaled(40))
        assert not self._thread.is_alive()
        assert self.failures == []


def coordinator_of(one: Cluster, group: str) -> int:
    """The broker that coordinates the group, as any broker answers; 0 while none is known."""
    for node_id in one.running:
        with RawPeer(one.brokers[node_id].kafka_port) as peer:
            fields = {"key": group, "key_type": 0, "coordinator_keys": [group]}
            found = peer.call(ApiKey.FIND_COORDINATOR, 4, fields).coordinators[0]
            if found.error_code == 0:
                return int(found.node_id)
    return 0


def committed(one: Cluster, group: str, topic: str) -> list[int]:
    consumer = Consumer({"bootstrap.servers": one.bootstrap_servers, "group.id": group, **QUIET})
    places = [TopicPartition(topic, index) for index in range(PARTITIONS)]
    try:
        return [place.offset for place in consumer.committed(places, timeout=scaled(30))]
    finally:
        consumer.close()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(
        tmp_path,
        broker_session_timeout_ms=SESSION_MS,
        group_initial_rebalance_delay_ms=0,
        offsets_topic_num_partitions=4,
    ) as one:
        yield one
        one.check_logs()


@pytest.mark.full
@pytest.mark.row("C5", "G4")
def test_group_goes_on_after_its_coordinators_broker_is_killed(one: Cluster) -> None:
    """Members of two clients share a group; what was committed stays committed, and all that was sent is received."""
    topic, group = "work", "workers"
    create_topic(one, topic, PARTITIONS)
    members: list[Member] = [
        ConfluentMember(one.bootstrap_servers, group, topic).join(),
        AiokafkaMember(one.bootstrap_servers, group, topic).join(),
    ]
    steady = Steady(one, topic)
    try:
        wait_until(lambda: all(len(member.received) > 50 for member in members), 30, "both have records")
        wait_until(lambda: min(committed(one, group, topic)) > 10, 30, "all partitions have commits")
        victim = coordinator_of(one, group)
        before = committed(one, group, topic)
        killed = one.kill(victim)
        counts = [len(member.received) for member in members]
        wait_until(lambda: coordinator_of(one, group) not in (0, victim), 30, "another coordinates")
        found_s = time.monotonic() - killed
        after = committed(one, group, topic)
        assert all(now >= then for now, then in zip(after, before, strict=True)), (before, after)
        wait_until(
            lambda: all(now > then for now, then in zip(committed(one, group, topic), after, strict=True)),
            30,
            "every partition is committed again",
        )
        goes_on_s = time.monotonic() - killed
        wait_until(
            lambda: sum(len(member.received) for member in members) > sum(counts) + 100, 30, "records go on"
        )
        one.start(victim)
        steady.stop()
        expected = set(steady.sent)
        wait_until(
            lambda: {value for member in members for value in member.values} >= expected,
            30,
            "all is received",
        )
    finally:
        for member in members:
            member.leave()
    received = [value for member in members for value in member.values]
    say(
        "coordinator killed",
        other_coordinator_s=found_s,
        commits_again_s=goes_on_s,
        sent=len(steady.sent),
        received_twice=len(received) - len(set(received)),
    )
    assert goes_on_s <= scaled(GOES_ON_S_MAX)


@pytest.mark.full
@pytest.mark.row("C5", "G4")
def test_our_own_client_commits_and_reads_on_over_the_death_of_the_coordinator(one: Cluster) -> None:
    topic, group = "own", "own-workers"
    create_topic(one, topic, PARTITIONS)
    steady = Steady(one, topic)
    received: list[bytes] = []
    try:
        with (
            blocking.connect(one.bootstrap_servers) as client,
            client.consume(topic, group=group) as consumer,
        ):

            def read_until(enough: int, deadline_s: float) -> float:
                begin = committed_at = time.monotonic()
                while len(received) < enough:
                    assert time.monotonic() < begin + deadline_s, one.tails()
                    received.extend(record.value or b"" for record in consumer.poll(200))
                    if len(received) < enough and time.monotonic() < committed_at + COMMIT_S:
                        continue  # a commit for each batch would be slower than the producer
                    with suppress(Unavailable):
                        consumer.commit()
                    committed_at = time.monotonic()
                return time.monotonic() - begin

            read_until(200, 30)
            victim = coordinator_of(one, group)
            before = committed(one, group, topic)
            one.kill(victim)
            took_s = read_until(len(received) + 1000, 40)
            consumer.commit()
            after = committed(one, group, topic)
            assert all(now >= then for now, then in zip(after, before, strict=True)), (before, after)
            steady.stop()
            read_until(len(set(steady.sent)), 40)
    finally:
        steady.stop()
    say("coordinator killed, own client", thousand_more_records_s=took_s, received=len(received))
    assert set(received) >= set(steady.sent)
