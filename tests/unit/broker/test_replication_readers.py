"""Readers without a leader epoch that ask a broker which is no longer the leader."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.errors import NotLeaderOrFollower, OffsetOutOfRange
from support.replicas import Cluster


def test_a_leader_that_may_be_none_any_more_calls_no_offset_out_of_range() -> None:
    """A consumer would begin elsewhere: at the start, or behind what it has not read."""
    cluster = Cluster(configs={"min.insync.replicas": "2"})
    cluster.run_for(500)
    zombie = cluster[1]
    ack = zombie.append(b"a")
    cluster.run_until(lambda: ack.acknowledged)
    with pytest.raises(OffsetOutOfRange):
        zombie.partition.read(2, 1000)
    zombie.session_until_s = 0
    with pytest.raises(NotLeaderOrFollower):
        zombie.partition.read(2, 1000)
    assert zombie.partition.read(0, 1000) is not None
    assert zombie.partition.read(1, 1000) is None


def deleting() -> tuple[Cluster, Any]:
    """Broker 1 deletes two of three records, and cannot be reached by broker 3."""
    cluster = Cluster(configs={"min.insync.replicas": "2"})
    cluster.run_for(500)
    for value in (b"a", b"b", b"c"):
        ack = cluster[1].append(value)
        cluster.run_until(lambda: ack.acknowledged)  # noqa: B023 - it runs now
    cluster.run_until(cluster.settled)
    cluster.network.isolate(3)
    return cluster, cluster[1].partition.delete_records(2)


def test_deleted_records_are_reported_gone_when_each_possible_leader_has_it_on_its_disk() -> None:
    cluster, deleted = deleting()
    cluster.run_until(lambda: cluster[2].log.durable_start_offset == 2, 1000)
    cluster.run_for(1000)
    assert cluster[1].log.start_offset == cluster[1].log.durable_start_offset == 2
    assert not deleted.done(), "broker 3 has them yet"
    cluster.network.cut.clear()
    cluster.run_until(deleted.done, 12_000)
    assert deleted.result() == 2
    for node_id in (1, 2, 3):
        cluster.kill(node_id, power=True)
    for node_id in (1, 2, 3):
        cluster.restart(node_id)
    cluster.elect(3)
    cluster.tell()
    cluster.run_for(500)
    assert cluster[3].log.start_offset == 2
    assert cluster[3].values() == [b"c"]


def test_deletion_that_a_replica_does_not_know_of_ends_when_it_is_in_sync_no_more() -> None:
    cluster, deleted = deleting()
    cluster.end_session(3)
    cluster.run_until(lambda: cluster.state().isr == (1, 2))
    cluster.run_until(deleted.done, 2000)
    assert deleted.result() == 2


def test_deletion_ends_with_the_leadership_it_began_in() -> None:
    cluster, deleted = deleting()
    cluster.elect(2)
    cluster.tell()
    cluster.run_until(deleted.done)
    with pytest.raises(NotLeaderOrFollower):
        deleted.result()


def test_deletion_takes_no_longer_than_a_follower_waits_for_news() -> None:
    cluster = Cluster()
    cluster.run_for(500)
    ack = cluster[1].append(b"a")
    cluster.run_until(lambda: ack.acknowledged and cluster.settled())
    deleted = cluster[1].partition.delete_records(-1)
    cluster.run_until(deleted.done, 600)
