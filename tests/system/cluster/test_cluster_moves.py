"""Partitions of a real cluster move while it is used, with a stock admin client: nothing is lost, and brokers delete
what was moved away."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from kafka import KafkaAdminClient
from kafka import TopicPartition as KafkaPythonPartition

from mansio import blocking
from support.cluster import cluster, on_same_processors
from system.cluster.load import ClusterLoad, create_topic, say
from system.cluster.prober import read_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from support.cluster import Cluster

BROKERS = 4
MOVED_DEADLINE_S = 90.0


def begin_moves(one: Cluster, topic: str, targets: Mapping[int, Sequence[int]]) -> None:
    """Ask until every partition is being moved: a broker that has just started may have no session yet."""
    admin = KafkaAdminClient(bootstrap_servers=one.bootstrap_servers.split(","))
    left = {KafkaPythonPartition(topic, index): list(target) for index, target in targets.items()}

    def ask() -> bool:
        for place, error in admin.alter_partition_reassignments(dict(left)).items():
            if error is None or getattr(error, "errno", 0) == 0:
                del left[place]
        return not left

    try:
        one.wait(ask, f"the moves {dict(targets)} begin")
    finally:
        admin.close()


def wait_moved(one: Cluster, topic: str, targets: Mapping[int, Sequence[int]]) -> None:
    def moved() -> bool:
        return all(
            place.replicas == tuple(targets[place.index]) and {*place.in_sync} == {*place.replicas}
            for place in one.places(topic)
            if place.index in targets
        )

    one.wait(moved, f"{topic} is on {dict(targets)}", MOVED_DEADLINE_S)


def directories(one: Cluster, node_id: int, topic: str) -> set[int]:
    """The partitions of which a broker has data."""
    root = one.brokers[node_id].data / "topics"
    return {int(path.name) for path in root.glob(f"{topic}.*/*") if path.name.isdigit()}


def wait_removed(one: Cluster, topic: str) -> None:
    """Each broker has the data of its replicas, and no others."""
    for node_id in one.brokers:
        wanted = {place.index for place in one.places(topic) if node_id in place.replicas}
        one.wait(
            lambda node_id=node_id, wanted=wanted: directories(one, node_id, topic) == wanted,
            f"broker {node_id} has the partitions {wanted} of {topic}",
        )


def others(replicas: Sequence[int]) -> list[int]:
    """The next target: each replica is the next broker."""
    return [replica % BROKERS + 1 for replica in replicas]


@pytest.mark.row("C3")
def test_a_moved_partition_has_its_records_and_its_old_broker_has_no_data_of_it(tmp_path: Path) -> None:
    with cluster(tmp_path, brokers=2) as one:
        create_topic(one, "t", copies=1)
        before = one.leader("t")
        after = 3 - before
        with blocking.connect(one.bootstrap_servers) as client:
            client.publish("t", b"before")
            begin_moves(one, "t", {0: [after]})
            wait_moved(one, "t", {0: [after]})
            client.publish("t", b"after")
        assert read_values(one, "t") == [(0, b"before"), (1, b"after")]
        wait_removed(one, "t")
        assert one.leader("t") == after
        one.check_logs()


@pytest.mark.full
@pytest.mark.row("C3")
@pytest.mark.timeout(420)
def test_partitions_that_move_under_load_lose_nothing_when_source_target_and_controller_are_killed(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, brokers=BROKERS) as one:
        load = ClusterLoad(one, "moved", commits=False)
        load.create_topic(segment_bytes="1000000")
        load.begin()
        try:
            took_s = []
            for killed in ("nobody", "source", "target", "controller"):
                places = one.places(load.topic)
                targets = {place.index: others(place.replicas) for place in places}
                begin = time.monotonic()
                begin_moves(one, load.topic, targets)
                if killed != "nobody":
                    (added,) = {*targets[0]} - {*places[0].replicas}
                    victim = {
                        "source": places[0].leader,
                        "target": added,
                        "controller": one.controller(),
                    }[killed]
                    one.kill(victim)
                    one.start(victim)
                wait_moved(one, load.topic, targets)
                took_s.append(time.monotonic() - begin)
                load.wait_resumed(time.monotonic())
                wait_removed(one, load.topic)
            verdict = load.judge()
        finally:
            load.stop()
        say(
            "moves",
            took_s=took_s,
            acknowledged=verdict.acknowledged,
            processors=on_same_processors(),
        )
        one.check_logs()


@pytest.mark.full
@pytest.mark.row("C3")
@pytest.mark.timeout(240)
def test_the_number_of_replicas_changes_and_a_move_that_cannot_end_is_cancelled(tmp_path: Path) -> None:
    with cluster(tmp_path, brokers=BROKERS) as one:
        load = ClusterLoad(one, "resized", commits=False)
        load.create_topic(segment_bytes="1000000")
        load.begin()
        try:
            replicas = {place.index: place.replicas for place in one.places(load.topic)}
            for size in (4, 1, 3):
                targets = {
                    index: [*dict.fromkeys((*each, 1, 2, 3, 4))][:size] for index, each in replicas.items()
                }
                begin_moves(one, load.topic, targets)
                wait_moved(one, load.topic, targets)
                one.wait(
                    lambda size=size: one.entries("topics/")[load.topic]["replication_factor"] == size,
                    f"the replication factor is {size}",
                )
            before = {*one.places(load.topic)[0].replicas}
            (added,) = {1, 2, 3, 4} - before
            one.pause(added)  # so that it cannot get in sync
            place = KafkaPythonPartition(load.topic, 0)
            admin = KafkaAdminClient(bootstrap_servers=one.bootstrap_servers.split(","))
            admin.alter_partition_reassignments({place: [added, *sorted(before)[1:]]})
            admin.alter_partition_reassignments({place: None})
            admin.close()
            one.resume(added)
            assert {*one.places(load.topic)[0].replicas} == before
            one.wait_in_sync(load.topic)
            wait_removed(one, load.topic)
            load.judge()
        finally:
            load.stop()
        one.check_logs()
