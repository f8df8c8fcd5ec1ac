"""Times of recurring schedules: both changes of daylight saving time, every zone, catch-up, and refusals."""

from __future__ import annotations

import contextlib
import zoneinfo
from datetime import UTC, datetime, timedelta
from functools import partial
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.broker.features.delays import recurrence as recurrence_module
from mansio.broker.features.delays.recurrence import (
    INTERVAL_MS_MAX,
    LATE_MS_MAX,
    Recurrence,
    find_zone,
    next_step,
)
from mansio.errors import InvalidSchedule
from mansio.wire.batch.schedule_control_records import CatchUpMode
from support.tiers import examples

BERLIN = "Europe/Berlin"
DAY_MS = 86_400_000
MOMENTS = st.integers(1_600_000_000_000, 2_400_000_000_000)
ZONES = sorted({*zoneinfo.available_timezones()} - {"localtime", "Factory"})
FIELD = st.sampled_from(["*", "*/7", "0", "30", "5,35", "10-12"])
HOURS = st.sampled_from(["*", "*/3", "0", "2", "1,3", "22-23", "9"])
CRON = st.tuples(FIELD, HOURS, st.sampled_from(["*", "1", "28-31", "L"]), st.just("*"), st.just("*")).map(
    " ".join
)


def cron(expression: str, zone: str = "UTC", created_ms: int = 0) -> Recurrence:
    return Recurrence(expression, 0, zone, created_ms)


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def times(recurrence: Recurrence, after: str, before: str) -> list[str]:
    """Due times between two moments, as UTC hours and minutes of the day."""
    found, moment_ms = [], ms(after)
    while (next_ms := recurrence.next_after(moment_ms)) is not None and next_ms < ms(before):
        found.append(datetime.fromtimestamp(next_ms / 1000, UTC).strftime("%H:%M"))
        moment_ms = next_ms
    return found


def test_unknown_zones_search_the_database_once(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Mock(return_value={"Europe/Berlin"})
    monkeypatch.setattr(zoneinfo, "available_timezones", search)
    monkeypatch.setattr(recurrence_module, "_ZONES_FOUND", [])
    for number in range(20):
        with pytest.raises(InvalidSchedule, match="is unknown"):
            find_zone(f"Nowhere/{number}")
    assert search.call_count == 1


def test_the_last_due_time_of_a_long_range_takes_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations = Mock(wraps=Recurrence.next_after)
    daily = cron("30 6 * * mon-fri", BERLIN)
    monkeypatch.setattr(Recurrence, "next_after", lambda *arguments: evaluations(*arguments))
    assert daily.last_before(ms("2026-11-16T00:00+01:00"), ms("2026-01-05T06:30+01:00")) == ms(
        "2026-11-13T06:30+01:00"
    )
    assert evaluations.call_count <= 3


@pytest.mark.parametrize(
    "guess", [None, "2026-11-11T06:30+01:00", "2026-11-13T06:31+01:00", "2026-11-13T06:30+01:00"]
)
def test_a_wrong_guess_of_the_last_due_time_is_noticed(
    monkeypatch: pytest.MonkeyPatch, guess: str | None
) -> None:
    daily = cron("30 6 * * mon-fri", BERLIN)
    monkeypatch.setattr(Recurrence, "_guess_before", lambda *_: None if guess is None else ms(guess))
    found = daily.last_before(ms("2026-11-16T00:00+01:00"), ms("2026-01-05T06:30+01:00"))
    assert found == ms("2026-11-13T06:30+01:00")


class TestDaylightSaving:
    """Berlin: 2026-03-29 02:00 becomes 03:00 at 01:00 UTC, 2026-10-25 03:00 becomes 02:00 at 01:00 UTC."""

    @pytest.mark.parametrize(
        ("expression", "expected"),
        [
            ("30 1 * * *", ["00:30"]),  # 01:30 winter time
            ("30 2 * * *", ["01:00"]),  # skipped: due at the end of the gap, 03:00 summer time
            ("0 3 * * *", ["01:00"]),
            ("0,30 2,3 * * *", ["01:00", "01:30"]),
            ("30 */2 * * *", ["23:30", "02:30"]),  # 00:30 and 04:30, 02:30 is skipped
            ("0 * * * *", ["23:00", "00:00", "01:00", "02:00", "03:00"]),
            ("*/30 2 * * *", []),
        ],
    )
    def test_the_clock_is_set_forward(self, expression: str, expected: list[str]) -> None:
        found = times(cron(expression, BERLIN), "2026-03-28T22:15+00:00", "2026-03-29T03:30+00:00")
        assert found == expected

    @pytest.mark.parametrize(
        ("expression", "expected"),
        [
            ("30 1 * * *", ["23:30"]),
            ("30 2 * * *", ["00:30"]),  # the first of two, summer time
            ("0 3 * * *", ["02:00"]),
            ("15,45 2 * * *", ["00:15", "00:45"]),
            ("0 * * * *", ["23:00", "00:00", "01:00", "02:00", "03:00"]),
            ("*/30 2 * * *", ["00:00", "00:30", "01:00", "01:30"]),
            ("0,30 2,3 * * *", ["00:00", "00:30", "02:00", "02:30"]),
        ],
    )
    def test_the_clock_is_set_back(self, expression: str, expected: list[str]) -> None:
        assert times(cron(expression, BERLIN), "2026-10-24T22:15+00:00", "2026-10-25T03:30+00:00") == expected

    def test_a_working_day_begins_at_the_same_local_time(self) -> None:
        found = times(cron("0 9 * * mon-fri", BERLIN), "2026-03-27T00:00+00:00", "2026-04-01T00:00+00:00")
        assert found == ["08:00", "07:00", "07:00"]
        found = times(cron("0 9 * * mon-fri", BERLIN), "2026-10-23T00:00+00:00", "2026-10-28T00:00+00:00")
        assert found == ["07:00", "08:00", "08:00"]

    @pytest.mark.parametrize(
        ("expression", "days"),
        [
            ("0 0 L * *", [31, 28, 31]),
            ("0 0 * * 5L", [30, 27, 27]),
            ("0 0 * * mon#2", [12, 9, 9]),
            ("0 0 13 * fri", [2, 9, 13, 16, 23, 30]),
            ("0 0 1,15 * *", [1, 15, 1, 15]),
        ],
    )
    def test_days_of_the_month_and_of_the_week(self, expression: str, days: list[int]) -> None:
        moment_ms = ms("2025-12-31T12:00+00:00")
        found: list[int] = []
        while len(found) < len(days):
            next_ms = cron(expression).next_after(moment_ms)
            assert next_ms is not None
            moment_ms = next_ms
            found.append(datetime.fromtimestamp(next_ms / 1000, UTC).day)
        assert found == days

    def test_an_interval_ignores_daylight_saving(self) -> None:
        hourly = Recurrence("", 3_600_000, "", ms("2026-03-28T23:10+00:00"))
        assert times(hourly, "2026-03-28T23:10+00:00", "2026-03-29T03:00+00:00") == [
            "00:10",
            "01:10",
            "02:10",
        ]

    def test_a_schedule_created_in_the_second_of_two_equal_hours_waits_for_the_next_day(self) -> None:
        created_ms = ms("2026-10-25T01:15+00:00")  # 02:15, winter time
        found = cron("30 2 * * *", BERLIN).next_after(created_ms)
        assert found == ms("2026-10-26T02:30+01:00")


@settings(max_examples=examples(60, 200))
@given(CRON, st.sampled_from(ZONES), MOMENTS)
def test_due_times_increase_and_match_in_every_zone(expression: str, zone: str, moment_ms: int) -> None:
    recurrence = cron(expression, zone)
    for _ in range(20):
        found = recurrence.next_after(moment_ms)
        assert found is not None
        assert found > moment_ms
        moment_ms = found


@pytest.mark.full
@settings(max_examples=examples(40, 100))
@given(st.integers(0, 23), st.integers(0, 59), st.sampled_from(ZONES), MOMENTS)
def test_a_daily_schedule_is_due_once_on_each_day_of_every_zone(
    hour: int, minute: int, zone: str, moment_ms: int
) -> None:
    recurrence, found = cron(f"{minute} {hour} * * *", zone), moment_ms
    days = []
    for _ in range(400):  # both changes of a year
        next_ms = recurrence.next_after(found)
        assert next_ms is not None
        local = datetime.fromtimestamp(next_ms / 1000, find_zone(zone))
        days.append(local.date())
        late = local.hour * 60 + local.minute - (60 * hour + minute)
        assert 0 <= late <= 120, "at its time, or at the end of a gap"
        found = next_ms
    assert days == [days[0] + timedelta(days=number) for number in range(400)]


@given(st.integers(1_000, INTERVAL_MS_MAX), MOMENTS, st.integers(0, 10**13))
def test_an_interval_is_counted_from_the_creation(every_ms: int, created_ms: int, later_ms: int) -> None:
    recurrence = Recurrence("", every_ms, "", created_ms)
    moment_ms = created_ms + later_ms
    found = recurrence.next_after(moment_ms)
    assert found is not None
    assert moment_ms < found <= moment_ms + every_ms
    assert (found - created_ms) % every_ms == 0
    assert recurrence.next_after(found - 1) == found


SCHEDULES = st.one_of(
    st.builds(cron, CRON, st.sampled_from([BERLIN, "UTC", "America/New_York", "Australia/Lord_Howe"])),
    st.builds(partial(Recurrence, "", timezone=""), every_ms=st.integers(1_000, DAY_MS), created_ms=MOMENTS),
)


@settings(max_examples=examples(50, 150))
@given(
    SCHEDULES,
    MOMENTS,
    st.sampled_from(CatchUpMode),
    st.lists(st.one_of(st.integers(0, 90_000), st.integers(0, 5 * DAY_MS)), min_size=1, max_size=8),
)
def test_catch_up_agrees_with_a_list_of_all_due_times(
    recurrence: Recurrence, begin_ms: int, catch_up: CatchUpMode, absences_ms: list[int]
) -> None:
    """The broker looks at the schedule at some moments only. Compared with a list of due times up to each of them."""
    due_ms = recurrence.next_after(begin_ms)
    assert due_ms is not None
    now_ms, known_ms = begin_ms, begin_ms
    for absence_ms in absences_ms:
        now_ms += absence_ms
        expected: list[int] = []
        missed: list[int] = []
        while (next_ms := recurrence.next_after(known_ms)) is not None and next_ms <= now_ms:
            (missed if next_ms < now_ms - LATE_MS_MAX else expected).append(next_ms)
            known_ms = next_ms
            if len(expected) + len(missed) > 2_000:
                return
        if catch_up is CatchUpMode.ALL:
            expected = missed + expected
        elif catch_up is CatchUpMode.LAST:
            expected = missed[-1:] + expected
        fired: list[int] = []
        while due_ms is not None and due_ms <= now_ms:
            step = next_step(recurrence, due_ms, now_ms, catch_up)
            assert step.next_due_ms is None or step.next_due_ms > due_ms
            due_ms = step.next_due_ms
            if step.fired_ms is not None:
                fired.append(step.fired_ms)
        assert fired == expected


def test_ten_missed_years_are_skipped_in_few_steps() -> None:
    now_ms = ms("2036-01-01T00:00:30+00:00")
    minutely = cron("* * * * *", BERLIN)
    step = next_step(minutely, ms("2026-01-01T00:00+00:00"), now_ms, CatchUpMode.LAST)
    assert step == (ms("2035-12-31T23:59+00:00"), ms("2036-01-01T00:00+00:00"))
    step = next_step(minutely, ms("2026-01-01T00:00+00:00"), now_ms, CatchUpMode.NONE)
    assert step == (None, ms("2036-01-01T00:00+00:00"))


class TestRefusals:
    @pytest.mark.parametrize(
        ("expression", "message"),
        [
            ("99 * * * *", "cron '99 * * * *': bad minute"),
            ("* * * *", "has 4 fields, not 5"),
            ("* * * * * *", "has 6 fields, not 5"),
            ("soon", "has 1 field, not 5"),
            ("* * 31 2 *", "bad day-of-month"),
            ("* * */20 * 1L", "never matches"),
            ("0 9 * * *" + " " * 200, "at most 200 characters"),
            ("1L/2 * * * *", "bad minute"),
            ("0 0 LW/2,L/3 * 9", "bad day-of-week"),
        ],
    )
    def test_an_invalid_cron_expression_is_one_line(self, expression: str, message: str) -> None:
        with pytest.raises(InvalidSchedule) as caught:
            cron(expression, BERLIN, 1_800_000_000_000).check()
        assert message in caught.value.message
        assert "\n" not in caught.value.message

    @given(st.text(alphabet="0123456789*,-/#LWA ", max_size=30))
    def test_any_text_is_a_schedule_or_one_typed_error(self, text: str) -> None:
        with contextlib.suppress(InvalidSchedule):
            cron(text, BERLIN, 1_800_000_000_000).check()

    @pytest.mark.parametrize(
        "zone", ["Europe/Bern", "Mars", "../etc/passwd", "Europe", "/etc/localtime", "Ä"]
    )
    def test_an_unknown_zone_is_refused(self, zone: str) -> None:
        with pytest.raises(InvalidSchedule, match="is unknown"):
            cron("0 9 * * *", zone).check()

    def test_a_machine_without_a_zone_database_is_reported_as_such(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(zoneinfo, "available_timezones", set)
        monkeypatch.setattr(recurrence_module, "_ZONES_FOUND", [])
        with pytest.raises(InvalidSchedule, match="no time zone database"):
            cron("0 9 * * *", "Europe/Atlantis").check()
        cron("0 9 * * *", "UTC").check()

    @pytest.mark.parametrize(
        "recurrence",
        [
            Recurrence("", 0, "", 0),
            Recurrence("* * * * *", 1_000, "", 0),
            Recurrence("", 999, "", 0),
            Recurrence("", -5_000, "", 0),
            Recurrence("", INTERVAL_MS_MAX + 1, "", 0),
            Recurrence("", 5_000, BERLIN, 0),
        ],
    )
    def test_one_of_cron_and_interval_is_required(self, recurrence: Recurrence) -> None:
        with pytest.raises(InvalidSchedule):
            recurrence.check()
