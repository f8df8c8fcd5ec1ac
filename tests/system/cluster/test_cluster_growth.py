"""A broker joins a cluster that is used, gets its part of the partitions, and is drained again, with the commands of an
operator."""

from __future__ import annotations

import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from mansio import OutgoingRecord, blocking
from mansio.cli.support.common import INTERRUPTED_EXIT_CODE
from mansio.config.broker_config import FOLLOWER_THROTTLE
from support.cluster import cluster, on_same_processors
from support.machine import scaled
from system.cluster.load import ClusterLoad, create_topic, say
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from pathlib import Path

    from support.cluster import Cluster

pytestmark = pytest.mark.full

THROTTLE = "20000000"
JOINING = 4
FILLED_PARTITIONS = 4


@pytest.mark.row("C3")
@pytest.mark.timeout(300)
def test_a_broker_is_added_and_drained_under_load_and_no_produce_fails(tmp_path: Path) -> None:
    """The judge takes a record that was given up for a failure, as it takes one that was lost or doubled."""
    with cluster(tmp_path, brokers=JOINING) as one:
        one.brokers[JOINING].stop()
        one.wait(lambda: one.sessions() == {1, 2, 3}, "three brokers are left")
        load = ClusterLoad(one, "grown", commits=False)
        load.create_topic(segment_bytes="1000000")
        fill(one)
        load.begin()
        shell = Shell(one.bootstrap_servers)
        try:
            assert JOINING not in {node_id for place in one.places(load.topic) for node_id in place.replicas}
            one.start(JOINING)
            one.wait(lambda: one.sessions() == {1, 2, 3, JOINING}, "the broker is there")

            begin = time.monotonic()
            planned = shell.json("cluster", "rebalance", "--dry-run")["planned"]
            assert planned
            assert not any(move["error"] for move in grow(shell)["executed"])
            grown_s = time.monotonic() - begin
            rows = {row["broker"]: row for row in shell.json("cluster", "brokers")}
            numbers = [row["replicas"] for row in rows.values()]
            assert max(numbers) <= 1.1 * min(numbers), numbers
            assert rows[JOINING]["leads"] > 0
            load.wait_resumed(time.monotonic())

            interrupt_a_drain(one, shell)
            begin = time.monotonic()
            drained = shell.json("cluster", "drain", str(JOINING), "--yes", "--throttle", THROTTLE)
            drained_s = time.monotonic() - begin
            assert drained["seconds"] >= 0
            rows = {row["broker"]: row for row in shell.json("cluster", "brokers")}
            assert (rows[JOINING]["replicas"], rows[JOINING]["leads"]) == (0, 0)
            assert throttles(one, shell) == {}
            assert one.brokers[JOINING].stop() == 0
            one.wait_in_sync(load.topic, "filled")
            load.wait_resumed(time.monotonic())
            verdict = load.judge()
        finally:
            load.stop()
        say(
            "growth",
            moves=len(planned),
            grown_s=grown_s,
            drained_s=drained_s,
            acknowledged=verdict.acknowledged,
            processors=on_same_processors(),
        )
        one.check_logs()


def fill(one: Cluster) -> None:
    """Make a topic whose replicas take more than one fetch request each."""
    create_topic(one, "filled", FILLED_PARTITIONS)
    value = random.Random(1).randbytes(500_000)
    with blocking.connect(one.bootstrap_servers) as client:
        for partition in range(FILLED_PARTITIONS):
            client.publish_many("filled", [OutgoingRecord(value, partition=partition)] * 10)


def interrupt_a_drain(one: Cluster, shell: Shell) -> None:
    """Begin a drain that would not end, and interrupt it: its moves go on with its throttle, until a cancellation."""
    with shell.start("cluster", "drain", str(JOINING), "--yes", "--throttle", "1000") as process:
        one.wait(lambda: shell.json("cluster", "moves"), "moves run")
        assert set(throttles(one, shell).values()) == {"1000"}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=scaled(30))
    assert process.returncode == INTERRUPTED_EXIT_CODE, errors
    assert b"go on at the throttle of 1.0 kB/s. Run the command again to continue" in errors
    assert set(throttles(one, shell).values()) == {"1000"}
    assert {row["throttle"] for row in shell.json("cluster", "moves")} == {1000}
    shell("cluster", "cancel-moves", "--yes")
    assert throttles(one, shell) == {}


def throttles(one: Cluster, shell: Shell) -> dict[int, str]:
    """The throttles of the brokers that have one."""
    found = {}
    for node_id in one.brokers:
        rows = shell.json("cluster", "settings", "--broker", str(node_id))
        values = {row["name"]: row["value"] for row in rows}
        if FOLLOWER_THROTTLE in values:
            found[node_id] = values[FOLLOWER_THROTTLE]
    return found


def grow(shell: Shell) -> dict[str, list[dict[str, str | None]]]:
    done: dict[str, list[dict[str, str | None]]] = shell.json(
        "cluster", "rebalance", "--yes", "--throttle", THROTTLE
    )
    return done
