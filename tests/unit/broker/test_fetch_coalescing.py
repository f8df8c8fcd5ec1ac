"""Fetch coalescing: the response to a follower waits for pending batches of producers, and never longer than its
limit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from mansio.broker.replication.fetch_coalescing import (
    FRUITLESS_WAITS_MAX,
    FULL_RESPONSE_BYTES,
    WAIT_MS_MAX,
    FetchCoalescer,
)
from mansio.wire.batch.record_batch import build_batch
from support.replicas import Cluster

if TYPE_CHECKING:
    import pytest

    from mansio.errors import MansioError

WINDOW = 8
BATCHES = 160
AWAY_MS = 0.3
"""From an answer to the producer's next request."""
TRAVEL_MS = 0.2
SYNC_MS = 0.6


def running() -> tuple[Cluster, list[int]]:
    """Three brokers, and who of them asks broker 1 for more from now on."""
    cluster = Cluster()
    cluster.network.delay_ms = lambda: TRAVEL_MS
    for node_id in (1, 2, 3):
        cluster[node_id].background._latency_ms = lambda: SYNC_MS
    cluster.run_for(1000)
    asked: list[int] = []
    cluster.network.spy = lambda node_id, _, __: asked.append(node_id)
    return cluster, asked


class Producer:
    """Sends batches to broker 1, which keeps count of those that wait as it does for the handler of Produce."""

    def __init__(self, cluster: Cluster, *, again: bool) -> None:
        """`again`: each answer has it send the next one."""
        self.node = cluster[1]
        self.again = again
        self.left = BATCHES
        self.waited_ms: list[float] = []

    def send(self) -> None:
        if not self.left:
            return
        self.left -= 1
        node = self.node
        pending: dict[Any, None] = node.service.produce.pending
        began_s = node.clock.monotonic()
        place = object()

        def complete(error: MansioError | None) -> None:
            assert error is None
            del pending[place]
            self.waited_ms.append((node.clock.monotonic() - began_s) * 1000)
            if self.again:
                node.scheduler.call_later(AWAY_MS, self.send)

        end = node.partition.append(build_batch([(0, None, b"x", ())])).end_offset
        pending[place] = None
        assert not node.partition.when_committed(end, complete)


def test_a_producers_whole_window_is_one_round_of_each_follower() -> None:
    cluster, asked = running()
    producer = Producer(cluster, again=True)
    for number in range(WINDOW):  # not in one turn of the loop
        cluster[1].scheduler.call_later(number * 0.05, producer.send)
    cluster.run_until(lambda: len(producer.waited_ms) == BATCHES, 60_000)
    for follower in (2, 3):
        assert asked.count(follower) < 1.2 * BATCHES / WINDOW, "rounds that were not full"


def test_who_sends_when_it_likes_waits_little_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited_ms() -> list[float]:
        cluster, _ = running()
        producer = Producer(cluster, again=False)
        gaps, at_ms = random.Random(1), 0.0
        for _ in range(BATCHES):
            at_ms += gaps.expovariate(1 / 0.5)
            cluster[1].scheduler.call_later(at_ms, producer.send)
        cluster.run_until(lambda: len(producer.waited_ms) == BATCHES, 60_000)
        return producer.waited_ms

    tried = waited_ms()
    monkeypatch.setattr(FetchCoalescer, "should_wait", lambda *_: False)
    usual = waited_ms()
    assert max(tried) <= max(usual) + 2 * WAIT_MS_MAX + 0.1, (
        "its own round's wait, and that of the round before"
    )
    assert sum(tried) <= 1.25 * sum(usual)


def test_one_batch_at_a_time_is_never_held_back() -> None:
    cluster, _ = running()
    producer = Producer(cluster, again=True)
    producer.send()
    cluster.run_until(lambda: len(producer.waited_ms) == BATCHES, 60_000)
    assert max(producer.waited_ms) < 2 * TRAVEL_MS + SYNC_MS + 0.1


def test_waits_in_vain_become_rare_and_a_full_round_brings_them_back() -> None:
    pending = dict.fromkeys(range(4))
    fetch_coalescer = FetchCoalescer(pending)
    assert not fetch_coalescer.should_wait(1), "nobody was answered yet"

    def in_vain() -> int:
        """How many answers leave at once before the next one waits, in vain."""
        at_once = next(count for count in range(100) if fetch_coalescer.should_wait(1))
        fetch_coalescer.record_wait()
        return at_once

    del pending[0], pending[1]
    fetch_coalescer.record_follower_fetch(4)
    assert not fetch_coalescer.should_wait(FULL_RESPONSE_BYTES)
    assert [in_vain() for _ in range(FRUITLESS_WAITS_MAX + 2)] == [0, 1, 3, 7, 15, 31, 31]
    pending |= {0: None, 1: None}
    assert fetch_coalescer.is_full
    assert not fetch_coalescer.should_wait(1)
    for _ in range(FRUITLESS_WAITS_MAX):
        fetch_coalescer.record_wait()
    pending.clear()
    assert any(fetch_coalescer.should_wait(1) for _ in range(100))
    assert fetch_coalescer.should_wait(1)
    fetch_coalescer.record_follower_fetch(0)
    assert not fetch_coalescer.should_wait(1), "there is no producer any more"


def test_the_leader_syncs_with_its_followers_and_without_them_soon() -> None:
    """One sync of each replica for a round, the leader's as well; where no follower asks, within the interval of syncs
    that nobody waits for."""
    cluster, asked = running()
    leader = cluster[1]
    before = leader.bench.group_commit.sync_count
    producer = Producer(cluster, again=True)
    for number in range(WINDOW):  # not in one turn of the loop
        leader.scheduler.call_later(number * 0.05, producer.send)
    cluster.run_until(lambda: len(producer.waited_ms) == BATCHES, 60_000)
    assert leader.bench.group_commit.sync_count - before < 1.2 * asked.count(2)
    for node_id in (2, 3):
        cluster.network.isolate(node_id)
    cluster.run_for(1000)
    end = leader.append(b"alone").offset + 1
    cluster.run_until(lambda: leader.log.durable_end_offset == end, 120)
