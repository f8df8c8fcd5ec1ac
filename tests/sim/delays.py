"""Delayed records in simulated histories: producers delay records, others cancel and move them, and make and delete
recurring schedules, readers read.

The topic of these histories accepts delays, and retention deletes its oldest segments, so that pending records are
copied. Every fourth history has a single node without etcd, the others have a cluster of three. In the end all clocks
are set beyond the last due time, so that everything is delivered. `sim.delay_history` judges.

Another kind of change of pending records is one more entry of `OPERATIONS`; one whose records the broker makes itself
has a `DeliveryChecker`, too.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple
from unittest.mock import patch
from uuid import NAMESPACE_OID, uuid5

from mansio.broker.features.delays import delay_manager, delayed_delivery, pending_records
from mansio.broker.features.delays.delay_manager import DelayManager
from mansio.broker.features.delays.schedule_manager import FIRING_HEADER
from mansio.broker.log_view import replay, snapshots
from mansio.broker.partition.partition import Partition
from mansio.errors import MansioError
from mansio.wire.apis import fetch as fetch_wire
from mansio.wire.batch.delay_headers import DELAY_HEADER, DELIVER_AT_HEADER
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.batch.record_reader import read_records
from mansio.wire.batch.schedule_control_records import NOT_DUE_MS, CatchUpMode, Schedule
from sim.clients import (
    FETCH_VERSION,
    OFFSET_OUT_OF_RANGE,
    TOPIC,
    Client,
)
from sim.delay_history import DelayHistory, Sent
from sim.feature import Feature, FeatureProducer, Until, ViewScene
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from mansio.broker.partition.partition_hook import Contents
    from sim.brokers import SimulatedBroker
    from sim.world import World

FIRST_SEED: Final = 1_000_000
"""Histories from this seed on are of delayed records only."""

PARTITIONS: Final = 2
CONFIGS: Final = {
    "mansio.delay.enable": "true",
    "segment.bytes": "16384",
    "index.interval.bytes": "512",
    "retention.ms": "-1",
    "retention.bytes": "40000",
}
SETTINGS: Final = {"log_retention_check_interval_ms": 3000}
CONSTANTS: Final = (
    (snapshots, "SNAPSHOT_INTERVAL_BYTES", 4000),
    (replay, "SLICE_BATCHES", 20),
    (replay, "READ_RETRY_MS", 500),
    (delayed_delivery, "UNCOMMITTED_RECORDS_MAX", 60),
    (delayed_delivery, "BATCH_BYTES_MAX", 3000),
    (delay_manager, "CACHED_BATCHES_MAX", 4),
    (delay_manager, "COPIED_RECORDS_MAX", 10),
    (pending_records, "RUN_RECORDS_MAX", 24),
)
"""Bounds that a history of some seconds would not reach."""

CHANGED_MAX: Final = 4
CHANGE_MS_MAX: Final = 2500
SCHEDULES_MAX: Final = 3
EVERY_MS: Final = 1000
COPIES_MS_MAX: Final = 10_000
"""A copy of a request that the network made arrives within this time."""

OVERDUE_MS_MAX: Final = 15_000
DRAIN_MS_MAX: Final = 120_000
DAY_MS: Final = 24 * 3_600_000
LOOKS_MS: Final = delayed_delivery.TIMER_MS_MAX + delayed_delivery.DELIVERY_RETRY_MS
"""In this time a broker looks at all its partitions, also after a jump of its clock."""


def configs_of(seed: int) -> dict[str, str]:
    """Settings of the topic."""
    del seed
    return dict(CONFIGS)


class Delays(ViewScene):
    """The clients of a history of delayed records, and its judge."""

    has_schedules = True
    constants = CONSTANTS
    partitions = PARTITIONS
    history: DelayHistory

    def __init__(self, world: World) -> None:
        super().__init__(world, DelayHistory(world.checker.broken))
        self.changers: list[Changer] = []
        self.halved: set[int] = set()
        """Brokers whose disks refuse the second batch of the next delivery."""

    def begin_clients(self) -> None:
        super().begin_clients()
        world = self.world
        world.producers = [
            DelayedProducer(world, f"{kind}{index}", index, idempotent=kind == "i", pace_ms=pace_ms)
            for kind, pace_ms in (("i", 60), ("p", 120))
            for index in range(PARTITIONS)
        ]
        world.readers = [DelayedReader(world, f"r{index}", index) for index in range(PARTITIONS)]
        self.changers = [Changer(world, f"changer {index}", index) for index in range(PARTITIONS)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Smaller bounds, and everything that leaders deliver or delete is seen."""
        history, append = self.history, Partition.append_unchanged

        def append_unchanged(
            partition: Partition, batches: Sequence[bytes], contents: Sequence[Contents | None] = ()
        ) -> int:
            history.appends(partition, batches)
            if len(batches) > 1 and partition.broker_id in self.halved:
                with self._refuse_second_batch(partition.broker_id):
                    return append(partition, batches, contents)
            return append(partition, batches, contents)

        with super().watched(), patch.object(Partition, "append_unchanged", append_unchanged):
            yield

    @contextmanager
    def _refuse_second_batch(self, node_id: int) -> Iterator[None]:
        """Let the disk of a broker have space for one more batch, and kill the broker soon."""
        world, broker = self.world, self.world.network.brokers[node_id]
        writes = 0

        def refuse(operation: str, path: str) -> int | None:
            nonlocal writes
            if operation != "write" or not path.endswith(".log"):
                return None
            writes += 1
            return errno.ENOSPC if writes > 1 else None

        def kill() -> None:
            if broker.running:
                broker.die()
                world.restart_later(broker, ms_max=1500)

        self.halved.discard(node_id)
        before, broker.disk.fail_when = broker.disk.fail_when, refuse
        try:
            yield
        finally:
            broker.disk.fail_when = before
            world.later(kill, 1, 40)

    # Brokers

    def find_manager(self, broker: SimulatedBroker, partition: Partition) -> DelayManager | None:
        return partition.find_feature(DelayManager)

    def reasons_of(self, manager: DelayManager) -> Iterator[str]:
        """Also records that should have been delivered."""
        yield from super().reasons_of(manager)
        partition, pending = manager.partition, manager.view.pending
        due_ms = pending.next_due_ms
        if partition.is_leader and due_ms is not None:
            late_ms = partition.clock.wall_ms() - due_ms
            if late_ms > OVERDUE_MS_MAX:
                yield f"a record is {late_ms} ms late, {len(pending)} are pending"

    def undelivered(self) -> Iterator[str]:
        """What is pending yet, and what readers have not read."""
        for index in range(PARTITIONS):
            for manager in self.managers(index):
                if manager.view.pending or not manager.replay.is_complete:
                    yield f"broker {manager.partition.broker_id} has {len(manager.view.pending)} pending in {index}"
        yield from self.reasons()

    # The end

    def drain(self, until: Until) -> None:
        """Compare views and logs, set the clocks beyond all due times, and wait until all is delivered."""
        world = self.world
        until(lambda: not any(self._busy()), DRAIN_MS_MAX, "rest of changers")
        for index in range(PARTITIONS):
            if (leader := self.leader(index)) is not None:
                self.history.schedules.check_existing(index, [one.name for one in leader.view.schedules])
        until(lambda: not self._delete_schedules(), DRAIN_MS_MAX, "end of schedules")
        self.has_schedules = False
        self._set_back_clocks_of_followers(until)
        latest_ms = world.wall_ms()
        for index in range(PARTITIONS):
            for manager in self.managers(index):
                records = list(manager.view.pending.select(-(1 << 62), 1 << 62))
                self.history.check_view(manager.partition, {one.id: one.due_ms for one in records})
                latest_ms = max([latest_ms, *(one.due_ms for one in records)])
        for clock in world.clocks.values():
            clock.wall_offset_ms += latest_ms + 1 - world.wall_ms()
        until(lambda: not any(self.undelivered()), DRAIN_MS_MAX, "delivery")

    def _set_back_clocks_of_followers(self, until: Until) -> None:
        """By the clocks of all followers of a partition its records are due for a while. Then the clocks are set back
        and the leader is killed: one of the followers has to deliver when they are due again."""
        world = self.world
        leader = self.leader(0)
        if world.is_single_node or leader is None:
            return
        node_id = leader.partition.broker_id
        followers = [clock for other, clock in world.clocks.items() if other != node_id]
        for clock in followers:
            clock.wall_offset_ms += DAY_MS
        ends_ms = world.simulation.now_ms + LOOKS_MS
        until(lambda: world.simulation.now_ms >= ends_ms, 2 * LOOKS_MS, "looks of followers")
        for clock in followers:
            clock.wall_offset_ms -= DAY_MS
        world.network.brokers[node_id].die()

    def _busy(self) -> Iterator[str]:
        for changer in self.changers:
            if not changer.done:
                yield changer.name
        if self.world.simulation.now_ms < self.world.healed_ms + COPIES_MS_MAX:
            yield "copies of requests may arrive"
        yield from self.reasons()

    def _delete_schedules(self) -> int:
        """Delete the schedules, which would go on for ever; returns how many replicas have yet."""
        found = 0
        for index in range(PARTITIONS):
            for manager in self.managers(index):
                for schedule in list(manager.view.schedules):
                    if manager.partition.is_leader:
                        with suppress(MansioError):
                            manager.schedules.delete(schedule.name)
                    found += 1
        return found

    def check_replica(self, manager: DelayManager) -> None:
        self.history.check_view(manager.partition, {})


def halve(world: World) -> bool:
    """A disk has no space for the second batch of a delivery, and the broker is killed soon after."""
    assert isinstance(world.scene, Delays)
    world.scene.halved.add(world.random.choice(world.node_ids))
    return True


class DelayedProducer(FeatureProducer):
    """Writes batches of records with and without delay."""

    def __init__(self, world: World, name: str, index: int, *, idempotent: bool, pace_ms: float) -> None:
        assert isinstance(world.scene, Delays)
        self.history = world.scene.history
        self.batch: list[bytes] = []
        """What is sent until it is acknowledged; an idempotent producer sends the same again."""
        self.delays: list[tuple[str, int] | None] = []
        self.first_ms = 0.0
        super().__init__(world, name, index, idempotent=idempotent, pace_ms=pace_ms)

    async def _send(self, values: list[bytes]) -> bool:
        if values != self.batch:
            self.batch, self.delays = values, [self._delay() for _ in values]
            self.first_ms = self.world.simulation.now_ms
        batch = self.build(
            [
                (self.world.wall_ms(), None, value, () if delay is None else ((delay[0], b"%d" % delay[1]),))
                for value, delay in zip(values, self.delays, strict=True)
            ]
        )
        self.history.sends(self.index, self._sent(until_ms=None))
        self.world.checker.sent(self.index, values, once=self.idempotent)
        return await self.send_once(batch, len(values), self._acknowledge, repeats=self.idempotent)

    def _acknowledge(self, base_offset: int) -> None:
        sent = self._sent(until_ms=self.world.simulation.now_ms if self.idempotent else None)
        self.history.sends(self.index, sent)
        self.history.acknowledged(self.index, base_offset, sent)

    def _delay(self) -> tuple[str, int] | None:
        """A header that delays a record; None for no delay."""
        kind = self.random.random()
        if kind < 0.3:
            return None
        if kind < 0.7:
            return DELAY_HEADER, self.random.choice((0, 1, self.random.randrange(3000), 40_000))
        return DELIVER_AT_HEADER, self.world.wall_ms() + self.random.randrange(-1000, 5000)

    def _sent(self, *, until_ms: float | None) -> list[Sent]:
        """What is sent. A delay begins when a leader receives the record: not before the first attempt, and by its
        clock. A copy of a request may arrive after the producer has given up."""
        sent = []
        for value, delay in zip(self.batch, self.delays, strict=True):
            due_ms = None
            if delay is not None:
                due_ms = (delay[1], delay[1])
                if delay[0] == DELAY_HEADER:
                    earliest_ms, latest_ms = self.world.wall_bounds_ms(self.first_ms, until_ms)
                    due_ms = (earliest_ms + delay[1], latest_ms + delay[1])
            sent.append(Sent(value, due_ms, self.idempotent))
        return sent


class DelayedReader(Client):
    """Reads one partition and passes control batches: each offset has one value for ever, and values of idempotent
    producers come once."""

    def __init__(self, world: World, name: str, index: int) -> None:
        super().__init__(world, name)
        self.index = index
        self.position = 0
        self.last_error: object = None
        self.run(self._run())

    async def _run(self) -> None:
        while not self.world.over:
            if not await self._read():
                await self.find_leader(self.index)
                await self.sleep(self.random.uniform(20, 150))
            await self.sleep(self.random.uniform(20, 150))

    async def _read(self) -> bool:
        wanted = fetch_wire.FetchPartition(self.index, -1, self.position, -1, -1, 16384)
        frame = await self.ask(
            lambda number: fetch_wire.encode_request(
                FETCH_VERSION,
                number,
                self.name,
                [(TOPIC, None, [wanted])],
                max_wait_ms=self.random.choice((0, 100, 400)),
                min_bytes=1,
                max_bytes=16384,
            )
        )
        if frame is None:
            self.last_error = "no answer"
            return False
        answer = fetch_wire.decode_response(FETCH_VERSION, frame).topics[0][2][0]
        if answer.error_code:
            self.last_error = answer.error_code
            if answer.error_code == OFFSET_OUT_OF_RANGE and answer.log_start_offset > self.position:
                self.position = answer.log_start_offset
            elif answer.error_code == OFFSET_OUT_OF_RANGE:
                self.position = max(self.position, self._log_start())
            return False
        checker = self.world.checker
        before = self.position
        for position, header in iterate_batches(answer.records):
            batch = answer.records[position : position + header.size]
            if not header.is_control:
                for record in read_records(batch, output_bytes_max=1 << 20):
                    if record.offset >= before and FIRING_HEADER not in dict(record.headers):
                        checker.read(self.index, record.offset, present(record.value).strip(), by=self.name)
            if header.last_offset >= answer.high_watermark:
                checker.broken(
                    f"{self.name} reads {header.last_offset}, the high watermark is {answer.high_watermark}"
                )
            self.position = max(self.position, header.last_offset + 1)
        return True

    def _log_start(self) -> int:
        assert isinstance(self.world.scene, ViewScene)
        return max((one.partition.start_offset for one in self.world.scene.managers(self.index)), default=0)


class Operation(NamedTuple):
    """A change of pending records. `run` returns when it is committed, or raises; `weight`: how often it is drawn."""

    run: Callable[[Changer, DelayManager], Awaitable[None]]
    weight: int


class Changer(Client):
    """Changes pending records of one partition: on whatever broker thinks that it is the leader."""

    def __init__(self, world: World, name: str, index: int) -> None:
        super().__init__(world, name)
        assert isinstance(world.scene, Delays)
        self.delays = world.scene
        self.history = world.scene.history
        self.index = index
        self.done = False
        self.created = 0
        self.run(self._run())

    async def _run(self) -> None:
        while not self.world.writes_end:
            await self.sleep(self.random.uniform(20, 250))
            leaders = [one for one in self.delays.managers(self.index) if one.partition.is_leader]
            if leaders:
                await self._change(self.random.choice(leaders))
        self.done = True

    async def _change(self, manager: DelayManager) -> None:
        """On the broker's own event loop, which may stop meanwhile."""
        names = list(OPERATIONS)
        name = self.random.choices(names, [OPERATIONS[one].weight for one in names])[0]
        broker = self.world.network.brokers[manager.partition.broker_id]
        ended = self.scheduler.promise()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        async def work() -> None:
            try:
                if not manager.partition.closed:
                    with suppress(MansioError):
                        await OPERATIONS[name].run(self, manager)
            finally:
                self.scheduler.call_soon(end)

        broker.scheduler.spawn(work(), name=name)
        timer = self.scheduler.call_later(CHANGE_MS_MAX, end)
        await ended
        timer.cancel()

    def choose(self, manager: DelayManager) -> list[int]:
        """Ids of some records, mostly of those that are due soon or now."""
        ids = [record.id for record in manager.view.pending.select(-(1 << 62), 1 << 62)]
        if self.random.random() < 0.7:
            ids = ids[: 2 * CHANGED_MAX]
        return self.random.sample(ids, min(len(ids), self.random.randint(1, CHANGED_MAX)))


async def cancel(changer: Changer, manager: DelayManager) -> None:
    ids = changer.choose(manager)
    changer.history.cancels(changer.index, ids)
    known, end_offset = manager.cancel(ids)
    await manager.partition.commit_promise(end_offset)
    changer.history.is_cancelled(changer.index, known)


async def move(changer: Changer, manager: DelayManager) -> None:
    ids = changer.choose(manager)
    due_ms = manager.partition.clock.wall_ms() + changer.random.randrange(-500, 6000)
    number = changer.history.moves(changer.index, ids, due_ms)
    known, end_offset = manager.reschedule(ids, due_ms)
    await manager.partition.commit_promise(end_offset)
    changer.history.is_moved(changer.index, known, number)


async def change_schedule(changer: Changer, manager: DelayManager) -> None:
    """Create, pause, resume or delete a schedule."""
    history, schedules, index = changer.history.schedules, manager.schedules, changer.index
    known = [one.name for one in manager.view.schedules]
    if len(known) < SCHEDULES_MAX:
        changer.created += 1
        name = f"s{index}-{changer.created}"
        history.creates(index, name)
        _, end_offset = schedules.create(_new_schedule(name, changer.random.choice([*CatchUpMode][:2])))
        await manager.partition.commit_promise(end_offset)
        history.is_created(name)
        return
    name, kind = changer.random.choice(known), changer.random.random()
    if kind < 0.5:
        change = schedules.pause if kind < 0.2 else schedules.resume
        found = manager.view.schedules.find(name)
        if kind >= 0.2 and found is not None and found.is_paused:
            history.resumes(name)
        await manager.partition.commit_promise(change(name)[1])
        return
    history.deletes(name)
    _, end_offset = schedules.delete(name)
    await manager.partition.commit_promise(end_offset)
    history.is_deleted(name, end_offset)


def _new_schedule(name: str, catch_up: CatchUpMode) -> Schedule:
    schedule_id = uuid5(NAMESPACE_OID, name)
    return Schedule(schedule_id, name, "", EVERY_MS, "", catch_up, None, name.encode(), (), 0, NOT_DUE_MS)


OPERATIONS: Final[dict[str, Operation]] = {
    "cancel": Operation(cancel, 4),
    "move": Operation(move, 6),
    "schedule": Operation(change_schedule, 3),
}


FEATURE: Final = Feature(
    FIRST_SEED, PARTITIONS, configs_of, SETTINGS, Delays, faults={"half a delivery": (halve, 5)}
)
