"""Leaders are killed while delayed records are accepted and delivered: each acknowledged one is delivered once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from mansio import blocking
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


@pytest.mark.full
@pytest.mark.row("D6", "C1")
@pytest.mark.timeout(240)
def test_replicas_built_after_the_setting_was_turned_off_deliver_what_is_pending(tmp_path: Path) -> None:
    """A replica without the setting and without a snapshot learns of pending records from the log alone."""
    with cluster(tmp_path) as one:
        create_topic(one, TOPIC, 1, mansio_delay_enable="true")
        values = [b"%d" % number for number in range(5)]
        with blocking.connect(one.bootstrap_servers) as client:
            for value in values:
                client.publish(TOPIC, value, delay=20)
            client.admin.alter_topic_config(TOPIC, {"mansio.delay.enable": "false"})
        for follower in one.followers(TOPIC):
            one.kill(follower)
            one.forget_data(follower)
            one.start(follower)
            one.wait_in_sync(TOPIC)
        former = one.leader(TOPIC)
        one.kill(former)
        one.wait_led_by_others([TOPIC], former, 60)
        with blocking.connect(one.bootstrap_servers) as client:
            assert client.admin.delays.counts(TOPIC)[0].count in (0, 5)  # delivered already on a slow machine
            with client.consume(TOPIC, max_records=5) as consumer:
                assert sorted(message.value or b"" for message in consumer) == values
