"""Dynamic settings of brokers in a cluster: set through one broker, effective on all, also on one that was down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio import blocking
from support.cluster import cluster
from support.raw_peer import RawPeer, batch_of
from support.waiting import wait_until
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from pathlib import Path

    from support.cluster import Cluster

NAME = "message.max.bytes"
MESSAGE_TOO_LARGE = 10


def seen(one: Cluster) -> dict[int, tuple[str, str | None]]:
    """(source, value) of the setting on each broker that runs."""
    found = {}
    for node_id in one.running:
        with blocking.connect(f"127.0.0.1:{one.brokers[node_id].kafka_port}") as client:
            entry = client.admin.describe_config(node_id, kind="broker")[NAME]
        found[node_id] = (entry.source, entry.value)
    return found


def test_settings_reach_every_broker_and_one_that_comes_back(tmp_path: Path) -> None:
    with cluster(tmp_path, broker_session_timeout_ms=3000, replica_lag_time_max_ms=2000) as one:
        create_topic(one, "t")
        first, second, third = sorted(one.brokers)
        with blocking.connect(f"127.0.0.1:{one.brokers[first].kafka_port}") as client:
            client.admin.alter_broker_config(None, {NAME: "5000"})
        wait_until(lambda: set(seen(one).values()) == {("broker default", "5000")}, 20)
        one.kill(third)
        with blocking.connect(f"127.0.0.1:{one.brokers[first].kafka_port}") as client:
            client.admin.alter_broker_config(second, {NAME: "6000"})
            client.admin.alter_broker_config(None, {NAME: "4000"})
        one.start(third)
        expected = {
            first: ("broker default", "4000"),
            second: ("broker", "6000"),
            third: ("broker default", "4000"),
        }
        wait_until(lambda: seen(one) == expected, 20)
        leader = one.leader("t")
        accepted = leader == second
        with RawPeer(one.brokers[leader].kafka_port) as raw:
            result = raw.produce("t", batch_of(b"v" * 4500))
            assert result.error_code == (0 if accepted else MESSAGE_TOO_LARGE), (
                "of the leader, as everything else"
            )
