"""Leaders are killed while schedules fire: each firing is appended once, and the clients find the new leaders."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

import mansio
from support.cluster import cluster
from support.machine import scaled
from system.cluster.load import create_topic
from system.crash.test_kill_schedules import (
    EVERY_S,
    PARTITIONS,
    TOPIC,
    check_fired_once,
    create_schedules,
    read_all,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.full
@pytest.mark.row("D6", "C1")
@pytest.mark.timeout(300)
def test_schedules_fire_once_when_their_leader_is_killed(tmp_path: Path) -> None:
    chance = random.Random(9)
    with cluster(tmp_path) as one:
        create_topic(one, TOPIC, PARTITIONS, mansio_delay_enable="true")
        created_ms = create_schedules(one.bootstrap_servers, 20)
        victim = one.leader(TOPIC, chance.randrange(PARTITIONS))
        one.kill(victim)
        with mansio.blocking.connect(one.bootstrap_servers) as client:
            client.admin.schedules.create(TOPIC, "deleted", b"x", every=3600)
            client.admin.schedules.delete(TOPIC, "deleted")
            listed = client.admin.schedules.list(TOPIC)
            assert {schedule.name for schedule in listed} == {*created_ms}
        one.start(victim)
        one.wait_in_sync(TOPIC)
        now_ms = int(time.time() * 1000)
        counts = {name: (now_ms - moment_ms) // (EVERY_S * 1000) for name, moment_ms in created_ms.items()}
        found = read_all(one.bootstrap_servers, counts, scaled(60))
        check_fired_once(created_ms, found, "a leader killed")
        one.check_logs()
