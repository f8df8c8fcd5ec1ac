"""Planner and controller with many partitions: what elections, moves and their plans cost, without logs and sockets.

    python -m bench.many_partitions [--partitions N] [--brokers N] [--topic-partitions N] [--profile STEP]

One broker runs the shipped metadata image, topic service and controller on virtual time, over a metadata store in
memory. The others are sessions. In place of the leaders, `Leaders` writes what they write: one transaction for each
replica that has caught up. The steps: topics are created, a broker is lost, it returns, leaderships return to it, three
brokers are added and get their share, a broker is drained.

Printed are, for each step, the transactions, the bytes of their keys and values, the partitions that the controller
looked at, the processor time of everything, and the longest callback of the event loop, in processor time. The numbers
do not depend on the machine; the times do.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from bench.interpreter import interpreter
from mansio.broker.services.reassignments import REASSIGNMENTS_MAX
from mansio.broker.topics.topics import NewTopic, TopicService
from mansio.config.settings import Settings
from mansio.metadata.cluster_view import PartitionChange
from mansio.metadata.controller.controller import Controller
from mansio.metadata.feature_level import SUPPORTED
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import Compare, Delete, Put, encode
from mansio.metadata.model import BROKER_ACTIVE, BrokerEndpoint, registration_document, session_document
from mansio.metadata.move_planner import (
    Drain,
    PlannedBroker,
    PlannedPartition,
    Rebalance,
    plan_moves,
    startable_moves,
)
from mansio.metadata.reassignment import Reassignment
from mansio.metadata.session import Session
from mansio.metadata.transactions import commit_changes
from mansio.testing.metadata import InMemoryStore, InMemoryStoreClient
from mansio.testing.scheduler import SimulatedClock, SimulatedRandom, Simulation
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence

    from mansio.metadata.metadata_store import TransactionResult
    from mansio.metadata.model import BrokerChange, PartitionState, Topic, TopicChange
    from mansio.metadata.move_planner import Goal, Move

CLUSTER_ID: Final = "many-partitions"
CONTROLLER: Final = 1
REPLICATION_FACTOR: Final = 3
RACKS: Final = 5
TTL_S: Final = 6.0
LEASE_S: Final = 1e9
COPY_MS: Final = 100.0
"""Time after which the first of the replicas that begin to copy has caught up."""
COPY_STEP_MS: Final = 10.0
"""The next ones follow one by one, so that each is an event of its own; those of one broker do so in reality, too."""
COPY_STEPS: Final = 200
POLL_MS: Final = 500.0
"""Time between two looks at the moves, as of `mansio cluster rebalance`."""
BALANCE_INTERVAL_MS: Final = 60_000
STEP_MS_MAX: Final = 3_600_000.0
TRANSACTIONS_PER_REPLICA_MAX: Final = 1.1
CREATED_BYTES_MAX: Final = 300
CHANGED_BYTES_MAX: Final = 1000
"""Bytes of keys and values for a replica that is added, or a leader that moves, with those of its move."""
EXAMINED_PER_CHANGE_MAX: Final = 6


@dataclass
class Costs:
    """What one step cost. `added`: replicas that came into the in-sync sets; `moved`: leaders that changed."""

    step: str
    transactions: int = 0
    conflicts: int = 0
    bytes_written: int = 0
    examined: int = 0
    registrations: int = 0
    """Sessions that began or ended."""
    added: int = 0
    moved: int = 0
    processor_s: float = 0.0
    plan_s: float = 0.0
    longest_s: float = 0.0
    longest_calls: int = 0
    """Calls of functions in the longest callback; counted on request, because that takes much time."""
    virtual_s: float = 0.0

    @property
    def transactions_max(self) -> float:
        """The transactions that the step may need."""
        return TRANSACTIONS_PER_REPLICA_MAX * self.added + self.moved


class CountingClient(InMemoryStoreClient):
    """Client that counts transactions, and the bytes that they write."""

    costs = Costs("")

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        done = await super().transact(compares, operations)
        costs = self.costs
        costs.transactions += 1
        costs.conflicts += not done.succeeded
        if done.succeeded:
            for operation in operations:
                costs.bytes_written += len(operation.key)
                if isinstance(operation, Put):
                    costs.bytes_written += len(operation.value)
        return done


class Leaders:
    """Adds replicas to in-sync sets when they have caught up, as the leader of each partition does."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._copying: set[tuple[str, int]] = set()
        cluster.state.on_change(self._handle_topic_change)
        cluster.state.on_broker_change(self._handle_broker_change)

    def _handle_topic_change(self, change: TopicChange) -> None:
        if change.before is None or change.after is None:
            return
        costs = self._cluster.client.costs
        for index in change.changed_partitions():
            before, after = change.before.partitions[index], change.after.partitions[index]
            costs.moved += before.leader != after.leader
            costs.added += len({*after.isr} - {*before.isr})
            self._copy(change.after, index)

    def _handle_broker_change(self, change: BrokerChange) -> None:
        if change.before is None and change.after is not None:
            for topic in self._cluster.state.topics.values():
                for index, partition in enumerate(topic.partitions):
                    if change.node_id in partition.replicas:
                        self._copy(topic, index)

    def _missing(self, partition: PartitionState) -> list[int]:
        brokers = self._cluster.state.brokers
        if partition.leader not in brokers:
            return []
        return [node for node in partition.replicas if node not in partition.isr and node in brokers]

    def _copy(self, topic: Topic, index: int) -> None:
        place = (topic.name, index)
        if place not in self._copying and self._missing(topic.partitions[index]):
            delay_ms = COPY_MS + COPY_STEP_MS * (len(self._copying) % COPY_STEPS)
            self._copying.add(place)
            self._cluster.scheduler.call_later(delay_ms, self._caught_up, place)

    def _caught_up(self, place: tuple[str, int]) -> None:
        self._cluster.scheduler.spawn(self._add(place), name="add a replica")

    async def _add(self, place: tuple[str, int]) -> None:
        cluster, (name, index) = self._cluster, place
        self._copying.discard(place)
        topic = cluster.state.topics[name]
        before = topic.partitions[index]
        missing = self._missing(before)
        if not missing:
            return
        node_id = missing[0]
        after = before._replace(isr=(*before.isr, node_id), partition_epoch=before.partition_epoch + 1)
        sessions = {node_id: cluster.state.epoch_of(node_id)}
        change = PartitionChange(topic.topic_id, index, before, after, "", sessions)
        keys = cluster.state.keys
        guard = Compare(keys.session(before.leader), create_revision=before.leader_broker_epoch)
        await commit_changes(cluster.client, keys, [change], guard, cluster.random)


@dataclass
class SimulatedCluster:
    """Brokers as sessions, one of them with a controller. `counts_calls`: see `Costs.longest_calls`."""

    brokers: int
    counts_calls: bool = False
    leases: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.simulation = Simulation()
        self.scheduler = self.simulation.scheduler("controller")
        self.clock = SimulatedClock(self.simulation)
        self.random = SimulatedRandom(self.simulation)
        self.store = InMemoryStore(self.clock, self.scheduler, events_kept=100_000)
        self.client = CountingClient(self.store, self.scheduler)
        self.session = Session(0, LEASE_S, self.clock.monotonic())

    async def _load(self) -> MetadataImage:
        return await MetadataImage.load(self.client, CLUSTER_ID, self.random, has_feature_level=True)

    def start(self) -> None:
        """Register the brokers, start the controller, and wait until it is elected."""
        self.state = self.simulation.run(self._load())
        self.state.start(self.client, self.scheduler, shared=True)
        self.controller = Controller(
            store=self.client,
            state=self.state,
            scheduler=self.scheduler,
            clock=self.clock,
            random=self.random,
            node_id=CONTROLLER,
            session=lambda: self.session,
            ttl_s=TTL_S,
            balance_interval_ms=BALANCE_INTERVAL_MS,
        )
        self.topics = TopicService(
            store=self.client,
            state=self.state,
            settings=Settings(
                node_id=CONTROLLER, etcd_endpoints="http://127.0.0.1:2379", partitions_max=10_000_000
            ),
            scheduler=self.scheduler,
            random=self.random,
            open_partitions=_do_nothing,
            close_partitions=_do_nothing,
            broker_epoch=lambda: self.session.epoch,
        )
        for node_id in range(1, self.brokers + 1):
            self.register(node_id)
        self.session.epoch = self.state.epoch_of(CONTROLLER)
        self.controller.start()
        self.simulation.run_until(lambda: self.controller.is_active)
        self.simulation.run_for(3000 * TTL_S)
        Leaders(self)

    def register(self, node_id: int) -> None:
        """Give a broker a session, and an active registration."""
        self.client.costs.registrations += 1
        rack = f"rack-{node_id % RACKS}"
        endpoint = BrokerEndpoint(node_id, f"broker-{node_id}", 9092, rack)
        lease = self.leases[node_id] = self.store.grant(LEASE_S)
        session = encode({**session_document({"PLAINTEXT": endpoint}, "PLAINTEXT", rack), "run": "1"}, "")
        active = encode(registration_document(BROKER_ACTIVE, SUPPORTED), "")
        keys = self.state.keys
        puts = [Put(keys.session(node_id), session, lease), Put(keys.registration(node_id), active)]
        assert self.store.transact([], puts).succeeded
        self.simulation.run_until(lambda: self.state.may_lead(node_id))

    def lose(self, node_id: int) -> None:
        """End the session of a broker."""
        self.client.costs.registrations += 1
        self.store.end_lease(self.leases.pop(node_id))

    def partitions(self) -> Iterable[PartitionState]:
        """All partitions."""
        for topic in self.state.topics.values():
            yield from topic.partitions

    def replicas_of(self, node_id: int) -> int:
        """Number of replicas of a broker."""
        return sum(node_id in partition.replicas for partition in self.partitions())

    def measure(
        self, step: str, begin: Callable[[], object], is_done: Callable[[], bool], *, look_ms: float = 1000
    ) -> Costs:
        """Execute a step, until `is_done`, which is called after each `look_ms` of virtual time. What it does itself is
        not measured."""
        costs = self.client.costs = Costs(step)
        examined, began_ms = self.controller.examined, self.simulation.now_ms
        begin()
        end_ms = began_ms + STEP_MS_MAX
        while True:
            self._run(costs, self.simulation.now_ms + look_ms)
            costs.virtual_s = (self.simulation.now_ms - began_ms) / 1000
            costs.examined = self.controller.examined - examined
            if is_done():
                return costs
            assert self.simulation.now_ms < end_ms, f"{step} does not end"

    def _run(self, costs: Costs, end_ms: float) -> None:
        step, now = self.simulation.step, time.thread_time
        more = True
        while more:
            calls = CallCounter() if self.counts_calls else None
            began = now()
            if calls is None:
                more = step(end_ms)
            else:
                with calls:
                    more = step(end_ms)
                costs.longest_calls = max(costs.longest_calls, calls.count)
            took = now() - began
            costs.processor_s += took
            costs.longest_s = max(costs.longest_s, took)
        self.simulation.now_ms = end_ms

    # The steps

    def create(self, topics: int, partitions: int) -> Costs:
        """Create topics, one after the other."""

        async def work() -> None:
            for number in range(topics):
                await self.topics.create(NewTopic(f"topic-{number:05}", partitions, REPLICATION_FACTOR))

        return self.measure("create", lambda: self._spawn(work()), lambda: len(self.state.topics) == topics)

    def lose_broker(self, node_id: int) -> Costs:
        """A broker is lost: others lead, and no in-sync set contains it."""
        return self.measure(
            f"lose broker {node_id}",
            lambda: self.lose(node_id),
            lambda: all(node_id not in one.isr and one.leader != node_id for one in self.partitions()),
        )

    def return_broker(self, node_id: int) -> Costs:
        """It returns, and its replicas get in sync."""
        return self.measure(
            f"return of {node_id}",
            lambda: self.register(node_id),
            lambda: all(len(one.isr) == len(one.replicas) for one in self.partitions()),
        )

    def balance(self) -> Costs:
        """Leaderships return to the preferred leaders."""
        return self.measure(
            "preferred leaders",
            lambda: None,
            lambda: all(one.leader == one.replicas[0] for one in self.partitions()),
        )

    def rest(self) -> Costs:
        """Two minutes without any change."""
        end_ms = self.simulation.now_ms + 120_000
        return self.measure("no change", lambda: None, lambda: self.simulation.now_ms >= end_ms)

    def move(self, step: str, goal: Goal) -> Costs:
        """Plan moves and execute them, as many at a time as the commands do."""
        began = time.thread_time()
        moves = self.plan(goal)
        plan_s = time.thread_time() - began
        pending = list(moves)
        running: list[Move] = []

        def begin() -> None:
            nonlocal pending
            starting = startable_moves(pending, running)
            begun = {(move.topic, move.partition) for move in starting}
            pending = [move for move in pending if (move.topic, move.partition) not in begun]
            running.extend(starting)
            for first in range(0, len(starting), REASSIGNMENTS_MAX):
                self._spawn(self._begin(starting[first : first + REASSIGNMENTS_MAX]))

        def is_done() -> bool:
            # One that has not begun yet has its former replicas.
            running[:] = [move for move in running if self._state_of(move).replicas != move.after]
            begin()
            return not running

        costs = self.measure(step, begin, is_done, look_ms=POLL_MS)
        costs.plan_s = plan_s
        assert all(self._state_of(move).replicas == move.after for move in moves)
        assert not self.plan(goal), "a plan for the outcome of a plan is empty"
        return costs

    async def _begin(self, moves: Sequence[Move]) -> None:
        wanted = [Reassignment(move.topic, move.partition, move.after) for move in moves]
        errors = await self.controller.reassign(wanted, may_change_factor=False)
        assert not any(errors), errors

    def plan(self, goal: Goal) -> list[Move]:
        """Plan moves; all replicas have about the same size."""
        brokers = [
            PlannedBroker(node_id, broker.rack) for node_id, broker in sorted(self.state.brokers.items())
        ]
        partitions = [
            PlannedPartition(topic.name, index, one.replicas, 1_000_000 + 1000 * (index % 100), one.leader)
            for topic in self.state.topics.values()
            for index, one in enumerate(topic.partitions)
        ]
        return plan_moves(brokers, partitions, goal)

    def _state_of(self, move: Move) -> PartitionState:
        return self.state.topics[move.topic].partitions[move.partition]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.scheduler.spawn(work, name="step")


class CallCounter:
    """Counts the calls of functions, also of those written in C, in a `with` block."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, _frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            self.count += 1


async def _do_nothing(topic: Topic) -> None:
    del topic


def steps_of(cluster: SimulatedCluster, topics: int, partitions: int) -> Iterator[Callable[[], Costs]]:
    """Yield the steps, to be executed in this order, for so many topics with so many partitions each."""
    first_new = cluster.brokers + 1
    yield lambda: cluster.create(topics, partitions)
    yield cluster.rest
    yield lambda: cluster.lose_broker(2)
    yield lambda: cluster.return_broker(2)
    yield cluster.balance

    def add() -> Costs:
        for node_id in range(first_new, first_new + 3):
            cluster.register(node_id)
        cluster.simulation.run_for(1000)
        return cluster.move("add 3 brokers", Rebalance())

    yield add
    yield lambda: cluster.move("drain broker 3", Drain(3))


def check_costs(costs: Costs, partitions: int) -> None:
    """Raise `AssertionError` if a step has cost more than it may in a cluster with so many partitions."""
    changes = costs.added + costs.moved
    if costs.step == "create":
        assert costs.transactions <= 0.02 * partitions + 10, costs
        assert costs.bytes_written <= CREATED_BYTES_MAX * partitions, costs
    else:
        assert costs.transactions <= costs.transactions_max + 5, costs
        assert costs.bytes_written <= CHANGED_BYTES_MAX * (changes + 10), costs
    # All partitions when something about the brokers changes, and each minute; those that change a few times.
    scans = 2 * costs.registrations + costs.virtual_s * 1000 / BALANCE_INTERVAL_MS + 2
    assert costs.examined <= scans * partitions + EXAMINED_PER_CHANGE_MAX * changes, costs


def show(costs: Costs) -> str:
    return (
        f"{costs.step:18}{costs.added:8,}{costs.moved:8,}{costs.transactions:9,}{costs.conflicts:6,}"
        f"{costs.bytes_written / 1e6:9.2f}{costs.examined:12,}{costs.plan_s:8.2f}{costs.processor_s:9.2f}"
        f"{costs.longest_s * 1000:9.1f}{costs.virtual_s:9.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--partitions", type=int, default=100_000)
    parser.add_argument("--brokers", type=int, default=50)
    parser.add_argument("--topic-partitions", type=int, default=100, help="partitions of each topic")
    parser.add_argument("--profile", default="", help="profile the steps whose name contains this")
    chosen = parser.parse_args()
    cluster = SimulatedCluster(chosen.brokers)
    cluster.start()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as `mansio serve`
    print(
        f"Mansio {__version__}, {chosen.partitions:,} partitions of {chosen.topic_partitions}, "
        f"{chosen.brokers} brokers, Python {interpreter()}"
    )
    print(f"{'':18}{'added':>8}{'moved':>8}{'trans.':>9}{'confl.':>6}{'MB':>9}{'examined':>12}", end="")
    print(f"{'plan s':>8}{'proc. s':>9}{'longest':>9}{'virtual s':>9}", flush=True)
    for step in steps_of(cluster, chosen.partitions // chosen.topic_partitions, chosen.topic_partitions):
        profile = cProfile.Profile(time.thread_time) if chosen.profile else None
        if profile is not None:
            profile.enable()
        costs = step()
        if profile is not None:
            profile.disable()
        print(show(costs), flush=True)
        if profile is not None and chosen.profile in costs.step:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
