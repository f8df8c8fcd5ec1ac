"""Members of etcd killed and paused under load."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from system.cluster import test_cluster_etcd
from system.cluster.load import NIGHTLY_PAUSE_S, ClusterLoad, say
from system.cluster.test_cluster_etcd import start_again

if TYPE_CHECKING:
    from support.cluster import Cluster

one = test_cluster_etcd.one


@pytest.mark.row("C2")
def test_leaders_of_etcd_killed_and_paused_under_load_lose_nothing_and_move_no_leader_for_long(
    one: Cluster,
) -> None:
    load = ClusterLoad(one, "etcd-hurt", pause_s=NIGHTLY_PAUSE_S)
    load.create_topic(segment_bytes="1000000")
    load.begin(idempotent=2)
    pauses: list[float] = []
    try:
        for turn in range(12):
            member = one.members[turn % 3]
            begin = time.monotonic()
            if turn % 2:
                member.pause()
                load.wait_resumed(begin + 3)
                member.resume()
            else:
                member.kill()
                load.wait_resumed(begin + 3)
                start_again([member])
            load.wait_resumed(time.monotonic())
            pauses += [pause.length_s for pause in load.pauses(begin, time.monotonic())]
        one.wait_in_sync("etcd-hurt")
        verdict = load.judge()
    finally:
        load.stop()
    say("members of etcd killed and paused", pauses_s=pauses, acknowledged=verdict.acknowledged)
    one.check_logs()
