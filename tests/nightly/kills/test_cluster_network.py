"""Brokers partitioned from each other and from etcd at random."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from support.broker_network import ETCD, Way
from support.seeds import chosen_seed
from system.cluster import test_cluster_network
from system.cluster.load import NIGHTLY_FAULTS, NIGHTLY_PAUSE_S, ClusterLoad, say

if TYPE_CHECKING:
    from support.cluster import Cluster

joined = test_cluster_network.joined
one = test_cluster_network.one


@pytest.mark.timeout(1800)
def test_brokers_parted_or_slow_at_random_under_load_lose_nothing_acknowledged(one: Cluster) -> None:
    chance = random.Random(chosen_seed())
    ends = [1, 2, 3, ETCD]
    load = ClusterLoad(one, "parted", pause_s=NIGHTLY_PAUSE_S)
    load.create_topic(segment_bytes="1000000")
    load.begin(idempotent=2)
    parted: list[list[Way]] = []
    try:
        for _ in range(NIGHTLY_FAULTS):
            ways = [Way(*chance.sample(ends, 2)) for _ in range(chance.randrange(1, 3))]
            if chance.random() < 0.5:
                ways += [Way(way.target, way.source) for way in ways]
            parted.append(ways)
            if chance.random() < 0.25:
                one.network.slow(ways, chance.uniform(0.01, 1))
            else:
                one.network.shut(ways)
            time.sleep(chance.uniform(0.2, 8))  # the random moment is the point
            one.network.heal()
            load.wait_resumed(time.monotonic())
        one.wait_in_sync("parted")
        verdict = load.judge()
    finally:
        load.stop()
        one.network.heal()
    say("parted at random", partitions=len(parted), acknowledged=verdict.acknowledged)
