"""Fetch sessions between brokers on virtual time: what is sent, and what happens when a side loses its session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from mansio.wire.apis.fetch import decode_request, decode_response
from mansio.wire.headers import read_request_header
from support.replicas import LAG_MS_MAX, TOPIC, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.state.broker_handshake import BrokerIdentity

LEADER, FOLLOWER = 1, 2
PARTITIONS: Final = 4


class Exchanged(NamedTuple):
    """A request of the follower, or a response to it: session id, session epoch, partitions, forgotten ones."""

    session_id: int
    epoch: int
    partitions: list[int]
    forgotten: list[int]


class Watched:
    """Two brokers, and what the follower sends and receives."""

    def __init__(self, partitions: int = PARTITIONS, brokers: int = 2) -> None:
        self.cluster = Cluster(brokers, partitions=partitions)
        self.requests: list[Exchanged] = []
        self.responses: list[Exchanged] = []
        self.cluster.network.delay_ms = lambda: 0.5
        self.cluster.network.spy = self._request
        self.watch_leader()
        self.cluster.run_for(1200)

    def watch_leader(self) -> None:
        leader = self.cluster[LEADER]
        receive = leader.receive

        def watching(request: bytes, answer: Callable[[bytes], None], sender: BrokerIdentity) -> None:
            def answered(frame: bytes) -> None:
                if sender.node_id == FOLLOWER:
                    self._response(frame)
                answer(frame)

            receive(request, answered, sender)

        leader.receive = watching

    def _request(self, source: int, _: int, frame: bytes) -> None:
        if source == FOLLOWER:
            body = memoryview(frame)[4:]
            found = decode_request(17, body, read_request_header(body).body_position)
            partitions = [one.index for topic in found.topics for one in topic[2]]
            forgotten = [index for topic in found.forgotten_topics for index in topic[2]]
            self.requests.append(Exchanged(found.session_id, found.session_epoch, partitions, forgotten))

    def _response(self, frame: bytes) -> None:
        found = decode_response(17, frame)
        partitions = [one.index for topic in found.topics for one in topic[2]]
        self.responses.append(Exchanged(found.session_id, found.error_code, partitions, []))

    def forget(self) -> None:
        self.requests.clear()
        self.responses.clear()

    def append(self, index: int) -> None:
        ack = self.cluster[LEADER].append(b"a", index=index)
        self.cluster.run_until(lambda: ack.settled, 5000)
        assert ack.acknowledged, ack.error


def test_requests_and_responses_have_only_what_has_changed() -> None:
    watched = Watched()
    first = watched.requests[0]
    assert (first.session_id, first.epoch, sorted(first.partitions)) == (0, 0, [0, 1, 2, 3])
    assert sorted(watched.responses[0].partitions) == [0, 1, 2, 3]
    session_id = watched.responses[0].session_id
    assert session_id > 0
    watched.forget()
    watched.cluster.run_for(3000)
    assert len(watched.requests) > 4
    assert all(one.session_id == session_id for one in watched.requests)
    epochs = [one.epoch for one in watched.requests]
    assert epochs == [*range(epochs[0], epochs[0] + len(epochs))]
    assert not any(one.partitions for one in watched.requests + watched.responses)
    watched.append(2)
    watched.cluster.run_for(1200)
    assert {index for one in watched.requests for index in one.partitions} == {2}
    assert [one.partitions for one in watched.requests if one.partitions] == [[2]], "its new end"
    assert {index for one in watched.responses for index in one.partitions} == {2}
    assert len([one for one in watched.responses if one.partitions]) == 2, "the record, and its commit"
    follower = watched.cluster[FOLLOWER].partitions[TOPIC.bytes, 2]
    assert follower.high_watermark == 1


def test_an_idle_follower_is_not_taken_for_one_that_lags() -> None:
    """No request names the partition for a long time; then records come, and the follower is slow."""
    watched = Watched()
    watched.append(0)
    watched.cluster.run_for(10 * LAG_MS_MAX)
    watched.cluster[FOLLOWER].background._latency_ms = lambda: LAG_MS_MAX / 2
    watched.append(0)
    assert watched.cluster[LEADER].isr_manager.shrink_count == 0
    watched.cluster.network.isolate(FOLLOWER)
    watched.cluster[LEADER].append(b"b", index=0)
    watched.cluster.run_until(lambda: watched.cluster.state(0).isr == (LEADER,), 2 * LAG_MS_MAX)


def test_a_follower_learns_of_a_commit_that_comes_after_its_last_request() -> None:
    """It has flushed the record long before the leader, and knows of nothing new when the leader has."""
    watched = Watched()
    watched.cluster[LEADER].background._latency_ms = lambda: 800.0
    ack = watched.cluster[LEADER].append(b"a", index=1)
    watched.cluster.run_for(700)
    assert watched.requests[-1].partitions == []
    assert not ack.settled
    follower = watched.cluster[FOLLOWER].partitions[TOPIC.bytes, 1]
    watched.cluster.run_until(lambda: ack.acknowledged and follower.high_watermark == 1, 2000)


def test_a_follower_that_left_the_set_while_nothing_was_appended_comes_back() -> None:
    watched = Watched()
    watched.append(0)
    watched.cluster.run_for(1200)
    watched.cluster[LEADER].isr_manager.handle_session_end(FOLLOWER)
    watched.cluster.run_until(lambda: watched.cluster.state(0).isr == (LEADER,), 2000)
    watched.cluster.run_until(lambda: watched.cluster.state(0).isr == (LEADER, FOLLOWER), 5000)


@pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "evicted"])
def test_a_follower_whose_session_the_leader_has_forgotten_begins_another_one(restarts: bool) -> None:
    watched = Watched()
    cluster = watched.cluster
    watched.append(1)
    if restarts:
        cluster.kill(LEADER)
        cluster.restart(LEADER)
        watched.watch_leader()
        for index in range(PARTITIONS):
            cluster.elect(LEADER, index=index)
        cluster.tell()
    else:
        (session,) = cluster[LEADER].service.fetch.sessions
        sessions = cluster[LEADER].service.fetch.sessions
        sessions.begin(session.session_id, -1, session.owner, [], [], 0)
    watched.forget()
    cluster.run_until(lambda: any(one.epoch == 0 for one in watched.requests), 12_000)
    cluster.run_for(1000)
    cluster.run_until(lambda: len(cluster.state(1).isr) == 2, 5000)
    watched.append(1)
    restart = next(one for one in watched.requests if one.epoch == 0)
    assert sorted(restart.partitions) == [0, 1, 2, 3]
    assert len(cluster[LEADER].service.fetch.sessions) == 1


def test_the_sessions_of_a_dead_broker_end_with_its_own() -> None:
    watched = Watched(brokers=3)
    cluster = watched.cluster
    assert sorted(one.owner.node_id for one in cluster[LEADER].service.fetch.sessions) == [2, 3]
    cluster.kill(3)
    cluster.end_session(3)
    cluster.run_for(10)
    assert [one.owner.node_id for one in cluster[LEADER].service.fetch.sessions] == [2]
    waits = [partition.waits for partition in cluster[LEADER].partitions.values()]
    assert [len(one.followers) for one in waits] == [1] * PARTITIONS, "nothing is left of it"


def test_a_follower_that_has_caught_up_ends_the_session_of_its_second_fetcher() -> None:
    watched = Watched(brokers=3)
    cluster = watched.cluster
    cluster.kill(FOLLOWER)
    cluster.end_session(FOLLOWER)
    for _ in range(3):
        watched.append(0)
    watched.forget()
    cluster.restart(FOLLOWER)
    sessions = cluster[LEADER].service.fetch.sessions

    def owners() -> list[int]:
        return sorted(one.owner.node_id for one in sessions)

    cluster.run_until(lambda: owners() == [2, 2, 3], 5000)
    cluster.run_until(lambda: FOLLOWER in cluster.state(0).isr, 5000)
    cluster.run_for(1000)
    assert owners() == [2, 3]
    assert sessions.eviction_count == 0
    waits = cluster[LEADER].partitions[TOPIC.bytes, 0].waits
    assert len(waits.followers) == 2
    watched.append(0)


def test_a_lost_response_costs_nothing_but_a_full_request() -> None:
    watched = Watched()
    cluster = watched.cluster
    session_id = watched.responses[0].session_id
    cluster.network.cut.add((LEADER, FOLLOWER))
    cluster[LEADER].append(b"a", index=3)
    cluster.run_for(2000)
    cluster.network.cut.clear()
    watched.forget()
    cluster.run_until(lambda: cluster[FOLLOWER].partitions[TOPIC.bytes, 3].high_watermark == 1, 15_000)
    restart = next(one for one in watched.requests if one.epoch == 0)
    assert (restart.session_id, sorted(restart.partitions)) == (session_id, [0, 1, 2, 3])


def test_a_partition_that_the_follower_gives_up_is_forgotten_and_comes_back() -> None:
    watched = Watched()
    cluster = watched.cluster
    cluster.elect(FOLLOWER, index=1)
    cluster.tell()
    watched.forget()
    cluster.run_for(1200)
    assert [one.forgotten for one in watched.requests if one.forgotten] == [[1]]
    (session,) = cluster[LEADER].service.fetch.sessions
    assert len(session) == 3
    cluster.elect(LEADER, index=1)
    cluster.tell()
    cluster.run_for(1)
    watched.append(1)
    assert len(session) == 4
    assert all(one.epoch > 0 for one in watched.requests), "in the same session"


def test_a_log_that_fails_while_its_partition_is_idle_leaves_the_session() -> None:
    watched = Watched()
    cluster = watched.cluster
    follower = cluster[FOLLOWER]
    follower.partitions[TOPIC.bytes, 2].log.fail(OSError("the disk is gone"), "it failed")
    watched.forget()
    cluster.run_for(1200)
    assert [one.partition.index for one in follower.fetcher_manager.failed_replicas()] == [2]
    assert [one.forgotten for one in watched.requests if one.forgotten] == [[2]]
    watched.append(1)


def test_a_request_of_a_session_that_has_a_newer_one_is_answered_at_once() -> None:
    watched = Watched()
    leader = watched.cluster[LEADER]
    fetches = leader.service.fetch
    (session,) = fetches.sessions
    watched.cluster.run_until(lambda: session.waiter is not None)
    waiting = session.waiter
    fetches.sessions.begin(session.session_id, session.epoch, session.owner, [], [], 0)
    assert session.waiter is None
    assert waiting not in fetches.parked
    watched.append(0)
