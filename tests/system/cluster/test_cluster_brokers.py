"""Brokers that hang, die together, lose their disk or miss the re-creation of a topic: acknowledged records are kept,
and the broker becomes in sync again.

All tests share one cluster with short sessions; each has its own topic and restores every broker.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
import uuid
from typing import TYPE_CHECKING

import pytest

from mansio import blocking
from mansio.broker.coordinator.share.state_messages import RequestSender
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce
from support.cluster import cluster
from support.forged_requests import INTER_BROKER, Target, check_refused
from support.process import ServedBroker
from support.raw_peer import RawPeer, batch_of
from system.cluster.load import create_topic, say
from system.cluster.prober import NOT_LEADER_OR_FOLLOWER, OK, TOO_FEW, VERSION, Prober, frame_of, read_values

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.cluster import Cluster

SESSION_MS = 3000
numbers = itertools.count()


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(
        tmp_path_factory.mktemp("brokers"),
        broker_session_timeout_ms=SESSION_MS,
        replica_lag_time_max_ms=2000,
        group_initial_rebalance_delay_ms=0,
    ) as one:
        yield one


@pytest.fixture
def one(joined: Cluster) -> Cluster:
    away = [node_id for node_id in joined.brokers if node_id not in joined.running]
    if away:  # a test before this one has failed
        joined.start(*away)
    joined.wait(lambda: len(joined.sessions()) == 3, "every broker has a session")
    return joined


def seen_by_any(one: Cluster) -> set[int]:
    """The brokers that at least one of those that run takes for alive: their views come one after the other."""
    seen: set[int] = set()
    for node_id in one.running:
        with RawPeer(one.brokers[node_id].kafka_port) as peer:
            seen.update(broker.node_id for broker in peer.call(ApiKey.METADATA, 9, {"topics": []}).brokers)
    return seen


@pytest.fixture
def prober(one: Cluster) -> Iterator[Prober]:
    """A topic with three replicas; at the end all of them are in sync, and everything is as it was acknowledged."""
    topic = f"topic-{next(numbers)}"
    create_topic(one, topic)
    prober = Prober(one, topic)
    prober.until(one.leader(topic), {OK})
    yield prober
    one.wait_in_sync(topic)
    prober.until(one.leader(topic), {OK})
    prober.check()
    one.check_logs()


def test_no_client_is_taken_for_a_follower_or_a_leader_of_share_groups(one: Cluster, prober: Prober) -> None:
    """In the name of a follower and its registered epoch; `test_cluster_impersonation` forges more."""
    topic_id = uuid.UUID(one.entries("topics/")[prober.topic]["uuid"])
    target = Target(prober.topic, topic_id, end_offset=1 << 20)
    leader, follower = one.leader(prober.topic), one.followers(prober.topic)[0]
    for key in INTER_BROKER:
        check_refused(
            one.brokers[leader].kafka_port, key, target, RequestSender(follower, one.epoch(follower))
        )
    prober.until(leader, {OK})


@pytest.mark.row("C1", "C2")
def test_leader_paused_beyond_its_session_acknowledges_nothing_when_it_wakes_and_follows(
    one: Cluster, prober: Prober
) -> None:
    """A record waits in its socket while it sleeps; meanwhile another leads, and takes others at the same offsets."""
    sleeper = one.leader(prober.topic)
    with RawPeer(one.brokers[sleeper].kafka_port) as peer:
        paused = one.pause(sleeper)
        late = b"sent while it slept"
        peer.send(frame_of(prober.topic, batch_of(late), 3000))
        one.wait_led_by_others([prober.topic], sleeper, 15)
        moved_s = time.monotonic() - paused
        prober.until(one.leader(prober.topic), {OK})
        again_s = time.monotonic() - paused
        one.resume(sleeper)
        answer = prober.note(late, peer.frame())
    say("SIGSTOP of a leader", moved_s=moved_s, acknowledged_again_s=again_s, woken=answer.code)
    assert answer.code == NOT_LEADER_OR_FOLLOWER, answer
    assert prober.send(sleeper).code == NOT_LEADER_OR_FOLLOWER
    one.wait_in_sync(prober.topic)
    assert late not in [value for _, value in read_values(one, prober.topic)]


@pytest.mark.full
@pytest.mark.row("C2")
def test_two_of_three_killed_acks_all_is_refused_reads_go_on_and_all_is_there_when_they_are_back(
    one: Cluster, prober: Prober
) -> None:
    leader, followers = one.leader(prober.topic), one.followers(prober.topic)
    for _ in range(20):
        prober.send(leader)
    before = read_values(one, prober.topic)
    killed = min(one.kill(follower) for follower in followers)
    first = prober.send(leader)
    assert first.code != OK
    prober.until(leader, TOO_FEW)
    refused_s = time.monotonic() - killed
    assert read_values(one, prober.topic)[: len(before)] == before
    assert prober.send(leader).code in TOO_FEW
    one.start(*followers)
    prober.until(leader, {OK}, 30)
    say("two of three killed", refused_with_its_reason_s=refused_s)


@pytest.mark.row("C2")
def test_all_three_killed_at_once_keep_what_they_acknowledged(one: Cluster, prober: Prober) -> None:
    leader = one.leader(prober.topic)
    for _ in range(50):
        prober.send(leader)
    for node_id in one.brokers:
        one.kill(node_id)
    one.start()
    one.wait_in_sync(prober.topic)


@pytest.mark.full
@pytest.mark.row("C2")
def test_leader_that_lost_its_data_comes_back_empty_and_copies_everything(
    one: Cluster, prober: Prober
) -> None:
    """Its own session may still stand when it is back: no broker may take it for the one that had everything."""
    loser = one.leader(prober.topic)
    for _ in range(20):
        prober.send(loser)
    one.kill(loser)
    one.forget_data(loser)
    one.start(loser)
    one.wait_in_sync(prober.topic)
    before = read_values(one, prober.topic)
    for node_id in [node_id for node_id in one.brokers if node_id != loser]:
        assert one.brokers[node_id].stop() == 0
    one.wait(lambda: one.leader(prober.topic) == loser, "it leads")
    assert read_values(one, prober.topic) == before
    one.start(*(node_id for node_id in one.brokers if node_id != loser))


@pytest.mark.full
@pytest.mark.row("C1")
def test_topic_made_again_while_a_broker_was_away_has_nothing_of_the_old_one(
    one: Cluster, prober: Prober
) -> None:
    """The one that is away was the controller, so the client has to find another for what it asks next, too."""
    topic = f"again-{next(numbers)}"
    create_topic(one, topic)
    away = one.controller()
    old = Prober(one, topic)
    old.until(one.leader(topic), {OK})
    with blocking.connect(one.bootstrap_servers) as client:
        client.admin.describe_cluster()
        one.kill(away)
        client.admin.delete_topic(topic)
        one.wait(lambda: not one.places(topic), "the topic is gone")
        one.wait(
            lambda: away not in seen_by_any(one), "every broker knows that the one that was killed is gone"
        )
        client.admin.create_topic(topic, partitions=1, replication_factor=2)
    new = Prober(one, topic)
    new.until(one.leader(topic), {OK})
    one.start(away)
    one.wait(lambda: "orphaned_directory_removed" in one.brokers[away].text(), "nothing of it is left")
    create_topic(one, f"{topic}-too")  # it takes part again
    new.check()
    assert not {value for _, value in read_values(one, topic)} & {answer.value for answer in old.reported}


@pytest.mark.full
@pytest.mark.row("C1")
def test_second_broker_under_the_same_number_waits_reports_it_and_stops_when_asked(
    one: Cluster, tmp_path: Path
) -> None:
    second = ServedBroker(tmp_path / "second", http=False)
    second.arguments = one.brokers[1].arguments
    starting = threading.Thread(target=start_in_vain, args=(second,))
    starting.start()
    try:
        one.wait(
            lambda: second.output.exists() and "another session under this node id" in second.text(),
            "it says why it waits",
        )
        begin = time.monotonic()
        second.signal(signal.SIGTERM)
        one.wait(lambda: not second.running, "it has ended", 10)
        say("told to stop while it waits for its number", stopped_after_s=time.monotonic() - begin)
    finally:
        second.kill()
        starting.join()
    assert one.sessions() == {1, 2, 3}


def start_in_vain(broker: ServedBroker) -> None:
    with contextlib.suppress(AssertionError):
        broker.start()


@pytest.mark.row("P3", "C2")
def test_idempotent_batch_sent_again_to_the_next_leader_is_known_there(one: Cluster, prober: Prober) -> None:
    """The second leader knows the producer from the log alone; a batch after it is taken, one that leaves a gap not."""
    leader = one.leader(prober.topic)
    with RawPeer(one.brokers[leader].kafka_port) as peer:
        fields = {"transactional_id": None, "transaction_timeout_ms": 60_000}
        made = peer.call(ApiKey.INIT_PRODUCER_ID, 2, fields)
        ids = {"producer_id": made.producer_id, "producer_epoch": made.producer_epoch}
        batches = [
            batch_of(b"once", b"only", base_sequence=0, **ids),
            batch_of(b"next", base_sequence=2, **ids),
        ]
        gap = batch_of(b"too far", base_sequence=7, **ids)
        first = peer.produce(prober.topic, batches[0])
        assert first.error_code == OK
    one.kill(leader)
    one.wait_led_by_others([prober.topic], leader, 15)
    other = one.leader(prober.topic)

    def send(batch: bytes) -> produce.PartitionResult:
        with RawPeer(one.brokers[other].kafka_port) as peer:
            peer.send(frame_of(prober.topic, batch, 5000))
            frame = peer.frame()
            assert frame is not None
            return produce.decode_response(VERSION, frame).topics[0][2][0]

    again, after = (
        one.wait(lambda batch=batch: (answer := send(batch)).error_code == OK and answer, "it is answered")
        for batch in batches
    )
    assert again.base_offset == first.base_offset
    assert after.base_offset == first.base_offset + 2
    assert send(gap).error_code != OK
    one.start(leader)
    values = [value for _, value in read_values(one, prober.topic)]
    assert values.count(b"once") == values.count(b"only") == values.count(b"next") == 1
