"""Deduplication windows of replicas: what a follower knows when it becomes the leader, after truncations, deletions and
restarts."""

from __future__ import annotations

import random

import pytest

from mansio.broker.features.deduplication import deduplicator
from mansio.broker.features.deduplication import window as window_module
from mansio.broker.log_view import replay, snapshots
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER, key_of
from mansio.wire.batch.record_batch import build_batch
from support.partition_bench import DIRECTORY, WINDOW_MS, PartitionBench, deduplicated
from support.tiers import examples


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOT_INTERVAL_BYTES", 500)
    monkeypatch.setattr(replay, "SLICE_BATCHES", 3)
    monkeypatch.setattr(deduplicator, "COPIED_IDS_MAX", 3)
    monkeypatch.setattr(window_module, "SHARD_IDS", 4)
    monkeypatch.setattr(window_module, "MARK_MS", 100)


def append(leader: PartitionBench, *ids: int) -> int:
    batch = build_batch([(1000, None, b"%d" % one, [(DEDUP_ID_HEADER, b"%d" % one)]) for one in ids])
    return leader.partition.append(batch).base_offset


def replicate(leader: PartitionBench, follower: PartitionBench, batches: int = 1 << 20) -> None:
    """Copy batches that the follower does not have, flush them, and let its view read them."""
    if follower.log.end_offset < leader.log.start_offset:
        follower.flush()
        follower.partition.reset_to(leader.log.start_offset)
    end = follower.log.end_offset
    records = b"".join(batch for _, batch in zip(range(batches), leader.log.batches(end), strict=False))
    if records and end < leader.log.end_offset:
        follower.partition.append_from_leader(memoryview(records), 0)
    follower.clock.seconds = leader.clock.seconds
    follower.flush()
    follower.partition.update_from_leader(follower.log.durable_end_offset, leader.log.start_offset)
    follower.scheduler.run()


def live_ids(one: PartitionBench, ids: int, ahead_ms: int = 0) -> dict[int, tuple[int, int]]:
    """Offset and time of each id that has not expired, also by a clock that is ahead so far."""
    until_ms = one.clock.wall_ms() + ahead_ms - WINDOW_MS
    found = {number: one.deduplication.view.window.find(key_of(b"%d" % number)) for number in range(ids)}
    return {number: known for number, known in found.items() if known and known.accepted_ms > until_ms}


def release(leader: PartitionBench, offset: int) -> None:
    """Delete the records below an offset, as retention does."""
    copying = leader.partition.release_below(offset)
    try:
        while True:
            copying.send(None)
            leader.flush()
    except StopIteration:
        pass
    leader.flush()
    floor = leader.partition.retention_floor()
    start = min(offset, leader.partition.high_watermark if floor is None else floor)
    assert start == min(offset, leader.partition.high_watermark), "released"
    if start > leader.partition.start_offset:
        leader.partition.trim(start)
        leader.flush()


@pytest.mark.parametrize("seed", range(examples(8, 20)))
def test_follower_that_becomes_leader_knows_every_id(seed: int) -> None:
    chance = random.Random(seed)
    leader = deduplicated()
    follower = deduplicated(is_follower=True)
    latest_ms = 0
    for _ in range(120):
        latest_ms = max(latest_ms, leader.clock.wall_ms())
        name = chance.choices(
            ["append", "replicate", "advance", "back", "delete", "restart"], [9, 6, 4, 1, 1, 1]
        )[0]
        if name == "append":
            append(leader, *(chance.randrange(40) for _ in range(chance.randrange(1, 5))))
        elif name == "replicate":
            leader.flush()
            replicate(leader, follower, chance.randrange(1, 9))
        elif name == "advance":
            leader.clock.seconds += chance.random()
        elif name == "back":
            leader.clock.seconds -= chance.random()
        elif name == "delete":
            leader.flush()
            release(leader, chance.randrange(leader.partition.high_watermark + 1))
        else:
            if chance.random() < 0.5:
                follower.partition.close()
            follower = deduplicated(follower.disk, seconds=follower.clock.seconds, is_follower=True)
    leader.flush()
    while follower.log.end_offset < leader.log.end_offset:
        replicate(leader, follower)
    assert follower.deduplication.is_complete
    ahead_ms = max(0, latest_ms - leader.clock.wall_ms())  # the clock may have been set back
    known_ids = live_ids(leader, 40, ahead_ms)
    assert live_ids(follower, 40, ahead_ms) == known_ids
    follower.partition.become_leader(follower.log.leader_epochs.latest_epoch + 1, in_sync=[1], replicas=[1])
    for number, known in known_ids.items():
        assert append(follower, number) == known[0]


@pytest.mark.parametrize("seed", range(4))
def test_ids_of_records_that_were_truncated_are_not_known(seed: int) -> None:
    chance = random.Random(seed)
    leader = deduplicated()
    follower = deduplicated(is_follower=True)
    lost: list[int] = []
    for number in range(60):
        offset = append(leader, number)
        if number == 40:
            leader.flush()
            replicate(leader, follower, 1 << 20)
        if number > 40:
            lost.append(offset)
    replicate(leader, follower)
    end = lost[chance.randrange(len(lost))]  # the control batch of this record stays, the record is truncated
    follower.log.truncate_to(end)
    follower.deduplication.on_truncate(end)
    follower.scheduler.run()
    kept = {number: known for number, known in live_ids(leader, 60).items() if known[0] < end}
    assert live_ids(follower, 60) == kept
    follower.partition.become_leader(follower.log.leader_epochs.latest_epoch + 1, in_sync=[1], replicas=[1])
    first = next(number for number in range(60) if number not in kept)
    stored = append(follower, first)
    assert stored > end
    assert append(follower, first) == stored


def test_segments_older_than_any_window_are_not_read() -> None:
    leader = deduplicated()
    for number in range(100):
        append(leader, number)
    leader.flush()
    bases = leader.log.segment_base_offsets()
    assert len(bases) > 3
    for base in bases[:2]:
        leader.disk.modified_ms_by_path[f"{DIRECTORY}/{base:020d}.log"] = 1
    for path in leader.deduplication.snapshots.paths():
        leader.disk.remove(path)
    again = deduplicated(leader.disk, seconds=leader.clock.seconds)
    offsets = [known[0] for known in live_ids(again, 100).values()]
    assert min(offsets) >= bases[2]
    assert max(offsets) == leader.log.end_offset - 1


def test_repeat_is_acknowledged_when_the_first_record_is_committed() -> None:
    leader = deduplicated()
    batch = build_batch([(1000, None, b"x", [(DEDUP_ID_HEADER, b"id")])])
    first = leader.partition.append(batch, urgent=False)
    repeat = leader.partition.append(batch)
    committed: list[object] = []
    assert repeat.end_offset == first.end_offset
    assert not leader.partition.when_committed(repeat.end_offset, committed.append)
    assert not committed
    for _ in range(4):  # the repeat has started the flush
        leader.scheduler.fire()
        leader.background.run_all()
    assert committed == [None]


def test_snapshot_of_records_that_were_truncated_is_not_used() -> None:
    leader = deduplicated()
    follower = deduplicated(is_follower=True)
    append(leader, 0)
    replicate(leader, follower)
    base = leader.log.end_offset
    for number in range(1, 6):
        append(leader, number)
    replicate(leader, follower)
    follower.partition.close()  # with a snapshot at its flushed end
    follower = deduplicated(follower.disk, seconds=follower.clock.seconds, is_follower=True)
    assert sorted(live_ids(follower, 20)) == [0, 1, 2, 3, 4, 5]
    follower.log.truncate_to(base)
    follower.deduplication.on_truncate(base)
    follower.scheduler.run()
    other = deduplicated()
    append(other, 0)
    for number in range(10, 18):
        append(other, number)
    replicate(other, follower)
    for again in (follower, deduplicated(follower.disk, seconds=follower.clock.seconds, is_follower=True)):
        assert live_ids(again, 20) == live_ids(other, 20)
