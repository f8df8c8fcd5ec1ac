"""Crash test of truncation: a power failure or a failing call while recovery truncates a damaged log loses no batch.

A log is killed some time after its last checkpoint, and one or two positions above it are damaged. All complete
batches on the disk are in the log or in quarantine files at the end, and a new leader epoch stays due until it is
started.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from mansio.errors import CorruptLog, StorageError
from mansio.storage.log import Log, LogSettings
from mansio.storage.recovery.quarantine import FileRange, find_batches, parse_quarantine_name
from mansio.storage.segment import base_offset_of
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import read_header
from support.logs import ManualClock, append, check_contents, make_batch

DIRECTORY = "/data/p"
STATES = 1_200


class Torn(NamedTuple):
    """A damaged disk. `stored`: every batch written; `whole`: the complete ones on it; `durable`: the number of durable
    ones.
    """

    disk: SimulatedDisk
    settings: LogSettings
    stored: list[bytes]
    whole: list[bytes]
    durable: int


def torn(seed: int) -> Torn:
    chance = random.Random(seed)
    disk = SimulatedDisk()
    settings = LogSettings(segment_bytes=chance.choice([300, 900, 20_000]), index_interval_bytes=1)
    log = Log.open(disk, ManualClock(), DIRECTORY, settings)
    stored = []
    durable = chance.randint(0, 4)
    for number in range(durable + chance.randint(2, 8)):
        batch = make_batch([number] * chance.randint(1, 3), chance.choice([20, 150, 600]), number)
        stored.append(append(log, batch, number // 4)[1])
        if number + 1 == durable:
            log.sync()
    disk.sync_all("/data")
    for number in chance.sample(range(durable, len(stored)), chance.randint(1, 2)):
        (place,) = [
            (path, at) for path, data in disk.files().items() if (at := data.find(stored[number])) >= 0
        ]
        byte = chance.choice(
            [8, 9, 10, 11, *range(17, len(stored[number]))]
        )  # the length, and what the CRC covers
        disk.flip_bit(place[0], 8 * (place[1] + byte) + chance.randrange(8))
    if chance.random() < 0.2:
        segments = [path for path in disk.files() if base_offset_of(path.rpartition("/")[2])]
        behind = [path for path in segments if not any(b in disk.files()[path] for b in stored[:durable])]
        if behind:
            disk.remove(chance.choice(behind))
            disk.sync_directory(DIRECTORY)
    whole = [batch for batch in stored if any(batch in data for data in disk.files().values())]
    return Torn(disk, settings, stored, whole, durable)


def check(case: Torn, disk: SimulatedDisk) -> Log:
    """Open and check that the log contains the durable batches, and every complete batch is in it or in quarantine."""
    log = Log.open(disk, ManualClock(), DIRECTORY, case.settings)
    durable_end = read_header(case.stored[case.durable]).base_offset
    assert log.end_offset >= durable_end
    check_contents(log, case.stored, thorough=False)
    nothing_whole_is_gone(case, disk)
    cut = log.recovery.truncated_tail
    if cut is not None and cut.path:
        data = disk.files()[cut.path]
        file = disk.open(cut.path)
        found = find_batches([FileRange(file, 0, len(data))])
        assert found[:3] >= (cut.batch_count, cut.first_offset, cut.last_offset)
        assert cut.batch_count > 0
    return log


def nothing_whole_is_gone(case: Torn, disk: SimulatedDisk) -> None:
    files = {path: data for path, data in disk.files().items() if _counts(path)}
    for batch in case.whole:
        assert any(batch in data for data in files.values()), read_header(batch).base_offset


def _counts(path: str) -> bool:
    name = path.rpartition("/")[2]
    return base_offset_of(name) is not None or parse_quarantine_name(name) is not None


def images_of(disk: SimulatedDisk, chance: random.Random) -> list[SimulatedDisk]:
    """A list that receives a crash image after each disk change from now on."""
    images: list[SimulatedDisk] = []
    disk.on_change = lambda: images.append(disk.crash(chance))
    return images


def test_batches_after_damage_survive_power_failures_during_quarantine() -> None:
    states = seed = quarantine = 0
    while states < STATES:
        seed += 1
        case = torn(seed)
        chance = random.Random(seed)
        disk = case.disk.crash(chance)  # everything on it is durable
        images = images_of(disk, chance)
        try:
            log = check(case, disk)
            disk.on_change = None
            assert log.needs_new_epoch == (log.recovery.truncated_tail is not None)
            quarantine += log.recovery.truncated_tail is not None and bool(log.recovery.truncated_tail.path)
            images.append(disk.crash(chance))
            for image in images:
                nothing_whole_is_gone(case, image)
                again = images_of(image, chance)
                reopened = check(case, image)
                ended = reopened.end_offset
                assert reopened.needs_new_epoch == log.needs_new_epoch
                image.on_change = None
                assert ended == log.end_offset
                for second in chance.sample(again, min(2, len(again))):
                    nothing_whole_is_gone(case, second)
                    after = check(case, second)
                    assert after.end_offset == ended
                    assert after.needs_new_epoch == log.needs_new_epoch
                    tail = append(after, make_batch([7], 300, 999), 1000)[1]
                    after.sync()
                    kept = [b for b in case.stored if read_header(b).base_offset < ended]
                    last = Log.open(second.crash(chance), ManualClock(), DIRECTORY, case.settings)
                    check_contents(last, [*kept, tail], thorough=False)
                    assert last.needs_new_epoch == log.needs_new_epoch
                    nothing_whole_is_gone(case, second)
                states += 1 + min(2, len(again))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert quarantine > seed // 3, "few of the damaged logs had whole batches behind the damage"


@pytest.mark.parametrize("code", [5, 28], ids=["EIO", "ENOSPC"])
def test_any_failing_call_during_quarantine_loses_no_batch(code: int) -> None:
    refused = 0
    for seed in range(1, 11):
        case = torn(seed)
        number = 0
        while True:
            number += 1
            disk = case.disk.crash(random.Random(seed))
            disk.fail_call(number, code)
            log = None
            try:
                log = Log.open(disk, ManualClock(), DIRECTORY, case.settings)
            except CorruptLog:  # so would an OSError
                raise
            except StorageError:
                refused += 1
            done = disk.calls < number
            disk.clear_failures()
            if log is not None:
                check_contents(log, case.stored, thorough=False)
            nothing_whole_is_gone(case, disk)
            image = disk.crash(random.Random(number))
            nothing_whole_is_gone(case, image)
            check(case, image)
            if done:
                break
    assert refused > 200
