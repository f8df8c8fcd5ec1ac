"""Times of an archive: every mark is a state the table had, their number is bounded, a date finds the one before it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mansio.spark.lake.marks import (
    DAY_MS,
    HOUR_MS,
    MARKS_MAX,
    NUMBERS_MAX,
    Mark,
    add_mark,
    mark_at,
    marks_text,
    parse_marks,
)

START_MS = 1_700_000_000_000


def test_one_an_hour_for_a_day_then_one_a_day() -> None:
    marks: tuple[Mark, ...] = ()
    for minute in range(0, 40 * 24 * 60, 20):
        marks = add_mark(marks, START_MS + minute * 60_000, {0: minute})
    newest = marks[-1].at_ms
    recent = [mark for mark in marks if mark.at_ms > newest - DAY_MS]
    old = [mark for mark in marks if mark.at_ms <= newest - DAY_MS]
    assert len(recent) == 24
    assert 38 <= len(old) <= 41
    assert len({mark.at_ms // DAY_MS for mark in old}) == len(old)


@given(st.lists(st.integers(0, 3 * DAY_MS), max_size=60))
def test_marks_are_sorted_states_of_the_table_and_survive_as_text(steps: list[int]) -> None:
    now = START_MS
    marks: tuple[Mark, ...] = ()
    states: dict[int, dict[int, int]] = {}
    for offset, step in enumerate(steps):
        now += step
        states[now] = {0: offset, 7: 2 * offset}
        marks = add_mark(marks, now, states[now])
    assert all(earlier.at_ms < later.at_ms for earlier, later in pairwise(marks))
    assert all(mark.at_ms in states for mark in marks)
    assert parse_marks(marks_text(marks)) == marks


def test_number_of_marks_is_bounded_also_for_many_partitions() -> None:
    marks: tuple[Mark, ...] = ()
    for day in range(MARKS_MAX + 50):
        marks = add_mark(marks, START_MS + day * DAY_MS, {0: day})
    assert len(marks) == MARKS_MAX
    wide = dict.fromkeys(range(1_000), 5)
    for day in range(50):
        marks = add_mark(marks, START_MS + (500 + day) * DAY_MS, wide)
    assert len(marks) == NUMBERS_MAX // 1_000


def test_date_finds_the_last_mark_before_it() -> None:
    marks = (Mark(10 * HOUR_MS, {0: 1}), Mark(11 * HOUR_MS, {0: 5}))
    assert mark_at(marks, 10 * HOUR_MS - 1) is None
    assert mark_at(marks, 11 * HOUR_MS - 1) == marks[0]
    assert mark_at(marks, 11 * HOUR_MS) == marks[1]


def test_clock_that_was_set_back_makes_no_mark_out_of_order() -> None:
    marks = add_mark((), START_MS, {0: 1})
    assert add_mark(marks, START_MS - DAY_MS, {0: 2}) == marks
