"""One simulated cluster and its history, drawn from one seed.

A history: the brokers start on empty disks and a topic is made; for a while clients write and read while faults are
drawn; then everything heals, and within a minute every partition must have a leader and all its replicas in sync, every
client must get through, and all replicas must be the same.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.topics.topics import NewTopic
from mansio.errors import MansioError, TopicAlreadyExists
from mansio.metadata.metadata_store import decode
from mansio.node.broker_runtime import NO_LIMITS, FileLimits
from mansio.testing.disk import CAPACITY_BYTES, SimulatedDisk
from mansio.testing.metadata import InMemoryStore
from mansio.testing.scheduler import WALL_START_MS, SimulatedClock, Simulation, Task, close_unstarted
from sim import delivery, fairness, moves, priorities, workload_clients
from sim.admin import Administrator
from sim.brokers import DriftingClock, SimulatedBroker, SingleNode
from sim.checker import Checker
from sim.clients import TOPIC, Committer, Producer, Reader
from sim.consumer_members import FIRST_SEED, NextMember
from sim.etcd import EtcdModel, SimulatedEtcdClient
from sim.faults import DOWN_MS_MAX, FAULTS
from sim.feature import SINGLE_FAULTS
from sim.features import feature_of
from sim.hand_over import END_SEED as END_HAND_OVER_SEED
from sim.hand_over import FIRST_SEED as FIRST_HAND_OVER_SEED
from sim.hand_over import HAND_OVER_FAULTS, EarlyEnds
from sim.members import GroupChecker, Member
from sim.more_faults import More
from sim.network import Network

if TYPE_CHECKING:
    from collections.abc import Callable

PARTITIONS: Final = 2
READY_MS_MAX: Final = 30_000
FAULTS_MS: Final = 20_000
FAULT_EVERY_MS: Final = (400, 800, 1500, 3000)
"""A history has one of these paces: dense faults meet each other, sparse ones meet much that was acknowledged."""
HAND_OVER_FAULTS_MS: Final = 35_000
HAND_OVER_FAULT_EVERY_MS_MIN: Final = 2500
"""Only sessions that have lasted for the time of a lease end early."""
HEALED_MS_MAX: Final = 60_000
CONFIGS: Final = {"min.insync.replicas": "2", "segment.bytes": "16384", "index.interval.bytes": "512"}


class Stalled(AssertionError):
    """It did not go on within a minute of everything being well again."""


class World:
    """See the module. Make it, `run` it."""

    def __init__(
        self,
        seed: int,
        *,
        faults_ms: float | None = None,
        only: str = "",
        more: bool = False,
        has_moves: bool = False,
        hand_over: bool = False,
        limits: FileLimits = NO_LIMITS,
        disk_ms: tuple[float, float] | None = None,
    ) -> None:
        """`faults_ms`: for how long faults are drawn, None for the usual time.

        `only`: draw no other fault than this. `more`: with the clients of `sim.more_faults`, too. `has_moves`: with
        partitions that are moved (`sim.moves`). `hand_over`: with early hand-overs, and the faults of `sim.hand_over`,
        too, as histories of its seeds are. `limits`: of each broker. `disk_ms`: for how long a job on a disk takes,
        None for what the seed says."""
        self.seed = seed
        self.limits = limits
        self.hand_over = hand_over = hand_over or FIRST_HAND_OVER_SEED <= seed < END_HAND_OVER_SEED
        self.wants_more = more
        self.more: More | None = None
        self.mover: moves.Mover | None = None
        self.delivery: delivery.Delivery | None = None
        self.settings: dict[str, int] = {}
        """Of brokers, beside those of all histories."""
        self.feature = feature_of(seed)
        """The feature that this history is of, if it is of only one."""
        if self.feature is not None:
            self.settings = dict(self.feature.settings)
        elif seed >= delivery.FIRST_SEED:
            self.settings = {
                "share_coordinator_state_topic_num_partitions": delivery.STATE_PARTITIONS,
                "share_coordinator_snapshot_update_records_per_snapshot": 30,
                "share_coordinator_state_topic_prune_interval_ms": 3000,
            }
        if hand_over:
            self.settings["broker_hand_over_enable"] = True
        self.only = only
        if faults_ms is None and self.feature is not None:
            faults_ms = self.feature.faults_ms
        if faults_ms is None and hand_over:
            faults_ms = HAND_OVER_FAULTS_MS
        self.faults_ms = FAULTS_MS if faults_ms is None else faults_ms
        self.simulation = Simulation(seed)
        self.random = self.simulation.random
        self.network = Network(self.simulation)
        self.checker = Checker()
        self.etcd_scheduler = self.simulation.scheduler("etcd")
        self.etcd = EtcdModel(self.simulation, SimulatedClock(self.simulation), self.etcd_scheduler)
        self.driver = self.simulation.scheduler("driver")
        self.node_ids = tuple(range(1, self.random.choice((3, 3, 4, 5)) + 1))
        self.is_single_node = self.feature is not None and self.feature.is_single_node(seed)
        if self.feature is not None and self.feature.single_every:
            self.node_ids = (1,) if self.is_single_node else (1, 2, 3)
        if has_moves:
            assert not self.is_single_node, "a single node moves no partitions"
            self.node_ids = tuple(range(1, max(moves.NODES_MIN, len(self.node_ids)) + 1))
        self.has_moves = has_moves
        self.metadata = InMemoryStore(SimulatedClock(self.simulation), self.etcd_scheduler)
        """What a single node has instead of etcd."""
        self.clocks = {
            node_id: DriftingClock(
                self.simulation,
                rate=self.random.uniform(0.97, 1.03),
                wall_offset_ms=self.random.choice((0, 0, -5000, 60_000)),
            )
            for node_id in self.node_ids
        }
        self.pace_ms = self.random.choice(FAULT_EVERY_MS)
        if self.feature is not None and self.feature.fault_every_ms_max is not None:
            self.pace_ms = min(self.pace_ms, self.feature.fault_every_ms_max)
        if hand_over:
            self.pace_ms = max(self.pace_ms, HAND_OVER_FAULT_EVERY_MS_MIN)
        self.lives: list[SimulatedBroker] = []
        self.early_ends = EarlyEnds(self) if hand_over else None
        if self.early_ends is not None:
            self.etcd.on_early_end = self.early_ends.ended
        self.no_etcd: set[int] = set()
        self.faults: dict[str, int] = {}
        self.disk_ms = disk_ms or delivery.disk_ms_of(seed)
        self.shares_of_faults = delivery.shares_of_faults(seed)
        if self.feature is not None:
            self.shares_of_faults = dict(
                SINGLE_FAULTS if self.is_single_node else self.feature.cluster_faults
            )
        self.event_log: list[str] = []
        self.writes_end = self.over = False
        self.clients: list[Any] = []
        self.producers: list[Producer] = []
        self.readers: list[Any] = []
        self.scene = None if self.feature is None else self.feature.scene(self)
        """The clients and the judge of a history of one feature."""
        self.healed_ms = self.recovered_ms = 0.0
        self.healed_ms_max = HEALED_MS_MAX * (2 if delivery.has_fairness(seed) else 1)
        """With fairness, there are backlogs to be delivered."""

    # The parts

    def brokers(self) -> list[SimulatedBroker]:
        """The newest life of each."""
        return [self.network.brokers[node_id] for node_id in self.node_ids]

    def start(self, node_id: int, disk: SimulatedDisk) -> None:
        life = sum(broker.node_id == node_id for broker in self.lives)
        kind = SingleNode if self.is_single_node else SimulatedBroker
        self.lives.append(kind(self, node_id, disk, life))

    def set_up_etcd_client(self, node_id: int, etcd_client: SimulatedEtcdClient) -> None:
        """A new life comes into the world as it is."""
        etcd_client.unreachable = node_id in self.no_etcd

    def wall_ms(self) -> int:
        return int(WALL_START_MS + self.simulation.now_ms)

    def wall_bounds_ms(self, first_ms: float, until_ms: float | None) -> tuple[int, int]:
        """The earliest and the latest time that any broker's wall clock had in that time; None: until ever."""
        if until_ms is None:
            return -(1 << 62), 1 << 62
        offsets = [
            offset for clock in self.clocks.values() for offset in clock.wall_offsets_ms(first_ms, until_ms)
        ]
        return (
            int(WALL_START_MS + first_ms + min(offsets)),
            int(WALL_START_MS + until_ms + max(offsets)) + 1,
        )

    def tell(self, what: str, *known: object) -> None:
        """Kept for the report of a failure."""
        self.event_log.append(f"{self.simulation.now_ms:.1f} {what} {' '.join(map(str, known))}")

    def work_failed(self, name: str, error: BaseException) -> None:
        self.tell("work failed", name, repr(error))

    # What faults do

    def later(self, call: Callable[[], object], ms_min: float, ms_max: float) -> None:
        self.driver.call_later(self.random.uniform(ms_min, ms_max), call)

    def restart_later(self, broker: SimulatedBroker, ms_max: float = DOWN_MS_MAX) -> None:
        self.later(lambda: self._restart(broker), 20, ms_max)

    def _restart(self, broker: SimulatedBroker) -> None:
        if self.network.brokers[broker.node_id] is not broker:
            return
        if broker.running:  # it is being stopped
            self.later(lambda: self._restart(broker), 100, 300)
            return
        self.start(broker.node_id, broker.disk)

    def lose_power(self, broker: SimulatedBroker) -> None:
        broker.die(ends_connections=False)
        broker.disk = broker.disk.crash(self.random)

    def lose_disk(self, broker: SimulatedBroker) -> None:
        broker.die(ends_connections=False)
        broker.disk = SimulatedDisk()

    def is_last_in_sync(self, node_id: int) -> bool:
        """Is there a partition with this broker alone in sync, as etcd has it?"""
        return any(
            decode(entry.key, entry.value)["isr"] == [node_id]
            for entry in self.etcd.list("/mansio/").entries
            if "/parts/" in entry.key
        )

    def make_room(self) -> None:
        for broker in self.brokers():
            broker.disk.capacity_bytes = CAPACITY_BYTES

    def reach_etcd(self, node_id: int, *, reach: bool) -> None:
        self.no_etcd.discard(node_id) if reach else self.no_etcd.add(node_id)
        broker = self.network.brokers[node_id]
        if hasattr(broker, "etcd_client"):
            broker.etcd_client.unreachable = not reach
            self.etcd.wake()

    def hear_again(self, broker: SimulatedBroker) -> None:
        broker.etcd_client.watch_stalls = False
        self.etcd.wake()

    def move_a_leader(self) -> bool:
        ready = [one for one in self.brokers() if one.ready and one.running and not one.scheduler.paused]
        if not ready or self.is_single_node:
            return False
        broker = self.random.choice(ready)

        async def move() -> None:
            try:
                await broker.cluster_member.controller.elect_preferred(
                    TOPIC, self.random.randrange(PARTITIONS)
                )
            except MansioError:
                return

        broker.scheduler.spawn(move(), name="move a leader")
        return True

    def holds(self, node_id: int) -> bool:
        """Does that broker think that its session lives?"""
        broker = self.network.brokers[node_id]
        return (
            broker.is_clustered
            and hasattr(broker, "cluster_member")
            and broker.cluster_member.is_session_valid()
        )

    def is_misled(self, node_id: int) -> bool:
        """Did etcd end that broker's lease before its time, without its knowledge? It cannot know better. A session
        that brokers end early is none: as long as its lease exists, no other broker acts in its place."""
        broker = self.network.brokers[node_id]
        if not self.holds(node_id):
            return False
        session = broker.cluster_member.session
        return session is None or session.lease not in self.etcd._leases

    # The history

    def run(self) -> None:
        """Raises `AssertionError` when a promise is broken."""
        gc.collect()
        gc.disable()
        try:
            with nullcontext() if self.scene is None else self.scene.watched():
                if delivery.has_fairness(self.seed):
                    with fairness.smaller_bounds():
                        self._run()
                else:
                    self._run()
        except BaseException as error:
            for line in self.event_log[-40:]:
                error.add_note(line)
            raise
        finally:
            close_unstarted()
            gc.enable()

    def _run(self) -> None:
        for node_id in self.node_ids:
            self.start(node_id, SimulatedDisk(can_sync_all=self.random.random() < 0.8))
        self._until(lambda: all(broker.ready for broker in self.brokers()), READY_MS_MAX, "start")
        self._make_topic()
        self._begin_clients()
        self.driver.call_later(500, self._fault)
        end_ms = self.simulation.now_ms + self.faults_ms
        self._until(lambda: self.simulation.now_ms >= end_ms, self.faults_ms + 1000, "end")
        self.writes_end = True
        self._heal()
        self.healed_ms = self.simulation.now_ms
        self._until(lambda: not any(workload_clients.reasons(self)), self.healed_ms_max, "recovery")
        self.recovered_ms = self.simulation.now_ms - self.healed_ms
        if self.scene is not None:
            self.scene.drain(self._until)
            self._until(lambda: not any(workload_clients.reasons(self)), HEALED_MS_MAX, "recovery")
        self.over = True
        self._until(lambda: not any(workload_clients.unlike(self)), HEALED_MS_MAX, "rest")
        workload_clients.check_end(self)
        if self.more is not None:
            self.more.check()
        if self.delivery is not None:
            self.delivery.check_end()
        if self.scene is not None:
            self.scene.check_end()

    def _until(self, condition: Callable[[], bool], within_ms: float, what: str) -> None:
        end_ms = self.simulation.now_ms + within_ms
        while self.checker.first is not None or not condition():
            if self.checker.first is not None:
                raise self.checker.first
            if self.simulation.now_ms >= end_ms:
                raise Stalled(f"no {what} in {within_ms} ms: {'; '.join(workload_clients.reasons(self))}")
            self.simulation.run_for(100)
            if self.early_ends is not None:
                self.early_ends.check_leaders()

    def _make_topic(self) -> None:
        broker = self.brokers()[0]
        replicas, configs, partitions = 1 if self.is_single_node else 3, CONFIGS, PARTITIONS
        if self.feature is not None:
            own, partitions = self.feature.configs(self.seed), self.feature.partitions
            configs = own if self.is_single_node else {**CONFIGS, **own}
        elif delivery.has_priorities(self.seed):
            configs = {**CONFIGS, **priorities.CONFIGS}

        async def make() -> None:
            while True:
                try:
                    await broker.core.topics.create(
                        NewTopic(TOPIC, partitions, replicas, configs=tuple(configs.items()))
                    )
                except TopicAlreadyExists:
                    return
                except MansioError as error:
                    self.tell("topic not made", repr(error))
                else:
                    return

        Task(broker.scheduler, make(), "make the topic")
        self._until(lambda: TOPIC in broker.core.state.topics, READY_MS_MAX, "topic")

    def _begin_clients(self) -> None:
        if self.has_moves:
            self.mover = moves.Mover(self)
        if self.scene is not None:
            self.scene.begin_clients()
            return
        producers = [
            Producer(self, f"i{index}", index, idempotent=True, pace_ms=60) for index in range(PARTITIONS)
        ]
        producers += [
            Producer(self, f"p{index}", index, idempotent=False, pace_ms=120) for index in range(PARTITIONS)
        ]
        weak = [
            Producer(self, "w0", 0, idempotent=False, acks=1, pace_ms=150),
            Producer(self, "z1", 1, idempotent=False, acks=0, pace_ms=200),
        ]
        readers = [Reader(self, f"r{index}", index, fences=index == 0) for index in range(PARTITIONS)]
        self.producers, self.readers = producers + weak, readers
        self.more = More(self) if self.wants_more else None
        self.administrator = Administrator(self)
        self.group = GroupChecker(self)
        self.committers = [Committer(self, "g1")]
        kind = Member if self.seed < FIRST_SEED else NextMember
        self.members = [kind(self, "g2", number, self.group) for number in range(2)]
        if delivery.has_share_group(self.seed):
            group = delivery.Settings(self)
            self._until(lambda: group.done, READY_MS_MAX, "settings of the share group")
            self.delivery = delivery.Delivery(self)

    def _fault(self) -> None:
        if self.writes_end:
            return
        faults = {**FAULTS, **HAND_OVER_FAULTS} if self.hand_over else FAULTS
        if self.feature is not None:
            allowed = SINGLE_FAULTS if self.is_single_node else FAULTS
            faults = {**{name: FAULTS[name] for name in allowed}, **self.feature.faults}
        names = [self.only] if self.only else list(faults)
        weights = [self.shares_of_faults.get(name, faults[name][1]) for name in names]
        name = self.random.choices(names, weights)[0]
        if faults[name][0](self):
            self.faults[name] = self.faults.get(name, 0) + 1
            self.tell("fault", name)
        self.driver.call_later(self.random.uniform(0.2, 1.8) * self.pace_ms, self._fault)

    def _heal(self) -> None:
        self.tell("heal")
        if self.early_ends is not None:
            self.early_ends.look()
        self.network.heal()
        self.make_room()
        for clock in self.clocks.values():
            clock.wall_offset_ms = 0.0
        self.no_etcd.clear()
        if self.etcd.without_majority:
            self.etcd.elect()
        self.driver.stop()  # what was to come of faults comes no more
        self.driver = self.simulation.scheduler("driver after")
        for broker in self.brokers():
            broker.disk.clear_failures()
            broker.listen_again()
            broker.disk_ms = (0.3, 2.5)
            if hasattr(broker, "etcd_client"):
                broker.etcd_client.late_requests = 0
                broker.etcd_client.heal()
            broker.resume()
            if broker.running and broker.ready and self._has_failed(broker):
                broker.die()
            if not broker.running:
                self.start(broker.node_id, broker.disk)
        self.etcd.wake()
        self.driver.call_later(500, self._look_after)

    def _has_failed(self, broker: SimulatedBroker) -> bool:
        if self.is_single_node and workload_clients.unopened(broker):
            return True  # a log that could not be opened is tried again by the next start
        return any(partition.log.failure is not None for partition in workload_clients.partitions_of(broker))

    def _look_after(self) -> None:
        """Who looks after processes and disks: a process that ended is started again, and one whose disk failed."""
        for broker in self.brokers():
            if broker.running and broker.ready and self._has_failed(broker):
                broker.die()
            if not broker.running:
                self.start(broker.node_id, broker.disk)
        if all(broker.running and broker.ready for broker in self.brokers()):
            self._help_out()
        self.driver.call_later(500, self._look_after)

    def _help_out(self) -> None:
        """What an operator does where a disk was lost and the others were not in sync any more: have the copy that is
        the furthest lead. Nothing acknowledged may be missing there."""
        broker = self.brokers()[0]
        for topic in broker.core.state.topics.values():
            for index, one in enumerate(topic.partitions):
                if one.isr or "lost disk" not in self.faults:
                    continue
                best = max(
                    workload_clients.copies(self, topic.topic_id, index),
                    key=lambda copy: (copy.log.leader_epochs.latest_epoch, copy.end_offset),
                )
                self.tell("operator elects", topic.name, index, best.broker_id)
                self.network.count("unclean elections")
                work = broker.cluster_member.controller.elect_unclean(topic.name, index, best.broker_id)
                broker.scheduler.spawn(work, name="elect")

    @property
    def committed(self) -> int:
        """Offsets of groups that were acknowledged."""
        if self.scene is not None or not hasattr(self, "group"):
            return 0
        return self.group.acknowledged + sum(one.acknowledged for one in self.committers)

    @property
    def acknowledged(self) -> int:
        if self.scene is not None:
            return sum(producer.acknowledged for producer in self.producers)
        return len(self.checker.acks)
