"""Moving a group: every way to say where."""

from __future__ import annotations

import pytest

from mansio.cli.support.common import OffsetSpec, missing_at_sign_hint, parse_offset_spec


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("earliest", OffsetSpec("earliest")),
        ("latest", OffsetSpec("latest")),
        ("42", OffsetSpec("offset", 42)),
        ("+10", OffsetSpec("relative", 10)),
        ("-10", OffsetSpec("relative", -10)),
        ("@1384992000000", OffsetSpec("time", 1384992000000)),
        ("2013-11-21T00:00:00Z", OffsetSpec("time", 1384992000000)),
    ],
)
def test_each_form_of_an_offset_option_is_parsed(text: str, target: OffsetSpec) -> None:
    assert parse_offset_spec(text) == target


def test_a_span_is_a_time_and_a_bare_number_is_not() -> None:
    assert parse_offset_spec("-15m").kind == "time"
    assert parse_offset_spec("-15").kind == "relative"


def test_a_number_that_looks_like_a_time_gets_a_hint_and_other_offsets_do_not() -> None:
    assert "@1384992000000" in (missing_at_sign_hint(parse_offset_spec("1384992000000")) or "")
    assert (
        missing_at_sign_hint(parse_offset_spec("42"))
        is missing_at_sign_hint(parse_offset_spec("@1384992000000"))
        is None
    )


@pytest.mark.parametrize("text", ["", "soonest", "@", "1.5", "--1", "9" * 19 + "0", "@" + "9" * 20])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the words are those of the standard library
        parse_offset_spec(text)
