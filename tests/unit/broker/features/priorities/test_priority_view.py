"""Priorities of replicas: what a follower knows when it becomes the leader, after truncations, deletions and restarts,
and from damaged files."""

from __future__ import annotations

import random

import pytest

from mansio.broker.log_view import replay, snapshots
from mansio.errors import InvalidRecord
from mansio.state.share_partition import offset_numbers
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER
from mansio.wire.batch.priority_header import PRIORITIES, PRIORITY_HEADER, Priority
from mansio.wire.batch.record_batch import build_batch, read_header
from support.partition_bench import DIRECTORY, LARGE_RULES, SMALL_SEGMENTS, PartitionBench, small_bench
from support.tiers import examples


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOT_INTERVAL_BYTES", 500)
    monkeypatch.setattr(replay, "SLICE_BATCHES", 3)
    monkeypatch.setattr(offset_numbers, "CHUNK_OFFSETS", 16)


class PrioritizedPartition(PartitionBench):
    """A partition with priorities on a simulated disk."""

    def __init__(
        self, disk: SimulatedDisk | None = None, *, is_follower: bool = False, is_new: bool = False
    ) -> None:
        super().__init__(
            disk,
            features=("producers", "new priorities" if is_new else "priorities"),
            is_follower=is_follower,
            log_settings=SMALL_SEGMENTS,
            rules=LARGE_RULES,
        )

    def append(self, *priorities: str, codec: Codec = Codec.NONE) -> int:
        batch = build_batch(
            [
                (1000, None, b"v", [(PRIORITY_HEADER, name.encode())] if name != "none" else [])
                for name in priorities
            ],
            codec=codec,
        )
        return self.partition.append(batch).base_offset

    def known(self) -> list[Priority]:
        """The priority of each offset of the log."""
        index = self.priorities.index
        assert index.end == self.log.end_offset
        parts = index.split(self.log.start_offset, index.end - 1)
        return [Priority(part.number) for part in parts for _ in range(part.first, part.last + 1)]


def replicate(leader: PrioritizedPartition, follower: PrioritizedPartition, batches: int = 1 << 20) -> None:
    """Copy batches that the follower does not have, flush them, and let its view read them."""
    if follower.log.end_offset < leader.log.start_offset:
        follower.flush()
        follower.partition.reset_to(leader.log.start_offset)
    end = follower.log.end_offset
    records = b"".join(batch for _, batch in zip(range(batches), leader.log.batches(end), strict=False))
    if records and end < leader.log.end_offset:
        follower.partition.append_from_leader(memoryview(records), 0)
    follower.flush()
    follower.partition.update_from_leader(follower.log.durable_end_offset, leader.log.start_offset)
    follower.scheduler.run()


@pytest.mark.parametrize("seed", range(examples(8, 20)))
def test_every_replica_knows_the_priorities_after_truncations_deletions_and_restarts(seed: int) -> None:
    chance = random.Random(seed)
    leader = PrioritizedPartition()
    follower = PrioritizedPartition(is_follower=True)
    expected: dict[int, Priority] = {}
    names = {"none": Priority.NORMAL, **{each.name.lower(): each for each in PRIORITIES}}
    for _ in range(120):
        kind = chance.randrange(12)
        if kind < 6:
            found = chance.choices([*names], k=chance.randint(1, 6))
            if chance.randrange(2):
                found = found[:1] * len(found)
            base = leader.append(*found, codec=chance.choice([Codec.NONE, Codec.GZIP, Codec.ZSTD]))
            expected |= {base + index: names[name] for index, name in enumerate(found)}
        elif kind < 9:
            leader.flush()
            replicate(leader, follower, chance.randint(1, 4))
        elif kind == 9 and leader.partition.high_watermark > leader.log.start_offset:
            leader.partition.trim(chance.randint(leader.log.start_offset, leader.partition.high_watermark))
            leader.flush()
        elif kind == 10:
            follower.flush()
            end = chance.randint(follower.log.start_offset, follower.log.end_offset)
            if end < follower.log.end_offset:
                epoch = follower.log.leader_epochs.latest_epoch
                follower.partition.truncate_diverging((epoch, end))
            follower.scheduler.run()
        else:
            follower.flush()
            follower.partition.close(save=bool(chance.randrange(2)))
            follower = PrioritizedPartition(follower.disk, is_follower=True)
    replicate(leader, follower)
    assert leader.known() == [expected[at] for at in range(leader.log.start_offset, leader.log.end_offset)]
    start = max(leader.log.start_offset, follower.log.start_offset)
    assert follower.log.end_offset == leader.log.end_offset
    assert (
        follower.known()[start - follower.log.start_offset :]
        == leader.known()[start - leader.log.start_offset :]
    )


def test_offsets_that_another_leader_writes_again_have_its_priorities() -> None:
    first, second = PrioritizedPartition(), PrioritizedPartition()
    follower = PrioritizedPartition(is_follower=True)
    first.append("high", "high", "high")
    second.append("high")
    second.append("low", "low")
    for leader in (first, second):
        leader.flush()
    replicate(first, follower)
    follower.partition.truncate_diverging((follower.log.leader_epochs.latest_epoch, 0))
    follower.scheduler.run()
    replicate(second, follower)
    assert follower.known() == [Priority.HIGH, Priority.LOW, Priority.LOW]


def test_priorities_of_a_batch_without_its_repeats_are_those_of_the_other_records() -> None:
    bench = small_bench(None, "producers", "deduplication", "priorities")

    def append(*records: tuple[bytes, bytes]) -> None:
        headers = [[(DEDUP_ID_HEADER, name), (PRIORITY_HEADER, priority)] for name, priority in records]
        bench.partition.append(build_batch([(1000, None, b"v", each) for each in headers]))

    append((b"1", b"high"))
    append((b"1", b"high"), (b"2", b"low"), (b"3", b"normal"), (b"2", b"high"))
    offsets = [record.offset for record in bench.records()]
    known = bench.priorities.index.split(0, bench.log.end_offset - 1)
    found = [next(part.number for part in known if part.first <= at <= part.last) for at in offsets]
    assert found == [Priority.HIGH, Priority.LOW, Priority.NORMAL]


def test_priorities_of_a_refused_batch_are_not_those_of_the_next_one() -> None:
    leader = PrioritizedPartition()
    follower = PrioritizedPartition(is_follower=True)  # it led before
    refused = build_batch([(1000, None, b"v", [(PRIORITY_HEADER, b"high")])])
    rules = follower.partition.rules
    follower.partition.pipeline.prepare(refused, read_header(refused), rules, None)  # and was not written
    leader.append("low")
    leader.flush()
    replicate(leader, follower)
    assert follower.known() == [Priority.LOW]


def test_records_before_the_setting_keep_normal_priority_over_a_restart() -> None:
    disk = SimulatedDisk()
    plain = small_bench(disk, "producers")
    plain.partition.append(build_batch([(1000, None, b"v", [(PRIORITY_HEADER, b"high")])]))
    plain.flush()
    plain.partition.close(save=False)
    with_setting = PrioritizedPartition(disk, is_new=True)
    with_setting.append("high", "low")
    with_setting.flush()
    expected = [Priority.NORMAL, Priority.HIGH, Priority.LOW]
    assert with_setting.known() == expected
    with_setting.partition.close(save=False)
    assert PrioritizedPartition(disk).known() == expected


def test_damaged_snapshot_is_left_out() -> None:
    disk = SimulatedDisk()
    one = PrioritizedPartition(disk)
    one.append("high", "low", "none")
    one.flush()
    one.partition.close()
    (name,) = [name for name in disk.list_directory(DIRECTORY) if name.endswith(".priority")]
    disk.flip_bit(f"{DIRECTORY}/{name}", 8 * 30)
    assert PrioritizedPartition(disk).known() == [Priority.HIGH, Priority.LOW, Priority.NORMAL]


def test_rejected_batch_leaves_nothing_in_the_index() -> None:
    one = PrioritizedPartition()
    one.append("high")
    with pytest.raises(InvalidRecord, match=r"mansio-priority is high, normal or low \(record 1"):
        one.append("low", "urgent")
    one.append("none")
    assert one.known() == [Priority.HIGH, Priority.NORMAL]


def test_batches_that_the_broker_changes_are_read_from_the_log() -> None:
    one = PrioritizedPartition()
    batch = build_batch([(1000, None, b"v", [(PRIORITY_HEADER, b"high")])])
    one.partition.append_unchanged([batch])
    assert one.known() == [Priority.HIGH]
