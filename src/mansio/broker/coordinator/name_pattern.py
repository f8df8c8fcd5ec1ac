"""Regular expressions (RE2) of topic names and transactional ids: matching takes time linear in the length of a name.

The expression is translated to the syntax of the regex engine in Rust that pydantic-core, a dependency of the settings,
contains. That engine has no backtracking either, but does not limit the cost of an expression before it compiles it. So
the translation counts the steps of the compiled expression: each character, class or group, as often as it is repeated.

Differences of the two syntaxes that the translation removes: `\\d`, `\\w`, `\\s` and `\\b` are ASCII in RE2; `[`, `&&`,
`~~` and `--` in a class have no meaning there, and neither have `\\<` and `\\>`; RE2 has no flags but `i`, `m`, `s` and
`U`; `{,n}` and a `{` that begins no repetition are literal text; `\\Q...\\E` quotes text; RE2 has octal codes and
`\\p{^X}`.
Refused although RE2 has it: `\\C`, which matches a byte, and a repetition of flags, `a(?i)*`.

Source: https://github.com/google/re2/wiki/Syntax and https://docs.rs/regex (syntax).
"""

from __future__ import annotations

import re
import string
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from mansio.errors import InvalidRegularExpression

if TYPE_CHECKING:
    from collections.abc import Callable

CHARACTERS_MAX: Final = 4_096
STEPS_MAX: Final = 1_000
"""Maximum number of steps of an expression. In the worst case each character of a name executes all steps."""
REPETITIONS_MAX: Final = 1_000
"""Maximum number in `{n,m}`, as in RE2."""
COMPILED_MAX: Final = 32
"""Maximum number of compiled expressions that are cached. Each takes up to half a megabyte."""

_WIDE_STEPS: Final = 4
"""Steps of a character, or of a part of a class, beyond ASCII: the engine matches bytes of UTF-8."""
_UNICODE_CLASS_STEPS: Final = 100
"""Steps of a class such as `\\pL`, which consists of hundreds of ranges."""

_ESCAPE: Final = (
    r"\\[pP](?:\{[^}]*\}|.)"
    r"|\\x(?:\{[0-9A-Fa-f]+\}|[0-9A-Fa-f]{2})"
    r"|\\(?:0[0-7]{0,2}|[1-7][0-7]{1,2})"
    r"|\\."
)
_TOKEN: Final = re.compile(
    r"\\Q(?P<quoted>.*?)(?:\\E|\Z)"
    rf"|{_ESCAPE}"
    r"|\(\?(?:P?<(?P<name>\w+)>|(?P<flags>[^:)]*)(?P<flags_end>[:)]))"
    r"|\{(?P<least>\d+)(?P<comma>,(?P<most>\d*))?\}"
    r"|.",
    re.DOTALL,
)
_CLASS_TOKEN: Final = re.compile(rf"\[:\^?[a-z]+:\]|{_ESCAPE}|.", re.DOTALL)
_FLAGS: Final = re.compile(r"[imsU]*(?:-[imsU]+)?")
_CLASS_NAMES: Final = re.compile(
    r"\[:\^?(?:alnum|alpha|ascii|blank|cntrl|digit|graph|lower|print|punct|space|upper|word|xdigit):\]"
)

_ASCII_CLASSES: Final = {
    "\\d": "[0-9]",
    "\\D": "[^0-9]",
    "\\w": "[0-9A-Za-z_]",
    "\\W": "[^0-9A-Za-z_]",
    "\\s": r"[\t\n\f\r ]",
    "\\S": r"[^\t\n\f\r ]",
}
_UNICODE_CLASSES: Final = ("\\p", "\\P")
_NEGATED: Final = frozenset(("\\D", "\\W", "\\S"))
_ASCII_BOUNDARIES: Final = {"\\b": r"(?-u:\b)", "\\B": r"(?-u:\B)"}
_SAME: Final = frozenset((".", "^", "$", "|", "\\A", "\\z"))
_CONTROLS: Final = frozenset(("\\a", "\\f", "\\t", "\\n", "\\r", "\\v"))
_REPEATERS: Final = frozenset("*+?")
_LAST_REPEATERS: Final = re.compile(r"(?:(?:[*+?]|\{[^}]*\})\??)?")


class _Translation:
    """Translation of one expression: `parts` is the text so far, `steps` its number of steps."""

    def __init__(self, pattern: str) -> None:
        self.parts: list[str] = []
        self.steps = 0
        self._pattern = pattern
        self._position = 0
        self._open_groups: list[int] = []
        """Number of steps before each group that is open."""
        self._before_last = 0
        """Number of steps before the last character, class or group."""
        self._repeaters = ""
        """The repetition at the end of the text so far, with the `?` that makes it lazy."""

    def translate(self) -> None:
        while self._position < len(self._pattern):
            found = _TOKEN.match(self._pattern, self._position)
            assert found is not None, "the last alternative matches any character"
            self._position = found.end()
            self._add(found)
            if self.steps > STEPS_MAX:
                raise InvalidRegularExpression(
                    f"{self._pattern[:80]!r} costs too much: it takes more than {STEPS_MAX} steps"
                )

    def _add(self, found: re.Match[str]) -> None:
        text = found.group()
        is_repeater = found["least"] is not None or text in _REPEATERS
        self._repeaters = self._repeaters + text if is_repeater else ""
        if not _LAST_REPEATERS.fullmatch(self._repeaters):
            raise _refused(self._pattern, f"bad repetition operator {self._repeaters}")
        if found["quoted"] is not None:
            for character in found["quoted"]:
                self._add_atom(*self._class_or_character("\\\\" if character == "\\" else character))
        elif text == "(" or found["name"] is not None or found["flags"] is not None:
            self._open_group(text, found)
        elif text == ")":
            if not self._open_groups:
                raise _refused(self._pattern, "it has an unexpected )")
            self._before_last = self._open_groups.pop()
            self.parts.append(text)
        elif text == "[":
            self._add_class()
        elif found["least"] is not None:
            self._repeat(found)
        elif is_repeater:
            self.parts.append(text)
        elif text in _ASCII_BOUNDARIES:
            self._add_atom(_ASCII_BOUNDARIES[text], 1)
        elif text in _SAME:
            self._add_atom(text, _WIDE_STEPS if text == "." else 1)
        else:
            self._add_atom(*self._class_or_character(text))

    def _class_or_character(self, element: str) -> tuple[str, int]:
        """Return the translation of a element that matches one character, and its number of steps."""
        if element.startswith(_UNICODE_CLASSES):
            if element.startswith("\\p{^"):
                element = "\\P{" + element[4:]
            return element, _UNICODE_CLASS_STEPS
        if element in _ASCII_CLASSES:
            return _ASCII_CLASSES[element], _WIDE_STEPS if element in _NEGATED else 1
        return self._character(element), _WIDE_STEPS if element.startswith(
            "\\x"
        ) or not element.isascii() else 1

    def _character(self, element: str) -> str:
        """Return the translation of a element that stands for a character."""
        character = element[-1] if len(element) == 2 and element[0] == "\\" else element
        if character in string.punctuation and element != "\\":
            return character if character in "<>" else f"\\{character}"
        if len(element) == 1 and element != "\\":
            return element
        if element in _CONTROLS or (element.startswith("\\x") and len(element) > 2):
            return element
        if element[1:].isdecimal() and (len(element) > 2 or element == "\\0"):
            return f"\\x{{{int(element[1:], 8):x}}}"
        raise _refused(self._pattern, f"unknown escape {element}")

    def _add_atom(self, text: str, steps: int) -> None:
        self._before_last = self.steps
        self.steps += steps
        self.parts.append(text)

    def _open_group(self, text: str, found: re.Match[str]) -> None:
        flags = found["flags"]
        if flags is not None and not _FLAGS.fullmatch(flags):
            raise _refused(self._pattern, f"unknown group or flags {text!r}")
        if text == "(?)":
            return
        if found["flags_end"] != ")":
            self._open_groups.append(self.steps)
            self.steps += 1
        self.parts.append("(" if found["name"] is not None else text)

    def _repeat(self, found: re.Match[str]) -> None:
        least, most = int(found["least"]), int(found["most"] or found["least"])
        if max(least, most) > REPETITIONS_MAX:
            raise _refused(self._pattern, f"it repeats something more than {REPETITIONS_MAX} times")
        self.steps += (self.steps - self._before_last) * (max(least, most, 1) - 1)
        self.parts.append(found.group())

    def _add_class(self) -> None:
        """Add a class, whose `[` is already read."""
        text, steps = ["["], 1
        if self._pattern.startswith("^", self._position):
            text.append("^")
            self._position += 1
            steps = _WIDE_STEPS
        tokens = self._class_tokens()
        while tokens:
            element = tokens.popleft()
            if element.startswith("[:"):
                if not _CLASS_NAMES.fullmatch(element):
                    raise _refused(self._pattern, f"unknown class {element}")
                part, part_steps = element, _WIDE_STEPS if "^" in element else 0
            elif len(tokens) > 1 and tokens[0] == "-" and not _is_class(element):
                tokens.popleft()
                last = tokens.popleft()
                part = f"{self._character(element)}-{self._character(last)}"
                part_steps = (
                    0
                    if f"{element}{last}".isascii() and "\\x" not in (element[:2], last[:2])
                    else _WIDE_STEPS
                )
            else:
                part, part_steps = self._class_or_character(element)
                part_steps = 0 if part_steps == 1 else part_steps
            text.append(part)
            steps += part_steps
        self._add_atom("".join((*text, "]")), steps)

    def _class_tokens(self) -> deque[str]:
        """Return the tokens of a class up to its end, which are read."""
        tokens: deque[str] = deque()
        while (found := _CLASS_TOKEN.match(self._pattern, self._position)) is not None:
            self._position = found.end()
            if found.group() == "]" and tokens:
                return tokens
            tokens.append(found.group())
        raise _refused(self._pattern, "it lacks a ]")


def _is_class(element: str) -> bool:
    return element in _ASCII_CLASSES or element.startswith(_UNICODE_CLASSES)


def _refused(pattern: str, reason: str) -> InvalidRegularExpression:
    return InvalidRegularExpression(f"{pattern[:80]!r} is not a valid RE2 expression: {reason}")


@lru_cache(COMPILED_MAX)  # a coordinator checks an expression shortly before it resolves it
def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that matches whole texts with an RE2 expression. Compiled expressions are cached. Raises
    `InvalidRegularExpression`."""
    if len(pattern) > CHARACTERS_MAX:
        raise InvalidRegularExpression(f"the expression is longer than {CHARACTERS_MAX} characters")
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # a megabyte, for few brokers

    translation = _Translation(pattern)
    translation.translate()
    translated = "".join(translation.parts)
    try:
        for text in (translated, f"^(?:{translated})$"):  # the second one alone would accept `a)|(?:b`
            schema = core_schema.str_schema(pattern=text, regex_engine="rust-regex", strict=True)
            validator = SchemaValidator(schema)
    except SchemaError as error:
        raise _refused(pattern, _reason(error)) from error
    return validator.isinstance_python


def _reason(error: Exception) -> str:
    """Return the last line of the engine's error, which names the fault."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")
