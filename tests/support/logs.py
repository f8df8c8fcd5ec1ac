"""Fixtures of log tests: manual clock, scheduler and worker, logs over them, batches, and a full check of a log's
content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.ports import SliceTimes
from mansio.storage.file_cache import FileCache
from mansio.storage.group_commit import GroupCommit
from mansio.storage.log import Log
from mansio.storage.settings import LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import build_batch, check_stored_batch, read_header
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

OUTPUT_BYTES_MAX = 1 << 24


class ManualClock:
    """A clock that the test advances. `wall_offset_ms`: error of the wall clock."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.wall_offset_ms = 0

    def wall_ms(self) -> int:
        return int(self.seconds * 1000) + 1_700_000_000_000 + self.wall_offset_ms

    def monotonic(self) -> float:
        return self.seconds


class ManualTimer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualScheduler:
    """Timers that the test fires. `clock`: measures the slices of work; None: they take no time."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.slices = SliceTimes((lambda: 0.0) if clock is None else clock.monotonic)
        self.timers: list[tuple[float, ManualTimer]] = []

    def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> ManualTimer:
        timer = ManualTimer(lambda: callback(*args))
        self.timers.append((delay_ms, timer))
        return timer

    def call_after_pause(self, callback: Callable[..., object], *args: Any) -> None:
        self.call_later(1, callback, *args)

    def fire(self, up_to_ms: float = 1e9) -> None:
        due = [timer for delay, timer in self.timers if delay <= up_to_ms]
        self.timers = [(delay, timer) for delay, timer in self.timers if delay > up_to_ms]
        for timer in due:
            if timer.callback is not None:
                timer.callback()


class ManualBackground:
    """A worker whose jobs the test runs one by one."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.jobs.append((work, done))

    def run_one(self) -> bool:
        if not self.jobs:
            return False
        work, done = self.jobs.pop(0)
        result, error = None, None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001  # the port hands every error to `done`
            error = caught
        done(result, error)
        return True

    def run_all(self) -> None:
        while self.run_one():
            pass

    def close(self) -> None:
        self.run_all()


class BenchScheduler(ManualScheduler):
    """Timers and calls that the test runs."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        super().__init__(clock)
        self.soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.soon.append(lambda: callback(*args))

    def call_after_pause(self, callback: Callable[..., object], *args: Any) -> None:
        self.call_soon(callback, *args)

    def promise(self) -> _Promise:
        return _Promise()

    async def sleep(self, delay_ms: float) -> None:
        del delay_ms

    def run_one(self) -> None:
        self.soon.pop(0)()

    def run(self) -> None:
        while self.soon:
            self.run_one()


class _Promise:
    """As much of a promise as is used here. A coroutine that waits for it yields until it is done."""

    def __init__(self) -> None:
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, _: object) -> None:
        self._is_done = True

    def set_exception(self, _: BaseException) -> None:
        self._is_done = True

    def __await__(self) -> Iterator[None]:
        while not self._is_done:
            yield


class LogBench:
    """Logs on a simulated disk, and their group commit."""

    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        *,
        root: str = "/data",
        clock: Any = None,
        scheduler: Any = None,
        background: Any = None,
        active_files_max: int | None = None,
        **group_commit: Any,
    ) -> None:
        """`active_files_max`: of the files that all logs share; None: each log has files of its own. `group_commit`:
        options of `GroupCommit`."""
        self.disk = disk or SimulatedDisk()
        self.files = (
            None if active_files_max is None else FileCache(self.disk, active_files_max=active_files_max)
        )
        self.clock: Any = clock or ManualClock()
        self.scheduler: Any = scheduler or BenchScheduler()
        self.background: Any = background or ManualBackground()
        self.group_commit = GroupCommit(
            self.disk, self.background, root, scheduler=self.scheduler, **group_commit
        )
        self.logs: list[Log] = []

    @property
    def log(self) -> Log:
        """The first or only log."""
        return self.logs[0]

    def open_log(
        self,
        directory: str,
        settings: LogSettings | None = None,
        *,
        leader_epoch: int = -1,
        registered: bool = True,
    ) -> Log:
        """Open or create a log. `registered`: the group commit looks after it also without requests."""
        log = Log.open(
            self.disk,
            self.clock,
            directory,
            settings or LogSettings(),
            leader_epoch=leader_epoch,
            files=self.files,
        )
        if self.files is not None:
            log.record_active_file()
        if registered:
            self.group_commit.register(log)
        self.logs.append(log)
        return log

    def run_jobs(self) -> None:
        """Run the worker, then the timers, then what they have given the worker."""
        self.background.run_all()
        self.scheduler.fire()
        self.background.run_all()


def make_batch(timestamps_ms: Sequence[int], value_bytes: int = 20, tag: int = 0) -> bytes:
    """A batch with one record per timestamp; `tag` makes its bytes unique."""
    value = tag.to_bytes(8, "big") + bytes(max(0, value_bytes - 8))
    return build_batch([(timestamp, None, value, ()) for timestamp in timestamps_ms])


def append(log: Log, batch: bytes, leader_epoch: int = 0, *, uses_reserve: bool = False) -> tuple[int, bytes]:
    """Append; (base offset, the bytes that must be found on disk)."""
    base_offset = log.append(batch, check_stored_batch(batch), leader_epoch, uses_reserve=uses_reserve)
    return base_offset, as_stored(batch, base_offset, leader_epoch)


def as_stored(batch: bytes, base_offset: int, leader_epoch: int) -> bytes:
    return base_offset.to_bytes(8, "big") + batch[8:12] + leader_epoch.to_bytes(4, "big") + batch[16:]


def last_offset(stored: bytes) -> int:
    header = read_header(stored)
    return header.base_offset + header.last_offset_delta


def check_contents(log: Log, expected: Sequence[bytes], *, thorough: bool = True) -> None:
    """Check that the log contains exactly the batches of `expected` (all ever written, in order) within its offsets.

    With `thorough` every search is compared with the plain list, too: by offset, by size, by timestamp.
    """
    start, end = log.start_offset, log.end_offset
    inside = [b for b in expected if last_offset(b) >= start and read_header(b).base_offset < end]
    assert list(log.batches(start)) == inside
    if inside:
        assert read_header(inside[0]).base_offset <= start
        assert last_offset(inside[-1]) + 1 == end
    else:
        assert start == end
    for stored in inside:
        header = read_header(stored)
        assert log.leader_epochs.epoch_for_offset(max(start, header.base_offset)) == header.leader_epoch
    if thorough:
        check_reads(log, inside)
        check_times(log, inside)


def check_reads(log: Log, inside: Sequence[bytes]) -> None:
    """Check that reads of all sizes from every offset return whole batches, beginning with the requested one."""
    for number, stored in enumerate(inside):
        header = read_header(stored)
        for offset in {
            max(log.start_offset, header.base_offset),
            header.base_offset + header.last_offset_delta,
        }:
            piece = log.read(offset, 1, log.end_offset)
            assert piece is not None
            assert piece.read() == stored
            assert piece.next_offset == last_offset(stored) + 1
        limit = header.base_offset
        if number and limit > log.start_offset:
            piece = log.read(
                max(log.start_offset, read_header(inside[number - 1]).base_offset), 1 << 20, limit
            )
            assert piece is not None
            assert piece.read() == inside[number - 1]
    for max_bytes in (1, 300, 1 << 20):
        offset, seen = log.start_offset, []
        while (piece := log.read(offset, max_bytes, log.end_offset)) is not None:
            seen.append(piece.read())
            assert piece.next_offset > offset
            offset = piece.next_offset
        assert offset == log.end_offset
        assert b"".join(seen) == b"".join(inside)


def check_times(log: Log, inside: Sequence[bytes]) -> None:
    """Compare searches by timestamp with a search through the plain list of records."""
    records = [
        (record.offset, record.timestamp_ms, read_header(stored).leader_epoch)
        for stored in inside
        for record in read_records(stored, output_bytes_max=OUTPUT_BYTES_MAX)
        if record.offset >= log.start_offset
    ]
    limit = read_header(inside[-1]).base_offset if inside else log.end_offset
    for bound in {limit, log.end_offset}:
        below = [record for record in records if record[0] < bound]
        times = sorted({record[1] for record in below})
        for moment in [*times[:3], *times[-2:], *(time + 1 for time in times[-2:])]:
            first = next((record for record in below if record[1] >= moment), None)
            assert log.offset_for_time(moment, bound) == first
        largest = max((record[1] for record in below), default=0)
        first = next((record for record in below if record[1] == largest), None)
        assert log.max_timestamp(bound) == first
