"""Refusals of the schema registry, with the error codes and texts of Confluent's REST API, which clients test for."""

from __future__ import annotations

from mansio.errors import SchemaRegistryRefusal

INCOMPATIBLE_SCHEMA = 409
SUBJECT_NOT_FOUND = 40401
VERSION_NOT_FOUND = 40402
SCHEMA_NOT_FOUND = 40403
SUBJECT_SOFT_DELETED = 40404
SUBJECT_NOT_SOFT_DELETED = 40405
VERSION_SOFT_DELETED = 40406
VERSION_NOT_SOFT_DELETED = 40407
NO_SUBJECT_COMPATIBILITY = 40408
NO_SUBJECT_MODE = 40409
INVALID_SCHEMA = 42201
INVALID_VERSION = 42202
INVALID_COMPATIBILITY = 42203
INVALID_MODE = 42204
OPERATION_NOT_PERMITTED = 42205
REFERENCE_EXISTS = 42206
INVALID_SUBJECT = 42208
STORE_ERROR = 50001


def refusal(code: int, message: str) -> SchemaRegistryRefusal:
    """Return the refusal with a code."""
    return SchemaRegistryRefusal.of(code, message)


def subject_not_found(subject: str) -> SchemaRegistryRefusal:
    return refusal(SUBJECT_NOT_FOUND, f"Subject '{subject}' not found.")


def version_not_found(version: int) -> SchemaRegistryRefusal:
    return refusal(VERSION_NOT_FOUND, f"Version {version} not found.")


def schema_not_found(what: str = "") -> SchemaRegistryRefusal:
    return refusal(SCHEMA_NOT_FOUND, f"Schema {what} not found" if what else "Schema not found")


def invalid_schema(message: str) -> SchemaRegistryRefusal:
    return refusal(INVALID_SCHEMA, f"Invalid schema: {message}")


def not_permitted(message: str) -> SchemaRegistryRefusal:
    return refusal(OPERATION_NOT_PERMITTED, message)
