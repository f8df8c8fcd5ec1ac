"""One broker's file system is really full: what it leads is refused by name, what it follows goes on without it,
nothing acknowledged is lost, and with room again it catches up.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from support.cluster import cluster
from support.small_disk import SmallDisk
from system.cluster.load import create_topic, say
from system.cluster.prober import ANSWER_MS_MAX, OK, Prober

if TYPE_CHECKING:
    from pathlib import Path

    from support.cluster import Cluster

pytestmark = pytest.mark.full

DISK_BYTES = 24 << 20
FULL = 3
"""The broker with the small disk."""

LAG_MS = 2000
TRIES = 60
LARGE_BYTES = 64 << 10
"""More than what is left in the last page of a file."""

KAFKA_STORAGE_ERROR = 56


def led_by(one: Cluster, node_id: int, *, name: str) -> Prober:
    """A topic with three replicas that this broker leads. Who leads a new one is by chance: one of three."""
    for number in range(TRIES):
        topic = f"{name}-{number}"
        create_topic(one, topic)
        if one.leader(topic) == node_id:
            prober = Prober(one, topic)
            prober.until(node_id, {OK})
            return prober
    raise AssertionError(f"broker {node_id} was given none of {TRIES} topics to lead")


@pytest.mark.row("L10", "C2")
def test_full_disk_of_one_broker_refuses_what_it_leads_and_the_others_go_on_without_it(
    tmp_path: Path,
) -> None:
    with (
        SmallDisk(tmp_path / "small", DISK_BYTES) as small,
        cluster(
            tmp_path,
            commands={FULL: small.command},
            places={FULL: small.path},
            broker_session_timeout_ms=3000,
            replica_lag_time_max_ms=LAG_MS,
        ) as one,
    ):
        mine, others = led_by(one, FULL, name="mine"), led_by(one, 1, name="others")
        for prober, leader in ((mine, FULL), (others, 1)):
            for _ in range(20):
                assert prober.send(leader, timeout_ms=ANSWER_MS_MAX).code == OK
        small.fill()
        full = time.monotonic()
        refused = mine.send(FULL, size_bytes=LARGE_BYTES)
        assert refused.code == KAFKA_STORAGE_ERROR, refused
        assert "full" in refused.reason or "No space" in refused.reason, refused
        others.send(1, size_bytes=LARGE_BYTES)
        others.until(1, {OK})
        without_s = time.monotonic() - full
        assert FULL not in one.place(others.topic).in_sync
        assert one.brokers[FULL].running
        assert FULL in one.sessions()
        for _ in range(20):
            assert others.send(1, timeout_ms=ANSWER_MS_MAX).code == OK
        small.free()
        freed = time.monotonic()
        mine.until(one.leader(mine.topic), {OK})
        one.wait_in_sync(mine.topic, others.topic)
        back_s = time.monotonic() - freed
        say("full disk", others_go_on_s=without_s, in_sync_again_s=back_s, refused=refused.reason)
        mine.check()
        others.check()
        one.check_logs()
