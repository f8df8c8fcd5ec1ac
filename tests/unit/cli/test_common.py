"""What every command shares: times, separators, pairs, tables."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
import typer

from mansio.cli.support import common, formatting
from mansio.cli.support.formatting import Output

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1384992000000", 1384992000000),
        ("now", NOW_MS),
        ("-90s", NOW_MS - 90_000),
        ("-15m", NOW_MS - 900_000),
        ("-2h", NOW_MS - 7_200_000),
        ("-3d", NOW_MS - 259_200_000),
        ("-250ms", NOW_MS - 250),
        ("2013-11-21T00:00:00Z", 1384992000000),
        ("2013-11-21T01:00:00+01:00", 1384992000000),
        ("2013-11-21", int(datetime(2013, 11, 21).timestamp() * 1000)),  # noqa: DTZ001  # local on purpose
    ],
)
def test_a_time_can_be_given_in_each_documented_form(text: str, expected: int) -> None:
    assert common.parse_time(text, NOW_MS) == expected


@pytest.mark.parametrize("text", ["", "yesterday", "-5", "5m", "-5w", "²", "2013-13-01"])
def test_a_time_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the words are those of the standard library
        common.parse_time(text, NOW_MS)


def test_time_option_turns_nonsense_into_a_usage_error() -> None:
    with pytest.raises(typer.BadParameter, match="soon"):
        common.parse_time_option("soon", "--from-time")
    assert common.parse_time_option(None, "--from-time") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":", b":"),
        (r"\t", b"\t"),
        (r"\n", b"\n"),
        (r"\0", b"\0"),
        (r"\\n", rb"\n"),
        (r"\x1f|", b"\x1f|"),
        ("é", "é".encode()),
        ("", b""),
    ],
)
def test_separators_may_be_escaped(text: str, expected: bytes) -> None:
    assert common.unescape_separator(text) == expected


def test_pairs_keep_order_and_a_missing_equals_sign_is_a_usage_error() -> None:
    assert common.parse_name_values(["b=1", "a==2", "b="], "--header") == [("b", "1"), ("a", "=2"), ("b", "")]
    for wrong in ("b", "=1"):
        with pytest.raises(typer.BadParameter, match="NAME=VALUE"):
            common.parse_name_values([wrong], "--header")


def test_a_table_in_a_pipe_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a" * 200, "size": 5, "extra": 1}, {"name": "b", "size": 12345, "extra": None}]
    formatting.show_rows(Output.TABLE, rows, ["name", "size"], empty="nothing")
    assert capsys.readouterr().out.splitlines() == [
        "NAME".ljust(200) + "   SIZE",
        "a" * 200 + "      5",
        "b".ljust(200) + "  12345",
    ]


def test_json_has_every_field_and_an_empty_list_stays_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    formatting.show_rows(Output.JSON, [{"name": "x", "extra": [1]}], ["name"], empty="nothing")
    assert json.loads(capsys.readouterr().out) == [{"name": "x", "extra": [1]}]
    formatting.show_rows(Output.JSON, [], ["name"], empty="nothing")
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == ([], "")


def test_an_empty_table_is_reported_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    formatting.show_rows(Output.TABLE, [], ["name"], empty="no topics")
    assert capsys.readouterr() == ("", "no topics\n")


def test_bytes_that_are_no_text_become_base64_in_json() -> None:
    assert formatting.text_or_base64("é".encode()) == ("é", None)
    assert formatting.text_or_base64(b"\xff\x00") == ("/wA=", "base64")
    assert formatting.text_or_base64(None) == (None, None)
    assert formatting.text_or_base64(b"") == ("", None)


def test_a_complaint_is_one_line_whatever_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert common.print_error("two\nlines") == 1
    assert capsys.readouterr().err == "mansio: two lines\n"
