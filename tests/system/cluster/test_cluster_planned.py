"""Rolling restart of a cluster under load: no produce request fails, and the longest pause of a partition is bounded
and printed.

All pauses are printed: the longest time without an acknowledgement, per partition that had to move.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from support.cluster import cluster, on_same_processors
from support.machine import scaled
from system.cluster.load import ClusterLoad, say

if TYPE_CHECKING:
    from pathlib import Path

    from support.cluster import Cluster

pytestmark = pytest.mark.full

PAUSE_S_MAX = 4.0
"""A second is what an operator is promised; here clients, brokers and etcd share the processors with other tests. Where
leadership is not handed over, it takes the session to end, six seconds."""


def restart(one: Cluster, load: ClusterLoad, node_id: int) -> tuple[list[float], float]:
    """SIGTERM, wait until it is gone, start again, wait until all is in sync. The pauses of the partitions it led, and
    how long it took to stop."""
    led = [place.index for place in one.places(load.topic) if place.leader == node_id]
    begin = time.monotonic()
    code = one.brokers[node_id].stop()
    stopped_s = time.monotonic() - begin
    assert code == 0, one.tails()
    load.wait_resumed(time.monotonic())
    pauses = [load.pause(partition, begin, time.monotonic()).length_s for partition in led]
    one.start(node_id)
    one.wait_in_sync(load.topic)
    load.wait_resumed(time.monotonic())
    return pauses, stopped_s


@pytest.mark.row("C6")
@pytest.mark.timeout(360)
def test_rolling_restart_under_load_fails_no_produce_and_no_client_waits_long(tmp_path: Path) -> None:
    """The judge takes a record that was given up for a failure, as it takes one that was lost or doubled."""
    with cluster(tmp_path) as one:
        load = ClusterLoad(one, "rolled", commits=False)
        load.create_topic(segment_bytes="1000000")
        load.begin()
        try:
            begin = time.monotonic()
            pauses, stops = [], []
            for node_id in one.brokers:
                of_one, stopped_s = restart(one, load, node_id)
                pauses += of_one
                stops.append(stopped_s)
            took_s = time.monotonic() - begin
            verdict = load.judge()
        finally:
            load.stop()
        say(
            "rolling restart",
            pauses_s=pauses,
            stops_s=stops,
            took_s=took_s,
            acknowledged=verdict.acknowledged,
            processors=on_same_processors(),
        )
        assert len(pauses) >= 4, "every partition had to move at least once"
        assert max(pauses) <= scaled(PAUSE_S_MAX)
        assert verdict.duplicates == 0 or load.history.sent["plain-0"], (
            "only plain producers repeat themselves"
        )
        one.check_logs()
