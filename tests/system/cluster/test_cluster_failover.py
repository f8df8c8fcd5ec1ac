"""Leaders are killed, paused or stopped under load: no acknowledged record is lost, moved or duplicated, and writes are
acknowledged again within ten seconds after kill -9.

All fail-over times are printed. `tests/nightly/kills` has many more kills.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from support.cluster import cluster, on_same_processors
from support.machine import scaled
from support.tiers import examples
from system.cluster.load import RESUME_S_MAX, ClusterLoad, say

if TYPE_CHECKING:
    from pathlib import Path

    from support.cluster import Cluster

KILLS = examples(1, 2, 2)
QUICK_GROUPS: dict[str, Any] = {"group_initial_rebalance_delay_ms": 0}


def fail_over(one: Cluster, load: ClusterLoad, index: int) -> list[float]:
    """Kill who leads a partition; for each partition it led: seconds from the kill to the first acknowledgement by
    another. The broker is back and in sync at the end."""
    victim = one.leader(load.topic, index)
    led = [place.index for place in one.places(load.topic) if place.leader == victim]
    moment = one.kill(victim)
    load.wait_resumed(moment + one.session_s / 3)
    end = time.monotonic()
    times = [load.pause(partition, moment, end).end - moment for partition in led]
    one.start(victim)
    one.wait_in_sync(load.topic)
    return times


@pytest.mark.row("C1", "C2")
@pytest.mark.timeout(360)
def test_chased_leaders_die_under_load_nothing_acknowledged_is_lost_and_writes_resume_in_10_s(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, **QUICK_GROUPS) as one:
        load = ClusterLoad(one, "chased")
        load.create_topic(segment_bytes="1000000")
        times: list[float] = []
        load.begin()
        try:
            for kill in range(KILLS):
                times += fail_over(one, load, kill)
            verdict = load.judge()
        finally:
            load.stop()
        say(
            "kill -9 of leaders",
            kills=KILLS,
            fail_over_s=times,
            acknowledged=verdict.acknowledged,
            processors=on_same_processors(),
        )
        assert max(times) <= scaled(RESUME_S_MAX)
        one.check_logs()
