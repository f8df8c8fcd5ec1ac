"""The sparse index is bounded and exact; checksummed files are complete or absent."""

from __future__ import annotations

import random

import pytest

from mansio.storage import index as index_module
from mansio.storage.checksummed_file import write_checksummed
from mansio.storage.index import SparseIndex, load_index
from mansio.storage.leader_epochs import LeaderEpochCache, load_leader_epochs
from mansio.storage.log import SegmentInfo
from mansio.storage.retention import find_expired
from mansio.testing.disk import SimulatedDisk


def filled(count: int, interval: int = 1) -> SparseIndex:
    index = SparseIndex(interval)
    for number in range(count):
        index.add(10 * number, 100 * number, 1000 + (number * 7) % 50)
    return index


def test_full_index_drops_every_second_entry_and_finds_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "ENTRIES_MAX", 64)
    index = filled(5000)
    assert len(index) <= 64
    gap = max(b[1] - a[1] for a, b in zip(index.entries(), index.entries()[1:], strict=False))
    for number in random.Random(1).sample(range(5000), 200):
        position = index.position_before_offset(10 * number)
        assert 100 * number - gap < position <= 100 * number
        assert index.entry_before_position(100 * number + 50)[1] <= 100 * number


def test_index_file_restores_the_index() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/d")
    index = filled(100)
    write_checksummed(disk, "/d/i", index.encode(5, 2000, 9999), durable=True)
    loaded = load_index(disk, "/d/i", 5)
    assert loaded is not None
    assert (loaded.end_offset, loaded.covered_bytes) == (2000, 9999)
    assert loaded.index.entries() == index.entries()
    assert loaded.index.max_timestamp_ms == index.max_timestamp_ms
    assert load_index(disk, "/d/i", 6) is None


def test_every_flipped_bit_and_truncation_of_a_checksummed_file_is_detected() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/d")
    data = LeaderEpochCache([(1, 0), (4, 77)]).encode()
    for bit in range(8 * len(data)):
        write_checksummed(disk, "/d/e", data, durable=True)
        disk.flip_bit("/d/e", bit)
        assert load_leader_epochs(disk, "/d/e") is None
    for size in range(len(data)):
        write_checksummed(disk, "/d/e", data, durable=True)
        disk.truncate_file("/d/e", size)
        assert load_leader_epochs(disk, "/d/e") is None


def test_an_epoch_that_wrote_nothing_is_replaced() -> None:
    epochs = LeaderEpochCache([(1, 0), (2, 10)])
    assert epochs.assign(5, 10)
    assert epochs.entries() == [(1, 0), (5, 10)]
    assert not epochs.assign(4, 20)
    epochs.trim_to(10)
    assert epochs.entries() == [(5, 10)]
    assert LeaderEpochCache().end_offset_for(0, 5) == (-1, -1)


SEGMENTS = [SegmentInfo(0, 10, 100, 1000), SegmentInfo(10, 20, 100, 3000), SegmentInfo(20, 30, 100, 2000)]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"now_ms": 10_000}, 0),
        ({"now_ms": 10_000, "retention_ms": 8_000}, 10),
        ({"now_ms": 10_000, "retention_ms": 1}, 30),
        ({"now_ms": 10_000, "retention_ms": 1, "floor_offset": 29}, 20),
        ({"now_ms": 2_500, "retention_ms": 0}, 10),
        ({"now_ms": 0, "retention_bytes": 250}, 0),
        ({"now_ms": 0, "retention_bytes": 200}, 10),
        ({"now_ms": 0, "retention_bytes": 0}, 20),
        ({"now_ms": 10_000, "retention_ms": 1, "floor_offset": 19}, 10),
        ({"now_ms": 10_000, "retention_ms": 1, "floor_offset": 0}, 0),
    ],
)
def test_retention_removes_whole_old_segments_up_to_the_floor(limits: dict[str, int], expected: int) -> None:
    *closed, newest = SEGMENTS
    found = find_expired(closed, newest, size_bytes=300, **{"floor_offset": 30, **limits})
    assert max(0, found.end_offset) == expected
