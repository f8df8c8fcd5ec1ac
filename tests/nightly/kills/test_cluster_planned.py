"""Rolling restarts, many in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.cluster import cluster
from support.machine import scaled
from system.cluster.load import NIGHTLY_PAUSE_S, ClusterLoad, say
from system.cluster.test_cluster_planned import PAUSE_S_MAX, restart

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(3600)
def test_ten_rolling_restarts_with_a_group_that_commits_lose_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, group_initial_rebalance_delay_ms=0) as one:
        load = ClusterLoad(one, "rolled", pause_s=NIGHTLY_PAUSE_S)
        load.create_topic(segment_bytes="1000000")
        load.begin(idempotent=2)
        try:
            pauses: list[float] = []
            for _ in range(10):
                for node_id in one.brokers:
                    of_one, _ = restart(one, load, node_id)
                    pauses += of_one
            verdict = load.judge()
        finally:
            load.stop()
        say("ten rolling restarts", pauses_s=pauses, acknowledged=verdict.acknowledged)
        assert max(pauses) <= scaled(PAUSE_S_MAX)
        one.check_logs()
