"""Stored batches are verified before their first read: what is known to be intact, and what a damaged segment serves.

The model of a segment is the list of its batches; `CheckedRanges` is compared with one byte per offset.
"""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import CorruptLog, DamagedRange, StorageError, VerificationPending
from mansio.storage.checked_ranges import OPEN_RANGE_END, RANGES_MAX, CheckedRange, CheckedRanges
from mansio.storage.log import Log, LogListener, LogSettings
from mansio.storage.verification import UNREADABLE_PIECES_MAX, CheckTask, check_batches
from mansio.testing.disk import SimulatedDisk, SimulatedFile
from mansio.wire.batch.record_batch import build_batch, read_header
from support.logs import ManualClock, append, make_batch

DIRECTORY = "/data/p"
SETTINGS = LogSettings(segment_bytes=4000, index_interval_bytes=600)
BATCHES = 60
RECORDS = 2
WIDTH = 10  # bytes per offset of the model


@st.composite
def additions(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """Ranges of batches, in order of their checks: (first, end, damaged)."""
    bounds = st.tuples(st.integers(0, 59), st.integers(1, 12), st.booleans())
    return [(first, min(60, first + count), bad) for first, count, bad in draw(st.lists(bounds, max_size=40))]


@given(additions())
def test_checked_ranges_answer_as_a_list_with_one_entry_per_offset(
    steps: list[tuple[int, int, bool]],
) -> None:
    checked = CheckedRanges()
    model = ["unknown"] * 60
    for first, end, bad in steps:
        for old in {
            id(r): r for r in checked.ranges
        }.values():  # damage is forgotten whole: it is checked again
            if old.damage and old.offset < end and old.end_offset > first:
                model[old.offset : old.end_offset] = ["unknown"] * (old.end_offset - old.offset)
        model[first:end] = ["damaged" if bad else "intact"] * (end - first)
        checked.add(CheckedRange(first * WIDTH, end * WIDTH, first, end, "bad" if bad else ""))
        for before, after in zip(checked.ranges, checked.ranges[1:], strict=False):
            assert before.end_offset <= after.offset
            assert before.end_position <= after.position
        assert len(checked.ranges) <= RANGES_MAX
        for offset, state in enumerate(model):
            found = checked.find(offset)
            known = "unknown" if found is None else "damaged" if found.damage else "intact"
            assert known == state
            assert found is None or (found.position, found.end_position) == (
                found.offset * WIDTH,
                found.end_offset * WIDTH,
            )
        assert checked.is_complete(60 * WIDTH, 60) == (set(model) == {"intact"})


def test_only_a_bounded_number_of_ranges_is_kept_and_the_newest_is_among_them() -> None:
    checked = CheckedRanges()
    for number in range(10 * RANGES_MAX):
        checked.add(CheckedRange(number * 20, number * 20 + 10, number * 2, number * 2 + 1))
        assert checked.find(number * 2) is not None
    assert len(checked.ranges) == RANGES_MAX


def built(batches: int = BATCHES) -> tuple[SimulatedDisk, list[bytes]]:
    """A log of several segments and epochs, closed; its batches."""
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    stored = [
        append(log, make_batch([1000 + n] * RECORDS, 60 + n % 7 * 40, n), leader_epoch=n // 10)[1]
        for n in range(batches)
    ]
    log.close()
    disk.sync_all("/data")  # the index files, too
    return disk, stored


def damage(disk: SimulatedDisk, path: str, chance: random.Random) -> None:
    """Flip a bit, cut the end, zero or exchange blocks."""
    data = bytearray(disk.files()[path])
    kind = chance.randrange(5)
    at = chance.randrange(len(data))
    if kind <= 1:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    else:
        other = chance.randrange(len(data))
        size = min(chance.choice((16, 128, 512)), len(data) - at, len(data) - other)
        first, second = bytes(data[at : at + size]), bytes(data[other : other + size])
        data[at : at + size] = second
        data[other : other + size] = first
    with disk_file(disk, path) as file:
        file.truncate(0)
        file.write_at([bytes(data)], 0)


class disk_file:  # noqa: N801 - used as a function
    def __init__(self, disk: SimulatedDisk, path: str) -> None:
        self.file = disk.open(path)

    def __enter__(self):  # type: ignore[no-untyped-def]
        return self.file

    def __exit__(self, *_: object) -> None:
        self.file.close()


class Checker:
    """The verifying thread of a log, run by the test."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.due: list[tuple[object, int]] = []
        log.listen(LogListener(on_check_due=lambda segment, offset: self.due.append((segment, offset))))

    def run(self) -> None:
        for segment, offset in self.due:
            if segment.checked is None or segment.checked.find(offset) is not None:  # type: ignore[attr-defined]
                continue
            file, task = self.log.check_task(segment, offset, with_index=True)  # type: ignore[arg-type]
            self.log.record_check(
                segment,  # type: ignore[arg-type]
                check_batches(file, task, bytes_max=1500, batches_max=7, delimit=True),
            )
        self.due.clear()


def read_all(log: Log, checker: Checker | None, order: list[int], sizes: random.Random) -> set[int]:
    """Read at every offset; what comes must be what was written. Returns the offsets that were refused."""
    refused: set[int] = set()
    for offset in order:
        for _ in range(200):
            try:
                piece = log.read(offset, sizes.choice((1, 400, 5000)), log.end_offset)
            except VerificationPending:
                assert checker is not None
                checker.run()
                continue
            except DamagedRange as error:
                refused.update({offset, *range(error.first_offset, error.end_offset, RECORDS)})
                break
            except CorruptLog:
                refused.add(offset)
                break
            assert piece is not None
            data, position, following = piece.read(), 0, offset
            while position < len(data):
                header = read_header(data, position)
                assert data[position : position + header.size] == STORED[header.base_offset // RECORDS]
                assert header.base_offset <= following <= header.last_offset
                following = header.last_offset + 1
                position += header.size
            assert piece.next_offset == following
            break
        else:
            raise AssertionError(f"offset {offset} is never verified")
    return refused


DISK, STORED = built()


@pytest.mark.parametrize("checked_by_thread", [False, True])
def test_a_damaged_segment_serves_all_intact_batches_and_nothing_else(checked_by_thread: bool) -> None:
    chance = random.Random(11)
    segments = sorted(path for path in DISK.files() if path.endswith(".log"))
    assert len(segments) >= 4
    refused_some = 0
    for number in range(400):
        disk = DISK.crash(random.Random(0))
        path = chance.choice(segments)
        damage(disk, path, chance)
        try:
            log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
        except CorruptLog:
            assert path == segments[-1]
            continue
        content = disk.files()[path]
        intact = {n for n, batch in enumerate(STORED) if in_place(batch, content, path, n)}
        order = list(range(0, log.end_offset, RECORDS))
        if number % 2:
            chance.shuffle(order)
        checker = Checker(log) if checked_by_thread else None
        refused = read_all(log, checker, order, chance)
        assert not refused & {n * RECORDS for n in intact}, (number, path)
        refused_some += bool(refused)
    assert refused_some > 250


def in_place(batch: bytes, content: bytes, path: str, number: int) -> bool:
    """Whether a batch is where it was written."""
    base = int(path.rpartition("/")[2].removesuffix(".log"))
    if number * RECORDS < base:
        return True
    original = DISK.files()[path]
    position = original.find(batch)
    return position < 0 or content[position : position + len(batch)] == batch


def test_a_flip_in_a_range_that_was_verified_is_found_when_checks_are_forgotten() -> None:
    disk = DISK.crash(random.Random(0))
    path = min(path for path in disk.files() if path.endswith(".log"))
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    assert log.read(0, 1 << 20, log.end_offset) is not None
    assert log._segments.segments[0].checked is None
    disk.flip_bit(path, 8 * 70)
    assert log.read(0, 1 << 20, log.end_offset) is not None
    log.forget_checks()
    with pytest.raises(DamagedRange):
        log.read(0, 1 << 20, log.end_offset)


def test_what_this_process_appended_and_what_recovery_checked_is_not_read_again() -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    for n in range(30):
        append(log, make_batch([n], 60, n))
    assert all(segment.checked is None for segment in log._segments.segments)
    log._run_inline(log.prepare_flush(), log.finish_flush)
    again = Log.open(disk.crash(random.Random(0)), ManualClock(), DIRECTORY, SETTINGS)
    assert again.end_offset == 30
    assert all(segment.checked is None for segment in again._segments.segments)


def test_after_a_start_only_appends_count_as_verified_and_truncation_drops_them() -> None:
    disk, _ = built(5)
    log = Log.open(disk, ManualClock(), DIRECTORY, replace(SETTINGS, segment_ms=1 << 50))
    offset, batch = append(log, make_batch([1], 60, 99), leader_epoch=3)
    log.listen(LogListener(on_check_due=lambda segment, offset: pytest.fail("an appended batch is verified")))
    piece = log.read(offset, 1, log.end_offset)
    assert piece is not None
    assert piece.read() == batch
    active = log._segments.active
    assert active.checked is not None
    assert active.checked.find(0) is None
    log.listen(LogListener())
    assert log.read(0, 1 << 20, log.end_offset) is not None
    log.sync()
    log.truncate_to(offset)
    assert active.checked is not None
    assert active.checked.find(0) is None


def test_a_failing_disk_is_reported_to_the_reader_that_waits_for_the_check() -> None:
    disk = DISK.crash(random.Random(0))
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    segment = log._segments.segments[0]
    log.on_check_failed(segment, StorageError("no"))
    with pytest.raises(StorageError, match="no"):
        log.read(0, 1, log.end_offset)
    assert log.read(0, 1, log.end_offset) is not None


def test_search_by_timestamp_reports_a_damaged_timestamp_and_skips_no_record() -> None:
    disk, clock = SimulatedDisk(), ManualClock()
    log = Log.open(disk, clock, DIRECTORY, LogSettings(segment_bytes=4000, index_interval_bytes=1 << 20))
    for number in range(BATCHES):
        append(log, build_batch([(1000 * number, None, b"x" * 60, ())]))
    log.close()
    log = Log.open(disk, clock, DIRECTORY)
    segment = log.segments()[1]
    wanted = 1000 * (segment.base_offset + 3)
    path = f"{DIRECTORY}/{segment.base_offset:020d}.log"
    assert log.offset_for_time(wanted, log.end_offset) == (segment.base_offset + 3, wanted, 0)
    content = bytearray(disk.files()[path])
    size = read_header(content).size
    content[3 * size + 35 : 3 * size + 43] = bytes(
        8
    )  # the largest timestamp of that batch: before all others
    disk.put_file(path, bytes(content))
    log = Log.open(disk, clock, DIRECTORY)
    with pytest.raises(CorruptLog):
        log.offset_for_time(wanted, log.end_offset)
    with pytest.raises(CorruptLog):
        log.offset_for_time(wanted + 500, log.end_offset)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_segment_that_was_cut_between_two_batches_is_not_complete_and_its_last_read_ends_at_the_cut(
    kept: int,
) -> None:
    disk = DISK.crash(random.Random(0))
    path = sorted(path for path in disk.files() if path.endswith(".log"))[1]
    content = disk.files()[path]
    size = 0
    for _ in range(kept):
        size += read_header(content, size).size
    disk.truncate_file(path, size)
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    base, end = log.segments()[1].base_offset, log.segments()[1].end_offset
    for _ in range(3):  # verified by the first of them
        for offset in range(base, base + kept * RECORDS):
            found = log.read(offset, 1 << 20, log.end_offset)
            assert found is not None
            assert found.next_offset == base + kept * RECORDS
        for offset in range(base + kept * RECORDS, end):
            with pytest.raises(DamagedRange) as caught:
                log.read(offset, 1 << 20, log.end_offset)
            assert (caught.value.first_offset, caught.value.end_offset) == (base + kept * RECORDS, end)


@pytest.mark.parametrize("bad", [[0], [5], [3, 9, 10], [24], list(range(4, 24)), list(range(25))])
def test_batches_with_a_part_that_the_disk_cannot_read_are_damaged_and_no_others(
    bad: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, sector = SimulatedDisk(), 4096
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings(segment_bytes=100_000))
    stored = [append(log, make_batch([1000], 900, n))[1] for n in range(110)]
    path = f"{DIRECTORY}/{0:020d}.log"
    log.close()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings(segment_bytes=100_000))
    segment = log._segments.segments[0]
    assert segment.size == len(disk.files()[path]) > 24 * sector
    read_at = SimulatedFile.read_at
    failed = 0

    def failing(self: SimulatedFile, length: int, position: int) -> bytes:
        nonlocal failed
        if self.path == path and any(
            position < (at + 1) * sector and at * sector < position + length for at in bad
        ):
            failed += 1
            raise OSError(errno.EIO, "Input/output error")
        return read_at(self, length, position)

    monkeypatch.setattr(SimulatedFile, "read_at", failing)
    found, position, offset, delimit = [], 0, 0, False
    while offset < segment.end_offset:
        task = log.scrub_task(segment, position, offset, with_index=delimit)
        result = check_batches(
            log.segment_file(segment), task, bytes_max=1 << 20, batches_max=512, delimit=delimit
        )
        found += result.ranges
        position, offset = result.position, result.offset
        delimit = bool(result.problem) and not delimit
    damaged = {n for each in found if each.damage for n in range(each.offset, each.end_offset)}
    ends = list(accumulate(len(batch) for batch in stored[: segment.end_offset]))
    expected = {
        n
        for n, end in enumerate(ends)
        if any(end - len(stored[n]) < (at + 1) * sector and at * sector < end for at in bad)
    }
    assert all("Input/output error" in each.damage for each in found if each.damage)
    if len(bad) < UNREADABLE_PIECES_MAX:
        assert damaged == expected
    else:
        assert damaged >= expected  # where too much is unreadable not every piece is tried
    assert failed < 100


def test_failed_read_that_does_not_come_from_the_medium_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, _ = built()
    with monkeypatch.context() as patched:
        patched.setattr(
            SimulatedFile, "read_at", lambda *_: (_ for _ in ()).throw(OSError(errno.EACCES, "not allowed"))
        )
        with pytest.raises(StorageError):
            check_batches(
                disk.open(f"{DIRECTORY}/{0:020d}.log"),
                CheckTask(0, 0, 1000, 10, 1000, 0, ()),
                bytes_max=1 << 20,
                batches_max=512,
                delimit=False,
            )


def one_segment() -> Log:
    """A log whose batches, of about 1 KB, are all in one segment, and are not verified."""
    disk = SimulatedDisk()
    settings = replace(SETTINGS, segment_bytes=1 << 20, segment_ms=1 << 50)
    log = Log.open(disk, ManualClock(), DIRECTORY, settings)
    for n in range(100):
        append(log, make_batch([n], 1_000, n))
    log.close()
    disk.sync_all("/data")
    return Log.open(disk, ManualClock(), DIRECTORY, settings)


@pytest.mark.parametrize("checks", [1, 3, 1_000])
def test_a_read_verifies_all_that_it_returns_while_the_event_loop_may_be_held(
    monkeypatch: pytest.MonkeyPatch, checks: int
) -> None:
    """With too little time for a whole read, it returns what is verified, and another thread goes on there."""
    monkeypatch.setattr("mansio.storage.log.CHECK_BYTES_MAX", 4_000)
    log = one_segment()
    size = log._segments.segments[0].size
    due: list[int] = []
    left = 0

    def may_check() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    log.listen(LogListener(on_check_due=lambda _, offset: due.append(offset), may_check=may_check))
    offset = reads = 0
    while offset < 100:
        left = checks
        piece = log.read(offset, 20_000, 100)
        assert piece is not None
        assert piece.length <= 20_000
        if checks == 1_000:
            assert piece.length > 18_000 or piece.next_offset == 100
        else:
            assert piece.length <= checks * (4_000 + 1_200)
        offset = piece.next_offset
        reads += 1
    assert reads <= (size // 18_000 + 1 if checks == 1_000 else 100)
    assert bool(due) == (checks < 1_000)


def test_a_read_is_left_to_another_thread_if_the_event_loop_was_held_for_its_time() -> None:
    log = one_segment()
    due: list[int] = []
    log.listen(LogListener(on_check_due=lambda _, offset: due.append(offset), may_check=lambda: False))
    with pytest.raises(VerificationPending):
        log.read(7, 20_000, 100)
    assert due == [7]


@pytest.mark.parametrize("bytes_max", [1, 3_000, 50_000, OPEN_RANGE_END])
def test_a_check_reads_each_byte_at_most_once_and_none_behind_its_end(bytes_max: int) -> None:
    log = one_segment()
    file, task = log.check_task(log._segments.segments[0], 0, with_index=False)
    read: list[tuple[int, int]] = []

    def read_at(length: int, position: int) -> bytes:
        found = file.read_at(length, position)
        read.append((position, position + len(found)))
        return found

    result = check_batches(file, task, bytes_max=bytes_max, batches_max=1_000, delimit=False, read_at=read_at)
    assert not result.problem
    assert result.position >= min(bytes_max, task.end_position)
    assert [begin for begin, _ in read[1:]] == [end for _, end in read[:-1]]
    assert read[-1][1] <= max(result.position, 61)
