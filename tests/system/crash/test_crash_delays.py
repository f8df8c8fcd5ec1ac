"""Crash test of delayed records and schedules: after a power failure between any two disk changes, each record that was
durably accepted is either pending or in the log once, unless it was cancelled, and each firing of a schedule is in the
log once."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import pytest

from mansio.broker.partition import delayed_records
from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.delay_manager import DelayManager
from mansio.broker.partition.delayed_records import DelayedRecords
from mansio.broker.partition.partition import Partition
from mansio.broker.partition.schedule_manager import DUE_HEADER, FIRING_HEADER, SCHEDULE_HEADER
from mansio.config import topic_config
from mansio.errors import DiskFull
from mansio.state.replica import ReplicationProgress
from mansio.state.schedules import recurrence
from mansio.storage.group_commit import GroupCommit
from mansio.storage.log import Log, LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.delay_headers import DELAY_HEADER
from mansio.wire.batch.record_batch import TimestampType, build_batch, read_header
from mansio.wire.batch.record_reader import read_records
from mansio.wire.batch.schedule_control_records import CatchUpMode, Schedule
from support.logs import ManualBackground, ManualClock, ManualScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.wire.batch.record_reader import Record

ROOT = "/data"
DIRECTORY = "/data/p"
SETTINGS = LogSettings(
    segment_bytes=3000, segment_ms=600_000, index_interval_bytes=1, index_snapshot_bytes=800
)
RULES = AppendRules(
    1 << 20, TimestampType.CREATE, 1 << 60, 1 << 60, accepts_delays=True, inspects_records=True
)
FAR_S = 2.0
UNKNOWN_OFFSET = 1 << 62


class _Promise:
    """As much of a promise as is used here. A coroutine that waits for it yields until it is done."""

    def __init__(self) -> None:
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, _: object) -> None:
        self._is_done = True

    def __await__(self) -> Iterator[None]:
        while not self._is_done:
            yield


class _Scheduler(ManualScheduler):
    def __init__(self) -> None:
        super().__init__()
        self.soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.soon.append(lambda: callback(*args))

    def promise(self) -> _Promise:
        return _Promise()

    async def sleep(self, delay_ms: float) -> None:
        del delay_ms

    def run(self) -> None:
        while self.soon:
            self.soon.pop(0)()


class Fired(NamedTuple):
    """A record of a schedule in the log."""

    number: int
    due_ms: int
    timestamp_ms: int


class DelayedPartition:
    """A partition with delayed records and schedules on a simulated disk."""

    def __init__(self, disk: SimulatedDisk, seconds: float) -> None:
        self.disk = disk
        self.clock = ManualClock()
        self.clock.seconds = seconds
        self.scheduler = _Scheduler()
        self.background = ManualBackground()
        self.group_commit = GroupCommit(disk, self.background, ROOT, scheduler=self.scheduler)
        self.log = Log.open(disk, self.clock, DIRECTORY, SETTINGS)
        self.group_commit.register(self.log)
        epoch = self.log.leader_epochs.latest_epoch + 1
        self.partition = Partition(
            topic="t",
            topic_id=UUID(int=1),
            index=0,
            broker_id=1,
            log=self.log,
            group_commit=self.group_commit,
            replica=ReplicationProgress(1, epoch, frozenset({1}), self.log.durable_end_offset),
            rules=RULES,
            clock=self.clock,
            scheduler=self.scheduler,  # type: ignore[arg-type]
            settings=topic_config.resolve_topic_settings({"mansio.delay.enable": "true"}, {}, 1),
        )
        self.view = DelayedRecords(disk, self.background, self.scheduler, self.log)  # type: ignore[arg-type]
        self.partition.add_hook(self.view)
        self.manager = DelayManager(self.partition, self.view)
        self.partition.convert_delayed = self.manager.convert
        self.scheduler.run()
        assert self.view.is_complete

    def flush(self) -> None:
        self.partition.request_flush()
        for _ in range(4):
            self.scheduler.fire()
            self.background.run_all()
        self.scheduler.run()

    def _records(self) -> Iterator[Record]:
        """Each record that consumers see."""
        for batch in self.log.batches(self.log.start_offset):
            if not read_header(batch).is_control:
                yield from read_records(batch, output_bytes_max=1 << 20)

    def visible(self) -> dict[int, bytes]:
        """Offset -> value of each record that consumers see, without those of schedules."""
        return {
            record.offset: record.value or b""
            for record in self._records()
            if SCHEDULE_HEADER not in dict(record.headers)
        }

    def fired(self) -> dict[str, list[Fired]]:
        """Name -> records of each schedule that consumers see."""
        found: dict[str, list[Fired]] = {}
        for record in self._records():
            headers = dict(record.headers)
            name = headers.get(SCHEDULE_HEADER)
            if name is not None:
                numbers = int(headers[FIRING_HEADER] or 0), int(headers[DUE_HEADER] or 0)
                found.setdefault(name.decode(), []).append(Fired(*numbers, record.timestamp_ms))
        return found

    def pending(self) -> dict[int, bytes]:
        """Id -> value of each pending record."""
        return {
            record.id: self.manager.read(record)[2] or b""
            for record in self.view.pending.select(-(1 << 62), 1 << 62)
        }

    def deliver_all(self) -> None:
        self.clock.seconds += FAR_S
        now_ms = self.clock.wall_ms()
        for _ in range(1_000):
            wake_ms = self.view.next_wake_ms
            if wake_ms is None or wake_ms > now_ms:
                return
            self.manager.deliver_due(50, 4_000)
        raise AssertionError("what is due does not become less")


class Workload:
    """Random use of one partition, and what must be true after a crash."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.live = DelayedPartition(SimulatedDisk(can_sync_all=seed % 2 == 0), 1_000.0)
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
        self.refused = 0
        """Deliveries of which only the first batch was appended."""
        self.firings = 0
        self._change_schedules()

    def step(self) -> None:
        chance, live = self.chance, self.live
        name = chance.choices(
            ["produce", "advance", "deliver", "cancel", "move", "flush", "background", "carry", "schedule"],
            [8, 6, 9, 2, 3, 5, 3, 2, 3],
        )[0]
        if name == "produce":
            self._produce()
        elif name == "advance":
            live.clock.seconds += chance.random() / 2
        elif name == "deliver":
            if chance.random() < 0.3:
                self._deliver_on_full_disk()
            else:
                live.manager.deliver_due(chance.randrange(1, 9), 300)
        elif name == "schedule":
            self._change_schedules()
        elif name in ("cancel", "move"):
            ids = [*live.pending()]
            if ids:
                chosen = chance.sample(ids, min(len(ids), 2))
                if name == "move":
                    live.manager.reschedule(chosen, live.clock.wall_ms() + chance.randrange(500))
                else:
                    self.cancelled |= dict.fromkeys(chosen, UNKNOWN_OFFSET)
                    _, end_offset = live.manager.cancel(chosen)
                    self.cancelled |= dict.fromkeys(chosen, end_offset)
        elif name == "flush":
            live.flush()
        elif name == "background":
            live.background.run_one()
            live.scheduler.fire()
        else:
            target = chance.randrange(live.partition.high_watermark + 1)
            if chance.random() < 0.7:
                copying = live.manager.release_below(target)
                with contextlib.suppress(StopIteration):
                    for _ in range(chance.randrange(1, 6)):  # fewer steps: some copies are not committed yet
                        copying.send(None)
                        if chance.random() < 0.5:
                            live.flush()
                copying.close()
            floor, high_watermark = live.partition.retention_floor(), live.partition.high_watermark
            start = min(target, high_watermark if floor is None else floor)
            if start > live.partition.start_offset:
                live.partition.trim(start)
                live.flush()

    def _change_schedules(self) -> None:
        chance, live = self.chance, self.live
        manager = live.manager.schedules
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
        states = {one.name: one for one in after.view.schedules}
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

    def _deliver_on_full_disk(self) -> None:
        """Deliver while the disk has space for the first of the two batches of a delivery only."""
        writes = 0

        def refuse_second(operation: str, path: str) -> int | None:
            nonlocal writes
            if operation != "write" or not path.endswith(".log"):
                return None
            writes += 1
            return errno.ENOSPC if writes > 1 else None

        self.live.disk.fail_when = refuse_second
        try:
            self.live.manager.deliver_due(self.chance.randrange(1, 9), 300)
        except DiskFull:
            self.refused += 1
        finally:
            self.live.disk.fail_when = None

    def _produce(self) -> None:
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
        after = DelayedPartition(self.live.disk.crash(chance), self.live.clock.seconds)
        start = after.log.start_offset
        before = {*self.trimmed, *(value for offset, value in self.known.items() if offset < start)}
        if chance.random() < 0.5:  # another record follows whatever is the last one
            after.partition.append(build_batch([(1000, None, b"after", ())]))
            after.flush()
            after = DelayedPartition(after.disk, after.clock.seconds)
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


@pytest.fixture(autouse=True)
def _frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_records, "SNAPSHOT_INTERVAL_BYTES", 300)
    monkeypatch.setattr(recurrence, "INTERVAL_MS_MIN", 1)
    monkeypatch.setattr(recurrence, "LATE_MS_MAX", 300)


def run(seed: int, steps: int, every: int) -> tuple[int, int, int]:
    """Run a workload, check every so many disk changes, and return the number of checks, of refused deliveries, and of
    firings of schedules."""
    workload = Workload(seed)
    seen = checked = 0
    found: list[AssertionError] = []

    def crash_here() -> None:
        nonlocal seen, checked
        seen += 1
        if seen % every == 0:
            checked += 1
            workload.live.disk.on_change = None
            try:
                workload.check_crash(random.Random(seed * 100_003 + seen))
            except AssertionError as error:  # the log would take it for an error of the disk
                found.append(error)
            workload.live.disk.on_change = crash_here

    workload.live.disk.on_change = crash_here
    for step in range(steps):
        workload.known = workload.live.visible()
        workload.step()
        workload.check_schedules(workload.live, 0)
        assert not found, f"seed {seed}, step {step}, change {seen}: {found[0]}"
        start = workload.live.log.start_offset
        workload.trimmed |= {value for offset, value in workload.known.items() if offset < start}
        for name, records in workload.live.fired().items():
            workload.fired[name] = records[-1].number
            workload.firings = max(workload.firings, sum(workload.fired.values()))
    return checked, workload.refused, workload.firings


@pytest.mark.row("D6")
def test_no_power_failure_loses_or_doubles_a_delayed_record() -> None:
    checks, refused, firings = map(sum, zip(*(run(seed, 60, every=5) for seed in range(1, 7)), strict=True))
    assert checks > 80
    assert refused > 3
    assert firings > 30


@pytest.mark.full
@pytest.mark.row("D6")
def test_no_power_failure_loses_or_doubles_a_delayed_record_in_long_runs() -> None:
    checks, refused, firings = map(
        sum, zip(*(run(seed, 150, every=2) for seed in range(100, 120)), strict=True)
    )
    assert checks > 1_700
    assert refused > 35
    assert firings > 400


@pytest.mark.row("D6")
@pytest.mark.parametrize("position", [8, 90], ids=["length", "content"])
def test_a_damaged_batch_delays_only_its_own_records(position: int) -> None:
    live = DelayedPartition(SimulatedDisk(), 1_000.0)
    for value in (b"damaged", b"intact"):
        live.partition.append(build_batch([(1000, None, value, ((DELAY_HEADER, b"50"),))]))
    live.flush()
    live.disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", 8 * position)
    live.clock.seconds += 1
    assert live.manager.deliver_due(10, 1 << 20) == 2
    later = [record.id for record in live.view.pending.select(0, 1 << 62)]
    assert later == [0], "it is tried again later"
    assert live.partition.storage_health.damaged
    live.disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", 8 * position)  # as a repair does
    live.clock.seconds += 11
    assert live.manager.deliver_due(10, 1 << 20) == 1
    assert [*live.visible().values()] == [b"intact", b"damaged"]


@pytest.mark.row("D6")
def test_a_clock_that_is_set_back_makes_no_record_early() -> None:
    live = DelayedPartition(SimulatedDisk(), 1_000.0)
    live.partition.append(build_batch([(1000, None, b"later", ((DELAY_HEADER, b"50"),))]))
    live.clock.seconds -= 100
    live.clock.seconds += 1
    assert live.manager.deliver_due(10, 1 << 20) == 0
    live.clock.seconds += 99.1
    assert live.manager.deliver_due(10, 1 << 20) == 1


@pytest.mark.row("D6")
def test_deliveries_that_were_truncated_do_not_hold_up_later_ones() -> None:
    live = DelayedPartition(SimulatedDisk(), 1_000.0)
    for value in (b"one", b"two"):
        live.partition.append(build_batch([(1000, None, value, ((DELAY_HEADER, b"50"),))]))
    live.flush()
    end = live.log.end_offset
    live.clock.seconds += 1
    assert live.manager.deliver_due(1, 1 << 20) == 1
    live.flush()
    live.log.truncate_to(end)
    live.view.on_truncate(end)
    live.scheduler.run()
    assert live.manager.uncommitted_end == 0, "it is not waited for"
    assert [*live.pending().values()] == [b"one", b"two"]


@pytest.mark.row("D6")
def test_a_record_without_delay_cannot_be_cancelled_while_its_delivery_fails() -> None:
    live = DelayedPartition(SimulatedDisk(), 1_000.0)
    writes = 0

    def refuse_later(operation: str, path: str) -> int | None:
        nonlocal writes
        writes += operation == "write" and path.endswith(".log")
        return errno.ENOSPC if writes > 1 and operation == "write" else None

    live.disk.fail_when = refuse_later
    live.partition.append(
        build_batch([(1000, None, b"now", ()), (1000, None, b"later", ((DELAY_HEADER, b"50"),))])
    )
    live.disk.fail_when = None
    assert sorted(live.pending()) == [0, 1]
    assert live.manager.cancel([0, 1])[0] == [1]
    assert live.manager.reschedule([0], 1 << 40)[0] == []
    live.deliver_all()
    assert [*live.visible().values()] == [b"now"]


@pytest.mark.row("D6")
def test_a_clock_that_is_set_back_makes_no_schedule_fire_early_or_twice() -> None:
    live = DelayedPartition(SimulatedDisk(), 1_000.0)
    new = Schedule(UUID(int=1), "s", "", 1_000, "", CatchUpMode.ALL, None, b"v", (), 0, 0)
    live.manager.schedules.create(new)
    live.clock.seconds += 1
    assert live.manager.deliver_due(10, 1 << 20) == 1
    live.clock.seconds -= 100
    for _ in range(101):
        assert live.manager.deliver_due(10, 1 << 20) == 0
        live.clock.seconds += 1
    assert live.manager.deliver_due(10, 1 << 20) == 1
    (one, other) = live.fired()["s"]
    assert (one.number, other.number, other.due_ms - one.due_ms) == (1, 2, 1_000)
