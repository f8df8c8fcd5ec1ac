"""Crash test of compaction: the latest record of each key is kept at its offset; no deleted record reappears.

A log of keyed records is written, synced, trimmed, truncated and compacted on the simulated disk. After every disk
change crash images are taken, opened, checked in full, crashed again while they recover, and opened once more.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mansio.errors import ConcurrentChange, StorageError
from mansio.storage.compaction_run import CompactionOutcome
from mansio.storage.log import Log, LogListener, LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch, check_batch, read_header
from support.compaction import Kept, finish, records_of, start_compaction
from support.logs import LogBench, ManualClock
from support.tiers import examples

if TYPE_CHECKING:
    from mansio.storage.compaction_run import CompactionRun

ROOT = "/data"
DIRECTORY = "/data/p"
SMALL = LogSettings(segment_bytes=400, index_interval_bytes=1, index_snapshot_bytes=300)
LARGE = LogSettings(segment_bytes=1500, index_interval_bytes=200, index_snapshot_bytes=300)
KEYS = (b"a", b"b", b"c", b"d", None)
STATES = examples(400, 2_500, 2_500)
STEPS = 40
SLICES_PER_STEP = 4


class Workload:
    """Random writes, syncs, maintenance, trims, truncations, restarts and compactions of one log.

    `written` is every record ever written and not truncated, by offset. `promised` is the highest end that was reported
    as durable, `committed` an end that no truncation goes below.
    """

    def __init__(self, disk: SimulatedDisk, chance: random.Random) -> None:
        self.disk = disk
        self.chance = chance
        self.clock = ManualClock()
        self.settings = chance.choice([SMALL, LARGE])
        self.map_bytes_max = chance.choice([64 * 24, 1 << 20])
        self.written: dict[int, Kept] = {}
        self.promised = 0
        self.committed = 0
        self.start_asked = 0
        self.runs = 0
        self.swaps = 0
        self.run: CompactionRun | None = None

    def open(self) -> None:
        life = LogBench(
            self.disk,
            clock=self.clock,
            sync_all_files_min=self.chance.choice([1, 99]),
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
        self.promised = durable_end_offset

    def step(self) -> None:
        actions = [self.write, self.sync, self.compact, self.trim, self.truncate, self.reopen, self.wait]
        self.chance.choices(actions, [9, 5, 12, 1, 0.5, 0.7, 2])[0]()

    def write(self) -> None:
        log, chance = self.log, self.chance
        rows = []
        for _ in range(chance.randint(1, 4)):
            value = None if chance.random() < 0.25 else chance.randbytes(chance.choice([3, 60]))
            rows.append((1000 + chance.randint(0, 99), chance.choice(KEYS), value))
        batch = build_batch([(*row, ()) for row in rows], codec=chance.choice([Codec.NONE, Codec.LZ4]))
        end = log.end_offset
        for delta, (timestamp, key, value) in enumerate(rows):
            self.written[end + delta] = Kept(end + delta, timestamp, key, value, ())
        log.append(batch, check_batch(batch), 0)

    def sync(self) -> None:
        self.group_commit.request_flush(self.log)
        self.background.run_all()
        if self.chance.random() < 0.7:
            self.committed = self.log.durable_end_offset
        self.scheduler.fire()
        self.background.run_all()

    def wait(self) -> None:
        self.clock.seconds += 0.7

    def compact(self) -> None:
        """Some slices of a compaction, started if none is running."""
        if self.run is None:
            self.sync()
            larger = replace(
                self.settings, segment_bytes=self.chance.choice([1, 5]) * self.settings.segment_bytes
            )
            self.log.update_settings(larger)  # so that several segments become one
            self.run = start_compaction(
                self.log,
                self.disk,
                now_ms=self.clock.wall_ms(),
                limit_offset=self.committed,
                map_bytes_max=self.map_bytes_max,
            )
            self.log.update_settings(self.settings)
            if self.run is None:
                return
            self.runs += 1
        for _ in range(SLICES_PER_STEP):
            if self.run.outcome is not None:
                break
            work = self.run.next_job()
            while work is not None:
                work = finish(self.run, work)
        if self.run.outcome is not None:
            self.swaps += self.run.swaps
            failed = self.run.outcome is CompactionOutcome.FAILED
            self.run = None
            if failed and self.log.failure is not None:
                raise self.log.failure

    def trim(self) -> None:
        log = self.log
        self.start_asked = log.start_offset + (log.end_offset - log.start_offset) // 4
        log.trim_to(self.start_asked)

    def truncate(self) -> None:
        log = self.log
        self.background.run_all()
        target = self.chance.randint(max(log.start_offset, self.committed), log.end_offset)
        headers = [h for h in log.batch_headers(log.start_offset) if h.last_offset >= target]
        end = min(target, headers[0].base_offset) if headers else target
        end = max(end, min(log.start_offset, log.durable_end_offset))
        before = self.promised
        self.promised = min(self.promised, end)
        try:
            log.truncate_to(target)
        except ConcurrentChange:
            self.promised = before
            return
        self.written = {offset: record for offset, record in self.written.items() if offset < log.end_offset}

    def reopen(self) -> None:
        if self.run is not None:
            self.run.stop()
            while self.run is not None:
                self.compact()
        self.background.run_all()
        self.log.close()
        self.open()


def check_log(log: Log, workload: Workload) -> None:
    """Check that it contains only written records, the latest of each key, and no key whose tombstone was removed."""
    log.verify()
    seen = records_of(log)
    sparse_end = log.compaction.state.sparse_end_offset
    visible = {record.offset: record for record in seen}
    for record in seen:
        assert workload.written[record.offset] == record
    end = log.end_offset
    newest: dict[bytes | None, Kept] = {}
    for offset, record in sorted(workload.written.items()):
        if log.start_offset <= offset < end:
            newest[record.key] = record
            if offset >= sparse_end:
                assert offset in visible
    newest.pop(None, None)
    for key, record in newest.items():
        if record.offset in visible:
            continue
        assert record.value is None, (key, record)
        assert not [one for one in seen if one.key == key], (key, record)
    if log.end_offset > log.start_offset:
        headers = [read_header(batch) for batch in log.batches(log.start_offset)]
        for offset in range(log.start_offset, end):
            piece = log.read(offset, 1, end)
            following = next((header for header in headers if header.last_offset >= offset), None)
            assert (piece is None) == (following is None)
            if piece is not None and following is not None:
                assert read_header(piece.read()).base_offset == following.base_offset


def check_image(image: SimulatedDisk, workload: Workload) -> Log:
    log = Log.open(image, workload.clock, DIRECTORY, workload.settings)
    assert log.end_offset >= workload.promised
    assert log.start_offset <= workload.start_asked
    assert log.durable_end_offset == log.end_offset
    assert log.compaction.state.swap is None
    assert not [path for path in image.files() if path.endswith(".tmp")]
    check_log(log, workload)
    return log


def check_crash(disk: SimulatedDisk, workload: Workload, chance: random.Random) -> int:
    """Check one crash image, and a crash in its recovery. Returns the number of states."""
    image = disk.crash(chance)
    again: list[SimulatedDisk] = []
    image.on_change = lambda: again.append(image.crash(chance)) if chance.random() < 0.3 else None
    log = check_image(image, workload)
    image.on_change = None
    second = check_image(image.crash(chance), workload)
    assert (second.start_offset, second.end_offset) == (log.start_offset, log.end_offset)
    assert records_of(second) == records_of(log)
    for torn in again[:2]:
        check_image(torn, workload)
    return 2 + len(again[:2])


def crash_states(states_wanted: int, first_seed: int) -> tuple[int, int]:
    """Crash after any disk change until enough states were checked; returns (states, swaps)."""
    states = swaps = 0
    seed = first_seed
    while states < states_wanted:
        seed += 1
        chance = random.Random(seed)
        disk = SimulatedDisk(can_sync_all=seed % 4 != 0)
        workload = Workload(disk, chance)
        seen = 0

        def crash_here(disk: SimulatedDisk = disk, workload: Workload = workload, seed: int = seed) -> None:
            nonlocal states, seen
            seen += 1
            swapping = workload.run is not None and workload.log.compaction.is_busy
            every = 1 if swapping else 6 if workload.run is not None else 20  # the rest has a test of its own
            if seen % every == 0:
                states += check_crash(disk, workload, random.Random(seed * 100_003 + seen))

        disk.on_change = crash_here
        try:
            workload.open()
            for _ in range(STEPS):
                workload.step()
            disk.on_change = None
            check_log(workload.log, workload)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, change {seen}: {error}") from error
        swaps += workload.swaps
    return states, swaps


def test_compacted_records_survive_a_crash_after_any_change_of_the_disk() -> None:
    states, swaps = crash_states(STATES, 0)
    assert states >= STATES
    assert swaps > STATES // 100


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
        check_image(disk.crash(chance), workload)
    return calls


@pytest.mark.parametrize(
    "code", [pytest.param(5, id="EIO"), pytest.param(28, id="ENOSPC", marks=pytest.mark.full)]
)
def test_any_single_failing_call_in_a_compaction_loses_nothing(code: int) -> None:
    points = 0
    seeds = examples(1, 2, 2)
    for seed in range(1, 1 + seeds):
        calls = run_with_failing_call(1 << 30, code, seed)
        for number in range(1, calls + 1, examples(3, 1, 1)):
            run_with_failing_call(number, code, seed)
        points += calls
    assert points > 100 * seeds
