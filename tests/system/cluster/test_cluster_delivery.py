"""Share groups in a cluster while the leaders of the partition and of its share state are killed or moved:
acknowledgements are kept, records are delivered again, each dead-lettered record is written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.routing.routes import partition_for, share_partition_key
from mansio.state.share_partition.state_records import SHARE_STATE_TOPIC
from mansio.state.share_partition.types import ShareKey
from mansio.wire.api_versions import ApiKey
from support.cluster import cluster
from support.raw_peer import RawPeer, batch_of
from support.waiting import wait_until
from system.cluster.load import create_topic, share_load
from system.crash.share_load import ShareMember

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.cluster import Cluster
    from system.crash.share_load import ShareLoad

SESSION_MS = 3000
LOCK_MS = 2000
GROUP, WORK = "crew", "work"
GOES_ON_S_MAX = 60.0
DEAD_LETTERS = 10


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Cluster]:
    settings: dict[str, Any] = {
        "share_coordinator_state_topic_num_partitions": 2,
        "share_coordinator_snapshot_update_records_per_snapshot": 40,
    }
    with cluster(tmp_path, broker_session_timeout_ms=SESSION_MS, **settings) as one:
        yield one
        one.check_logs()


def load_of(one: Cluster) -> ShareLoad:
    return share_load(one, WORK, GROUP, lock_ms=LOCK_MS, states=SHARE_STATE_TOPIC)


def state_leader(one: Cluster, load: ShareLoad) -> int:
    places = one.places(SHARE_STATE_TOPIC)
    return places[partition_for(share_partition_key(ShareKey(GROUP, load.topic_id, 0)), len(places))].leader


def goes_on(one: Cluster, load: ShareLoad, accepted: int = 40) -> None:
    before = load.history.accepted
    try:
        wait_until(
            lambda: load.failures or load.history.accepted > before + accepted,
            GOES_ON_S_MAX,
            "more are accepted",
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{load.described()}") from None
    assert not load.failures, load.failures


@pytest.mark.full
@pytest.mark.row("C5", "D1", "D3", "D5")
@pytest.mark.timeout(240)
def test_deliveries_outlive_leaders_and_coordinators_of_their_state(one: Cluster) -> None:
    load = load_of(one)
    load.start(members=3)
    try:
        goes_on(one, load)
        for which in ("leader", "state leader", "both"):
            victims = {
                "leader": {one.leader(WORK)},
                "state leader": {state_leader(one, load)},
                "both": {one.leader(WORK), state_leader(one, load)},
            }[which]
            print(which, sorted(victims))
            for victim in sorted(victims):
                one.kill(victim)
            if len(victims) == 1:
                goes_on(one, load)
            one.start(*sorted(victims))
            one.wait_in_sync(WORK, SHARE_STATE_TOPIC)
            goes_on(one, load)
        before = one.leader(WORK)
        elect(one, next(node for node in one.place(WORK).replicas))
        print("elected", before, one.leader(WORK))
        goes_on(one, load)
        load.finish()
    finally:
        load.stop()
    print(load.history)
    assert min(load.history.rejected, load.history.offered_again) > 0


def elect(one: Cluster, preferred: int) -> None:
    """Have the first replicas lead."""
    with RawPeer(one.brokers[one.controller()].kafka_port) as peer:
        wanted = [
            {"topic": name, "partitions": [place.index]}
            for name in (WORK, SHARE_STATE_TOPIC)
            for place in one.places(name)
        ]
        peer.call(
            ApiKey.ELECT_LEADERS, 2, {"election_type": 0, "topic_partitions": wanted, "timeout_ms": 10_000}
        )
    one.wait(lambda: one.leader(WORK) == preferred, "the preferred replica leads")


@pytest.mark.full
@pytest.mark.row("C5", "D3")
@pytest.mark.timeout(120)
def test_dead_letters_of_a_group_that_no_client_uses_go_on_after_the_leader_is_gone(one: Cluster) -> None:
    load = load_of(one)
    create_topic(one, "not-for-letters")
    load.alter(errors_deadletterqueue_topic_name="not-for-letters")
    with RawPeer(load.port) as peer:
        values = [b"%d" % number for number in range(DEAD_LETTERS)]
        assert peer.produce(WORK, batch_of(*values)).error_code == 0
        member = ShareMember(load, "m", 1)
        member.member = "m"
        member._fetch(peer, 0, {})
        while len(member.held) < DEAD_LETTERS:
            member._fetch(peer, DEAD_LETTERS, {})
        member._acknowledge(peer, {"reject": member.held})
        wait_until(
            lambda: "not-for-letters" in load._described(peer).topics[0].partitions[0].dead_letter_error,
            20,
            "they wait",
        )
        assert load.history.rejected == DEAD_LETTERS
    gone = one.leader(WORK)
    one.kill(gone)
    one.wait_led_by_others([WORK, SHARE_STATE_TOPIC], gone, GOES_ON_S_MAX)
    load.alter(errors_deadletterqueue_topic_name="")
    one.wait(lambda: one.places(f"dlq.{WORK}"), "there is a dead-letter topic", GOES_ON_S_MAX)
    one.wait(lambda: len(load.dead_letters()) == DEAD_LETTERS, "the dead letters are there", GOES_ON_S_MAX)
    load.history.finish({0: DEAD_LETTERS}, load.dead_letters())
