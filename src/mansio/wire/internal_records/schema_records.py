"""Codec of the records of `_schemas`: keys and values are JSON, in the format of Confluent's and Karapace's registries.

    key                                                          value
    {"keytype":"SCHEMA","subject":S,"version":N,"magic":1}       subject, version, id, schema, deleted, and where they
                                                                 differ from the default: guid, schemaType, references,
                                                                 metadata, ruleSet
    {"keytype":"CONFIG","subject":S or null,"magic":0}           {"compatibilityLevel":...} and further settings
    {"keytype":"MODE","subject":S or null,"magic":0}             {"mode":...}
    {"keytype":"DELETE_SUBJECT","subject":S,"magic":0}           subject, version: versions up to it are deleted
    {"keytype":"CLEAR_SUBJECT","subject":S,"magic":0}            all versions that are deleted are removed
    {"keytype":"NOOP","magic":0}                                 none
    {"keytype":"MANSIO_LAST_ID","magic":0}                       {"id":N}: an id that was assigned

A value of null removes what the key names. Mansio writes no DELETE_SUBJECT, CLEAR_SUBJECT and NOOP. It writes
MANSIO_LAST_ID when it removes the schema with the greatest id, which must not be assigned again; other registries skip
a key that they do not know.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Final, NamedTuple

from mansio.errors import CorruptLog

SCHEMAS_TOPIC: Final = "_schemas"
"""Topic of the schema registry. It has one partition."""

SCHEMA_MAGIC: Final = 1
OTHER_MAGIC: Final = 0


class KeyType(StrEnum):
    """What a record is about."""

    SCHEMA = "SCHEMA"
    CONFIG = "CONFIG"
    MODE = "MODE"
    DELETE_SUBJECT = "DELETE_SUBJECT"
    CLEAR_SUBJECT = "CLEAR_SUBJECT"
    NOOP = "NOOP"
    LAST_ID = "MANSIO_LAST_ID"


class SchemaKey(NamedTuple):
    """Key of a record. `subject`: None for all; `version`: 0 where the type has none."""

    kind: KeyType
    subject: str | None = None
    version: int = 0


def encode_key(key: SchemaKey) -> bytes:
    """Encode a key, in the order of members in which other registries write it."""
    found: dict[str, Any] = {"keytype": key.kind.value}
    if key.kind not in (KeyType.NOOP, KeyType.LAST_ID):
        found["subject"] = key.subject
    if key.kind is KeyType.SCHEMA:
        found["version"] = key.version
    found["magic"] = SCHEMA_MAGIC if key.kind is KeyType.SCHEMA else OTHER_MAGIC
    return _encode(found)


def decode_key(data: bytes) -> SchemaKey | None:
    """Decode a key; None for one of a type that is not known. Raises `CorruptLog`."""
    found = _decode(data)
    try:
        kind = KeyType(found["keytype"])
    except ValueError:
        return None
    except KeyError:
        raise CorruptLog(f"{SCHEMAS_TOPIC}: a key without keytype") from None
    subject, version = found.get("subject"), found.get("version", 0)
    if not isinstance(subject, str | None) or type(version) is not int:
        raise CorruptLog(f"{SCHEMAS_TOPIC}: a key of type {kind} with an invalid member")
    if kind in (KeyType.SCHEMA, KeyType.DELETE_SUBJECT, KeyType.CLEAR_SUBJECT) and not subject:
        raise CorruptLog(f"{SCHEMAS_TOPIC}: a key of type {kind} without subject")
    return SchemaKey(kind, subject or None, version)


def encode_value(value: dict[str, Any]) -> bytes:
    """Encode a value."""
    return _encode(value)


def decode_value(data: bytes) -> dict[str, Any]:
    """Decode a value. Raises `CorruptLog`."""
    return _decode(data)


def _encode(found: dict[str, Any]) -> bytes:
    return json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _decode(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptLog(f"{SCHEMAS_TOPIC}: a record that is not JSON") from error
    if not isinstance(found, dict):
        raise CorruptLog(f"{SCHEMAS_TOPIC}: a record that is no JSON object")
    return found
