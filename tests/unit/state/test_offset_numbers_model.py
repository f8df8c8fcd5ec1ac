"""Numbers of offsets against a dictionary, and its snapshots."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.broker.features.priorities.priority_index import PriorityIndex
from mansio.errors import CorruptLog
from mansio.state.share_partition import offset_numbers
from mansio.state.share_partition.offset_numbers import NumberedOffsets, NumberedRange
from mansio.wire.batch.priority_header import PRIORITIES, Priority

if TYPE_CHECKING:
    from collections.abc import Iterable


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        if found and found[-1][1] == first - 1:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found


PRIORITY = st.sampled_from(PRIORITIES)
BATCH = st.lists(st.tuples(st.integers(1, 9), PRIORITY), min_size=1, max_size=6)
STEP = st.one_of(
    st.tuples(st.just("append"), BATCH),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
    st.tuples(st.just("drop"), st.floats(0, 1)),
    st.tuples(st.just("restart"), st.none()),
)


class Model:
    """The priority of each offset."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.of: dict[int, Priority] = {}

    def ranges(self, priority: Priority, first: int, last: int) -> list[tuple[int, int]]:
        offsets = [
            at for at in range(max(first, self.start), min(last + 1, self.end)) if self.of[at] is priority
        ]
        return merged((at, at) for at in offsets)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_numbers, "CHUNK_OFFSETS", 8)


@given(start=st.integers(0, 20), steps=st.lists(STEP, max_size=30), at=st.data())
def test_index_equals_a_dictionary(start: int, steps: list[tuple[str, object]], at: st.DataObject) -> None:
    index, model = PriorityIndex(start), Model(start)
    for kind, value in steps:
        if kind == "append":
            ranges, end = [], model.end
            for size, priority in value:  # type: ignore[attr-defined]
                ranges.append(NumberedRange(end, end + size - 1, priority))
                model.of |= dict.fromkeys(range(end, end + size), priority)
                end += size
            index.append(end, ranges)
            model.end = end
        elif kind == "truncate":
            model.end -= int((model.end - model.start) * value)  # type: ignore[operator]
            index.truncate(model.end)
        elif kind == "drop":
            model.start += int((model.end - model.start) * value)  # type: ignore[operator]
            index.drop_below(model.start)
        else:
            frozen = index.freeze()
            index.append(index.end + 3, [NumberedRange(index.end, index.end + 2, Priority.LOW)])
            index.truncate(frozen.end)
            index = PriorityIndex.from_bytes(frozen.to_bytes())
        assert (index.start, index.end) == (model.start, model.end)
        for priority in PRIORITIES:  # counts are kept until the next change
            present = sum(model.of[each] is priority for each in range(model.start, model.end))
            assert index.count(priority, 0, model.end + 9) == present
    first = at.draw(st.integers(0, model.end + 5))
    last = at.draw(st.integers(first - 1, model.end + 9))
    for priority in PRIORITIES:
        expected = model.ranges(priority, first, last)
        own = NumberedOffsets(index, priority)
        for _ in range(2):  # the second time, parts without such offsets are known
            assert merged(own.within(first, last)) == expected
        assert own.count(first, last) == sum(high - low + 1 for low, high in expected)
        following = model.ranges(priority, first, model.end)
        assert own.first_at_or_above(first) == (following[0][0] if following else None)
        records = at.draw(st.integers(1, 12))
        known = [offset for low, high in following for offset in range(low, high + 1)]
        bound = (
            known[records - 1] + 1 if len(known) >= records else max(model.end, first) + records - len(known)
        )
        assert own.bound_after(first, records) == bound
    covered = range(model.start, model.end)
    expected_split = [model.of[at] if at in covered else Priority.NORMAL for at in range(first, last + 1)]
    parts = index.split(first, last)
    assert [part.number for part in parts for _ in range(part.first, part.last + 1)] == expected_split
    assert all(one.number != other.number for one, other in pairwise(parts))


def test_index_of_records_of_normal_priority_takes_no_memory() -> None:
    index = PriorityIndex(0)
    index.append(1_000_000)
    assert not index.mixed_chunk_count
    assert index.count(Priority.NORMAL, 0, 10**9) == 1_000_000


def test_offsets_that_are_added_after_a_search_are_found() -> None:
    index = PriorityIndex(0)
    index.append(20)
    own = NumberedOffsets(index, Priority.HIGH)
    assert [*own.within(0, 100)] == []
    index.append(30, [NumberedRange(20, 25, Priority.HIGH)])
    assert merged(own.within(0, 100)) == [(20, 25)]


def test_a_frozen_index_does_not_change_with_the_other_one() -> None:
    index = PriorityIndex(0)
    index.append(3, [NumberedRange(0, 0, Priority.HIGH)])
    frozen = index.freeze()
    index.append(5, [NumberedRange(3, 4, Priority.LOW)])
    frozen.append(5)
    assert frozen.count(Priority.LOW, 0, 4) == 0


def test_chunk_of_a_snapshot_is_not_decompressed_beyond_its_size() -> None:
    index = PriorityIndex(0)
    index.append(10, [NumberedRange(3, 5, Priority.HIGH)])
    index._chunks[0] = bytearray(100 << 20)
    with pytest.raises(CorruptLog):
        PriorityIndex.from_bytes(index.to_bytes())


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_snapshot_is_refused(damage: str) -> None:
    index = PriorityIndex(0)
    index.append(10, [NumberedRange(3, 5, Priority.HIGH)])
    data = index.to_bytes()
    data = data[:-3] if damage == "cut" else data[:-6] + bytes(6)
    with pytest.raises(CorruptLog):
        PriorityIndex.from_bytes(data)
