"""Regular expressions with groups, matched with whole texts in time linear in the length of the text.

The regex engine of `broker.coordinator.name_pattern` reports whether a text matches, not its groups, and Python's `re`
backtracks. So an expression is compiled to a program of a few steps, which all ways to match execute side by side, one
character after the other (Pike's algorithm): at most `STEPS_MAX` steps for each character. That is slow compared with
an engine in C, and meant for texts of some hundred characters, a few times per connection.

Of several ways to match, the one is taken that Java's `Pattern` and Python's `re` would find first. The syntax is what
both have in common: characters, `.`, classes, `\\d \\w \\s` and their opposites (ASCII), groups, `|`, `^`, `$`, and
repetitions, greedy or lazy. Anything else is refused: flags, named groups, look-around, back-references.

Source: Russ Cox, Regular Expression Matching: the Virtual Machine Approach, https://swtch.com/~rsc/regexp/regexp2.html
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRegularExpression

if TYPE_CHECKING:
    from collections.abc import Callable

CHARACTERS_MAX: Final = 1_000
STEPS_MAX: Final = 500
DEPTH_MAX: Final = 20
"""Maximum number of groups within each other."""
REPETITIONS_MAX: Final = 100
"""Maximum number in `{n,m}`."""

_REPETITION: Final = re.compile(r"(?P<sign>[*+?])|\{(?P<least>\d{1,4})(?P<comma>,(?P<most>\d{1,4})?)?\}")
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\\[])*\]", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(?:[dDwWsStnrf]|[^A-Za-z0-9])", re.DOTALL)
_ANY: Final = r"[^\n\r\x85\u2028\u2029]"
_NOT_LITERAL: Final = frozenset("*+?{}[]()|\\")


class _Kind(Enum):
    CHARACTER = auto()
    SPLIT = auto()
    JUMP = auto()
    SAVE = auto()
    AT_START = auto()
    AT_END = auto()
    MATCH = auto()


class _Step(NamedTuple):
    """One step of a program. `first` and `second` are relative positions of a SPLIT, in the order of preference;
    `first` is that of a JUMP, and the number of the position of a SAVE."""

    kind: _Kind
    first: int = 0
    second: int = 0
    matches: Callable[[str], object] | None = None


class GroupPattern:
    """A compiled expression."""

    __slots__ = ("_program", "group_count")

    def __init__(self, pattern: str) -> None:
        """Compile an expression. Raises `InvalidRegularExpression`."""
        parser = _Parser(pattern)
        self._program = (*parser.parse(), _Step(_Kind.MATCH))
        self.group_count = parser.group_count

    @property
    def step_count(self) -> int:
        """Number of steps: the cost of each character of a text is at most proportional to it."""
        return len(self._program)

    def match(self, text: str) -> tuple[str, ...] | None:
        """Return the whole text and the text of each group, empty for a group without one, if the whole text matches;
        else None."""
        threads = self._follow({}, (None,) * (2 * self.group_count), 0, 0, len(text))
        for position, character in enumerate(text, 1):
            arrived: dict[int, tuple[int | None, ...]] = {}
            for index, saved in threads.items():
                step = self._program[index]
                if step.matches is not None and step.matches(character):
                    self._follow(arrived, saved, index + 1, position, len(text))
            threads = {index: arrived[index] for index in arrived if self._program[index].kind in _STOPS}
            if not threads:
                return None
        matched = threads.get(len(self._program) - 1)
        if matched is None:
            return None
        ends = zip(matched[::2], matched[1::2], strict=True)
        return (text, *("" if begin is None or end is None else text[begin:end] for begin, end in ends))

    def _follow(
        self,
        arrived: dict[int, tuple[int | None, ...]],
        saved: tuple[int | None, ...],
        index: int,
        position: int,
        end: int,
    ) -> dict[int, tuple[int | None, ...]]:
        """Add the steps that are reached from one without a character, unless they were reached before by a way that
        is preferred."""
        pending = [(index, saved)]
        while pending:
            index, saved = pending.pop()
            if index in arrived:
                continue
            arrived[index] = saved
            kind, first, second, _ = self._program[index]
            if kind is _Kind.SPLIT:
                pending += ((index + second, saved), (index + first, saved))
            elif kind is _Kind.JUMP:
                pending.append((index + first, saved))
            elif kind is _Kind.SAVE:
                pending.append((index + 1, (*saved[:first], position, *saved[first + 1 :])))
            elif (kind is _Kind.AT_START and position == 0) or (kind is _Kind.AT_END and position == end):
                pending.append((index + 1, saved))
        return arrived


_STOPS: Final = frozenset((_Kind.CHARACTER, _Kind.MATCH))
_Program = tuple[_Step, ...]


class _Parser:
    """Recursive descent from an expression to its program. Jumps are relative, so programs can be put together."""

    def __init__(self, pattern: str) -> None:
        self.group_count = 0
        self._pattern = pattern
        self._position = 0
        self._depth = 0

    def parse(self) -> _Program:
        if len(self._pattern) > CHARACTERS_MAX:
            raise self._refused(f"it is longer than {CHARACTERS_MAX} characters")
        program = self._alternatives()
        if self._position < len(self._pattern):
            raise self._refused("it has an unexpected )")
        return program

    def _alternatives(self) -> _Program:
        program = self._sequence()
        if not self._skip("|"):
            return program
        others = self._alternatives()
        return self._checked(
            (
                _Step(_Kind.SPLIT, 1, len(program) + 2),
                *program,
                _Step(_Kind.JUMP, len(others) + 1),
                *others,
            )
        )

    def _sequence(self) -> _Program:
        program: _Program = ()
        while self._position < len(self._pattern) and self._pattern[self._position] not in "|)":
            program = self._checked(program + self._repeated(self._atom()))
        return program

    def _atom(self) -> _Program:
        if self._skip("("):
            return self._group()
        if self._skip("^"):
            return (_Step(_Kind.AT_START),)
        if self._skip("$"):
            return (_Step(_Kind.AT_END),)
        if self._skip("."):
            return self._character(_ANY)
        for syntax in (_CLASS, _ESCAPE):
            if found := syntax.match(self._pattern, self._position):
                self._position = found.end()
                if "&&" in found.group():
                    raise self._refused("it has an intersection of classes")
                return self._character(found.group())
        character = self._pattern[self._position]
        if character in _NOT_LITERAL:
            raise self._refused(f"it has an unexpected or unsupported {self._pattern[self._position :][:2]}")
        self._position += 1
        return self._character(re.escape(character))

    def _group(self) -> _Program:
        """Return the program of a group, whose parenthesis is already read."""
        number = None
        if self._skip("?"):
            if not self._skip(":"):
                raise self._refused("it has a group with flags, a name or look-around")
        else:
            number, self.group_count = self.group_count, self.group_count + 1
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._refused(f"it has more than {DEPTH_MAX} groups within each other")
        program = self._alternatives()
        self._depth -= 1
        if not self._skip(")"):
            raise self._refused("it lacks a )")
        if number is None:
            return program
        return (_Step(_Kind.SAVE, 2 * number), *program, _Step(_Kind.SAVE, 2 * number + 1))

    def _repeated(self, program: _Program) -> _Program:
        """Return the program with the repetition that follows it, if there is one."""
        found = _REPETITION.match(self._pattern, self._position)
        if found is None:
            return program
        self._position = found.end()
        is_lazy = self._skip("?")
        if _REPETITION.match(self._pattern, self._position):
            raise self._refused("it has two repetitions after each other")
        least, most = _bounds(found)
        if max(least, most or 0) > REPETITIONS_MAX or (most is not None and most < least):
            raise self._refused(f"it has a repetition with wrong numbers, or over {REPETITIONS_MAX}")
        if most is None:
            loop = (
                *_split(is_lazy, 1, len(program) + 2),
                *program,
                _Step(_Kind.JUMP, -len(program) - 1),
            )
            return self._checked(program * least + loop)
        optional: _Program = ()
        for _ in range(most - least):
            optional = self._checked(program + optional)
            optional = (*_split(is_lazy, 1, len(optional) + 1), *optional)
        return self._checked(program * least + optional)

    def _character(self, expression: str) -> _Program:
        """Return the program of an expression that matches one character, for which `re` has nothing to try twice."""
        try:
            matches = re.compile(expression, re.ASCII).match
        except re.error as error:
            raise self._refused(str(error)) from error
        return (_Step(_Kind.CHARACTER, matches=matches),)

    def _skip(self, text: str) -> bool:
        is_next = self._pattern.startswith(text, self._position)
        self._position += len(text) * is_next
        return is_next

    def _checked(self, program: _Program) -> _Program:
        if len(program) > STEPS_MAX:
            raise self._refused(f"it takes more than {STEPS_MAX} steps")
        return program

    def _refused(self, reason: str) -> InvalidRegularExpression:
        return InvalidRegularExpression(f"the expression {self._pattern[:80]!r} is refused: {reason}")


def _bounds(repetition: re.Match[str]) -> tuple[int, int | None]:
    """Return the least and the most repetitions; None: any number."""
    sign = repetition["sign"]
    if sign is not None:
        return (1 if sign == "+" else 0), (1 if sign == "?" else None)
    least = int(repetition["least"])
    if repetition["comma"] is None:
        return least, least
    return least, None if repetition["most"] is None else int(repetition["most"])


def _split(is_lazy: bool, inside: int, behind: int) -> _Program:
    """Return the step that prefers one more repetition, or the end of them if it is lazy."""
    return (_Step(_Kind.SPLIT, behind, inside) if is_lazy else _Step(_Kind.SPLIT, inside, behind),)
