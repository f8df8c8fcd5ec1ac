"""Fetch sessions in random histories: elections, cut connections, kills, late copies of requests, trims. In the end
each leader knows the positions of its followers, all have all records, and idle brokers exchange few requests."""

from __future__ import annotations

import contextlib
from collections import Counter
from random import Random
from typing import Any, Final

import pytest

from mansio.broker.replication.replica_fetcher import ReplicaFetcherSettings
from mansio.errors import MansioError
from mansio.state.replica import ReplicationProgress
from support.replicas import TOPIC, Cluster
from support.tiers import examples

PARTITIONS: Final = 5
STEPS: Final = 60
IDLE_MS: Final = 4000
IDLE_REQUESTS_MAX: Final = 14


class History:
    """A cluster of three brokers, to which something happens in each step."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        settings = ReplicaFetcherSettings(
            request_timeout_ms=800,
            backoff_ms_max=400,
            catch_up_bytes_per_second=random.choice([0, 0, 20_000]),
        )
        self.cluster = Cluster(3, seed=seed, partitions=PARTITIONS, follower_settings=settings)
        network = self.cluster.network
        network.late_copies = random.choice([0, 0.1])
        delays_ms = random.choice([[0.2, 0.5, 1, 1.5], [0.5, 0.5, 5, 40]])
        network.delay_ms = lambda: random.choice(delays_ms)

    def running(self) -> list[int]:
        return [node_id for node_id in self.cluster.node_ids if not self.cluster[node_id].scheduler.stopped]

    def leader(self, index: int) -> int | None:
        """The leader, if it runs."""
        leader = self.cluster.state(index).leader
        return leader if leader in self.running() else None

    def electable(self, index: int) -> list[int]:
        """The in-sync replicas that have a session."""
        return [node_id for node_id in self.cluster.state(index).isr if node_id in self.cluster.epochs]

    def run(self) -> None:
        steps = [self.append, self.elect, self.tell, self.cut, self.mend, self.kill, self.restart, self.trim]
        for _ in range(STEPS):
            (step,) = self.random.choices(steps, [35, 25, 10, 8, 10, 3, 5, 4])
            with contextlib.suppress(MansioError):
                step(self.random.randrange(PARTITIONS))
            self.cluster.run_for(self.random.choice([0.1, 1, 10, 100, 700]))

    def append(self, index: int) -> None:
        if (leader := self.leader(index)) is not None:
            self.cluster[leader].append(b"a" * self.random.choice([1, 50]), index=index)

    def elect(self, index: int) -> None:
        """Brokers learn of it at different times."""
        if candidates := [each for each in self.electable(index) if each in self.running()]:
            self.cluster.elect(self.random.choice(candidates), index=index)
            self.cluster.tell(*[each for each in self.running() if self.random.random() < 0.8])

    def tell(self, _index: int) -> None:
        self.cluster.tell(*self.running())

    def cut(self, _index: int) -> None:
        sender, receiver = self.random.sample(self.cluster.node_ids, 2)
        self.cluster.network.cut.add((sender, receiver))

    def mend(self, _index: int) -> None:
        self.cluster.network.cut.clear()

    def kill(self, _index: int) -> None:
        cluster, running = self.cluster, self.running()
        if len(running) < 3:
            return
        killed = self.random.choice(running)
        cluster.kill(killed, power=self.random.random() < 0.5)
        if killed in cluster.epochs:
            cluster.end_session(killed)
        cluster.run_for(self.random.choice([1, 300]))
        for index in range(PARTITIONS):
            if cluster.state(index).leader == killed and self.electable(index):
                cluster.elect(self.random.choice(self.electable(index)), index=index)
        self.tell(0)

    def restart(self, _index: int) -> None:
        for node_id in self.cluster.node_ids:
            if node_id not in self.running():
                self.cluster.restart(node_id)

    def trim(self, index: int) -> None:
        if (leader := self.leader(index)) is not None:
            partition = self.cluster[leader].partitions[TOPIC.bytes, index]
            partition.trim(self.random.randint(partition.start_offset, partition.high_watermark))

    def end(self) -> None:
        """Repair everything, and wait until all replicas are in sync."""
        cluster, network = self.cluster, self.cluster.network
        network.cut.clear()
        network.late_copies = 0
        network.delay_ms = lambda: 0.5
        self.restart(0)
        for index in range(PARTITIONS):
            state = cluster.state(index)
            if cluster.epochs.get(state.leader) != state.leader_broker_epoch:
                cluster.elect(self.electable(index)[0], index=index)
        cluster.tell()
        cluster.run_for(100)
        cluster.tell()
        everywhere = range(PARTITIONS)
        cluster.run_until(lambda: all(len(cluster.state(index).isr) == 3 for index in everywhere))
        cluster.run_for(6000)

    def check(self) -> None:
        sent: Counter[tuple[int, int]] = Counter()
        self.cluster.network.spy = lambda sender, receiver, _frame: sent.update([(sender, receiver)])
        self.cluster.run_for(IDLE_MS)
        assert max(sent.values()) <= IDLE_REQUESTS_MAX
        for index in range(PARTITIONS):
            self.check_partition(index)
        for node_id in self.cluster.node_ids:
            for (leader, _), fetcher in self.cluster[node_id].fetcher_manager._fetchers.items():
                self.check_session(leader, fetcher._session)

    def check_partition(self, index: int) -> None:
        led = self.cluster[self.cluster.state(index).leader].partitions[TOPIC.bytes, index]
        for node_id in self.cluster.node_ids:
            partition = self.cluster[node_id].partitions[TOPIC.bytes, index]
            assert partition.end_offset == partition.high_watermark == led.end_offset
            assert partition.start_offset >= led.start_offset
        assert isinstance(led.replica, ReplicationProgress)
        ends = {follower.durable_end for follower in led.replica.followers().values()}
        assert ends == {led.end_offset}, "the leader knows what its followers have"

    def check_session(self, leader: int, session: Any) -> None:
        if not session:
            return  # it had partitions, and ended
        (led,) = (
            one
            for one in self.cluster[leader].service.fetch.sessions
            if one.session_id == session._session_id
        )
        assert positions(led.partitions) == positions(session._positions)
        assert not led.changed


def positions(known: dict[Any, Any]) -> dict[Any, tuple[int, int, int]]:
    return {
        key: (one.fetch_offset, one.current_leader_epoch, one.log_start_offset) for key, one in known.items()
    }


def test_leaders_know_the_positions_of_followers_after_any_history() -> None:
    for seed in range(examples(12, 150)):
        history = History(seed)
        try:
            history.run()
            history.end()
            history.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def requests(cluster: Cluster, within_ms: int) -> Counter[tuple[int, int]]:
    """The requests that brokers send within a time, by sender and receiver."""
    sent: Counter[tuple[int, int]] = Counter()
    cluster.network.spy = lambda sender, receiver, _frame: sent.update([(sender, receiver)])
    cluster.run_for(within_ms)
    return sent


@pytest.mark.parametrize("delay_ms", [0.5, 20.0])
def test_a_partition_that_is_given_up_while_a_session_is_opened_leaves_it(delay_ms: float) -> None:
    cluster = Cluster(2, partitions=4)
    cluster.network.delay_ms = lambda: delay_ms
    cluster.run_for(30)
    cluster.elect(2, index=1)
    cluster.tell()
    cluster.run_for(1200)
    cluster.network.delay_ms = lambda: 0.5
    assert max(requests(cluster, 3000).values()) <= 8
    (session,) = cluster[1].service.fetch.sessions
    assert len(session) == 3


def test_a_hung_follower_of_an_idle_partition_leaves_the_in_sync_set_of_a_new_leader() -> None:
    cluster = Cluster(3)
    cluster.run_for(100)
    ack = cluster[1].append(b"a")
    cluster.run_until(lambda: ack.settled)
    cluster.run_for(1500)
    cluster.network.isolate(3)  # its session lives
    cluster.elect(2)
    cluster.tell()
    cluster.run_until(lambda: cluster.state().isr == (1, 2))


def test_partitions_that_fail_are_queued_once_each() -> None:
    """Also for a leader without sessions, to which each request names all partitions."""
    cluster = Cluster(2, partitions=21)
    cluster[1].service.fetch.sessions.slots_max = 0
    cluster.run_for(500)
    for index in range(1, 21):
        del cluster[1].partitions[TOPIC.bytes, index]
    cluster.run_for(5000)
    for _ in range(100):
        cluster[1].append(b"a")
        cluster.run_for(2)
    assert len(cluster[2].fetcher_manager._fetchers[1, False]._delayed) == 20


def test_a_leader_that_leads_nothing_any_more_has_no_sessions() -> None:
    cluster = Cluster(2, partitions=20)
    cluster.run_for(1200)
    for leader in (2, 1, 2):
        for index in range(20):
            cluster.elect(leader, index=index)
        cluster.tell()
        cluster.run_for(2000)
        former = cluster[3 - leader].service.fetch.sessions
        assert len(former) == 0
        assert former.eviction_count == 0
