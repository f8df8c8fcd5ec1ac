"""Regular expressions of JSON Schema (ECMA 262): a search takes time linear in the length of the text.

The expression is translated to the syntax of the regex engine in Rust that pydantic-core contains, which has no
backtracking and limits the size of a compiled expression. Differences that the translation removes: `\\d` and `\\w` are
ASCII in ECMA 262; `[`, `&&`, `~~` and `--` have no meaning in a class; `\\/` is a slash. Refused, because they need
backtracking: look-around and back-references; and `\\c`.

Source: ECMA 262 (Patterns), and https://docs.rs/regex (syntax).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from mansio.serde.errors import UnsupportedSchema, reason

if TYPE_CHECKING:
    from collections.abc import Callable

CHARACTERS_MAX: Final = 4_096
REPETITIONS_MAX: Final = 1_000
"""Maximum number in `{n,m}`."""
COMPILED_MAX: Final = 256

_TOKEN: Final = re.compile(
    r"\\u\{?[0-9A-Fa-f]+\}?|\\x[0-9A-Fa-f]{2}|\\.|\[\^?|\]|\(\?<?[=!:<]?|\{\d+(?:,\d*)?\}|.", re.DOTALL
)
_CLASSES: Final = {
    "\\d": "[0-9]",
    "\\D": "[^0-9]",
    "\\w": "[0-9A-Za-z_]",
    "\\W": "[^0-9A-Za-z_]",
    "\\b": r"(?-u:\b)",
    "\\B": r"(?-u:\B)",
    "\\/": "/",
}
_IN_CLASS: Final = {"\\b": "\\x08", "&": "\\&", "~": "\\~"}


@lru_cache(COMPILED_MAX)
def compile_regex(pattern: str) -> Callable[[str], bool]:
    """Return a function that searches an expression in a text. Compiled expressions are cached. Raises
    `UnsupportedSchema`."""
    if len(pattern) > CHARACTERS_MAX:
        raise UnsupportedSchema(f"a regular expression is longer than {CHARACTERS_MAX} characters")
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        schema = core_schema.str_schema(pattern=_translated(pattern), regex_engine="rust-regex", strict=True)
        return SchemaValidator(schema).isinstance_python
    except (SchemaError, UnicodeEncodeError) as error:
        lines = [one.strip() for one in str(error).splitlines() if one.strip()]
        raise _refused(pattern, lines[-1].removeprefix("error: ")) from error


def _translated(pattern: str) -> str:
    parts, in_class = [], False
    for found in _TOKEN.finditer(pattern):
        part = found.group()
        if part in ("[", "[^"):
            parts.append(part.replace("[", "\\[") if in_class else part)
            in_class = True
        elif part == "]" and in_class:
            in_class = False
            parts.append(part)
        elif in_class:
            is_range = part == "-" and parts[-1] not in ("[", "[^") and pattern[found.end() :][:1] != "]"
            inner = _IN_CLASS.get(part, _CLASSES.get(part, part))
            parts.append(inner if part != "-" or is_range else "\\-")
        elif part in ("]", "}"):
            parts.append(f"\\{part}")
        elif part == "{":
            parts.append("\\{")
        elif part.startswith("(?") and part not in ("(?:", "(?<"):
            raise _refused(pattern, "look-around is not supported")
        else:
            if part.startswith("{") and any(int(one) > REPETITIONS_MAX for one in re.findall(r"\d+", part)):
                raise _refused(pattern, f"it repeats something more than {REPETITIONS_MAX} times")
            parts.append(_CLASSES.get(part, part))
    return "".join(parts)


def _refused(pattern: str, text: str) -> UnsupportedSchema:
    return UnsupportedSchema(f"the regular expression {pattern[:80]!r} is not supported: {reason(text)}")
