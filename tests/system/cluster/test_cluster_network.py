"""Network partitions between brokers, and between a broker and etcd, in both directions or one: a broker that may have
lost its leadership or its in-sync replicas acknowledges nothing, and all recovers afterwards.

Sessions are short here, so that a test need not wait long for their end.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import pytest

from support.broker_network import ETCD, Way
from support.cluster import cluster
from support.machine import scaled
from support.raw_peer import RawPeer
from system.cluster.load import create_topic, say
from system.cluster.prober import (
    ANSWER_MS_MAX,
    NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    NOT_SURE_TO_LEAD,
    OK,
    TOO_FEW,
    Prober,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.cluster import Cluster

pytestmark = pytest.mark.full

SESSION_MS = 3000
LAG_MS = 2000
numbers = itertools.count()


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(
        tmp_path_factory.mktemp("network"),
        with_network=True,
        broker_session_timeout_ms=SESSION_MS,
        replica_lag_time_max_ms=LAG_MS,
        group_initial_rebalance_delay_ms=0,
    ) as one:
        yield one


@pytest.fixture
def one(joined: Cluster) -> Iterator[Cluster]:
    joined.wait(lambda: len(joined.sessions()) == 3, "every broker has a session")
    yield joined
    joined.network.heal()
    joined.check_logs()


@pytest.fixture
def prober(one: Cluster, request: pytest.FixtureRequest) -> Iterator[Prober]:
    """A topic of its own with three replicas in sync; at the end everything is mended, in sync and as acknowledged."""
    topic = f"topic-{next(numbers)}"
    create_topic(one, topic)
    prober = Prober(one, topic)
    prober.until(one.leader(topic), {OK})
    yield prober
    one.network.heal()
    one.wait_in_sync(topic)
    prober.until(one.leader(topic), {OK})
    prober.check()


@pytest.mark.row("C1", "C2")
@pytest.mark.parametrize("lost", ["both directions", "requests of the followers", "answers of the leader"])
def test_leader_cut_off_from_its_followers_acknowledges_nothing_and_goes_on_when_mended(
    one: Cluster, prober: Prober, lost: str
) -> None:
    """It reaches etcd all the time, so it leads on, alone; what it took meanwhile is not readable before others have
    it."""
    leader, followers = one.leader(prober.topic), one.followers(prober.topic)
    requests = [Way(follower, leader) for follower in followers]
    answers = [Way(leader, follower) for follower in followers]
    ways = {"requests of the followers": requests, "answers of the leader": answers}
    one.network.shut(ways.get(lost, [*requests, *answers]))
    begin = time.monotonic()
    first = prober.send(leader)
    assert first.code != OK, "nobody else can have it"
    took_s = prober.until(leader, TOO_FEW)
    say(f"cut off from followers, {lost}", first=first.code, refused_after_s=time.monotonic() - begin)
    assert took_s < scaled(LAG_MS / 1000 + 5)
    assert one.place(prober.topic).in_sync == (leader,)
    refused = prober.send(leader)
    assert "min.insync.replicas" in refused.reason or refused.code == NOT_ENOUGH_REPLICAS_AFTER_APPEND
    with RawPeer(one.brokers[leader].kafka_port) as peer:
        readable = peer.end_offset(prober.topic)
    assert readable == sum(answer.code == OK for answer in prober.reported), "only what was acknowledged"
    one.network.heal()
    say("mended", acknowledged_again_s=prober.until(leader, {OK}))


@pytest.mark.row("C2")
def test_one_follower_cut_off_leaves_the_in_sync_set_and_comes_back_writes_go_on(
    one: Cluster, prober: Prober
) -> None:
    leader, (cut, other) = one.leader(prober.topic), one.followers(prober.topic)
    one.network.part((leader, cut))
    prober.until(leader, {OK})
    place = one.place(prober.topic)
    assert (place.leader, set(place.in_sync)) == (leader, {leader, other})
    assert prober.send(leader, timeout_ms=ANSWER_MS_MAX).code == OK


@pytest.mark.row("C1", "C2")
@pytest.mark.parametrize("lost", ["both directions", "answers of etcd", "requests to etcd"])
def test_leader_cut_off_from_etcd_acknowledges_nothing_after_its_deadline_and_another_leads(
    one: Cluster, prober: Prober, lost: str
) -> None:
    leader = one.leader(prober.topic)
    ways = {"answers of etcd": [Way(ETCD, leader)], "requests to etcd": [Way(leader, ETCD)]}
    cut = ways.get(lost, [Way(leader, ETCD), Way(ETCD, leader)])
    one.network.shut(cut)
    begin = last_ok = time.monotonic()
    while one.place(prober.topic).leader == leader:
        asked = time.monotonic()
        if prober.send(leader).code == OK:
            last_ok = asked  # acknowledged not earlier than it was sent
        assert time.monotonic() < begin + 30, one.tails()
    moved = time.monotonic()
    after = prober.send(leader)
    assert after.code in NOT_SURE_TO_LEAD, after
    next_leader = one.leader(prober.topic)
    prober.until(next_leader, {OK})
    say(
        f"cut off from etcd, {lost}",
        last_acknowledged_s=last_ok - begin,
        moved_s=moved - begin,
        acknowledged_again_s=time.monotonic() - begin,
    )
    assert last_ok < moved
    assert last_ok - begin <= 0.7 * SESSION_MS / 1000 + 0.6, "the deadline counts from the last good renewal"
    assert prober.send(leader).code in NOT_SURE_TO_LEAD
    one.network.heal()
    one.wait(lambda: leader in one.sessions(), "the broker that was cut off is back")
    one.wait_in_sync(prober.topic)


@pytest.mark.row("C2")
def test_follower_cut_off_from_etcd_leaves_the_in_sync_set_though_it_copies_on(
    one: Cluster, prober: Prober
) -> None:
    leader, (cut, other) = one.leader(prober.topic), one.followers(prober.topic)
    one.network.part((cut, ETCD))
    one.wait(lambda: set(one.place(prober.topic).in_sync) == {leader, other}, f"broker {cut} is not in sync")
    assert prober.send(leader, timeout_ms=ANSWER_MS_MAX).code == OK
