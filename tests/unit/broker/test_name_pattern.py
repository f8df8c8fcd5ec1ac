"""Expressions of names mean what they mean in RE2, and none costs more than its bound."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.broker.coordinator import name_pattern
from mansio.broker.coordinator.name_pattern import STEPS_MAX, compile_pattern
from mansio.errors import InvalidRegularExpression
from support.tiers import examples

CLASSES = (".", r"\d", r"\w", r"\W", r"\S", "[ab]", "[^a]", "[a-b0_-]", r"[\d.]")
BOUNDARIES = ("^", "$", r"\b")
ATOMS = st.sampled_from(["a", "b", "0", "-", "_", r"\.", *CLASSES, *BOUNDARIES])
REPEATERS = st.sampled_from(["", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}"])


def _repeated(atom: str, repeater: str) -> str:
    return atom if atom in BOUNDARIES else atom + repeater


EXPRESSIONS = st.recursive(
    st.builds(_repeated, ATOMS, REPEATERS),
    lambda parts: st.one_of(
        st.lists(parts, max_size=4).map("".join),
        st.builds("({}|{}){}".format, parts, parts, REPEATERS),
        st.builds("(?:{}){}".format, parts, REPEATERS),
    ),
    max_leaves=8,
)
NAMES = st.text("ab0-_.é ", max_size=4)
"""Short ones: what Python's engine takes for nested repetitions grows exponentially with the length."""


@settings(max_examples=examples(150, 2_000))
@given(EXPRESSIONS, st.lists(NAMES, max_size=8))
def test_an_expression_matches_the_names_that_it_matches_elsewhere(pattern: str, names: list[str]) -> None:
    """Python's expressions mean the same in what is generated here, with classes of ASCII."""
    is_match = compile_pattern(pattern)
    for name in names:
        assert is_match(name) == (re.fullmatch(pattern, name, re.ASCII) is not None), (pattern, name)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a|ab", ["a", "ab"], ["b", "abb", ""]),
        (r"\Qa.b[\E.*", ["a.b[", "a.b[x"], ["axb["]),
        (r"a{,3}b{", ["a{,3}b{"], ["aab{"]),
        ("}{", ["}{"], []),
        ("[[&&a~~]+", ["[&a~"], ["b", "-"]),
        ("[]a]+[^]b]", ["]a]c"], ["]a]b"]),
        ("[[:alpha:]][[:^digit:]]", ["ab"], ["a1", "1a"]),
        (r"\pL+", ["éa"], ["1"]),
        (r"\w+\s\d", ["a 1"], ["é 1", "a \u0661", "a\u00a01"]),
        ("(?i)topic", ["TOPIC", "topic"], ["topi"]),
        ("(?P<x>a)(?<y>b)", ["ab"], ["a"]),
        (r"\Aa\z", ["a"], ["a\n"]),
        ("a$", ["a"], ["a\n"]),
        (r"\x41\x{42}", ["AB"], ["ab"]),
        ("", [""], ["a"]),
        (r"a\<b\>", ["a<b>"], ["ab"]),
        ("[!--a]", ["!", ",", "-", "a"], ["b"]),
        ("[+--]", ["+", ",", "-"], ["."]),
        (r"[\w-]", ["b", "-"], ["!"]),
        ("[--a]", ["-", "Z", "a"], ["b", ","]),
        (r"\0\012\101", ["\x00\nA"], []),
        (r"\p{^Greek}", ["a"], ["\u03b1"]),
        ("(?)a", ["a"], []),
    ],
)
def test_the_syntax_is_that_of_re2(pattern: str, matching: list[str], others: list[str]) -> None:
    is_match = compile_pattern(pattern)
    assert [name for name in matching + others if is_match(name)] == matching


REFUSED = (
    r"""( ) a)|(b [ [] * a** a++ a{2}{3} a{1001} a(?=b) a(?!b) (?P=x) (?x)a \ (a)\1 \C (?u:a) [b-a] \y"""
)
COSTLY = (
    r"""(a{10}){101} ((a{10}){10}){11} (.?){250} \pL{11} \w{501}{2} (a|b|c){400} [^a]{300} (a*){600} é{300}"""
)


MANY_RANGES = "[" + "".join(map(chr, range(0x100, 0x2000, 2))) + "]"


@pytest.mark.parametrize("pattern", [*REFUSED.split(), "(?<=a>b)", "[[:foo:]]", r"\u0041", "(?P<>a)"])
def test_what_re2_refuses_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRegularExpression, match="is not a valid RE2 expression"):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["a" * (STEPS_MAX + 1), "(" * 1_001 + ")" * 1_001, MANY_RANGES, "[éèêë]{70}", *COSTLY.split()]
)
def test_an_expression_of_too_many_steps_is_refused_before_it_is_compiled(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_pattern, "_reason", lambda error: pytest.fail("it was compiled"))
    with pytest.raises(InvalidRegularExpression):
        compile_pattern(pattern)


@settings(max_examples=examples(100, 2_000))
@given(st.text("ab.*+?{}()[]|^$\\12,:-=<>!PQEpLdwsixzu&~é", max_size=30))
def test_any_text_is_compiled_or_refused(pattern: str) -> None:
    with contextlib.suppress(InvalidRegularExpression):
        compile_pattern(pattern)
