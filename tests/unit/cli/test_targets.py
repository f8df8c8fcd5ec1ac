"""Moving a group: every way to say where, and never outside the log."""

from __future__ import annotations

import pytest

from mansio.cli.targets import Target, new_offset, parse_target


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("earliest", Target("earliest")),
        ("latest", Target("latest")),
        ("42", Target("offset", 42)),
        ("+10", Target("relative", 10)),
        ("-10", Target("relative", -10)),
        ("@1384992000000", Target("time", 1384992000000)),
        ("2013-11-21T00:00:00Z", Target("time", 1384992000000)),
    ],
)
def test_each_way_to_say_where(text: str, target: Target):
    assert parse_target(text) == target


def test_a_span_is_a_time_and_a_bare_number_is_not():
    assert parse_target("-15m").kind == "time"
    assert parse_target("-15").kind == "relative"


@pytest.mark.parametrize("text", ["", "soonest", "@", "1.5", "--1"])
def test_nonsense_is_refused(text: str):
    with pytest.raises(ValueError):  # noqa: PT011  # the words are those of the standard library
        parse_target(text)


@pytest.mark.parametrize(
    ("target", "committed", "at_time", "expected"),
    [
        (Target("earliest"), 50, None, 10),
        (Target("latest"), 50, None, 100),
        (Target("offset", 42), 50, None, 42),
        (Target("offset", 5), 50, None, 10),
        (Target("offset", 500), 50, None, 100),
        (Target("relative", -5), 50, None, 45),
        (Target("relative", -500), 50, None, 10),
        (Target("relative", 500), 50, None, 100),
        (Target("relative", 5), None, None, 15),
        (Target("time", 1), 50, 77, 77),
        (Target("time", 1), 50, None, 100),
    ],
)
def test_the_new_offset_stays_within_the_log(target: Target, committed: int | None, at_time, expected: int):
    assert new_offset(target, committed=committed, start=10, end=100, at_time=at_time) == expected
