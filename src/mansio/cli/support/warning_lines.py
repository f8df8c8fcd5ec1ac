"""Warnings of Mansio's modules as lines for people, in commands that configure no log.

An event (`mansio.logs`) is a stable name and fields; without a configured log Python would print the bare name.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

from mansio.logs import FIELDS, escaped

REASONS: Final = ("error", "reason", "message")
"""Fields that say why; they end the line."""


class WarningLines(logging.Handler):
    """Prints each warning to standard error: `mansio: pipeline progress not published (pipeline copy): timed out`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        print(warning_line(record), file=sys.stderr, flush=True)


def warning_line(record: logging.LogRecord) -> str:
    """Return a warning as one line."""
    values = dict(getattr(record, FIELDS, {}))
    if not values:
        return f"mansio: {escaped(record.getMessage())}"
    text = record.getMessage().replace("_", " ")
    reason = next((str(values.pop(name)) for name in REASONS if name in values), "")
    details = ", ".join(f"{name} {value}" for name, value in values.items())
    return escaped(
        f"mansio: {text}{f' ({details})' if details else ''}{f': {reason}' if reason else ''}", 4_000
    )


def show_warnings() -> None:
    """Print the warnings of this process, unless a log is configured."""
    logger = logging.getLogger("mansio")
    if not logging.getLogger().handlers and not any(isinstance(one, WarningLines) for one in logger.handlers):
        logger.addHandler(WarningLines())
