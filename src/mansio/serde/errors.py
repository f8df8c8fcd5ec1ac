"""Errors of schemas, of encoded values, and of the schema registry."""

from __future__ import annotations

from mansio.errors import ConfigError, MansioError


class UnsupportedSchema(ConfigError):
    """The schema is invalid, or cannot be represented by columns."""


class MalformedValue(MansioError):
    """A value does not have the format that its schema describes."""


class SchemaRegistryError(MansioError):
    """The schema registry cannot be reached, or answers with an error."""

    retriable = True


class SchemaNotFound(SchemaRegistryError):
    """The schema registry does not have this schema, subject or version."""

    retriable = False


class InvalidSchema(MansioError):
    """The text is no valid schema of its format, or exceeds a bound."""
