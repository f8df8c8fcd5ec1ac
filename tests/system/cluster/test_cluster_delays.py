"""Leaders are killed while delayed records are accepted and delivered: each acknowledged one is delivered once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from support.cluster import cluster
from support.machine import scaled
from system.cluster.load import create_topic
from system.crash.test_kill_delays import PARTITIONS, TOPIC, DelayedLoad, check_delivered_once, read_all

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 3


@pytest.mark.full
@pytest.mark.row("D6", "C1")
@pytest.mark.timeout(360)
def test_delayed_records_are_delivered_once_when_their_leaders_are_killed(tmp_path: Path) -> None:
    chance = random.Random(9)
    with cluster(tmp_path) as one:
        create_topic(one, TOPIC, PARTITIONS, mansio_delay_enable="true", segment_bytes="1000000")
        load = DelayedLoad(one.bootstrap_servers, 9)
        try:
            for _ in range(KILLS):
                load.wait_acknowledged(chance.randrange(100, 600))
                victim = one.leader(TOPIC, chance.randrange(PARTITIONS))
                one.kill(victim)
                load.wait_acknowledged(200)
                one.start(victim)
                one.wait_in_sync(TOPIC)
        finally:
            load.stop()
        found = read_all(one.bootstrap_servers, {*load.acknowledged}, scaled(90))
        check_delivered_once(load, found, f"{KILLS} leaders killed")
        one.check_logs()
