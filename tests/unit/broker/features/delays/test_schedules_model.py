"""`Schedules` compared with a dictionary: order, snapshots, and every change."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.broker.features.delays.schedules import OUTDATED_ENTRIES_MAX, Schedules, record_bytes
from mansio.errors import CorruptLog
from mansio.wire.batch.schedule_control_records import NOT_DUE_MS, CatchUpMode, Firing, Schedule
from support.tiers import examples

MOMENTS = st.just(NOT_DUE_MS) | st.integers(0, 40)
NUMBERS = st.integers(0, 6)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NUMBERS, MOMENTS, st.integers(0, 90)),
        st.tuples(st.just("remove"), NUMBERS),
        st.tuples(st.just("fire"), st.lists(st.tuples(NUMBERS, MOMENTS), max_size=4)),
        st.tuples(st.just("postpone"), NUMBERS, st.integers(0, 40)),
        st.tuples(st.just("snapshot")),
    ),
    max_size=60,
)


def schedule(number: int, next_due_ms: int, firings: int = 0) -> Schedule:
    return Schedule(
        UUID(int=number + 1),
        f"s{number}",
        "* * * * *",
        0,
        "Europe/Berlin",
        CatchUpMode.LAST,
        None,
        b"v" * number,
        (("h", None),),
        5,
        next_due_ms,
        firings,
    )


@settings(max_examples=examples(80, 300))
@given(CHANGES)
def test_schedules_behave_like_a_dictionary(changes: list[tuple]) -> None:
    schedules = Schedules()
    model: dict[UUID, tuple[Schedule, int, int]] = {}
    for name, *arguments in changes:
        if name == "put":
            number, next_due_ms, location = arguments
            one = schedule(number, next_due_ms)
            schedules.put(one, location)
            model[one.id] = (one, location, next_due_ms)
        elif name == "remove":
            schedules.remove(UUID(int=arguments[0] + 1))
            model.pop(UUID(int=arguments[0] + 1), None)
        elif name == "fire":
            firings = [
                Firing(UUID(int=number + 1), at, due_ms) for at, (number, due_ms) in enumerate(arguments[0])
            ]
            schedules.apply_firings(firings)
            for schedule_id, count, due_ms in firings:
                if schedule_id in model:
                    one, location, _ = model[schedule_id]
                    model[schedule_id] = (
                        one._replace(firings=count, next_due_ms=due_ms),
                        location,
                        due_ms,
                    )
        elif name == "postpone":
            schedule_id = UUID(int=arguments[0] + 1)
            if schedule_id in model:
                schedules.postpone(schedule_id, arguments[1])
                model[schedule_id] = (*model[schedule_id][:2], arguments[1])
        else:
            schedules = Schedules.from_bytes(schedules.freeze().to_bytes())
            model = {key: (one, location, one.next_due_ms) for key, (one, location, _) in model.items()}
        waking = [row for row in model.values() if row[2] != NOT_DUE_MS]
        assert {*schedules} == {row[0] for row in model.values()}
        assert len(schedules) == len(model)
        assert schedules.size_bytes == sum(record_bytes(row[0]) for row in model.values())
        assert schedules.next_wake_ms == min((row[2] for row in waking), default=None)
        assert schedules.lowest_location() == min((row[1] for row in model.values()), default=None)
        for moment_ms in (0, 20, 40):
            due = sorted(
                (row[0] for row in waking if row[2] <= moment_ms), key=lambda one: (one.next_due_ms, one.name)
            )
            assert schedules.due(moment_ms, 100) == due
            assert schedules.due(moment_ms, 2) == due[:2]
            below = {row[0] for row in model.values() if row[1] < moment_ms}
            assert {*schedules.located_below(moment_ms)} == below
        assert all(schedules.find(row[0].name) == row[0] for row in model.values())


def test_a_frozen_state_does_not_change_with_later_firings() -> None:
    schedules = Schedules()
    schedules.put(schedule(1, 5), 0)
    frozen = schedules.freeze()
    schedules.apply_firings([Firing(UUID(int=2), 1, 9)])
    assert [*Schedules.from_bytes(frozen.to_bytes())] == [schedule(1, 5)]


def test_a_schedule_that_fires_for_years_takes_no_more_memory() -> None:
    schedules = Schedules()
    schedules.put(schedule(0, 10**15), 0)
    schedules.put(schedule(1, 0), 0)
    for number in range(1, 5_000):
        schedules.apply_firings([Firing(UUID(int=2), number, number), Firing(UUID(int=1), number, 10**15)])
        assert schedules.next_wake_ms == number
    assert len(schedules._order) <= 2 * 2 + OUTDATED_ENTRIES_MAX + 1


@given(st.integers(0, 400))
def test_an_incomplete_snapshot_is_refused(size: int) -> None:
    schedules = Schedules()
    for number in range(3):
        schedules.put(schedule(number, number), number)
    data = schedules.freeze().to_bytes()
    if size < len(data):
        with pytest.raises(CorruptLog):
            Schedules.from_bytes(data[:size])
