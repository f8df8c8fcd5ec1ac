"""Errors of schemas, of encoded values, and of the schema registry."""

from __future__ import annotations

from typing import Final

from mansio.errors import ConfigError, MansioError

REASON_CHARACTERS_MAX: Final = 300


def reason(error: Exception | str) -> str:
    """Return the text of an error on one line of at most `REASON_CHARACTERS_MAX` characters."""
    line = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= REASON_CHARACTERS_MAX else f"{line[: REASON_CHARACTERS_MAX - 3]}..."


class UnsupportedSchema(ConfigError):
    """The schema is invalid, or cannot be represented by columns."""


class MalformedValue(MansioError):
    """A value does not have the format that its schema describes."""


class NotFramed(MalformedValue):
    """A value names no schema: it has no frame of a schema registry."""


class SchemaRegistryError(MansioError):
    """The schema registry cannot be reached, or answers with an error."""

    retriable = True


class SchemaNotFound(SchemaRegistryError):
    """The schema registry does not have this schema, subject or version."""

    retriable = False


class InvalidSchema(MansioError):
    """The text is no valid schema of its format, or exceeds a bound."""
