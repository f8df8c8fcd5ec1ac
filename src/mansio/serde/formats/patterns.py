"""Regular expressions in JSON Schemas: checked and matched in time linear in the length of a text.

The engine is that of `mansio.broker.coordinator.name_pattern`: the one in Rust that pydantic-core contains. An
expression that it does not have (look-around, back-references), or whose repetitions make it large, is valid, but is
never matched.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from mansio.serde.errors import InvalidSchema

if TYPE_CHECKING:
    from collections.abc import Callable

CHARACTERS_MAX: Final = 4_096
STEPS_MAX: Final = 5_000
"""Maximum number of characters of an expression times its numbers of repetitions: beyond it, it is not compiled."""
COMPILED_MAX: Final = 512
"""Maximum number of compiled expressions that are cached. Each takes up to a hundred kilobytes."""

_REPETITION: Final = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_CLASS: Final = re.compile(r"\\[pPwWdDsS]|\(\?i")
_CLASS_STEPS: Final = 100
"""Steps of a class beyond ASCII, which consists of hundreds of ranges."""
_ECMA_ONLY: Final = (
    (re.compile(r"\(\?<(?=[A-Za-z_])"), "(?P<"),
    (re.compile(r"\\[pP]\{[^}]*\}|\\c[A-Za-z]|\\u\{[^}]*\}"), "a"),
)
"""Syntax that Python's engine does not have, and a replacement of the same structure."""


def check_pattern(pattern: str) -> None:
    """Raise `InvalidSchema` for what is no regular expression, or is longer than `CHARACTERS_MAX`."""
    if len(pattern) > CHARACTERS_MAX:
        raise InvalidSchema(f"a regular expression is longer than {CHARACTERS_MAX} characters")
    if matcher(pattern) is not None:
        return
    for syntax, replacement in _ECMA_ONLY:
        pattern = syntax.sub(replacement, pattern)
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise InvalidSchema(f"{pattern[:80]!r} is no regular expression: {error}") from error


@lru_cache(COMPILED_MAX)
def matcher(pattern: str) -> Callable[[str], bool] | None:
    """Return a function that finds an expression anywhere in a text; None if the engine cannot have it."""
    if _steps(pattern) > STEPS_MAX:
        return None
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        schema = core_schema.str_schema(pattern=pattern, regex_engine="rust-regex", strict=True)
        return SchemaValidator(schema).isinstance_python
    except SchemaError:
        return None


def _steps(pattern: str) -> int:
    """Return an upper bound of the size of the compiled expression."""
    steps = len(pattern) + _CLASS_STEPS * len(_CLASS.findall(pattern))
    for found in _REPETITION.finditer(pattern):
        if len(found.group()) > 12:
            return STEPS_MAX + 1
        steps *= max(int(found[1]), int(found[2] or 1), 1)
        if steps > STEPS_MAX:
            break
    return steps
