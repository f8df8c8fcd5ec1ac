"""Bit flips and truncations in any file of a log: repaired from what is left, or reported; never answered as data."""

from __future__ import annotations

import random

import pytest

from mansio.errors import CorruptLog, RequestError
from mansio.log.log import Log, LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.records import check_batch
from support.logs import ManualClock, append, check_contents, make_batch

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


def test_every_kind_of_file_is_there_to_be_damaged() -> None:
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
        bits = chance.sample(range(8 * len(data)), 120)
        for bit in bits:
            damaged = disk.crash(random.Random(0))
            damaged.flip_bit(path, bit)
            assert outcome(damaged, stored) == expected, (path, bit)


def test_a_flipped_bit_in_the_checkpoint_costs_time_only() -> None:
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
def test_a_file_cut_short(kind: str, expected: str) -> None:
    disk, stored = built()
    for path, data in disk.files().items():
        if path.endswith(kind) and data:
            for size in {0, 1, len(data) // 2, len(data) - 1}:
                damaged = disk.crash(random.Random(0))
                damaged.cut_file(path, size)
                assert outcome(damaged, stored) == expected, (path, size)


def test_a_missing_segment_is_reported() -> None:
    disk, stored = built()
    for path in disk.files():
        if path.endswith(".log"):
            damaged = disk.crash(random.Random(0))
            damaged.remove(path)
            assert outcome(damaged, stored) == "reported", path


def test_reading_a_damaged_log_never_gives_bytes_that_pass_for_others() -> None:
    """Without `verify`: what a read returns fails its checksum, or is right, or the read says the log is corrupt."""
    chance = random.Random(3)
    disk, stored = built()
    segments = [path for path in disk.files() if path.endswith(".log")]
    seen = set()
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
        for offset in range(0, 24, 2):
            try:
                piece = log.read(offset, 1, 24)
                assert piece is not None
                data = piece.read()
                check_batch(data)
            except (CorruptLog, RequestError) as error:
                seen.add(type(error).__name__)
                continue
            assert data[16:] in {batch[16:] for batch in stored}
    assert {"CorruptLog", "CorruptMessage"} <= seen


def test_damage_above_the_checkpoint_is_cut_and_said(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    stored = [append(log, make_batch([n], 50, n))[1] for n in range(3)]
    log.sync()
    append(log, make_batch([3], 50, 3))
    disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", 8 * (sum(map(len, stored)) + 70))
    again = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    assert again.end_offset == 3
    assert again.recovery.cut_bytes > 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    check_contents(again, stored)


def test_damage_below_the_checkpoint_is_reported_and_nothing_is_cut() -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    for n in range(3):
        append(log, make_batch([n], 50, n))
    log.sync()
    path = f"{DIRECTORY}/{0:020d}.log"
    size = len(disk.files()[path])
    disk.cut_file(path, size - 1)
    with pytest.raises(CorruptLog, match="were durable"):
        Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    assert len(disk.files()[path]) == size - 1
