"""Damage at any position of any file of a log: every read returns the written record or reports corruption.

A log of several segments, all codecs and several leader epochs, with its index, epoch, times, checkpoint and producer
files, is written once. Each case damages one position of one file: a flipped bit, a zeroed or foreign block, a
truncation, a missing file. Then it is opened and read: batch by batch, in long slices, by timestamp.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import pytest

from mansio.broker.partition.producer_hook import ProducerHook
from mansio.errors import CorruptLog, MansioError, RequestError
from mansio.storage.checkpoint import SLOT_DISTANCE_BYTES
from mansio.storage.log import Log, LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch, check_batch, iterate_batches, read_header
from mansio.wire.batch.record_reader import read_records
from support.logs import ManualBackground, ManualClock, append, last_offset
from support.seeds import chosen_seed

if TYPE_CHECKING:
    from mansio.wire.batch.record_reader import Record

DIRECTORY = "/data/p"
CASES = 1_500
BATCHES = 36
BLOCK_BYTES = 512
CRC_COVERS_FROM = 17
"""The base offset, the length, the leader epoch and the magic byte of a batch stand before its CRC."""

OUTPUT_BYTES_MAX = 1 << 20


class Built(NamedTuple):
    """The files of a log, and what was written to it. `places`: (segment path, position) of each batch."""

    files: dict[str, bytes]
    settings: LogSettings
    stored: list[bytes]
    places: list[tuple[str, int]]
    start_offset: int
    end_offset: int
    producers: bytes


def build(seed: int) -> Built:
    chance = random.Random(seed)
    settings = LogSettings(segment_bytes=2500, index_interval_bytes=1, index_snapshot_bytes=600)
    disk, clock = SimulatedDisk(), ManualClock()
    log = Log.open(disk, clock, DIRECTORY, settings)
    hook = ProducerHook(disk, clock, ManualBackground(), DIRECTORY, log, expiration_ms=1 << 40)
    stored, sequences = [], [0, 0, 0]
    for number in range(BATCHES):
        producer = number % 3
        count = chance.randint(1, 4)
        records = [
            (1000 * number + n, b"key-%d" % n, chance.randbytes(20) + bytes(chance.randrange(200)), ())
            for n in range(count)
        ]
        batch = build_batch(
            records,
            codec=list(Codec)[number % len(Codec)],
            producer_id=7000 + producer,
            producer_epoch=0,
            base_sequence=sequences[producer],
        )
        sequences[producer] += count
        header = check_batch(batch)
        assert hook.before_append(header) is None
        base_offset, as_written = append(log, batch, leader_epoch=number // 10)
        hook.on_append(header, base_offset)
        stored.append(as_written)
        if number % 9 == 5:
            log.sync()
            hook.save()
    log.trim_to(read_header(stored[3]).base_offset + 1)
    hook.save()
    log.close()
    disk.sync_all("/data")
    start, end = log.start_offset, log.end_offset
    kept = [batch for batch in stored if last_offset(batch) >= log.segments()[0].base_offset]
    files = disk.files()
    return Built(files, settings, kept, _places(files, kept), start, end, hook.table.to_bytes(end))


def _places(files: dict[str, bytes], stored: list[bytes]) -> list[tuple[str, int]]:
    found = []
    for batch in stored:
        (place,) = [
            (path, at)
            for path, data in files.items()
            if path.endswith(".log") and (at := data.find(batch)) >= 0
        ]
        found.append(place)
    return found


class Damage(NamedTuple):
    """One damage: `path` has the content `data` (None: it is missing) and differs in [begin, end) from the original."""

    path: str
    data: bytes | None
    begin: int
    end: int
    kind: str


def damage(files: dict[str, bytes], chance: random.Random) -> Damage:
    """One damaged position in one file. Segments are chosen three times as often as other files."""
    kinds = sorted({path.rpartition("/")[2].rpartition(".")[2] for path in files})
    while True:
        suffix = chance.choice([*kinds, "log", "log"])
        path = chance.choice([path for path in sorted(files) if path.endswith(suffix)])
        before = files[path]
        kind = chance.choice(["bit", "bit", "bit", "cut", "zero", "foreign", "missing"])
        if kind == "missing":
            return Damage(path, None, 0, len(before), kind)
        if not before:
            continue
        if kind == "cut":
            size = chance.choice([0, chance.randrange(len(before)), len(before) - 1])
            return Damage(path, before[:size], size, len(before), kind)
        data = bytearray(before)
        if kind == "bit":
            bit = chance.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
        else:
            at = chance.randrange(len(data)) // BLOCK_BYTES * BLOCK_BYTES
            length = min(BLOCK_BYTES, len(data) - at)
            other = files[chance.choice(sorted(files))][:length] if kind == "foreign" else b""
            data[at : at + length] = other + bytes(length - len(other))
        if data != before:
            differ = [n for n, (old, new) in enumerate(zip(before, data, strict=True)) if old != new]
            return Damage(path, bytes(data), differ[0], differ[-1] + 1, kind)


def damaged_disk(built: Built, harm: Damage) -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    for path, data in built.files.items():
        if path != harm.path:
            disk.put_file(path, data)
        elif harm.data is not None:
            disk.put_file(path, harm.data)
    return disk


def opened(data: bytes) -> list[Record]:
    """Decode fetched bytes as a client does: batches, checksums, records."""
    found = []
    for position, header in iterate_batches(data):
        batch = data[position : position + header.size]
        check_batch(batch)
        found += read_records(batch, output_bytes_max=OUTPUT_BYTES_MAX)
    return found


class Case:
    """One damaged log, and the results of its readers."""

    def __init__(self, built: Built, harm: Damage) -> None:
        self.built = built
        self.harm = harm
        self.disk = damaged_disk(built, harm)
        self.right = [
            record
            for batch in built.stored
            for record in read_records(batch, output_bytes_max=OUTPUT_BYTES_MAX)
        ]
        self.by_offset = {record.offset: record for record in self.right}
        self.touched = [self._is_touched(number) for number in range(len(built.stored))]
        self.uncovered = any(self._uncovered(number) for number in range(len(built.stored)))
        """The damage reaches into bytes that no CRC covers."""

    def _is_touched(self, number: int) -> bool:
        path, at = self.built.places[number]
        return (
            path == self.harm.path
            and at < self.harm.end
            and self.harm.begin < at + len(self.built.stored[number])
        )

    def _uncovered(self, number: int) -> bool:
        path, at = self.built.places[number]
        return path == self.harm.path and at < self.harm.end and self.harm.begin < at + CRC_COVERS_FROM

    def judge(self) -> str:
        built = self.built
        is_segment = self.harm.path.endswith(".log")
        try:
            log = Log.open(self.disk, ManualClock(), DIRECTORY, built.settings)
            hook = ProducerHook(
                self.disk, ManualClock(), ManualBackground(), DIRECTORY, log, expiration_ms=1 << 40
            )
        except CorruptLog:
            if not is_segment or not self.may_keep_the_log_closed:
                raise
            return "not served"
        assert log.end_offset == built.end_offset
        if (
            log.start_offset != built.start_offset
        ):  # nothing else knows it: what was trimmed in part is whole again
            assert self.harm.path.endswith("checkpoint")
            assert self.harm.begin < 64 < SLOT_DISTANCE_BYTES < self.harm.end
            assert log.start_offset == log.segments()[0].base_offset
        if not is_segment:
            self._all_is_right(log)
            assert hook.table.to_bytes(built.end_offset) == built.producers
            return "nothing lost"
        with pytest.raises(CorruptLog):
            log.verify()
        self._read_each_batch(log)
        self._read_slices(log)
        self._look_up_times(log)
        return "reported"

    @property
    def may_keep_the_log_closed(self) -> bool:
        """Damage to the active segment, or a missing first one; no other damage makes the whole partition
        unavailable.
        """
        segments = sorted(path for path in self.built.files if path.endswith(".log"))
        return self.harm.path == segments[-1] or (self.harm.path == segments[0] and self.harm.data is None)

    def _all_is_right(self, log: Log) -> None:
        log.verify()
        offset = log.start_offset
        seen: list[Record] = []
        while (piece := log.read(offset, 700, log.end_offset)) is not None:
            seen += opened(piece.read())
            offset = piece.next_offset
        assert seen == self.right[-len(seen) :]
        assert {record.offset for record in seen} >= set(range(log.start_offset, log.end_offset))
        self._look_up_times(log, may_fail=False)

    def _read_each_batch(self, log: Log) -> None:
        """Every undamaged batch is readable; a damaged one is correct or fails."""
        for number, batch in enumerate(self.built.stored):
            offset = max(read_header(batch).base_offset, log.start_offset)
            if last_offset(batch) < offset:
                continue
            try:
                piece = log.read(offset, 1, log.end_offset)
                assert piece is not None
                records = opened(piece.read())
            except (CorruptLog, RequestError):
                assert self.touched[number], f"batch {number} at offset {offset} was not touched"
                continue
            if not self.touched[number]:
                assert records == read_records(batch, output_bytes_max=OUTPUT_BYTES_MAX)
            self._right_or_relabelled(records)

    def _read_slices(self, log: Log) -> None:
        """A reader of long slices that continues one offset later after an error."""
        offset, seen = log.start_offset, []
        while offset < log.end_offset:
            try:
                piece = log.read(offset, 1 << 20, log.end_offset)
                assert piece is not None
                data = piece.read()
            except CorruptLog:
                offset += 1
                continue
            try:
                seen += opened(data)
            except RequestError:
                offset += 1
                continue
            offset = piece.next_offset
        self._right_or_relabelled(seen)

    def _look_up_times(self, log: Log, *, may_fail: bool = True) -> None:
        for moment in (0, *(record.timestamp_ms for record in self.right[::5]), 1 << 50):
            right = next(
                (r for r in self.right if r.offset >= log.start_offset and r.timestamp_ms >= moment), None
            )
            try:
                found = log.offset_for_time(moment, log.end_offset)
            except MansioError:
                assert may_fail
                continue
            if not self.uncovered and not self.harm_reaches_times:
                assert (found and found[:2]) == (right and (right.offset, right.timestamp_ms))

    @property
    def harm_reaches_times(self) -> bool:
        """A header's largest timestamp is used without checking the CRC; the records decide the result."""
        return any(self.touched)

    def _right_or_relabelled(self, records: list[Record]) -> None:
        for record in records:
            right = self.by_offset.get(record.offset)
            if record != right:
                assert self.uncovered, f"offset {record.offset} was answered with something else"


def run_cases(seed: int, count: int) -> Counter[tuple[str, str, str]]:
    chance = random.Random(seed)
    built = [build(chance.randrange(1 << 32)) for _ in range(4)]
    seen: Counter[tuple[str, str, str]] = Counter()
    for number in range(count):
        log = built[number % 4]
        harm = damage(log.files, chance)
        name = harm.path.rpartition("/")[2]
        try:
            outcome = Case(log, harm).judge()
        except Exception as error:
            where = f"case {number}: {harm.kind} in {name} at [{harm.begin}, {harm.end})"
            raise AssertionError(f"seed {seed}, {where}: {error}") from error
        seen[name.rpartition(".")[2], harm.kind, outcome] += 1
    return seen


def test_damage_tests_cover_every_kind_of_file() -> None:
    kinds = {path.rpartition("/")[2].rpartition(".")[2] for path in build(1).files}
    assert kinds == {"log", "index", "epochs", "checkpoint", "times", "producers"}


@pytest.mark.full
def test_log_with_one_damaged_position_returns_correct_data_or_is_corrupt() -> None:
    seen = run_cases(chosen_seed(), CASES)
    reported = sum(seen["log", kind, "reported"] for kind in ("bit", "cut", "zero", "foreign", "missing"))
    refused = sum(seen["log", kind, "not served"] for kind in ("bit", "cut", "zero", "foreign", "missing"))
    print(f"reported to the reader of the batch {reported}, partition not served {refused}")
    assert reported > 3 * refused > 0
