"""Expressions with groups mean what they mean in Python's `re`, and none costs more than its bound."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import InvalidRegularExpression
from mansio.state.authentication import group_pattern
from mansio.state.authentication.group_pattern import DEPTH_MAX, STEPS_MAX, GroupPattern
from support.tiers import examples

ATOMS = st.sampled_from(["a", "b", "=", ".", "[ab]", "[^a,]", r"\w", r"\W", r"\d", r"\,", "^", "$"])
REPEATERS = st.sampled_from(["", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}?"])


def _repeated(atom: str, repeater: str) -> str:
    return atom if atom in "^$" else atom + repeater


# A repetition of something that may be empty ends at different places in each engine, and nobody writes it.
EXPRESSIONS = st.recursive(
    st.builds(_repeated, ATOMS, REPEATERS),
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=4).map("".join),
        st.builds("({}|{})".format, parts, parts),
        st.builds("({})".format, parts),
        st.builds("(?:{})".format, parts),
        st.builds("(a{}){}".format, parts, REPEATERS),
    ),
    max_leaves=8,
)
TEXTS = st.text("ab=,1é\n", max_size=10)


@settings(max_examples=examples(200, 5_000))
@given(EXPRESSIONS, st.lists(TEXTS, max_size=8))
def test_groups_are_those_that_a_backtracking_engine_finds_first(pattern: str, texts: list[str]) -> None:
    compiled = GroupPattern(pattern)
    # Python's `$` and `.` differ at line ends from the ends of texts and from Java's.
    python = re.compile(pattern.replace("$", r"\Z").replace(".", r"[^\n\r\x85\u2028\u2029]"), re.ASCII)
    assert compiled.group_count == python.groups
    for text in texts:
        found = python.fullmatch(text)
        expected = None if found is None else (text, *(group or "" for group in found.groups()))
        assert compiled.match(text) == expected, (pattern, text)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a)(b",
        "[",
        "[b-a]",
        "*",
        "a**",
        "a*+",
        "a{2}{2}",
        "a{3,2}",
        "a{101}",
        "a{,2}",
        "{",
        "}",
        "]",
        "\\",
        r"\b",
        r"\1",
        r"\pL",
        "(?i)a",
        "(?<n>a)",
        "(?P<n>a)",
        "(?=a)",
        "(?!a)",
        "[a-z&&[^b]]",
        "[a[b]]",
        "a" * 1_001,
    ],
)
def test_what_is_no_expression_or_means_something_else_elsewhere_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRegularExpression) as caught:
        GroupPattern(pattern)
    assert "\n" not in str(caught.value)


@given(st.text("ab()[]{}|*+?^$.,\\01-:", max_size=30))
def test_no_text_breaks_the_parser(pattern: str) -> None:
    try:
        compiled = GroupPattern(pattern)
    except InvalidRegularExpression:
        return
    assert compiled.step_count <= STEPS_MAX + 1


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:(?:(?:a{100}){100}){100}){100}",
        "(?:(?:(?:a?){100}){100}){100}",
        "(" * (DEPTH_MAX + 1) + ")" * (DEPTH_MAX + 1),
        "a{100}" * 6,
    ],
)
def test_an_expression_over_the_bounds_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRegularExpression, match="more than"):
        GroupPattern(pattern)


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a+)+(.*?),(.*?),(.*?)x", "(a|a)*(a|aa)+b", "(?:a?){40}b"])
def test_the_work_for_a_text_is_bounded_by_its_length_times_the_steps(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them takes a backtracking engine years."""
    compiled = GroupPattern(pattern)
    followed: list[int] = []
    follow = GroupPattern._follow

    def counted(self: GroupPattern, arrived: dict, *args: object) -> dict:
        before = len(arrived)
        result = follow(self, arrived, *args)  # type: ignore[arg-type]
        followed.append(len(result) - before)
        return result

    monkeypatch.setattr(GroupPattern, "_follow", counted)
    length = 200
    assert compiled.match("a" * length) is None
    assert sum(followed) <= (length + 1) * compiled.step_count
    assert len(followed) <= (length + 1) * compiled.step_count


def test_the_bounds_are_those_of_the_module() -> None:
    assert GroupPattern("a" * (STEPS_MAX - 1)).step_count <= STEPS_MAX < group_pattern.CHARACTERS_MAX
