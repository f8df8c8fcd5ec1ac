"""Bit flips and truncations in any file of a log are repaired or reported, and never returned as data."""

from __future__ import annotations

import random

import pytest

from mansio.errors import CorruptLog, DamagedRange
from mansio.storage.log import Log, LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import check_batch
from support.logs import ManualClock, append, as_stored, check_contents, make_batch
from support.tiers import examples

SETTINGS = LogSettings(segment_bytes=700, index_interval_bytes=1)
DIRECTORY = "/data/p"


def built() -> tuple[SimulatedDisk, list[bytes]]:
    """A log of several segments and epochs, cleanly closed, and its batches."""
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    stored = [append(log, make_batch([1000 + n, 1001 + n], 80, n), leader_epoch=n // 4)[1] for n in range(12)]
    log.close()
    disk.sync_all("/data")  # the index files too: a crash image is now a copy
    return disk, stored


def outcome(disk: SimulatedDisk, stored: list[bytes]) -> str:
    """Open, verify and compare: "intact" or "reported"; anything else fails."""
    try:
        log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
        log.verify()
    except CorruptLog:
        return "reported"
    check_contents(log, stored)
    assert log.end_offset == 24
    return "intact"


def test_damage_tests_cover_every_kind_of_file() -> None:
    disk, stored = built()
    assert outcome(disk, stored) == "intact"
    kinds = {path.rpartition("/")[2].rpartition(".")[2] for path in disk.files()}
    assert kinds == {"log", "index", "epochs", "checkpoint", "times"}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("log", "reported"), ("index", "intact"), ("epochs", "intact"), ("times", "intact")],
)
def test_a_flipped_bit(kind: str, expected: str) -> None:
    chance = random.Random(7)
    disk, stored = built()
    for path, data in disk.files().items():
        if not path.endswith(kind):
            continue
        bits = chance.sample(range(8 * len(data)), examples(40, 120, 120))
        for bit in bits:
            damaged = disk.crash(random.Random(0))
            damaged.flip_bit(path, bit)
            assert outcome(damaged, stored) == expected, (path, bit)


@pytest.mark.full
def test_flipped_bit_in_the_checkpoint_costs_only_time() -> None:
    disk, stored = built()
    path = f"{DIRECTORY}/checkpoint"
    for bit in range(8 * len(disk.files()[path])):
        if 8 * 64 < bit < 8 * 4096:
            continue
        damaged = disk.crash(random.Random(0))
        damaged.flip_bit(path, bit)
        assert outcome(damaged, stored) == "intact", bit
    disk.flip_bit(path, 100)
    disk.flip_bit(path, 8 * 4096 + 100)
    assert outcome(disk, stored) == "intact"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("log", "reported"), ("index", "intact"), ("epochs", "intact"), ("times", "intact")],
)
def test_truncated_file(kind: str, expected: str) -> None:
    disk, stored = built()
    for path, data in disk.files().items():
        if path.endswith(kind) and data:
            for size in {0, 1, len(data) // 2, len(data) - 1}:
                damaged = disk.crash(random.Random(0))
                damaged.truncate_file(path, size)
                assert outcome(damaged, stored) == expected, (path, size)


def test_a_missing_segment_is_reported() -> None:
    disk, stored = built()
    for path in disk.files():
        if path.endswith(".log"):
            damaged = disk.crash(random.Random(0))
            damaged.remove(path)
            assert outcome(damaged, stored) == "reported", path


def test_reading_a_damaged_log_never_returns_wrong_records() -> None:
    """Without `verify`: a read returns correct data or `CorruptLog`, and only the damaged batch is affected, also by a
    flip in the 17 bytes that its CRC does not cover."""
    chance = random.Random(3)
    disk, stored = built()
    segments = [path for path in disk.files() if path.endswith(".log")]
    seen = 0
    for _ in range(300):
        path = chance.choice(segments)
        damaged = disk.crash(random.Random(0))
        data = damaged.files()[path]
        bit = chance.randrange(8 * len(data))
        damaged.flip_bit(path, bit)
        try:
            log = Log.open(damaged, ManualClock(), DIRECTORY, SETTINGS)
        except CorruptLog:
            continue
        damaged_offsets: list[int] = []
        for offset in range(0, 24, 2):
            try:
                piece = log.read(offset, 1, 24)
            except DamagedRange as error:
                damaged_offsets.extend(range(error.first_offset, error.end_offset, 2))
                continue
            assert piece is not None
            assert piece.read() == stored[offset // 2]
        assert len(damaged_offsets) <= 1, (path, bit, damaged_offsets)
        seen += len(damaged_offsets)
    assert seen > 250


def test_damage_above_the_checkpoint_is_truncated_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    stored = [append(log, make_batch([n], 50, n))[1] for n in range(3)]
    log.sync()
    append(log, make_batch([3], 50, 3))
    disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", 8 * (sum(map(len, stored)) + 70))
    again = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    assert again.end_offset == 3
    assert again.recovery.truncated_bytes > 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    check_contents(again, stored)


def test_damage_below_the_checkpoint_is_reported_and_nothing_is_truncated() -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    for n in range(3):
        append(log, make_batch([n], 50, n))
    log.sync()
    path = f"{DIRECTORY}/{0:020d}.log"
    size = log.size_bytes
    disk.truncate_file(path, size - 1)
    with pytest.raises(CorruptLog, match="were durable"):
        Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    assert len(disk.files()[path]) == size - 1


def test_without_a_checkpoint_damage_before_the_last_segment_is_no_torn_tail() -> None:
    """Later segments prove that it was complete once. Nothing is truncated."""
    disk, _ = built()
    disk.remove(f"{DIRECTORY}/checkpoint")
    segments = sorted(path for path in disk.files() if path.endswith(".log"))
    disk.flip_bit(segments[1], 8 * 100)
    before = disk.files()
    with pytest.raises(CorruptLog, match="damaged below its durable end"):
        Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    assert {path: data for path, data in disk.files().items() if path in segments} == {
        path: before[path] for path in segments
    }


def test_batch_of_an_older_leader_after_the_checkpoint_is_truncated() -> None:
    """Its offset is the next one and its CRC is valid: bytes of a truncated tail that a crash made visible again."""
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    stored = [append(log, make_batch([n], 50, n), leader_epoch=5)[1] for n in range(3)]
    log.sync()
    path = f"{DIRECTORY}/{0:020d}.log"
    left_over = as_stored(make_batch([3], 50, 3), 3, 4)
    disk.open(path).write_at([left_over], log.size_bytes)
    again = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    check_contents(again, stored)
    assert again.end_offset == 3
    assert again.recovery.truncated_bytes >= len(left_over)


def test_decreasing_offsets_end_a_walk() -> None:
    """The CRC of a batch does not cover its base offset; only the order of offsets shows the damage."""
    disk = SimulatedDisk()
    settings = LogSettings(index_interval_bytes=1 << 20)
    log = Log.open(disk, ManualClock(), DIRECTORY, settings)
    sizes = [len(append(log, make_batch([n, n], 50, n))[1]) for n in range(4)]
    log.close()
    disk.sync_all("/data")
    disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", 8 * (sizes[0] + sizes[1] + 7) + 2)  # 4 becomes 0
    again = Log.open(disk, ManualClock(), DIRECTORY, settings)
    for read in (lambda: list(again.batches(0)), lambda: list(again.batch_headers(0)), again.verify):
        with pytest.raises(CorruptLog):
            read()
    piece = again.read(0, 1, 8)
    assert piece is not None
    assert check_batch(piece.read()).base_offset == 0


def test_reader_of_a_shortened_file_gets_an_error() -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    for n in range(3):
        append(log, make_batch([n], 50, n))
    log.sync()
    piece = log.read(0, 1 << 20, 3)
    assert piece is not None
    path = f"{DIRECTORY}/{0:020d}.log"
    for size in (log.size_bytes - 1, 70, 1):
        disk.truncate_file(path, size)
        for read in (piece.read, lambda: list(log.batches(0))):
            with pytest.raises(CorruptLog, match=f"ends at byte {size}"):
                read()


def test_batch_of_damaged_length_does_not_affect_other_readers() -> None:
    """The next reader gets the next offset's batch, not the position where the damaged batch seems to end."""
    disk, stored = built()
    first = min(path for path in disk.files() if path.endswith(".log"))
    disk.flip_bit(first, 8 * 11)  # the last byte of the length of the first batch
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    for _ in range(2):
        with pytest.raises(DamagedRange):
            log.read(0, 1, 24)
        after = log.read(2, 1, 24)
        assert after is not None
        assert after.read() == stored[1]


def test_batch_whose_length_is_damaged_after_its_verification_does_not_affect_other_readers() -> None:
    """A log does not verify again what it appended itself. The reader of the damaged batch gets as many bytes as its
    header states; where they end is no position for the reader of the next offset."""
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    stored = [append(log, make_batch([1000 + n, 1001 + n], 80, n))[1] for n in range(12)]
    first = min(path for path in disk.files() if path.endswith(".log"))
    disk.flip_bit(first, 8 * 11)  # the last byte of the length of the first batch
    for _ in range(2):
        damaged, after = log.read(0, 1, 24), log.read(2, 1, 24)
        assert damaged is not None
        assert after is not None
        assert (damaged.length != len(stored[0]), damaged.next_offset) == (True, 2)
        assert after.read() == stored[1]
