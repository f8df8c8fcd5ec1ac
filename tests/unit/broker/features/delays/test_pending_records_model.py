"""`PendingRecords` compared with a dictionary: order, bounds, snapshots, and every change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.broker.features.delays import pending_records
from mansio.broker.features.delays.pending_records import PendingRecord, PendingRecords
from mansio.errors import CorruptLog
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Iterator


MOMENTS = st.integers(0, 40)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.tuples(MOMENTS, st.integers(0, 90)), min_size=1, max_size=12)),
        st.tuples(st.just("remove"), st.integers(0, 200)),
        st.tuples(st.just("move"), st.integers(0, 200), MOMENTS, st.integers(0, 90)),
        st.tuples(st.just("take"), MOMENTS, st.integers(1, 9), st.integers(1, 40)),
        st.tuples(st.just("deliver"), st.integers(0, 9), st.lists(st.integers(0, 200), max_size=2)),
        st.tuples(st.just("postpone"), st.integers(0, 200), MOMENTS),
        st.tuples(st.just("snapshot")),
        st.tuples(st.just("select"), MOMENTS, MOMENTS, st.none() | st.tuples(MOMENTS, st.integers(0, 200))),
        st.tuples(st.just("below"), st.integers(0, 90), st.integers(1, 30)),
    ),
    max_size=60,
)


@pytest.fixture(autouse=True)
def _small_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending_records, "RUN_RECORDS_MAX", 8)
        yield


@settings(max_examples=examples(80, 300))
@given(CHANGES)
def test_pending_records_behave_like_a_sorted_dictionary(changes: list[tuple]) -> None:
    pending, model = PendingRecords(), _Model()
    for name, *arguments in changes:
        if name == "snapshot":
            pending = PendingRecords.from_bytes(pending.freeze().to_bytes())
            model.until.clear()
        else:
            getattr(model, name)(pending, *arguments)
        rows = sorted(model.rows.values())
        assert pending.count == len(rows)
        assert pending.size_bytes == sum(row.size for row in rows)
        assert pending.next_due_ms == min((model.until.get(row.id, row.due_ms) for row in rows), default=None)
        assert all(pending.find(row.id) == row for row in rows)
        lowest = pending.lowest_location()
        assert (lowest is None) == (not rows)
        assert lowest is None or lowest <= min(row.location for row in rows)


class _Model:
    def __init__(self) -> None:
        self.rows: dict[int, PendingRecord] = {}
        self.until: dict[int, int] = {}
        self._next_id = 0

    def add(self, pending: PendingRecords, records: list[tuple[int, int]]) -> None:
        for due_ms, location in records:
            row = PendingRecord(due_ms, self._next_id, location, 7 * self._next_id, 1 + due_ms % 9)
            self._next_id += 1
            pending.add(row)
            self.rows[row.id] = row

    def remove(self, pending: PendingRecords, record_id: int) -> None:
        assert pending.remove(record_id) == self.rows.pop(record_id, None)
        self.until.pop(record_id, None)

    def postpone(self, pending: PendingRecords, record_id: int, until_ms: int) -> None:
        if record_id in self.rows:
            pending.postpone(self.rows[record_id], until_ms)
            self.until[record_id] = until_ms

    def move(self, pending: PendingRecords, record_id: int, due_ms: int, location: int) -> None:
        if record_id in self.rows:
            row = self.rows[record_id]._replace(due_ms=due_ms, location=location)
            self.rows[record_id] = row
            self.until.pop(record_id, None)
            pending.replace(row)

    def take(self, pending: PendingRecords, now_ms: int, records_max: int, bytes_max: int) -> None:
        expected: list[PendingRecord] = []
        self.until = {record_id: until_ms for record_id, until_ms in self.until.items() if until_ms > now_ms}
        for row in sorted(row for row in self.rows.values() if row.id not in self.until):
            if row.due_ms > now_ms or len(expected) == records_max:
                break
            if expected and sum(one.size for one in expected) + row.size > bytes_max:
                break
            expected.append(row)
        assert pending.take_due(now_ms, records_max, bytes_max) == expected
        for row in expected:
            del self.rows[row.id]

    def deliver(self, pending: PendingRecords, earliest: int, others: list[int]) -> None:
        ids = [row.id for row in sorted(self.rows.values())[:earliest]] + others
        known = {*ids} & {*self.rows}
        assert pending.remove_delivered(ids) == len(known)
        for record_id in known:
            del self.rows[record_id]
            self.until.pop(record_id, None)

    def select(
        self, pending: PendingRecords, begin_ms: int, end_ms: int, after: tuple[int, int] | None
    ) -> None:
        expected = [
            row
            for row in sorted(self.rows.values())
            if begin_ms <= row.due_ms < end_ms and (after is None or (row.due_ms, row.id) > after)
        ]
        assert [*pending.select(begin_ms, end_ms, after)] == expected

    def below(self, pending: PendingRecords, location: int, records_max: int) -> None:
        expected = {row for row in self.rows.values() if row.location < location}
        found = pending.located_below(location, records_max)
        assert len(found) == min(records_max, len(expected))
        assert {*found} <= expected


def test_a_frozen_state_does_not_change_with_later_removals() -> None:
    pending = PendingRecords()
    rows = [PendingRecord(number % 5, number, 0, 0, 1) for number in range(30)]
    for row in rows:
        pending.add(row)
    frozen = pending.freeze()
    for number in range(0, 30, 3):
        pending.remove(number)
    pending.take_due(9, 9, 99)
    loaded = PendingRecords.from_bytes(frozen.to_bytes())
    assert [*loaded.select(0, 9)] == sorted(rows)


@given(st.integers(0, 400))
def test_an_incomplete_snapshot_is_refused(size: int) -> None:
    pending = PendingRecords()
    for number in range(12):
        pending.add(PendingRecord(number, number, 0, 0, 1))
    data = pending.freeze().to_bytes()
    if size < len(data):
        with pytest.raises(CorruptLog):
            PendingRecords.from_bytes(data[:size])


def test_memory_does_not_grow_with_the_number_of_cancelled_records() -> None:
    """A timeout per request that is cancelled when the request is done, while an earlier record is pending."""
    pending = PendingRecords()
    pending.add(PendingRecord(0, 0, 0, 0, 1))
    for number in range(1, 20_000):
        pending.add(PendingRecord(1_000, number, number, 0, 1))
        pending.remove(number)
    assert len(pending._recent_order) <= 2 + pending_records._OUTDATED_MAX + 1
    for number in range(20_000, 21_000):
        pending.add(PendingRecord(1_000 + number, number, number, 0, 1))
    for number in range(20_000, 21_000):
        pending.remove(number)
    assert len(pending._heads) <= 2 * len(pending._runs) + pending_records._OUTDATED_MAX + 1
