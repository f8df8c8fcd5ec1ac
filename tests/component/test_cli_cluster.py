"""`mansio cluster` and the admin client with a real broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.cli.admin import cluster as commands
from mansio.client import TopicPartition
from mansio.client.admin import cluster as admin_cluster_module
from mansio.client.admin.cluster import BrokerHealth, BrokerStatus, ClusterStatus, PartitionStatus
from mansio.errors import InvalidReplicaAssignment, NoReassignmentInProgress, UnknownTopicOrPartition
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNTS = {"flights": 3, "gates": 2}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    directory = tmp_path_factory.mktemp("cluster") / "data"
    with mansio.Broker(directory, listeners="127.0.0.1:0", node_id=7, broker_rack="east") as started:
        with mansio.blocking.connect(started.address) as client:
            for name, count in COUNTS.items():
                client.admin.create_topic(name, partitions=count)
        yield started


@pytest.fixture
def shell(broker: mansio.Broker) -> Shell:
    return Shell(broker.address)


@pytest.mark.row("A6")
def test_a_single_broker_is_described_as_one(shell: Shell, broker: mansio.Broker) -> None:
    status = shell.json("cluster", "status")
    assert status.pop("cluster_id")
    assert status == {
        "controller": 7,
        "brokers": 1,
        "fenced": 0,
        "no_session": 0,
        "topics": 2,
        "partitions": 5,
        "offline": 0,
        "under_min_isr": 0,
        "under_replicated": 0,
        "faults": [],
    }
    assert "controller 7" in shell("cluster", "status")
    assert shell.json("cluster", "brokers") == [
        {
            "broker": 7,
            "address": broker.address,
            "rack": "east",
            "controller": True,
            "state": "ok",
            "leads": 5,
            "replicas": 5,
            "not_in_sync": 0,
        }
    ]
    rows = shell.json("cluster", "partitions", "--topic", "flights")
    assert [row["partition"] for row in rows] == [0, 1, 2]
    assert {key: rows[0][key] for key in ("leader", "replicas", "in_sync", "min_in_sync", "state")} == {
        "leader": 7,
        "replicas": [7],
        "in_sync": [7],
        "min_in_sync": 1,
        "state": "ok",
    }
    assert shell.json("cluster", "partitions", "--only", "troubled") == []
    assert "UNDER MIN ISR" in shell("cluster", "status")


@pytest.mark.row("A6")
def test_an_election_is_not_needed_where_there_is_one_replica(shell: Shell) -> None:
    assert shell.json("cluster", "elect") == []
    rows = shell.json("cluster", "elect", "--topic", "gates")
    assert [(row["topic"], row["partition"], row["outcome"]) for row in rows] == [
        ("gates", 0, "not needed"),
        ("gates", 1, "not needed"),
    ]
    assert len(shell.json("cluster", "elect", "--topic", "gates", "--partition", "1")) == 1
    shell("cluster", "elect", "--topic", "gates", "--partition", "9", code=2)
    assert "gates has no partition 9" in shell.errors
    shell("cluster", "elect", "--topic", "missing", code=1)
    assert "missing" in shell.errors


@pytest.mark.row("A6")
def test_an_unclean_election_states_what_may_be_lost_and_wants_a_yes(shell: Shell) -> None:
    shell("cluster", "elect", "--unclean", code=2)
    assert "--topic" in shell.errors
    shell("cluster", "elect", "--unclean", "--topic", "gates", code=2)
    assert "every record it does not have is lost permanently, including acknowledged ones" in shell.errors
    assert "--yes" in shell.errors
    rows = shell.json("cluster", "elect", "--unclean", "--topic", "gates", "--yes")
    assert "lost permanently" in shell.errors
    assert {row["outcome"] for row in rows} == {"not needed"}


def test_pages_are_put_together(broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_cluster_module, "PARTITIONS_PER_PAGE", 2)
    with mansio.blocking.connect(broker.address) as client:
        found = client.admin.cluster.partitions()
        assert [(one.topic, one.partition) for one in found] == [
            (name, index) for name, count in sorted(COUNTS.items()) for index in range(count)
        ]
        assert {one.min_in_sync_replicas for one in found} == {1}
        assert client.admin.cluster.partitions([]) == []
        with pytest.raises(UnknownTopicOrPartition, match="missing"):
            client.admin.cluster.partitions(["gates", "missing"])


def test_an_election_that_fails_is_reported_for_its_partition(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        wanted = [TopicPartition("gates", 0), TopicPartition("gates", 9)]
        first, second = client.admin.cluster.elect_leaders("preferred", wanted)
    assert (first.outcome, first.error) == ("not needed", None)
    assert second.outcome == "failed"
    assert isinstance(second.error, UnknownTopicOrPartition)


@pytest.mark.row("C3")
def test_a_single_broker_has_nothing_to_move(shell: Shell) -> None:
    assert shell("cluster", "rebalance") == ""
    assert "nothing to move" in shell.errors
    assert shell.json("cluster", "rebalance", "--dry-run") == {
        "planned": [],
        "copied_bytes": 0,
        "seconds": None,
        "executed": [],
    }
    assert shell.json("cluster", "moves") == []
    assert shell.json("cluster", "cancel-moves") == []
    shell("cluster", "moves")
    assert "no moves are running" in shell.errors
    shell("cluster", "drain", "7", code=1)
    assert "replica(s), and without broker 7 there is no usable broker" in shell.errors
    shell("cluster", "drain", "8", code=1)
    assert "there is no broker 8" in shell.errors
    shell("cluster", "replace", "7", "8", code=1)
    assert "broker 8 is not there" in shell.errors
    shell("cluster", "rebalance", "--throttle", "0", code=2)


def test_sizes_and_moves_of_partitions_are_read_and_refusals_returned(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        cluster = client.admin.cluster
        (directory,) = cluster.log_dirs()
        assert (directory.node_id, directory.error) == (7, None)
        assert {(one.topic, one.partition) for one in cluster.partitions()} == set(directory.replica_bytes)
        assert 0 < (directory.usable_bytes or 0) <= (directory.total_bytes or 0)
        assert cluster.list_reassignments() == []
        stays, away, cancelled, missing = cluster.alter_reassignments(
            {("flights", 0): [7], ("flights", 1): [8], ("flights", 2): None, ("gates", 9): [7]},
            allow_replication_factor_change=False,
        )
        assert (stays.topic, stays.partition, stays.error) == ("flights", 0, None)
        assert isinstance(away.error, InvalidReplicaAssignment)
        assert isinstance(cancelled.error, NoReassignmentInProgress)
        assert isinstance(missing.error, UnknownTopicOrPartition)


# -- what several brokers would show --------


def partition(index: int, leader: int, in_sync: tuple[int, ...], **more: Any) -> PartitionStatus:
    replicas = (1, 2, 3)
    offline = tuple(node_id for node_id in replicas if node_id not in in_sync)
    return PartitionStatus("t", index, leader, 4, replicas, in_sync, offline, more.get("least", 2), False)


TROUBLED = [
    partition(0, 1, (1, 2, 3)),
    partition(1, 2, (1, 2)),
    partition(2, 1, (1,)),
    partition(3, -1, (3,)),
    partition(4, 1, (1,), least=None),
]


def test_the_worst_problem_of_a_partition_is_its_state_and_each_kind_can_be_asked_for() -> None:
    states = [commands._partition_row(one)["state"] for one in TROUBLED]
    assert states == ["ok", "under-replicated", "under-min-in-sync", "offline", "under-replicated"]
    shown = {
        only: [one.partition for one in TROUBLED if commands._matches_filter(one, only)]
        for only in commands.PartitionFilter
    }
    assert shown == {
        "troubled": [1, 2, 3, 4],
        "offline": [3],
        "under-replicated": [1, 2, 3, 4],
        "under-min-in-sync": [2, 3],
    }


def test_a_broker_that_is_gone_is_listed_with_what_it_keeps_and_counted_nowhere_else() -> None:
    here = [BrokerStatus(node_id, "h", 9092, None, node_id == 2, node_id == 1) for node_id in (1, 2)]
    status = ClusterStatus("id", 5, tuple(here))
    health = [BrokerHealth(1), BrokerHealth(2, is_session_held=False)]
    summary = commands.status_row(status, TROUBLED, health)
    assert summary["no_session"] == 1
    assert summary["controller"] is None  # 5 is not there
    assert [summary[name] for name in ("brokers", "fenced", "offline", "under_min_isr")] == [2, 1, 1, 2]
    rows = [
        commands._broker_row(node_id, dict(enumerate(here, 1)).get(node_id), None, TROUBLED)
        for node_id in (1, 2, 3)
    ]
    assert [row["state"] for row in rows] == ["fenced", "ok", "gone"]
    assert [row["not_in_sync"] for row in rows] == [1, 3, 3]
    assert rows[2]["address"] is None


def test_settings_of_running_brokers_are_changed_and_shown(shell: Shell) -> None:
    def shown(*arguments: str) -> dict[str, tuple[str, str, bool]]:
        rows = shell.json("cluster", "settings", *arguments)
        return {row["name"]: (row["value"], row["source"], row["changeable"]) for row in rows}

    assert shown() == {}
    assert shown("--broker", "7")["listeners"][2] is False
    shell("cluster", "settings", "-c", "log.retention.ms=5000")
    shell("cluster", "settings", "--broker", "7", "-c", "num.partitions=3")
    assert shown() == {"log.retention.ms": ("5000", "broker default", True)}
    own = shown("--broker", "7")
    assert own["log.retention.ms"] == ("5000", "broker default", True)
    assert own["num.partitions"] == ("3", "broker", True)
    shell("cluster", "settings", "-u", "log.retention.ms")
    shell("cluster", "settings", "--broker", "7", "-u", "num.partitions")
    assert shown() == {}
    assert shown("--broker", "7")["num.partitions"] == ("1", "default", True)


def test_a_single_broker_has_nothing_to_finalize(shell: Shell, broker: mansio.Broker) -> None:
    row = {"broker": 7, "address": broker.address, "state": "active", "version": "0.2", "levels": [1, 2]}
    assert shell.json("cluster", "finalize") == {"level": 2, "level_after": 2, "brokers": [row]}
    assert shell("cluster", "finalize").startswith("feature level 2 (0.2)\n")
