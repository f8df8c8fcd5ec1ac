"""Consumer groups (KIP-848) in a cluster: after a coordinator moved, members get no contradictory responses."""

from __future__ import annotations

import pytest

from unit.broker.cluster_fixtures import GroupCluster
from unit.broker.consumer_groups_fixtures import UNKNOWN_MEMBER, Catalogue, Member, check_alone, stabilize
from unit.broker.test_coordinator_moves import HOME, LEADER, OTHER

NOT_COORDINATOR, LOADING = 16, 14


def cluster_with_topics() -> GroupCluster:
    cluster = GroupCluster().made()
    catalogue = Catalogue(t=4)
    cluster.live.update(catalogue.live)
    for broker in cluster.brokers.values():
        broker.catalogue = catalogue  # type: ignore[attr-defined]
    return cluster


def two_at(cluster: GroupCluster, node_id: int) -> tuple[Member, Member]:
    members = Member(cluster.brokers[node_id], "a"), Member(cluster.brokers[node_id], "b")
    stabilize(members)
    return members


@pytest.mark.parametrize("cut", [False, True])
def test_members_carry_on_with_the_next_coordinator(cut: bool) -> None:
    cluster = cluster_with_topics()
    members = two_at(cluster, LEADER)
    had = [(each.owned, each.epoch) for each in members]
    cluster.move(HOME, OTHER, cut=cut)
    assert members[0].beat() == NOT_COORDINATOR
    cluster.tell(HOME)
    cluster.scheduler.turn()
    for each in members:
        each.broker = cluster.brokers[OTHER]
    stabilize(members)
    assert [(each.owned, each.epoch) for each in members] == had
    assert cluster.brokers[LEADER].groups.store.entries == {}
    cluster.scheduler.pass_time(44_000)
    assert members[0].beat() == 0
    cluster.scheduler.pass_time(2_000)
    assert (
        members[1].beat() == UNKNOWN_MEMBER
    )  # its session began with the load, and the new coordinator ended it


def test_what_was_not_committed_was_returned_to_no_client() -> None:
    cluster = cluster_with_topics()
    first, second = Member(cluster.brokers[LEADER], "a"), Member(cluster.brokers[LEADER], "b")
    stabilize((first,))
    cluster.partitions[HOME].holds = True
    joining = second.begin()
    assert not joining.done()
    cluster.move(HOME, OTHER, cut=True)
    cluster.scheduler.turn()
    assert second.answered(joining.result()) == NOT_COORDINATOR
    cluster.tell(HOME)
    cluster.scheduler.turn()
    first.broker = second.broker = cluster.brokers[OTHER]
    check_alone((first, second))
    stabilize((first, second))
    assert sorted(map(len, (first.owned, second.owned))) == [2, 2]


def test_a_new_coordinator_returns_nothing_that_it_may_lose_again() -> None:
    cluster = cluster_with_topics()
    first, second = Member(cluster.brokers[LEADER], "a"), Member(cluster.brokers[LEADER], "b")
    stabilize((first,))
    second.beat()
    cluster.partitions[HOME].holds = True
    lost = first.begin()  # told to give two up; the answer waits for the commit
    assert not lost.done()
    after = cluster.move(HOME, OTHER)  # the next leader has the record, and knows not whether others have it
    after.holds, after.high_watermark = True, after.end_offset - 1
    cluster.tell(HOME)
    cluster.scheduler.turn()
    first.broker = cluster.brokers[OTHER]
    first.is_full_request = True
    asking = first.begin()
    assert not asking.done()
    after.sync()
    cluster.scheduler.turn()
    assert first.answered(asking.result()) == 0


def test_a_broker_that_leads_no_more_ends_no_sessions() -> None:
    cluster = cluster_with_topics()
    members = two_at(cluster, LEADER)
    entry = cluster.brokers[LEADER].groups.store.entries["g"]
    group = entry.group
    cluster.move(HOME, OTHER)
    cluster.brokers[LEADER].groups.handle_role_change(
        cluster.partitions[HOME].__class__(cluster.scheduler, HOME, 9)
    )
    cluster.scheduler.pass_time(100_000)
    assert entry.is_unloaded
    assert len(group.members) == len(members)
