"""Crash test: a power failure between any two disk changes loses no durable record and leaves no inconsistency.

A workload runs on the simulated disk. After every write, truncation, creation, rename, removal and sync, crash images
are taken (any subset of what was not synced survives, whole or in sectors). Each image is opened, checked in full,
crashed again while it recovers, and opened once more.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from mansio.errors import MansioError, StorageError
from mansio.storage.checkpoint import load_checkpoint
from mansio.storage.log import Log, LogListener, LogSettings
from mansio.storage.scan import scan
from mansio.testing.disk import SimulatedDisk
from support.logs import (
    LogBench,
    ManualClock,
    append,
    check_contents,
    last_offset,
    make_batch,
)
from support.nightly_counts import leave

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = "/data"
DIRECTORY = "/data/p"
SETTINGS = LogSettings(segment_bytes=900, segment_ms=60_000, index_interval_bytes=1, index_snapshot_bytes=400)
LARGE_SEGMENTS = LogSettings(segment_bytes=20_000, index_interval_bytes=1, index_snapshot_bytes=1)
RARE_SNAPSHOTS = LogSettings(segment_bytes=20_000, index_interval_bytes=150, index_snapshot_bytes=1200)
STATES = 20_000
STEPS = 24


class Workload:
    """Random appends, syncs, maintenance, trims, truncations, new leaders and recoveries of one log.

    `promised` is the highest end that was reported as durable; `written` all batches, in order; `also` those that a
    running truncation removes: until it returns, both states are correct.
    """

    def __init__(self, disk: SimulatedDisk, chance: random.Random) -> None:
        self.disk = disk
        self.chance = chance
        self.clock = ManualClock()
        self.promised = 0
        self.written: list[bytes] = []
        self.also: list[bytes] = []
        self.start_asked = 0
        self.epoch = 0
        self.tag = 0
        self.log: Log | None = None
        self.settings = chance.choice([SETTINGS, LARGE_SEGMENTS, RARE_SNAPSHOTS])

    def open(self) -> None:
        life = LogBench(
            self.disk,
            clock=self.clock,
            sync_all_files_min=self.chance.choice([1, 3, 99]),
        )
        self.background, self.scheduler, self.group_commit = (
            life.background,
            life.scheduler,
            life.group_commit,
        )
        self.log = life.open_log(DIRECTORY, self.settings, registered=False)
        self.promised = self.log.durable_end_offset
        self.log.listen(LogListener(on_durable=self.reported))
        self.group_commit.register(self.log)

    def reported(self, durable_end_offset: int) -> None:
        assert durable_end_offset > self.promised
        self.promised = durable_end_offset

    def step(self) -> None:
        assert self.log is not None
        action = self.chance.choices(
            [
                self.write,
                self.sync,
                self.run_job,
                self.prune,
                self.trim,
                self.truncate,
                self.new_leader,
                self.reopen,
            ],
            [10, 4, 6, 3, 2, 1, 2, 1],
        )[0]
        action(self.log)

    def write(self, log: Log) -> None:
        self.tag += 1
        count = self.chance.randint(1, 3)
        times = [1000 + self.chance.randint(0, 99) for _ in range(count)]
        batch = make_batch(times, self.chance.choice([20, 90, 700]), self.tag)
        end = log.end_offset
        self.written.append(_stored_ahead(batch, end, self.epoch))
        try:
            _, stored = append(log, batch, self.epoch)
        except MansioError:
            self.also = [*self.written]
            self.written.pop()
            raise
        assert stored == self.written[-1]

    def sync(self, log: Log) -> None:
        self.group_commit.request_flush(log)

    def run_job(self, log: Log) -> None:
        self.background.run_one()

    def prune(self, log: Log) -> None:
        self.scheduler.fire()

    def trim(self, log: Log) -> None:
        self.start_asked = log.start_offset + (log.end_offset - log.start_offset) // 3
        log.trim_to(self.start_asked)

    def truncate(self, log: Log) -> None:
        self.background.run_all()
        target = self.chance.randint((log.start_offset + log.end_offset) // 2, log.end_offset)
        kept = [b for b in self.written if last_offset(b) < target]
        self.also, self.written = self.written, kept
        self.promised = min(self.promised, last_offset(kept[-1]) + 1 if kept else log.start_offset)
        self.promised = max(self.promised, min(log.start_offset, log.durable_end_offset))
        log.truncate_to(target)
        self.also = []

    def new_leader(self, log: Log) -> None:
        self.epoch += 1

    def reopen(self, log: Log) -> None:
        self.background.run_all()
        log.close()
        self.open()


def _stored_ahead(batch: bytes, base_offset: int, epoch: int) -> bytes:
    return base_offset.to_bytes(8, "big") + batch[8:12] + epoch.to_bytes(4, "big") + batch[16:]


def check_image(image: SimulatedDisk, workload: Workload, *, thorough: bool) -> Log:
    """Open a crash image: it contains one of the correct states, at least up to the promised end."""
    log = Log.open(image, workload.clock, DIRECTORY, workload.settings)
    assert log.end_offset >= workload.promised, (log.end_offset, workload.promised, log.recovery)
    assert log.start_offset <= max(workload.start_asked, 0)
    assert log.durable_end_offset == log.end_offset
    try:
        check_contents(log, workload.written, thorough=thorough)
    except AssertionError:
        if not workload.also:
            raise
        check_contents(log, workload.also, thorough=thorough)
    return log


def check_nothing_whole_is_gone(before: dict[str, bytes], image: SimulatedDisk, log: Log) -> None:
    """Check that every complete batch in the segments before recovery is in a segment or a quarantine file after it."""
    after = [data for path, data in image.files().items() if path.endswith(".log") or ".cut-" in path]
    for path, data in before.items():
        if not path.endswith(".log"):
            continue
        position = 0
        file = SimulatedDisk()
        file.put_file("/s", data)
        for found in scan(file.open("/s"), len(data), 0, 1 << 62):
            batch = data[position : position + found.length]
            position += found.length
            if found.header is not None and found.header.last_offset >= log.start_offset:
                assert any(batch in kept for kept in after), (path, found.position)


def check_crash(disk: SimulatedDisk, workload: Workload, chance: random.Random) -> int:
    """Check one crash image, and a crash in its recovery. Returns the number of states."""
    image = disk.crash(chance)
    again: list[SimulatedDisk] = []
    image.on_change = lambda: again.append(image.crash(chance)) if chance.random() < 0.3 else None
    before = image.files() if chance.random() < 0.2 else {}
    log = check_image(image, workload, thorough=chance.random() < 0.3)
    image.on_change = None
    check_nothing_whole_is_gone(before, image, log)
    first = (log.start_offset, log.end_offset, log.leader_epochs.entries())
    second_image = image.crash(chance)
    second = check_image(second_image, workload, thorough=False)
    assert (second.start_offset, second.end_offset, second.leader_epochs.entries()) == first
    assert second.recovery.checked_bytes == 0  # what the first recovery kept, it made durable
    if chance.random() < 0.3:
        stored = list(second.batches(second.start_offset))
        stored += [append(second, make_batch([5000], 30 + 70 * n, 900 + n), 1000)[1] for n in range(4)]
        check_contents(second, stored)
        second.sync()
        check_contents(Log.open(second_image.crash(chance), workload.clock, DIRECTORY, SETTINGS), stored)
    for torn in again[:2]:
        check_image(torn, workload, thorough=False)
    return 2 + len(again[:2])


@pytest.mark.full
def test_durable_records_survive_a_crash_after_any_change_of_the_disk() -> None:
    states = 0
    seed = 0
    while states < STATES:
        seed += 1
        chance = random.Random(seed)
        disk = SimulatedDisk(can_sync_all=seed % 4 != 0)
        workload = Workload(disk, chance)
        seen = 0

        def crash_here(disk: SimulatedDisk = disk, workload: Workload = workload, seed: int = seed) -> None:
            nonlocal states, seen
            seen += 1
            states += check_crash(disk, workload, random.Random(seed * 100_003 + seen))

        disk.on_change = crash_here
        try:
            workload.open()
            for _ in range(STEPS):
                workload.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, change {seen}: {error}") from error
    leave("crash states", of_one_log=states)


def test_durable_records_survive_a_crash_of_an_intermittently_full_disk() -> None:
    """There is space for records; checkpoints, indexes, epochs and removals find the disk full every third time."""
    retry_sync = 0
    for seed in range(60):
        chance = random.Random(seed)
        disk = SimulatedDisk(can_sync_all=seed % 3 != 0)
        workload = Workload(disk, chance)
        workload.open()
        seen = 0

        def refuse(operation: str, path: str, chance: random.Random = chance) -> int | None:
            nonlocal retry_sync
            wanted = operation in ("write", "remove") and (operation == "remove" or not path.endswith(".log"))
            if not wanted or chance.random() > 0.33:
                return None
            retry_sync += 1
            return 28

        def crash_here(disk: SimulatedDisk = disk, workload: Workload = workload, seed: int = seed) -> None:
            nonlocal seen
            seen += 1
            if seen % 4 == 0:
                check_crash(disk, workload, random.Random(seed * 100_003 + seen))

        disk.on_change = crash_here
        try:
            for _ in range(STEPS):
                disk.fail_when = refuse
                jobs = [workload.sync, workload.run_job, workload.run_job, workload.prune]
                action = chance.choice([workload.write, *jobs, workload.trim, workload.new_leader])
                assert workload.log is not None
                action(workload.log)
                assert workload.log.failure is None
                disk.fail_when = None
                if chance.random() < 0.1:
                    workload.truncate(workload.log)
            workload.background.run_all()
            assert workload.log is not None
            workload.sync(workload.log)
            workload.background.run_all()
            assert workload.log.failure is None, workload.log.failure
            assert workload.log.durable_end_offset == workload.log.end_offset
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, change {seen}: {error}") from error
    assert retry_sync > 20


def run_with_failing_call(number: int, code: int, seed: int) -> int:
    """Run the same workload with one failing call; returns the number of calls."""
    chance = random.Random(seed)
    disk = SimulatedDisk(can_sync_all=seed % 2 == 0)
    disk.fail_call(number, code)
    workload = Workload(disk, chance)
    try:
        workload.open()
        for _ in range(STEPS):
            workload.step()
    except StorageError:  # anything but a StorageError (an OSError, say) fails the test
        assert disk.calls >= number
    if disk.calls < number and number < 1 << 30:
        return disk.calls
    disk.fail_when = None
    calls = disk.calls
    for _ in range(2):
        log = check_image(disk.crash(chance), workload, thorough=False)
        append(log, make_batch([5000], 30, 999), 1000)
        log.sync()
    return calls


@pytest.mark.parametrize("code", [5, 28], ids=["EIO", "ENOSPC"])
def test_any_single_failing_call_loses_nothing_durable_and_is_a_storage_error(code: int) -> None:
    points = 0
    for seed in range(1, 6):
        calls = run_with_failing_call(1 << 30, code, seed)
        for number in range(1, calls + 1):
            run_with_failing_call(number, code, seed)
        points += calls
    assert points > 250


def test_failed_sync_is_never_retried() -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    failures: list[StorageError] = []
    log.listen(LogListener(on_failure=failures.append))
    append(log, make_batch([1]))
    disk.fail_when = lambda operation, path: 5 if operation == "sync" and path.endswith(".log") else None
    with pytest.raises(StorageError, match="cannot sync"):
        log.sync()
    disk.fail_when = None
    syncs = disk.syncs
    for attempt in (log.sync, lambda: append(log, make_batch([2]))):
        with pytest.raises(StorageError, match="cannot sync"):
            attempt()
    assert disk.syncs == syncs
    assert log.durable_end_offset == 0
    assert failures == [log.failure]


def test_checkpoint_is_never_ahead_of_the_log_after_a_crash() -> None:
    def check(disk: SimulatedDisk) -> Callable[[], None]:
        def look() -> None:
            checkpoint = load_checkpoint(disk, f"{DIRECTORY}/checkpoint")
            if checkpoint is not None:
                sizes = {path: len(data) for path, data in _durable_files(disk).items()}
                path = f"{DIRECTORY}/{checkpoint.segment_base:020d}.log"
                assert sizes.get(path, 0) >= checkpoint.position

        return look

    for seed in range(20):
        disk = SimulatedDisk(can_sync_all=False)
        workload = Workload(disk, random.Random(seed))
        disk.on_change = check(disk)
        workload.open()
        for _ in range(STEPS):
            workload.step()


def _durable_files(disk: SimulatedDisk) -> dict[str, bytes]:
    class Never(random.Random):
        def random(self) -> float:
            return 0.0  # a crash that keeps nothing unsynced

    return disk.crash(Never()).files()


def test_new_records_after_a_torn_tail_are_not_mixed_with_the_old_ones() -> None:
    """The truncated tail never reappears, neither in the segment nor through an old index."""
    for seed in range(200):
        chance = random.Random(seed)
        settings = chance.choice([SETTINGS, LARGE_SEGMENTS, RARE_SNAPSHOTS])
        disk = SimulatedDisk()
        clock = ManualClock()
        stored: list[bytes] = []
        durable = 0
        for life in range(5):
            log = Log.open(disk, clock, DIRECTORY, settings)
            assert log.end_offset >= durable
            stored = stored[: log.end_offset]
            check_contents(log, stored)
            for tag in range(chance.randint(1, 8)):
                batch = make_batch(
                    [1000 + chance.randint(0, 9)], chance.choice([20, 150, 400]), 10 * life + tag
                )
                stored.append(append(log, batch)[1])
                if chance.random() < 0.3:
                    log.sync()
                    durable = log.durable_end_offset
                elif chance.random() < 0.2 and log.end_offset > durable:
                    log.truncate_to(log.end_offset - 1)
                    stored.pop()
                    durable = min(durable, log.end_offset)
            disk = disk.crash(chance)


def test_truncated_tail_does_not_reappear_through_an_old_index() -> None:
    disk, clock = SimulatedDisk(), ManualClock()
    log = Log.open(disk, clock, DIRECTORY, RARE_SNAPSHOTS)
    stored = [append(log, make_batch([1000 + tag], 200, tag))[1] for tag in range(6)]
    log.sync()  # saves an index of six batches
    assert any(path.endswith(".index") for path in disk.files())
    log.truncate_to(2)
    stored = stored[:2]
    stored += [append(log, make_batch([2000 + tag], 170, 50 + tag))[1] for tag in range(5)]
    log.sync()
    stored += [append(log, make_batch([2000 + tag], 170, 60 + tag))[1] for tag in range(2)]
    log.sync()
    for seed in range(40):
        check_contents(Log.open(disk.crash(random.Random(seed)), clock, DIRECTORY, RARE_SNAPSHOTS), stored)


def test_index_of_lost_records_is_not_used() -> None:
    """Neither at the next recovery, nor later when another crash may undo its removal."""
    disk, clock = SimulatedDisk(), ManualClock()
    log = Log.open(disk, clock, DIRECTORY, LARGE_SEGMENTS)
    stored = [append(log, make_batch([1000 + tag], 200, tag))[1] for tag in range(3)]
    log.sync()
    for tag in range(3):
        append(log, make_batch([1500 + tag], 200, 10 + tag))
    job = log.prepare_maintenance(closing=True)
    assert job is not None
    job.run(disk)  # the index of all six batches reaches the disk, the last three of them do not
    disk.sync_all(ROOT)
    disk.truncate_file(f"{DIRECTORY}/{0:020d}.log", sum(len(batch) for batch in stored))
    no_snapshots = LogSettings(index_interval_bytes=1, index_snapshot_bytes=1 << 20)
    log = Log.open(disk, clock, DIRECTORY, no_snapshots)
    stored += [append(log, make_batch([900 + tag], 170, 20 + tag))[1] for tag in range(8)]
    check_contents(log, stored)
    log.sync()
    for seed in range(30):
        check_contents(Log.open(disk.crash(random.Random(seed)), clock, DIRECTORY, no_snapshots), stored)


def test_a_truncation_of_a_log_trimmed_beyond_its_durable_end_loses_nothing_written_later() -> None:
    disk, clock = SimulatedDisk(), ManualClock()
    log = Log.open(disk, clock, DIRECTORY, LARGE_SEGMENTS)
    append(log, make_batch([1, 2]))
    log.sync()
    append(log, make_batch([3, 4, 5]))
    log.trim_to(3)  # inside a batch that is not durable
    log.truncate_to(4)
    assert (log.start_offset, log.end_offset) == (3, 3)
    stored = [append(log, make_batch([6]))[1]]
    work = log.prepare_flush()
    assert work is not None
    work.run(disk)
    log.finish_flush(work, None)
    for seed in range(20):
        again = Log.open(disk.crash(random.Random(seed)), clock, DIRECTORY, LARGE_SEGMENTS)
        assert again.end_offset == log.durable_end_offset == 4
        check_contents(again, stored)
