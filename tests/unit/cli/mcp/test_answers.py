"""Answers of `mansio mcp` are valid JSON of a bounded size, whatever they are made of."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mansio.cli.mcp.answers import ANSWER_BYTES_MAX, ITEMS_MAX, TEXT_CHARACTERS_MAX, answer_text

TEXTS = st.text(max_size=600) | st.text(alphabet='\x00"\\\ud800💥é', min_size=200, max_size=3_000)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=9)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=40)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=40) | st.integers(), inner, max_size=20)
    ),
    max_leaves=300,
)
ANSWERS = st.dictionaries(st.text(max_size=300), TREES, max_size=40)


@given(ANSWERS, st.none() | st.text(alphabet='a"💥', max_size=800))
def test_no_answer_is_larger_than_its_bound_and_all_are_valid_json(
    answer: dict[str, Any], command: str | None
) -> None:
    if command is not None:
        answer["command"] = command
    text = answer_text(answer)
    assert len(text.encode()) <= ANSWER_BYTES_MAX
    found = json.loads(text)
    if command is not None:
        assert found["command"] == command


@given(st.lists(st.text(alphabet="abc", max_size=30), max_size=3_000), st.integers(30, ANSWER_BYTES_MAX))
def test_items_that_are_left_out_are_counted(topics: list[str], bytes_max: int) -> None:
    text = answer_text({"topics": topics}, bytes_max=bytes_max)
    assert len(text.encode()) <= bytes_max
    found = json.loads(text)
    if isinstance(found.get("left_out"), str):  # nothing but the bound fits
        return
    kept = found["topics"]
    assert topics[: len(kept)] == kept
    assert len(kept) + found.get("left_out", {}).get("topics", 0) == len(topics)


def test_an_answer_that_fits_is_not_changed() -> None:
    answer = {
        "lag": 3,
        "findings": [{"cause": "no-member", "records": None}],
        "command": "mansio why billing",
    }
    assert json.loads(answer_text(answer)) == answer


def test_a_timeline_loses_its_middle_and_keeps_begin_and_end() -> None:
    events = [{"kind": "delivered", "attempt": number} for number in range(1_000)]
    found = json.loads(answer_text({"events": events}))
    kept = [each["attempt"] for each in found["events"]]
    assert kept[0] == 0
    assert kept[-1] == 999
    assert len(kept) + found["left_out"]["events"] == 1_000
    assert len(kept) > 20


def test_a_long_text_is_shortened_and_marked() -> None:
    found = json.loads(answer_text({"untrusted_data": {"value": "x" * 100_000}}))
    value = found["untrusted_data"]["value"]
    assert len(value) == TEXT_CHARACTERS_MAX
    assert value.endswith("…")


def test_what_is_nested_deeply_ends_with_a_mark() -> None:
    tree: Any = "x"
    for _ in range(5_000):
        tree = [tree]
    assert len(answer_text({"tree": tree}).encode()) <= ANSWER_BYTES_MAX


def test_numbers_that_json_has_not_are_null() -> None:
    assert json.loads(answer_text({"rate": float("nan"), "factor": float("inf")})) == {
        "rate": None,
        "factor": None,
    }


def test_long_lists_are_cut_before_they_are_measured() -> None:
    found = json.loads(answer_text({"partitions": [0] * 100_000}))
    assert len(found["partitions"]) <= ITEMS_MAX
    assert len(found["partitions"]) + found["left_out"]["partitions"] == 100_000
