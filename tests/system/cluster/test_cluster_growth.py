"""A broker joins a cluster that is used, gets its part of the partitions, and is drained again, with the commands of an
operator."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from mansio.config.broker_config import FOLLOWER_THROTTLE
from support.cluster import cluster, on_same_processors
from system.cluster.load import ClusterLoad, say
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full

THROTTLE = "20000000"
JOINING = 4


@pytest.mark.row("C3")
@pytest.mark.timeout(300)
def test_a_broker_is_added_and_drained_under_load_and_no_produce_fails(tmp_path: Path) -> None:
    """The judge takes a record that was given up for a failure, as it takes one that was lost or doubled."""
    with cluster(tmp_path, brokers=JOINING) as one:
        one.brokers[JOINING].stop()
        one.wait(lambda: one.sessions() == {1, 2, 3}, "three brokers are left")
        load = ClusterLoad(one, "grown", commits=False)
        load.create_topic(segment_bytes="1000000")
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
            places = one.places(load.topic)
            numbers = [sum(node_id in place.replicas for place in places) for node_id in one.brokers]
            assert max(numbers) - min(numbers) <= 1, numbers
            assert {place.leader for place in places} >= {place.replicas[0] for place in places}
            assert shell.json("cluster", "rebalance", "--dry-run")["planned"] == []
            load.wait_resumed(time.monotonic())

            begin = time.monotonic()
            drained = shell.json("cluster", "drain", str(JOINING), "--yes", "--throttle", THROTTLE)
            drained_s = time.monotonic() - begin
            assert drained["seconds"] >= 0
            rows = {row["broker"]: row for row in shell.json("cluster", "brokers")}
            assert (rows[JOINING]["replicas"], rows[JOINING]["leads"]) == (0, 0)
            for node_id in one.brokers:
                settings = shell.json("cluster", "settings", "--broker", str(node_id))
                assert FOLLOWER_THROTTLE not in {row["name"] for row in settings}
            assert one.brokers[JOINING].stop() == 0
            one.wait_in_sync(load.topic)
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


def grow(shell: Shell) -> dict[str, list[dict[str, str | None]]]:
    done: dict[str, list[dict[str, str | None]]] = shell.json(
        "cluster", "rebalance", "--yes", "--throttle", THROTTLE
    )
    return done
