"""The next leader of a partition, while the earlier one may not know that its session was ended early, commits records,
and neither leases them nor answers for groups."""

from __future__ import annotations

from support.replicas import Cluster


def is_uncertain(cluster: Cluster) -> bool:
    return cluster[2].partition.is_leadership_uncertain


def test_next_leader_is_uncertain_until_the_earlier_one_must_know_and_commits_meanwhile() -> None:
    cluster = Cluster(configs={"min.insync.replicas": "2"})
    cluster.run_for(500)
    cluster[2].ended_sessions[1] = 7
    cluster.elect(2, isr=(2, 3))
    cluster.tell(2, 3)
    cluster.run_for(500)
    assert is_uncertain(cluster)
    ack = cluster[2].append(b"a")
    cluster.run_until(lambda: ack.acknowledged, 1000)
    cluster.elect(2)
    cluster.tell(2, 3)
    cluster.run_for(500)
    assert cluster[2].partition.leader_epoch == 2
    assert is_uncertain(cluster), "in its next epoch, too"
    del cluster[2].ended_sessions[1]
    assert not is_uncertain(cluster)


def test_leaders_do_not_wait_for_sessions_that_ended_after_their_election() -> None:
    cluster = Cluster()
    cluster.run_for(500)
    cluster[2].ended_sessions[3] = 7
    cluster.elect(2)
    cluster.tell()
    cluster.run_for(500)
    assert is_uncertain(cluster), "broker 3 may have led it"
    cluster[2].ended_sessions[3] = 8
    assert not is_uncertain(cluster), "that session has ended, and is followed by another one"
    cluster.elect(2)
    cluster.tell()
    cluster.run_for(500)
    assert cluster[2].partition.leader_epoch == 2
    assert not is_uncertain(cluster), "it has led since before"
