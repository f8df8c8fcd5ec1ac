"""An etcd of three members without a majority, with a new leader, or slow: brokers acknowledge nothing they cannot
guarantee, committed records can be read, and all recovers without intervention."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Self

import pytest

from support.cluster import cluster
from system.cluster.load import create_topic, say
from system.cluster.prober import (
    ANSWER_MS_MAX,
    NOT_LEADER_OR_FOLLOWER,
    NOT_SURE_TO_LEAD,
    OK,
    Prober,
    read_values,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.cluster import Cluster
    from support.etcd import Etcd

pytestmark = pytest.mark.full

SESSION_MS = 3000
DEADLINE_S = 0.7 * SESSION_MS / 1000
"""Until when a broker may act on the last renewal of its session that it knows of."""
LATE_S = 0.6
RENEWAL_PAUSE_S = 0.02


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(
        tmp_path_factory.mktemp("etcds"),
        etcd_members=3,
        broker_session_timeout_ms=SESSION_MS,
        group_initial_rebalance_delay_ms=0,
    ) as one:
        yield one


class Renewals:
    """Renews a lease of its own on one member of etcd, again and again: `last` is when that was last answered, so
    nobody's session was renewed there much later."""

    def __init__(self, member: Etcd) -> None:
        self._member = member
        self._lease = int(member.post("lease/grant", TTL=600)["ID"])
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.last = time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(RENEWAL_PAUSE_S):
            with suppress(OSError, HTTPException, ValueError):
                answer = self._member.post("lease/keepalive", ID=self._lease)
                if "TTL" in answer.get("result", {}):
                    self.last = time.monotonic()


def start_again(members: list[Etcd]) -> None:
    for member in members:
        member.launch()
    for member in members:
        member.wait_healthy()


@pytest.mark.row("C1", "C2")
def test_without_a_majority_of_etcd_acks_all_is_refused_with_the_reason_and_reads_go_on(one: Cluster) -> None:
    topic = "no-majority"
    create_topic(one, topic)
    prober = Prober(one, topic)
    leader = one.leader(topic)
    prober.until(leader, {OK})
    for _ in range(10):
        assert prober.send(leader, timeout_ms=ANSWER_MS_MAX).code == OK
    before = read_values(one, topic)
    epoch = one.place(topic).leader_epoch
    left, *dead = one.members
    with Renewals(left) as renewals:
        for member in dead:
            member.kill()
        begin = last_ok = asked = time.monotonic()
        while (answer := prober.send(leader)).code != NOT_LEADER_OR_FOLLOWER:
            assert answer.code in {OK, *NOT_SURE_TO_LEAD}
            if answer.code == OK:
                last_ok = asked  # acknowledged not earlier than it was sent
            asked = time.monotonic()
            assert asked < begin + 30
        # Where the member that is left was etcd's leader, it answers renewals until it notices that it is alone.
        renewed = max(begin, renewals.last)
        refused_s = time.monotonic() - begin
        refused = prober.send(leader)
        assert refused.code == NOT_LEADER_OR_FOLLOWER, refused
        assert "has not reached the metadata store in time" in refused.reason
        assert last_ok - renewed <= DEADLINE_S + LATE_S
        assert read_values(one, topic)[: len(before)] == before
        for node_id in one.brokers:
            if node_id != leader:
                assert prober.send(node_id).code == NOT_LEADER_OR_FOLLOWER
        start_again(dead)
    healed = time.monotonic()
    one.wait(lambda: len(one.sessions()) == 3, "every broker has a session")
    one.wait_in_sync(topic)
    now = one.place(topic)
    took_s = prober.until(now.leader, {OK})
    say(
        "no majority of etcd",
        last_renewed_s=renewed - begin,
        last_acknowledged_s=last_ok - begin,
        refused_s=refused_s,
        goes_on_s=time.monotonic() - healed,
        waited_s=took_s,
        epochs=[epoch, now.leader_epoch],
    )
    prober.check()
    one.check_logs()


@pytest.mark.row("C1")
def test_broker_started_without_a_majority_of_etcd_ends_and_reports_why(one: Cluster) -> None:
    """What it keeps is not served before it is decided who leads."""
    node_id = 3
    assert one.brokers[node_id].stop() == 0
    for member in one.members[1:]:
        member.kill()
    try:
        with pytest.raises(AssertionError, match=r"mansio serve ended with 1:(.|\n)*mansio: .*etcd"):
            one.start(node_id)
    finally:
        one.brokers[node_id].kill()
        start_again(one.members[1:])
    one.start(node_id)
    one.wait(lambda: len(one.sessions()) == 3, "every broker has a session")
