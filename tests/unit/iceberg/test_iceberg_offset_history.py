"""Offset history of an archive: each entry is a state that the table had, their number is bounded, and a date finds the
entry before it."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from mansio.iceberg.archive.table_format import (
    DAY_MS,
    HISTORY_ENTRIES_MAX,
    HISTORY_OFFSETS_MAX,
    HOUR_MS,
    HistoryEntry,
    add_offset_history_entry,
    format_history,
    history_entry_at,
    parse_history,
)

START_MS = 1_700_000_000_000


def marks_of(commits: list[tuple[int, dict[int, int]]]) -> tuple[HistoryEntry, ...]:
    """The marks after commits at these times, which led to these offsets."""
    history: tuple[HistoryEntry, ...] = ()
    before: HistoryEntry | None = None
    for at_ms, offsets in commits:
        history = add_offset_history_entry(history, at_ms, offsets, before)
        before = HistoryEntry(at_ms, offsets)
    return history


def test_every_full_hour_of_a_day_then_every_midnight() -> None:
    history = marks_of([(START_MS + minute * 60_000, {0: minute}) for minute in range(0, 40 * 24 * 60, 20)])
    newest = history[-1].at_ms
    recent = [mark for mark in history if mark.at_ms > newest - DAY_MS]
    old = [mark for mark in history[1:] if mark.at_ms <= newest - DAY_MS]
    assert [mark.at_ms % HOUR_MS for mark in recent] == [0] * 24
    assert 38 <= len(old) <= 41
    assert sum(mark.at_ms % DAY_MS == 0 for mark in old) >= len(old) - 1
    assert history[0] == HistoryEntry(START_MS, {0: 0}), "since when anything is known"


def test_a_date_is_the_table_as_it_was_at_midnight() -> None:
    """And not as it was a day before, though the commit of that minute came a little later."""
    first_ms = START_MS // DAY_MS * DAY_MS
    commits = [(first_ms + minute * 60_000 + 30_000, {0: minute}) for minute in range(4 * 24 * 60)]
    history = marks_of(commits)
    for day in (1, 2, 3):
        found = history_entry_at(history, first_ms + day * DAY_MS)
        assert found == HistoryEntry(first_ms + day * DAY_MS, {0: day * 24 * 60 - 1})


def test_what_was_archived_before_a_quiet_time_is_in_the_mark_of_the_hour_after() -> None:
    first_ms = START_MS // DAY_MS * DAY_MS
    history = marks_of([(first_ms, {0: 1}), (first_ms + 60_000, {0: 2}), (first_ms + 9 * HOUR_MS, {0: 3})])
    assert history == (HistoryEntry(first_ms, {0: 1}), HistoryEntry(first_ms + HOUR_MS, {0: 2}))


@given(st.lists(st.integers(1, 3 * DAY_MS), max_size=60))
def test_marks_are_sorted_states_of_the_table_and_survive_as_text(steps: list[int]) -> None:
    commits = []
    for offset, at_ms in enumerate(accumulate(steps, initial=START_MS)):
        commits.append((at_ms, {0: offset, 7: 2 * offset}))
    history = marks_of(commits)
    assert all(earlier.at_ms < later.at_ms for earlier, later in pairwise(history))
    for mark in history:
        then = [offsets for at_ms, offsets in commits if at_ms <= mark.at_ms]
        assert mark.offsets in then[-2:], "the last before it, or the one of that very millisecond"
    assert parse_history(format_history(history)) == history


def test_number_of_marks_is_bounded_also_for_many_partitions() -> None:
    commits = [(START_MS + day * DAY_MS, {0: day}) for day in range(HISTORY_ENTRIES_MAX + 50)]
    assert len(marks_of(commits)) == HISTORY_ENTRIES_MAX
    wide = dict.fromkeys(range(1_000), 5)
    commits += [(START_MS + (500 + day) * DAY_MS, wide) for day in range(50)]
    assert len(marks_of(commits)) == HISTORY_OFFSETS_MAX // 1_000


def test_date_finds_the_last_mark_before_it() -> None:
    history = (HistoryEntry(10 * HOUR_MS, {0: 1}), HistoryEntry(11 * HOUR_MS, {0: 5}))
    assert history_entry_at(history, 10 * HOUR_MS - 1) is None
    assert history_entry_at(history, 11 * HOUR_MS - 1) == history[0]
    assert history_entry_at(history, 11 * HOUR_MS) == history[1]


def test_clock_that_was_set_back_makes_no_mark_out_of_order() -> None:
    history = add_offset_history_entry((), START_MS, {0: 1})
    assert add_offset_history_entry(history, START_MS - DAY_MS, {0: 2}) == history
