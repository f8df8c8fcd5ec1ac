"""Leaders killed, paused and stopped for a long time: MANSIO_NIGHTLY_LEADER_KILLS kills, 60 by default."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from support.cluster import cluster
from support.machine import scaled
from support.seeds import chosen_seed
from system.cluster.load import NIGHTLY_FAULTS, NIGHTLY_PAUSE_S, RESUME_S_MAX, ClusterLoad, say
from system.cluster.test_cluster_failover import QUICK_GROUPS, fail_over

if TYPE_CHECKING:
    from pathlib import Path


NIGHTLY_KILLS = int(os.environ.get("MANSIO_NIGHTLY_LEADER_KILLS", "60"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("life", range(-(-NIGHTLY_KILLS // 20)))
def test_long_chase_of_leaders_loses_nothing_acknowledged(tmp_path: Path, life: int) -> None:
    chance = random.Random(chosen_seed())
    with cluster(tmp_path, **QUICK_GROUPS) as one:
        load = ClusterLoad(one, "chased", pause_s=NIGHTLY_PAUSE_S)
        load.create_topic(segment_bytes="1000000")
        times: list[float] = []
        load.begin(idempotent=2)
        try:
            for _ in range(20):
                time.sleep(chance.uniform(0, 2))  # the random moment is the point
                times += fail_over(one, load, chance.randrange(4))
            verdict = load.judge()
        finally:
            load.stop()
        say("kill -9 of leaders", kills=20, fail_over_s=times, acknowledged=verdict.acknowledged)
        assert max(times) <= scaled(RESUME_S_MAX)
        one.check_logs()


@pytest.mark.timeout(3600)
def test_leaders_killed_paused_and_stopped_in_turn_by_chance_lose_nothing_acknowledged(
    tmp_path: Path,
) -> None:
    """A pause may be shorter than a session, or longer; two brokers may be away at once."""
    chance = random.Random(chosen_seed())
    with cluster(tmp_path, broker_session_timeout_ms=3000, **QUICK_GROUPS) as one:
        load = ClusterLoad(one, "hurt", pause_s=NIGHTLY_PAUSE_S)
        load.create_topic(segment_bytes="1000000")
        load.begin(idempotent=2)
        faults: Counter[str] = Counter()
        try:
            for _ in range(NIGHTLY_FAULTS):
                victim = one.leader("hurt", chance.randrange(4))
                fault = chance.choice(["kill", "pause", "stop", "two"])
                faults[fault] += 1
                if fault == "pause":
                    one.pause(victim)
                    time.sleep(chance.uniform(0.1, 8))  # the random moment is the point
                    one.resume(victim)
                elif fault == "stop":
                    assert one.brokers[victim].stop() == 0
                    one.start(victim)
                else:
                    away = [
                        victim,
                        *chance.sample([each for each in one.brokers if each != victim], fault == "two"),
                    ]
                    for node_id in away:
                        one.kill(node_id)
                    time.sleep(chance.uniform(0, 5))  # this one, too
                    one.start(*away)
                load.wait_resumed(time.monotonic())
                one.wait_in_sync("hurt")
            verdict = load.judge()
        finally:
            load.stop()
        say("leaders hurt by chance", faults=sum(faults.values()), acknowledged=verdict.acknowledged)
        print(dict(faults))
        one.check_logs()
