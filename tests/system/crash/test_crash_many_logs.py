"""Crash test of many logs that share syncs: each keeps its durable records.

The counterpart of `test_crash_states` (one log, every feature) for shared syncs, during writes and during recovery. An
image of the disk is taken after changes, opened, crashed again while it is being opened, and opened once more.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from mansio.storage.file_cache import FileCache
from mansio.storage.group_commit import flush_on_shutdown
from mansio.storage.log import Log, LogListener, LogSettings
from mansio.storage.parallel_recovery import OpenRequest, open_logs
from mansio.testing.disk import SimulatedDisk
from support.logs import (
    LogBench,
    ManualClock,
    append,
    as_stored,
    check_contents,
    make_batch,
)
from support.nightly_counts import leave

ROOT = "/data"
SETTINGS = LogSettings(segment_bytes=600, index_interval_bytes=1, index_snapshot_bytes=300)
STATES = 3_000
STEPS = 30


class ManyLogs:
    """Random appends, syncs, maintenance, new logs and restarts. `promised[n]` of log n was reported as durable."""

    def __init__(self, disk: SimulatedDisk, chance: random.Random) -> None:
        self.disk = disk
        self.chance = chance
        self.clock = ManualClock()
        self.written: list[list[bytes]] = []
        self.promised: list[int] = []
        self.logs: list[Log] = []
        self.tag = 0
        disk.make_directory(ROOT)

    def make(self) -> None:
        """A topic with some more partitions."""
        more = self.chance.randint(1, 4)
        self.written += [[] for _ in range(more)]
        self.open()
        self.promised += [0] * more

    def open(self) -> None:
        self.close()
        life = LogBench(self.disk, root=ROOT, clock=self.clock)
        self.background, self.scheduler, self.group_commit = (
            life.background,
            life.scheduler,
            life.group_commit,
        )
        self.logs = opened(self.disk, self.clock, len(self.written))
        for number, log in enumerate(self.logs):
            log.listen(LogListener(on_durable=partial(self.promised.__setitem__, number)))
            self.group_commit.register(log)

    def close(self) -> None:
        if not self.logs:
            return
        self.background.run_all()
        for log in self.logs:
            self.group_commit.request_flush(log)
        self.background.run_all()
        if self.chance.random() < 0.5:
            flush_on_shutdown(self.disk, ROOT, self.logs)
        for log in self.logs:
            log.close(save=self.chance.random() < 0.5)

    def step(self) -> None:
        actions = [self.write, self.sync, self.background.run_one, self.scheduler.fire, self.make, self.open]
        self.chance.choices(actions, [8, 3, 5, 2, 0.3, 0.6])[0]()

    def write(self) -> None:
        for number in self.chance.sample(range(len(self.logs)), self.chance.randint(1, len(self.logs))):
            self.tag += 1
            batch = make_batch([1000 + self.tag], self.chance.choice([20, 150]), self.tag)
            log, epoch = self.logs[number], self.tag // 20
            self.written[number].append(as_stored(batch, log.end_offset, epoch))  # a crash may come within
            append(log, batch, epoch)

    def sync(self) -> None:
        for log in self.logs:
            self.group_commit.request_flush(log)


def opened(disk: SimulatedDisk, clock: ManualClock, count: int) -> list[Log]:
    requests = [OpenRequest(f"{ROOT}/{number}", SETTINGS) for number in range(count)]
    logs = open_logs(disk, clock, ROOT, requests, FileCache(disk))
    assert all(isinstance(log, Log) for log in logs), logs
    return [log for log in logs if isinstance(log, Log)]


def check_image(image: SimulatedDisk, world: ManyLogs) -> list[int]:
    """Open a crash image: every log contains a prefix of what was written, at least up to the promised end."""
    logs = opened(image, world.clock, len(world.promised))
    for log, written, promised in zip(logs, world.written, world.promised, strict=False):
        assert log.end_offset >= promised, (log.directory, log.end_offset, promised)
        check_contents(log, written, thorough=False)
    return [log.end_offset for log in logs]


def check_crash(disk: SimulatedDisk, world: ManyLogs, chance: random.Random) -> int:
    """Check one crash image, a crash in its recovery, and one right after it. Returns the number of images."""
    image = disk.crash(chance)
    again: list[SimulatedDisk] = []
    image.on_change = lambda: again.append(image.crash(chance)) if chance.random() < 0.1 else None
    ends = check_image(image, world)
    image.on_change = None
    assert check_image(image.crash(chance), world) == ends  # what opening handed out is durable
    for torn in again[:2]:
        check_image(torn, world)
    return 2 + len(again[:2])


def run(states_wanted: int) -> None:
    states = seed = 0
    wrong: list[str] = []
    while states < states_wanted:
        seed += 1
        chance = random.Random(seed)
        disk = SimulatedDisk(can_sync_all=seed % 4 != 0)
        world = ManyLogs(disk, chance)
        seen = 0

        def crash_here(disk: SimulatedDisk = disk, world: ManyLogs = world, seed: int = seed) -> None:
            nonlocal states, seen
            seen += 1
            if seen % 5 == 0 and world.promised and not wrong:
                try:
                    states += check_crash(disk, world, random.Random(seed * 100_003 + seen))
                except AssertionError as error:  # not raised here, where a worker would take it for its own
                    wrong.append(f"seed {seed}, change {seen}: {error!r}")

        disk.on_change = crash_here
        world.make()
        for _ in range(STEPS):
            world.step()
            assert not wrong, wrong
    leave("crash states", of_many_logs=states)


@pytest.mark.full
def test_durable_records_of_many_logs_survive_a_crash_during_shared_syncs() -> None:
    run(STATES)
