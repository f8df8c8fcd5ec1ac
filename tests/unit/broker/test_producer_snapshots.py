"""State of producers after a start: exactly what the log of the partition contains."""

from __future__ import annotations

from random import Random

import pytest

from mansio.broker.partition.producer_hook import EXPIRY_INTERVAL_MS, ProducerHook
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import build_batch, check_batch
from support.logs import LogBench, append, make_batch

DIRECTORY = "/data/p"
DAY_MS = 86_400_000


class ProducerLog(LogBench):
    """A log with a producer hook, started as often as wanted."""

    def __init__(self, disk: SimulatedDisk, *, expiration_ms: int = 1 << 40, wall_offset_ms: int = 0) -> None:
        super().__init__(disk)
        self.clock.wall_offset_ms = wall_offset_ms
        self.open_log(DIRECTORY)
        self.hook = ProducerHook(
            disk, self.clock, self.background, DIRECTORY, self.log, expiration_ms=expiration_ms
        )

    def write(self, sequence: int, producer_id: int = 7) -> None:
        batch = build_batch(
            [(1000, None, b"value", ())], producer_id=producer_id, producer_epoch=0, base_sequence=sequence
        )
        header = check_batch(batch)
        assert self.hook.before_append(header) is None, "the batch is in the log"
        base_offset, _ = append(self.log, batch)
        self.hook.on_append(header, base_offset)

    def pass_time(self, ms: int) -> None:
        self.clock.seconds += ms / 1000

    def sequences(self) -> list[int]:
        producer = self.hook.table.get(7)
        return [] if producer is None else [batch.base_sequence for batch in producer.batches]


@pytest.mark.parametrize("name_offset", [2, 3])
def test_snapshot_beyond_the_end_of_the_log_is_not_used(name_offset: int) -> None:
    """A batch that only the snapshot has would be answered as a duplicate, and never be stored. The end offset inside
    the file counts, whatever its name is."""
    disk = SimulatedDisk()
    bench = ProducerLog(disk)
    for sequence in range(2):
        bench.write(sequence)
    bench.log.sync()
    ahead = bench.hook.table.from_bytes(bench.hook.table.to_bytes(2))[0]
    ahead.record(
        check_batch(
            build_batch([(1000, None, b"lost", ())], producer_id=7, producer_epoch=0, base_sequence=2)
        ),
        2,
        0,
    )
    disk.put_file(f"{DIRECTORY}/{name_offset:020d}.producers", ahead.to_bytes(3))
    again = ProducerLog(disk)
    assert again.sequences() == [0, 1]
    again.write(2)
    assert again.log.end_offset == 3


def test_a_snapshot_that_knows_more_than_the_log_does_not_outlast_the_log_growing_again() -> None:
    disk = SimulatedDisk()
    bench = ProducerLog(disk)
    for sequence in range(3):
        bench.write(sequence)
    bench.log.sync()
    bench.hook.save()
    damaged = bytearray(disk.read_file(f"{DIRECTORY}/{0:020d}.log"))
    damaged[60] ^= 1
    disk.put_file(f"{DIRECTORY}/{0:020d}.log", bytes(damaged))
    disk.remove(
        f"{DIRECTORY}/checkpoint"
    )  # as if killed before it was written: the damage looks like a torn tail
    disk.put_file(f"{DIRECTORY}/somebody.producers", b"theirs")
    cut = ProducerLog(disk)
    assert (cut.log.end_offset, cut.sequences()) == (0, [])
    for _ in range(4):
        append(cut.log, make_batch([1000]))
    cut.log.sync()
    again = ProducerLog(disk.crash(Random(1)))
    assert (again.log.end_offset, again.sequences()) == (4, [])


def test_batches_after_a_snapshot_are_known_from_the_log() -> None:
    disk = SimulatedDisk()
    bench = ProducerLog(disk)
    bench.write(0)
    bench.log.sync()
    bench.hook.save()
    for sequence in (1, 2):
        bench.write(sequence)
    bench.log.sync()
    assert ProducerLog(disk).sequences() == [0, 1, 2]


def test_a_snapshot_is_written_when_all_it_knows_is_durable_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mansio.broker.log_view.snapshots.SNAPSHOT_INTERVAL_BYTES", 100)
    disk = SimulatedDisk()
    bench = ProducerLog(disk)
    for sequence in range(3):
        bench.write(sequence)
    bench.hook.on_committed(1)
    bench.background.run_all()
    assert not any(path.endswith(".producers") for path in disk.files())
    bench.hook.on_committed(3)
    bench.background.run_all()
    assert any(path.endswith(".producers") for path in disk.files())


def test_a_clock_that_is_set_forward_makes_no_duplicate_possible() -> None:
    bench = ProducerLog(SimulatedDisk(), expiration_ms=DAY_MS)
    bench.write(0)
    bench.clock.wall_offset_ms = 2 * DAY_MS
    bench.write(0, producer_id=8)
    assert bench.sequences() == [0]
    with pytest.raises(AssertionError, match="is in the log"):
        bench.write(0)


def test_a_clock_that_is_set_forward_makes_no_duplicate_possible_after_a_restart() -> None:
    disk = SimulatedDisk()
    bench = ProducerLog(disk, expiration_ms=DAY_MS)
    bench.write(0)
    bench.write(0, producer_id=8)
    bench.log.sync()
    bench.hook.save()
    again = ProducerLog(disk, expiration_ms=DAY_MS, wall_offset_ms=2 * DAY_MS)
    again.pass_time(EXPIRY_INTERVAL_MS)
    again.write(1, producer_id=8)
    assert again.sequences() == [0]


@pytest.mark.parametrize("jump_ms", [0, 5 * DAY_MS, -5 * DAY_MS])
def test_producers_expire_by_the_time_that_has_passed(jump_ms: int) -> None:
    bench = ProducerLog(SimulatedDisk(), expiration_ms=DAY_MS)
    bench.write(0)
    bench.pass_time(DAY_MS // 2)
    bench.write(0, producer_id=8)
    bench.clock.wall_offset_ms = jump_ms
    bench.write(1, producer_id=8)
    bench.pass_time(DAY_MS // 2 + max(-jump_ms, 0) + 2 * EXPIRY_INTERVAL_MS)
    bench.write(2, producer_id=8)
    assert bench.sequences() == []
