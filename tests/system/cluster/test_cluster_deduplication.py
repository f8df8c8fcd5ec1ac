"""Leaders are killed while producers repeat ids: the new leader has the deduplication window of the former one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from support.cluster import cluster
from system.cluster.load import create_topic
from system.crash.test_kill_deduplication import PARTITIONS, TOPIC, WINDOW_MS, RepeatingLoad, read_ids

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 2


@pytest.mark.full
@pytest.mark.row("P3", "C1", "C5")
@pytest.mark.timeout(360)
def test_no_id_is_stored_twice_when_leaders_are_killed(tmp_path: Path) -> None:
    chance = random.Random(9)
    with cluster(tmp_path) as one:
        create_topic(one, TOPIC, PARTITIONS, mansio_dedup_ms=str(WINDOW_MS), segment_bytes="1000000")
        loads = [RepeatingLoad(one.bootstrap_servers, number, idempotent=bool(number)) for number in range(2)]
        try:
            for number in range(KILLS):
                loads[number % 2].wait_acknowledged(chance.randrange(100, 600))
                victim = one.leader(TOPIC, chance.randrange(PARTITIONS))
                one.kill(victim)
                for load in loads:
                    load.wait_acknowledged(200)
                one.start(victim)
                one.wait_in_sync(TOPIC)
        finally:
            for load in loads:
                load.stop()
        found = read_ids(one.bootstrap_servers)
        for load in loads:
            load.check(found, f"{KILLS} leaders killed")
        one.check_logs()
