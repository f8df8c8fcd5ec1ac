"""`mansio why` in a cluster: facts of several brokers, brokers that are down or hang, and a coordinator that is away.
All tests share one cluster; each restores every broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import mansio.blocking
from mansio.broker.routing.routes import partition_for
from mansio.config.topic_names import OFFSETS_TOPIC
from support.cluster import cluster
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.cluster import Cluster

pytestmark = pytest.mark.full

SESSION_MS = 6_000
RECORDS = 5


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(
        tmp_path_factory.mktemp("why"),
        http=True,
        broker_session_timeout_ms=SESSION_MS,
        group_initial_rebalance_delay_ms=0,
        offsets_topic_num_partitions=6,
    ) as one:
        with mansio.blocking.connect(one.bootstrap_servers) as client:
            client.admin.describe_group("any")  # creates the topic in which groups are stored
        one.wait_in_sync(OFFSETS_TOPIC)
        yield one


@pytest.fixture
def one(joined: Cluster) -> Cluster:
    away = [node_id for node_id in joined.brokers if node_id not in joined.running]
    if away:
        joined.start(*away)
    joined.wait(lambda: len(joined.sessions()) == 3, "every broker has a session")
    return joined


def explained(one: Cluster, group: str) -> Any:
    return Shell(one.bootstrap_servers).json("why", group)


def topic_on(client: mansio.blocking.Client, name: str, replicas: list[list[int]], **config: str) -> None:
    """A topic whose partitions have these replicas, with some records in each."""
    settings = {key.replace("_", "."): value for key, value in config.items()}
    client.admin.create_topic(name, partitions=len(replicas), replication_factor=1, config=settings)
    moves: dict[tuple[str, int], list[int]] = {(name, index): nodes for index, nodes in enumerate(replicas)}
    client.admin.cluster.alter_reassignments(moves)
    wait_until(lambda: not client.admin.cluster.list_reassignments(), what="the replicas in their places")
    for index in range(len(replicas)):
        for number in range(RECORDS):
            client.publish(name, b"%d" % number, partition=index)


def coordinator(one: Cluster, group: str) -> int:
    """The node id of the coordinator of a group."""
    return one.leader(OFFSETS_TOPIC, partition_for(group, 6))


@pytest.mark.row("T8")
def test_the_coordinator_collects_what_each_leader_knows(one: Cluster) -> None:
    """A record that fails again and again on each broker, and no broker knows of more than its own."""
    with mansio.blocking.connect(one.bootstrap_servers) as client:
        topic_on(client, "spread", [[1], [2], [3]])
        settings = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "0"}
        client.admin.alter_group_config("spread", settings)
        with client.receive("spread", group="spread", prefetch=0, lease_ms=600_000) as receiver:
            attempts: dict[int, int] = {}

            def fail() -> bool:
                for message in receiver.poll(timeout_ms=200, max_records=100):
                    if message.offset == 0:
                        attempts[message.partition] = message.delivery_count
                        if message.delivery_count < 3:
                            message.retry(after=0)
                    else:
                        message.ack()
                return sorted(attempts.values()) == [3, 3, 3]

            wait_until(fail, what="three attempts of a record on each broker")
            wait_until(
                lambda: bool(receiver.poll(timeout_ms=50)) or explained(one, "spread")["lag"] == 3,
                what="acknowledgements of the others",
            )
            found = explained(one, "spread")
    named = {
        (each["partition"], each["offset"]) for each in found["findings"] if each["cause"] == "poison-record"
    }
    assert named == {(0, 0), (1, 0), (2, 0)}
    assert found["silent_brokers"] == []


def test_a_partition_without_leader_is_named_with_the_broker_that_is_down(one: Cluster) -> None:
    victim = next(node_id for node_id in one.brokers if node_id != coordinator(one, "headless"))
    with mansio.blocking.connect(one.bootstrap_servers) as client:
        topic_on(client, "headless", [[victim]])
        client.admin.reset_offsets("headless", ["headless"], to=0)
        one.kill(victim)
        one.wait(lambda: victim not in one.sessions(), "the session of the killed broker ends")
        wait_until(
            lambda: explained(one, "headless")["findings"][0]["cause"] == "no-leader", what="the reason"
        )
        first = explained(one, "headless")["findings"][0]
    assert (first["impact"], first["is_certain"]) == ("blocks", True)
    assert f"broker {victim}, which has the records, is down" in first["text"]
    assert first["command"] == "mansio cluster partitions --topic headless --only offline"


def test_a_leader_that_hangs_is_named_within_a_few_seconds(one: Cluster) -> None:
    victim = next(node_id for node_id in one.brokers if node_id != coordinator(one, "hanging"))
    with mansio.blocking.connect(one.bootstrap_servers) as client:
        topic_on(client, "hanging", [[victim]])
        client.admin.reset_offsets("hanging", ["hanging"], to=0)
        coordinating = one.brokers[coordinator(one, "hanging")].bootstrap_servers
        one.pause(victim)
        try:
            shell = Shell(coordinating)
            wait_until(lambda: victim in shell.json("why", "hanging")["silent_brokers"], what="no answer")
            found = shell.json("why", "hanging")
        finally:
            one.resume(victim)
    causes = [each["cause"] for each in found["findings"]]
    assert causes[0] in ("no-answer", "no-leader"), found  # its session may have ended meanwhile
    assert f"broker {victim}" in found["findings"][0]["text"]


def test_a_group_without_coordinator_is_named(one: Cluster) -> None:
    """All replicas of the partition in which the group is stored are on a broker that is down."""
    group = "lost"
    index = partition_for(group, 6)
    with mansio.blocking.connect(one.bootstrap_servers) as client:
        place = mansio.TopicPartition(OFFSETS_TOPIC, index)
        before = one.place(OFFSETS_TOPIC, index).replicas
        victim = before[-1]
        client.admin.cluster.alter_reassignments({place: [victim]})
        wait_until(lambda: not client.admin.cluster.list_reassignments(), what="one replica")
        one.kill(victim)
        one.wait(lambda: victim not in one.sessions(), "the session of the killed broker ends")
        found = explained(one, group)
        one.start(victim)
        one.wait(lambda: len(one.sessions()) == 3, "every broker has a session")
        client.admin.cluster.alter_reassignments({place: list(before)})
        wait_until(lambda: not client.admin.cluster.list_reassignments(), what="all replicas")
    first = found["findings"][0]
    assert (found["status"], first["cause"]) == ("blocked", "no-leader")
    assert first["command"] == f"mansio cluster partitions --topic {OFFSETS_TOPIC} --only offline"
