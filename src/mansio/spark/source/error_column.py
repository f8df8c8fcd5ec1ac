"""Text of the column `error` of an unreadable record: its offsets and the reason."""

from __future__ import annotations

import re
from typing import Final

_ERROR_TEXT_PATTERN: Final = re.compile(r"offsets (\d+) to (\d+) cannot be read: ")


def unreadable_offsets_text(first: int, last: int, reason: str) -> str:
    """Return the text of the column `error`: the first and last unreadable offset, both inclusive, and the reason."""
    return f"offsets {first} to {last} cannot be read: {reason}"


def parse_error_offsets(text: str) -> tuple[int, int] | None:
    """Return the offsets in a text of `unreadable_offsets_text`, both inclusive; None for any other text."""
    found = _ERROR_TEXT_PATTERN.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def parse_error_reason(text: str) -> str:
    """Return the reason in a text of `unreadable_offsets_text`; any other text unchanged."""
    found = _ERROR_TEXT_PATTERN.match(text)
    return text if found is None else text[found.end() :]
