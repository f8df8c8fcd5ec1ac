"""From the bytes of a share fetch to leased messages: what was acquired, no more and no less, whatever else came."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.client import TopicPartition
from mansio.client.share import in_flight_records
from mansio.client.share.in_flight_records import OPEN_BATCHES_MAX, AcquiredRecordReader
from mansio.client.share.leased import GAP, REJECT, RELEASE
from mansio.errors import CorruptMessage
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.unreadable import read_or_skip
from support.batch_contents import compressed_batch, encoded_record
from support.tiers import examples

PLACE = TopicPartition("t", 0)


def batch(base_offset: int, count: int, **more: Any) -> bytes:
    rows = [(1, None, b"%d" % (base_offset + number), ()) for number in range(count)]
    return build_batch(rows, base_offset=base_offset, **more)


def read(
    reader: AcquiredRecordReader, data: bytes, *acquired: tuple[int, int, int]
) -> tuple[list[tuple[int, int]], Any]:
    found, holes = reader.read(PLACE, memoryview(data), acquired)
    assert all(message.value == b"%d" % message.offset for message in found)
    ranges = [(hole.first, hole.last, hole.ack_type) for hole in holes]
    return [(message.offset, message.delivery_count) for message in found], ranges


def test_only_what_was_acquired_is_taken_with_the_count_of_its_range() -> None:
    data = batch(10, 5) + batch(15, 5)
    found, holes = read(AcquiredRecordReader(1 << 20), data, (11, 12, 1), (14, 16, 3))
    assert found == [(11, 1), (12, 1), (14, 3), (15, 3), (16, 3)]
    assert holes == []


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An element for each batch that was opened."""
    opened: list[Any] = []

    def counted(*args: Any, **more: Any) -> Any:
        opened.append(args)
        return read_or_skip(*args, **more)

    monkeypatch.setattr(in_flight_records, "read_or_skip", counted)
    return opened


def test_a_batch_is_opened_once_however_often_it_is_sent(opened: list[Any]) -> None:
    reader, data = AcquiredRecordReader(1 << 20), batch(0, 100)
    for first in range(0, 100, 10):
        found, _ = read(reader, data, (first, first + 9, 1))
        assert found == [(offset, 1) for offset in range(first, first + 10)]
    assert len(opened) == 1
    assert read(reader, data, (5, 6, 2)) == ([(5, 2), (6, 2)], [])  # one comes anew
    assert len(opened) == 2
    other = batch(0, 100, codec=Codec.GZIP)  # the same place in a topic that was made anew
    assert read(reader, other, (50, 51, 1)) == ([(50, 1), (51, 1)], [])
    assert len(opened) == 3


def test_batches_that_are_leased_side_by_side_are_opened_once_each(opened: list[Any]) -> None:
    """As with priorities: a response has some records of the batch of each priority."""
    reader, bases = AcquiredRecordReader(1 << 20), (0, 30, 60)
    data = b"".join(batch(base, 30) for base in bases)
    for step in range(0, 30, 10):
        acquired = [(base + step, base + step + 9, 1) for base in bases]
        found, holes = read(reader, data, *acquired)
        assert found == [(each, 1) for first, last, _ in acquired for each in range(first, last + 1)]
        assert holes == []
    assert len(opened) == len(bases)


def test_of_many_batches_those_that_were_read_last_are_kept(opened: list[Any]) -> None:
    reader, bases = AcquiredRecordReader(1 << 20), range(0, 30 * (OPEN_BATCHES_MAX + 1), 30)
    data = b"".join(batch(base, 30) for base in bases)
    read(reader, data, *[(base, base + 9, 1) for base in bases])
    read(reader, data, *[(base + 10, base + 19, 1) for base in bases[1:]])
    assert len(opened) == len(bases)
    assert read(reader, data, (10, 11, 1)) == ([(10, 1), (11, 1)], [])
    assert len(opened) == len(bases) + 1


def test_what_the_log_has_not_is_a_gap_and_what_did_not_come_is_given_back() -> None:
    first, _, third = batch(0, 3), batch(3, 3), batch(6, 3)
    data = first + third + batch(9, 3)[:-1]
    found, holes = read(AcquiredRecordReader(1 << 20), data, (1, 10, 1))
    assert [offset for offset, _ in found] == [1, 2, 6, 7, 8]
    assert holes == [(3, 5, GAP), (9, 10, RELEASE)]
    assert read(AcquiredRecordReader(1 << 20), b"", (4, 5, 1)) == ([], [(4, 5, RELEASE)])


def test_a_batch_that_was_damaged_on_its_way_is_refused_as_a_whole() -> None:
    damaged = bytearray(batch(0, 3))
    damaged[-1] ^= 1
    with pytest.raises(CorruptMessage):
        read(AcquiredRecordReader(1 << 10), bytes(damaged), (0, 2, 1))


def test_only_the_records_that_cannot_be_read_are_rejected_and_all_others_are_taken() -> None:
    large = build_batch([(1, None, bytes(2_000), ())] * 5, base_offset=3, codec=Codec.GZIP)
    data = batch(0, 3) + large + batch(10, 2)
    found, holes = read(AcquiredRecordReader(1 << 10), data, (1, 11, 1))
    assert [offset for offset, _ in found] == [1, 2, 10, 11]
    assert holes == [(3, 7, REJECT), (8, 9, GAP)]
    (_, holes) = AcquiredRecordReader(1 << 10).read(PLACE, memoryview(data), ((3, 5, 1),))
    assert [hole.first for hole in holes] == [3]
    assert "more than" in holes[0].reason


def test_readable_records_before_an_unreadable_one_of_their_batch_are_taken() -> None:
    records = [encoded_record(number, b"%d" % number) for number in range(40_000)]
    data = compressed_batch(b"".join(records)[:-2], 40_000, Codec.ZSTD)
    reader = AcquiredRecordReader(1 << 24)
    taken: list[int] = []
    for first in range(0, 40_000, 8_000):
        found, holes = read(reader, data, (first, first + 7_999, 1))
        taken += [offset for offset, _ in found]
    assert taken == list(range(39_999))
    assert holes == [(39_999, 39_999, REJECT)]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=6),
    ranges=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=6
    ),
)
@settings(max_examples=examples(15, 50), deadline=None)
def test_however_ranges_and_batches_lie_each_record_that_was_acquired_is_taken_once(
    sizes: list[tuple[int, int]], ranges: list[tuple[int, int, int]]
) -> None:
    data, there, offset = b"", set(), 0
    for hole, count in sizes:
        data += batch(offset + hole, count)
        there |= set(range(offset + hole, offset + hole + count))
        offset += hole + count
    acquired, first = [], 0
    for hole, length, count in ranges:
        acquired.append((first + hole, first + hole + length - 1, count))
        first += hole + length
    leased = {each: count for first, last, count in acquired for each in range(first, last + 1)}
    found, holes = read(AcquiredRecordReader(1 << 20), data, *acquired)
    assert found == [(each, count) for each, count in leased.items() if each in there]
    returned = [(each, kind) for first, last, kind in holes for each in range(first, last + 1)]
    assert returned == [(each, GAP if each < offset else RELEASE) for each in leased if each not in there]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    responses=st.lists(st.sets(st.integers(0, 40), min_size=1), min_size=1, max_size=5),
)
@settings(max_examples=examples(15, 50), deadline=None)
def test_whatever_was_read_before_each_record_that_is_acquired_is_taken(
    sizes: list[int], responses: list[set[int]]
) -> None:
    data, end = b"", 0
    for size in sizes:
        data += batch(end, size)
        end += size
    reader = AcquiredRecordReader(1 << 20)
    for offsets in responses:
        acquired = sorted(offset for offset in offsets if offset < end)
        if acquired:
            found, holes = read(reader, data, *[(offset, offset, 2) for offset in acquired])
            assert found == [(offset, 2) for offset in acquired]
            assert holes == []
