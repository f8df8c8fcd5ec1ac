"""Regular expressions (RE2) of topic names and transactional ids: matching takes time linear in the length of a name.

The expression is translated to the syntax of the regex engine in Rust that pydantic-core, a dependency of the settings,
contains. That engine has no backtracking either, but does not limit the cost of an expression before it compiles it. So
the translation counts the steps of the compiled expression: each character, class or group, as often as it is repeated.

Differences of the two syntaxes that the translation removes: `\\d`, `\\w`, `\\s` and `\\b` are ASCII in RE2; `[`, `&`
and `~` in a class have no meaning there; RE2 has no flags but `i`, `m`, `s` and `U`; `{,n}` and a `{` that begins no
repetition are literal text; `\\Q...\\E` quotes text. Refused although RE2 has it: `\\C`, which matches a byte.

Source: https://github.com/google/re2/wiki/Syntax and https://docs.rs/regex (syntax).
"""

from __future__ import annotations

import re
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
"""Maximum number of compiled expressions that are cached."""

_WIDE_STEPS: Final = 4
"""Steps of a class that contains characters beyond ASCII, in UTF-8."""
_UNICODE_CLASS_STEPS: Final = 100
"""Steps of a class such as `\\pL`, which consists of hundreds of ranges."""

_TOKEN: Final = re.compile(
    r"\\Q(?P<quoted>.*?)(?:\\E|\Z)"
    r"|\\[pP](?:\{[^}]*\}|.)"
    r"|\\x\{[^}]*\}"
    r"|\\."
    r"|\(\?(?:P?<(?P<name>[^>]*)>|(?P<flags>[^:)]*)(?P<flags_end>[:)]))"
    r"|\{(?P<least>\d+)(?P<comma>,(?P<most>\d*))?\}"
    r"|.",
    re.DOTALL,
)
_CLASS_TOKEN: Final = re.compile(r"\[:\^?[a-z]+:\]|\\[pP](?:\{[^}]*\}|.)|\\x\{[^}]*\}|\\.|.", re.DOTALL)
_FLAGS: Final = re.compile(r"[imsU]*(?:-[imsU]+)?")

_ASCII_CLASSES: Final = {
    "\\d": "[0-9]",
    "\\D": "[^0-9]",
    "\\w": "[0-9A-Za-z_]",
    "\\W": "[^0-9A-Za-z_]",
    "\\s": r"[\t\n\f\r ]",
    "\\S": r"[^\t\n\f\r ]",
}
_ASCII_BOUNDARIES: Final = {"\\b": r"(?-u:\b)", "\\B": r"(?-u:\B)"}
_LITERAL_IN_CLASS: Final = frozenset("[&~")
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
                raise _refused(self._pattern, f"it takes more than {STEPS_MAX} steps")

    def _add(self, found: re.Match[str]) -> None:
        text = found.group()
        is_repeater = found["least"] is not None or text in _REPEATERS
        self._repeaters = self._repeaters + text if is_repeater else ""
        if not _LAST_REPEATERS.fullmatch(self._repeaters):
            raise _refused(self._pattern, f"bad repetition operator {self._repeaters}")
        if found["quoted"] is not None:
            for character in found["quoted"]:
                self._add_atom(re.escape(character), 1)
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
        elif text == "{":
            self._add_atom("\\{", 1)
        elif text == "}":
            self._add_atom("\\}", 1)
        elif text in _ASCII_BOUNDARIES:
            self._add_atom(_ASCII_BOUNDARIES[text], 1)
        elif text == "\\C":
            raise _refused(self._pattern, "\\C is not supported")
        else:
            self._add_atom(_ASCII_CLASSES.get(text, text), _steps_of(text))

    def _add_atom(self, text: str, steps: int) -> None:
        self._before_last = self.steps
        self.steps += steps
        self.parts.append(text)

    def _open_group(self, text: str, found: re.Match[str]) -> None:
        flags = found["flags"]
        if flags is not None and not _FLAGS.fullmatch(flags):
            raise _refused(self._pattern, f"unknown group or flags {text!r}")
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
        text, steps, is_first = ["["], 0, True
        if self._pattern.startswith("^", self._position):
            text.append("^")
            self._position += 1
            steps = _WIDE_STEPS
        while (found := _CLASS_TOKEN.match(self._pattern, self._position)) is not None:
            part = found.group()
            self._position = found.end()
            if part == "]" and not is_first:
                text.append(part)
                self._add_atom("".join(text), max(steps, 1))
                return
            is_first = False
            steps = max(steps, _steps_of(part))
            if part in _LITERAL_IN_CLASS or part == "]":
                part = f"\\{part}"
            text.append(_ASCII_CLASSES.get(part, part))
        raise _refused(self._pattern, "it lacks a ]")


def _steps_of(token: str) -> int:
    """Return the number of steps that match a character, an escape or a part of a class."""
    if token[:2] in ("\\p", "\\P"):
        return _UNICODE_CLASS_STEPS
    if token in (".", "\\D", "\\W", "\\S") or token.startswith(("\\x", "[:^")) or not token.isascii():
        return _WIDE_STEPS
    return 1


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
