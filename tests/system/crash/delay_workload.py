"""Crash workload of delayed records and schedules: after a power failure between any two disk changes, each record that
was durably accepted is either pending or in the log once, unless it was cancelled, and each firing of a schedule is in
the log once."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from mansio.broker.features.delays import recurrence
from mansio.broker.features.delays.schedule_manager import DUE_HEADER, FIRING_HEADER, SCHEDULE_HEADER
from mansio.broker.log_view import snapshots
from mansio.wire.batch.delay_headers import DELAY_HEADER
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.schedule_control_records import CatchUpMode, Schedule
from support.partition_bench import LARGE_RULES, SMALL_SEGMENTS, PartitionBench
from system.crash.feature_workload import FeatureWorkload

if TYPE_CHECKING:
    import random

    from mansio.broker.features.delays.delay_manager import DelayManager
    from mansio.testing.disk import SimulatedDisk

WEIGHTS: Final = {
    "produce": 8,
    "advance": 6,
    "deliver": 9,
    "cancel": 2,
    "move": 3,
    "flush": 5,
    "background": 3,
    "delete_records": 2,
    "change_schedules": 3,
}
"""How often each step is drawn."""
FAR_S = 2.0
UNKNOWN_OFFSET = 1 << 62


class Fired(NamedTuple):
    """A record of a schedule in the log."""

    number: int
    due_ms: int
    timestamp_ms: int


class DelayedPartition(PartitionBench):
    """A partition with delayed records and schedules on a simulated disk."""

    def __init__(self, disk: SimulatedDisk | None = None, seconds: float = 1_000.0) -> None:
        super().__init__(
            disk, features=("delays",), seconds=seconds, log_settings=SMALL_SEGMENTS, rules=LARGE_RULES
        )

    def visible(self) -> dict[int, bytes]:
        """Offset -> value of each record that consumers see, without those of schedules."""
        return {
            record.offset: record.value or b""
            for record in self.records()
            if SCHEDULE_HEADER not in dict(record.headers)
        }

    def fired(self) -> dict[str, list[Fired]]:
        """Name -> records of each schedule that consumers see."""
        found: dict[str, list[Fired]] = {}
        for record in self.records():
            headers = dict(record.headers)
            name = headers.get(SCHEDULE_HEADER)
            if name is not None:
                numbers = int(headers[FIRING_HEADER] or 0), int(headers[DUE_HEADER] or 0)
                found.setdefault(name.decode(), []).append(Fired(*numbers, record.timestamp_ms))
        return found

    def pending(self) -> dict[int, bytes]:
        """Id -> value of each pending record."""
        return {
            record.id: self.delay_manager.read(record)[2] or b""
            for record in self.delayed_records.view.pending.select(-(1 << 62), 1 << 62)
        }

    def deliver_all(self) -> None:
        self.clock.seconds += FAR_S
        now_ms = self.clock.wall_ms()
        for _ in range(1_000):
            wake_ms = self.delayed_records.view.next_wake_ms
            if wake_ms is None or wake_ms > now_ms:
                return
            self.delay_manager.deliver_due(50, 4_000)
        raise AssertionError("what is due does not become less")


class DelayWorkload(FeatureWorkload):
    """Delayed records that are cancelled and moved, and schedules."""

    weights = WEIGHTS
    constants = (
        (snapshots, "SNAPSHOT_INTERVAL_BYTES", 300),
        (recurrence, "INTERVAL_MS_MIN", 1),
        (recurrence, "LATE_MS_MAX", 300),
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.accepted: dict[int, bytes] = {}
        self.cancelled: dict[int, int] = {}
        """Id -> offset below which the log is durable once the cancellation cannot be lost."""
        self.trimmed: set[bytes] = set()
        """Values that were delivered before the log start moved beyond them."""
        self.known: dict[int, bytes] = {}
        """What consumers saw before the current step."""
        self.schedules: dict[str, Schedule] = {}
        """The state of each schedule after its last change."""
        self.stored: dict[str, int] = {}
        """Name -> offset below which the log is durable once the last change of a schedule cannot be lost."""
        self.deleted: set[str] = set()
        self.was_paused: set[str] = set()
        self.fired: dict[str, int] = {}
        """Name -> number of the last firing that consumers have seen."""
        self.number = 0
        self.change_schedules()

    def open(self, disk: SimulatedDisk, seconds: float) -> DelayedPartition:
        return DelayedPartition(disk, seconds)

    def manager(self) -> DelayManager:
        return self.live.delay_manager

    def before_step(self) -> None:
        self.known = self.live.visible()

    def after_step(self) -> None:
        self.check_schedules(self.live, 0)
        start = self.live.log.start_offset
        self.trimmed |= {value for offset, value in self.known.items() if offset < start}
        for name, records in self.live.fired().items():
            self.fired[name] = records[-1].number
            self.counts["firings"] = max(self.counts["firings"], sum(self.fired.values()))

    def deliver(self) -> None:
        """Deliver; sometimes while the disk has space for the first of the two batches of a delivery only."""
        if self.chance.random() < 0.3:
            self.run_on_full_disk(self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        self.live.delay_manager.deliver_due(self.chance.randrange(1, 9), 300)

    def move(self) -> None:
        chosen = self._choose()
        if chosen:
            self.live.delay_manager.reschedule(chosen, self.live.clock.wall_ms() + self.chance.randrange(500))

    def cancel(self) -> None:
        chosen = self._choose()
        if chosen:
            self.cancelled |= dict.fromkeys(chosen, UNKNOWN_OFFSET)
            _, end_offset = self.live.delay_manager.cancel(chosen)
            self.cancelled |= dict.fromkeys(chosen, end_offset)

    def _choose(self) -> list[int]:
        """Ids of one or two pending records."""
        ids = [*self.live.pending()]
        return self.chance.sample(ids, min(len(ids), 2)) if ids else []

    def change_schedules(self) -> None:
        chance, live = self.chance, self.live
        manager = live.delay_manager.schedules
        existing = [name for name in self.schedules if name not in self.deleted]
        if len(existing) < 3:
            name = f"s{len(self.schedules)}"
            self.stored[name] = UNKNOWN_OFFSET
            self.schedules[name] = new = Schedule(
                UUID(int=len(self.schedules) + 1),
                name,
                "",
                chance.randrange(20, 200),
                "",
                chance.choice([*CatchUpMode]),
                None,
                bytes(chance.randrange(100)),
                (),
                0,
                0,
            )
            self.schedules[name], self.stored[name] = manager.create(new)
            return
        name = chance.choice(existing)
        self.stored[name] = UNKNOWN_OFFSET
        if chance.random() < 0.2:
            self.deleted.add(name)
            _, self.stored[name] = manager.delete(name)
        elif self.schedules[name].is_paused:
            self.schedules[name], self.stored[name] = manager.resume(name)
        else:
            self.was_paused.add(name)
            self.schedules[name], self.stored[name] = manager.pause(name)

    def check_schedules(self, after: DelayedPartition, durable_end: int) -> None:
        """Each firing is in the log once, and the state of each schedule is that of the log."""
        fired = after.fired()
        states = {one.name: one for one in after.delayed_records.view.schedules}
        for name, records in fired.items():
            every_ms, catch_up = self.schedules[name].every_ms, self.schedules[name].catch_up
            numbers = [one.number for one in records]
            assert numbers == [*range(numbers[0], numbers[0] + len(numbers))], f"firings {numbers} of {name}"
            assert numbers[0] <= 1 + (self.fired.get(name, 0) if after.log.start_offset else 0)
            steps = [later.due_ms - one.due_ms for one, later in itertools.pairwise(records)]
            assert all(step > 0 and step % every_ms == 0 for step in steps), f"{name} fired twice: {steps}"
            if catch_up is CatchUpMode.ALL and name not in self.was_paused:
                assert {*steps} <= {every_ms}, f"{name} lost a firing: {steps}"
            assert all(one.timestamp_ms >= one.due_ms for one in records), f"{name} fired early"
            if name in states:
                state = states[name]
                assert state.firings == numbers[-1], (
                    f"{name}: {state.firings} firings, {numbers[-1]} in the log"
                )
                assert state.is_paused or state.next_due_ms > records[-1].due_ms
                if catch_up is CatchUpMode.ALL and name not in self.was_paused:
                    assert state.next_due_ms == records[-1].due_ms + every_ms
        for name, end_offset in self.stored.items():
            if end_offset <= durable_end:
                assert (name in states) == (name not in self.deleted), f"{name} is lost, or was deleted"
                assert name in self.deleted or states[name].is_paused == self.schedules[name].is_paused
                assert name in self.deleted or states[name].value == self.schedules[name].value

    def produce(self) -> None:
        records = []
        for _ in range(self.chance.randrange(1, 5)):
            delay_ms = self.chance.choice([None, 0, 50, 200, 900])
            headers = () if delay_ms is None else ((DELAY_HEADER, b"%d" % delay_ms),)
            records.append((1000, None, b"%d" % self.number, headers))
            self.number += 1
        result = self.live.partition.append(build_batch(records), urgent=self.chance.random() < 0.5)
        for index, record in enumerate(records):
            self.accepted[result.base_offset + index] = record[2]

    def check_crash(self, chance: random.Random) -> None:
        """Check what a power failure at this moment leaves."""
        durable_end = self.live.log.durable_end_offset
        after = self.after_crash(chance)
        start = after.log.start_offset
        before = {*self.trimmed, *(value for offset, value in self.known.items() if offset < start)}
        for delivered in (False, True):
            if delivered:
                after.deliver_all()
            self.check_schedules(after, durable_end)
            seen = Counter(after.visible().values())
            assert all(count == 1 for count in seen.values()), f"delivered twice: {seen}"
            waiting = {*after.pending().values()}
            assert not waiting & {*seen}, "delivered and still pending"
            assert not delivered or not waiting
            for record_id, value in self.accepted.items():
                if record_id >= durable_end:
                    continue
                end_offset = self.cancelled.get(record_id)
                if end_offset is None:
                    assert value in seen or value in waiting or value in before, f"{value!r} is lost"
                elif end_offset <= durable_end:
                    assert value not in seen, f"{value!r} was cancelled"
                    assert value not in waiting, f"{value!r} was cancelled"
        again = DelayedPartition(after.disk.crash(chance), after.clock.seconds)
        assert max(Counter(again.visible().values()).values(), default=1) == 1
