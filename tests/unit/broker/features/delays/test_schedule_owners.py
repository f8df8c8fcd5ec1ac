"""Schedules of replicas on virtual time: a leader that was replaced fires, too, and each firing is in the log once."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock
from uuid import UUID

import pytest

from mansio.broker.features.delays import schedule_manager
from mansio.broker.features.delays.delay_feature import DelayFeature
from mansio.broker.features.delays.delay_manager import DelayManager
from mansio.broker.features.delays.schedule_manager import DUE_HEADER, FIRING_HEADER, SCHEDULE_HEADER
from mansio.broker.features.delays.schedule_service import ScheduleQuery, ScheduleService
from mansio.broker.features.feature_ports import FeaturePorts
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.authorization import Authorization
from mansio.errors import InvalidSchedule, MansioError, RequestTimedOut, ScheduleNotFound
from mansio.host.item_turns import TURN_S
from mansio.ports import SliceTimes
from mansio.wire.batch.record_reader import read_records
from mansio.wire.batch.schedule_control_records import CatchUpMode, Schedule
from support.present import present
from support.replicas import TOPIC, Cluster, Node
from support.tiers import examples

if TYPE_CHECKING:
    from mansio.broker.features.delays.delayed_delivery import DelayedDelivery
    from mansio.broker.partition.partition import Partition
    from mansio.ports import Clock

EVERY_MS = 1_000


class ScheduledCluster(Cluster):
    """Three brokers whose partition has schedules."""

    def __init__(self, seed: int, **options: Any) -> None:
        """`options`: of `Cluster`."""
        self.managers: dict[int, DelayManager] = {}
        self.deliveries: dict[int, DelayedDelivery] = {}
        configs = {"mansio.delay.enable": "true", **options.pop("configs", {})}
        super().__init__(seed=seed, configs=configs, **options)
        for node_id in self.node_ids:
            self.attach(self[node_id])
        self.run_for(1_000)

    def attach(self, node: Node) -> None:
        """Keep track of schedules on a broker, as `PartitionSet` does."""
        partition = node.partitions[TOPIC.bytes, 0]
        feature = DelayFeature(FeaturePorts(node.disk, node.background, node.scheduler, node.clock))
        self.deliveries[node.node_id] = feature.delivery
        partition.attach(feature, is_new=True)
        manager = present(partition.find_feature(DelayManager))
        self.managers[node.node_id] = manager

    def restart(self, node_id: int) -> Node:
        node = super().restart(node_id)
        self.attach(node)
        return node


def schedule(number: int, catch_up: CatchUpMode = CatchUpMode.ALL) -> Schedule:
    return Schedule(UUID(int=number), f"s{number}", "", EVERY_MS, "", catch_up, None, b"v", (), 0, 0)


def firings(partition: Partition) -> dict[str, list[tuple[int, int]]]:
    """Number and due time of each record of a schedule in the log."""
    found: dict[str, list[tuple[int, int]]] = {}
    for batch in partition.log.batches(partition.start_offset):
        for record in read_records(batch, output_bytes_max=1 << 20):
            headers = dict(record.headers)
            if SCHEDULE_HEADER in headers:
                name = (headers[SCHEDULE_HEADER] or b"").decode()
                found.setdefault(name, []).append(
                    (int(headers[FIRING_HEADER] or 0), int(headers[DUE_HEADER] or 0))
                )
                assert record.timestamp_ms >= int(headers[DUE_HEADER] or 0), "fired early"
    return found


def check(cluster: ScheduledCluster, created: dict[str, Schedule]) -> int:
    """All replicas have the same log, in which each firing is once. Returns the number of firings."""
    cluster.check_same()
    fired = firings(cluster[1].partition)
    for name, one in created.items():
        numbers = fired.get(name, [])
        expected = [(number, one.created_ms + number * EVERY_MS) for number in range(1, len(numbers) + 1)]
        assert numbers == expected, f"{name}: {numbers}"
    for manager in cluster.managers.values():
        states = {one.name: one.firings for one in manager.view.schedules}
        assert states == {name: len(fired.get(name, [])) for name in created}
    return sum(map(len, fired.values()))


def test_a_leader_that_was_replaced_fires_for_nothing() -> None:
    cluster = ScheduledCluster(seed=1)
    created, _ = cluster.managers[1].schedules.create(schedule(1))
    cluster.run_for(2_500)
    cluster.network.isolate(1)
    before = len(firings(cluster[1].partition)["s1"])
    cluster.elect(2, isr=(2, 3))
    cluster.tell(2, 3)
    cluster.managers[1].schedules.create(schedule(2))  # never committed
    cluster.run_for(3_000)
    old, new = firings(cluster[1].partition)["s1"], firings(cluster[2].partition)["s1"]
    assert len(old) > before, "the former leader fires as long as it knows no other"
    assert old[-1] in new, "and so does the new leader, the same firings"
    assert cluster[1].partition.high_watermark < cluster[1].partition.end_offset
    cluster.network.cut.clear()
    cluster.tell()
    cluster.run_for(2_000)
    cluster.run_until(cluster.settled)
    assert check(cluster, {"s1": created}) >= 7
    cluster.elect(1)
    cluster.tell()
    cluster.run_for(3_000)
    cluster.run_until(cluster.settled)
    assert check(cluster, {"s1": created}) >= 10


@pytest.mark.parametrize("seed", range(examples(8, 20)))
def test_each_firing_is_in_the_log_once_whichever_replicas_lead(seed: int) -> None:
    chance = random.Random(seed)
    cluster = ScheduledCluster(seed)
    created: dict[str, Schedule] = {}
    leader = 1
    for number in range(1, 4):
        one, end_offset = cluster.managers[1].schedules.create(schedule(number))
        created[one.name] = one
        cluster.run_until(lambda end_offset=end_offset: cluster[1].partition.high_watermark >= end_offset)
    for _ in range(8):
        cluster.run_for(chance.uniform(0, 2_500))
        event = chance.choice(["isolate", "kill", "power", "move"])
        isr = cluster.state().isr
        others = [node_id for node_id in isr if node_id != leader]
        if not others:
            cluster.run_for(5_000)
            continue
        chosen = chance.choice(others)
        if event == "isolate":
            cluster.network.isolate(leader)
            if chance.random() < 0.5:
                cluster.managers[leader].schedules.pause(f"s{chance.randrange(1, 4)}")  # never committed
            cluster.elect(chosen, isr=others)
            cluster.tell(*(node_id for node_id in cluster.node_ids if node_id != leader))
            cluster.run_for(chance.uniform(500, 2_500))
            cluster.network.cut.clear()
        elif event == "move":
            cluster.elect(chosen)
        else:
            cluster.kill(leader, power=event == "power")
            cluster.elect(chosen, isr=others)
            cluster.tell()
            cluster.run_for(chance.uniform(0, 1_500))
            cluster.restart(leader)
        leader = chosen
        cluster.tell()
        cluster.run_until(lambda: len(cluster.state().isr) == 3, 60_000)
    cluster.run_for(3_000)
    cluster.run_until(cluster.settled)
    assert check(cluster, created) > 30


class SteppingClock:
    """A clock that a test sets, and that shows 0.3 ms more at each look at its monotonic time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ahead_ms = 0
        self.step_s = 0.0003
        self.steps = 0

    def wall_ms(self) -> int:
        return self.clock.wall_ms() + self.ahead_ms

    def monotonic(self) -> float:
        self.steps += 1
        return self.clock.monotonic() + self.steps * self.step_s


@pytest.mark.parametrize("catch_up", CatchUpMode)
def test_firings_after_a_long_downtime_are_slices_of_about_a_millisecond(catch_up: CatchUpMode) -> None:
    cluster = ScheduledCluster(seed=1)
    manager = cluster.managers[1]
    for number in range(1, 31):
        manager.schedules.create(schedule(number, catch_up))
    clock = manager.partition.clock = SteppingClock(manager.partition.clock)
    clock.ahead_ms = 95_000
    cluster[1].scheduler.slices = SliceTimes(clock.monotonic)
    for _ in range(4):
        before = {one.name: one.next_due_ms for one in manager.view.schedules}
        assert manager.deliver_due(64, 1 << 18) == (0 if catch_up is CatchUpMode.NONE else 4)
        changed = [one for one in manager.view.schedules if one.next_due_ms != before[one.name]]
        assert len(changed) == 4
        assert manager.has_fired


def test_a_schedule_that_cannot_fire_does_not_wait_for_a_clock_that_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = ScheduledCluster(seed=1)
    manager = cluster.managers[1]
    manager.schedules.create(schedule(1))
    clock = SteppingClock(manager.partition.clock)
    manager.partition.clock = cluster.deliveries[1]._clock = clock
    with monkeypatch.context() as patched:
        patched.setattr(schedule_manager, "next_step", Mock(side_effect=InvalidSchedule("no such zone")))
        clock.ahead_ms = 86_400_000
        cluster.run_for(30_000)
    assert manager.schedules.failing() == [("s1", "no such zone")]
    clock.ahead_ms = 0
    cluster.run_for(30_000)
    assert len(firings(manager.partition)["s1"]) >= 55
    assert manager.schedules.failing() == []


def test_the_reason_of_a_failure_is_void_once_another_leader_has_fired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = ScheduledCluster(seed=1)
    cluster.managers[1].schedules.create(schedule(1))
    with monkeypatch.context() as patched:
        patched.setattr(schedule_manager, "next_step", Mock(side_effect=InvalidSchedule("no such zone")))
        cluster.run_for(3_000)
    assert cluster.managers[1].schedules.failing() == [("s1", "no such zone")]
    cluster.elect(2)
    cluster.tell()
    cluster.run_for(15_000)
    assert len(firings(cluster[2].partition)["s1"]) >= 10
    assert cluster.managers[1].schedules.failing() == []


def test_a_schedule_that_fired_by_a_wrong_clock_fires_again_after_it_is_paused_and_resumed() -> None:
    cluster = ScheduledCluster(seed=1)
    manager = cluster.managers[1]
    manager.schedules.create(schedule(1))
    clock = SteppingClock(manager.partition.clock)
    clock.step_s = 0.0
    manager.partition.clock = cluster.deliveries[1]._clock = clock
    clock.ahead_ms = 300_000
    cluster.run_for(15_000)
    clock.ahead_ms = 0
    count = len(firings(manager.partition)["s1"])
    assert count >= 300
    cluster.run_for(15_000)
    assert len(firings(manager.partition)["s1"]) == count, "never early"
    manager.schedules.pause("s1")
    manager.schedules.resume("s1")
    cluster.run_for(5_000)
    assert len(firings(manager.partition)["s1"]) >= count + 4


def service(cluster: ScheduledCluster, node_id: int) -> ScheduleService:
    """The schedule service of one broker."""
    manager = cluster.managers[node_id]
    partitions = SimpleNamespace(
        find=lambda *_: manager.partition, name_of=lambda _: "t", delay_manager=lambda _: manager
    )
    node = cluster[node_id]
    return ScheduleService(
        cast("Any", partitions),
        clock=node.clock,
        scheduler=node.scheduler,
        wait_ms_max=500,
        authorization=Authorization(None),
    )


def test_a_missing_schedule_is_answered_only_after_its_deletion_is_committed() -> None:
    cluster = ScheduledCluster(seed=1)
    cluster.managers[1].schedules.create(schedule(1))
    cluster.run_for(2_500)
    cluster.network.isolate(1)
    cluster.elect(2, isr=(2, 3))
    cluster.tell(2, 3)
    schedules, run = service(cluster, 1), cluster.simulation.run
    for _ in range(2):
        with pytest.raises(RequestTimedOut):
            run(schedules.delete(TOPIC.bytes, 0, "s1", timeout_ms=500, caller=ANONYMOUS))
    with pytest.raises(RequestTimedOut):
        run(schedules.pause(TOPIC.bytes, 0, "s1", timeout_ms=500, caller=ANONYMOUS))
    cluster.managers[1].schedules.create(schedule(1))  # never committed, either
    other = schedule(1)._replace(value=b"w")
    with pytest.raises(RequestTimedOut):
        run(schedules.create(TOPIC.bytes, 0, other, timeout_ms=500, caller=ANONYMOUS))
    schedules = service(cluster, 2)
    cluster.run_for(1_000)
    run(schedules.delete(TOPIC.bytes, 0, "s1", timeout_ms=500, caller=ANONYMOUS))
    with pytest.raises(ScheduleNotFound):
        run(schedules.delete(TOPIC.bytes, 0, "s1", timeout_ms=500, caller=ANONYMOUS))


def test_a_list_of_many_due_times_yields_to_the_event_loop_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = ScheduledCluster(seed=1)
    cluster.managers[1].schedules.create(schedule(1))
    schedules = service(cluster, 1)
    clock = SteppingClock(cluster[1].clock)
    clock.step_s = TURN_S / 3
    cluster[1].scheduler.slices = SliceTimes(clock.monotonic)
    turns = Mock(side_effect=cluster[1].scheduler.sleep)
    monkeypatch.setattr(cluster[1].scheduler, "sleep", turns)
    query = ScheduleQuery(TOPIC.bytes, 0)
    answer: Any = cluster.simulation.run(schedules.list_schedules([query], times_max=100, caller=ANONYMOUS))
    ((listed,),) = answer
    assert len(listed.next_times_ms) == 100
    assert listed.next_times_ms[99] - listed.next_times_ms[0] == 99 * EVERY_MS
    assert turns.call_count >= 25


def test_a_leader_that_leaves_fails_the_creation() -> None:
    cluster = ScheduledCluster(seed=2)
    with pytest.raises(MansioError):
        cluster.managers[2].schedules.create(schedule(1))
    assert not cluster.managers[2].view.schedules
