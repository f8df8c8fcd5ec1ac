"""Values of the schema registry: schemas, their versions, and the settings of subjects."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import md5
from typing import Any, Final, NamedTuple
from uuid import UUID

AVRO: Final = "AVRO"
SCHEMA_TYPES: Final = ("JSON", "PROTOBUF", "AVRO")
"""Formats of schemas, in the order of Confluent's registry."""


class Mode(StrEnum):
    """What may be written to a subject."""

    READWRITE = "READWRITE"
    READONLY = "READONLY"
    READONLY_OVERRIDE = "READONLY_OVERRIDE"
    """READONLY, whatever the modes of subjects are. Of all subjects only."""
    IMPORT = "IMPORT"
    """Schemas are registered with their ids and versions, without a check of compatibility."""


class Compatibility(StrEnum):
    """What the versions of a subject guarantee. BACKWARD: readers with the new version read what the version before it
    wrote. FORWARD: readers with the version before it read what the new one writes. FULL: both. TRANSITIVE: the same
    with all earlier versions."""

    NONE = "NONE"
    BACKWARD = "BACKWARD"
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    FORWARD = "FORWARD"
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    FULL = "FULL"
    FULL_TRANSITIVE = "FULL_TRANSITIVE"

    @property
    def is_transitive(self) -> bool:
        """Whether all earlier versions count, and not only the last one."""
        return self.value.endswith("_TRANSITIVE")

    @property
    def is_backward(self) -> bool:
        """Whether the new version has to read what earlier ones wrote."""
        return self.value.startswith(("BACKWARD", "FULL"))

    @property
    def is_forward(self) -> bool:
        """Whether earlier versions have to read what the new one writes."""
        return self.value.startswith(("FORWARD", "FULL"))


class SchemaReference(NamedTuple):
    """Reference of a schema to a version of a subject. `name`: how the schema refers to it: full name of an Avro type,
    URI of a JSON Schema, file name in an import of Protobuf."""

    name: str
    subject: str
    version: int


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema: format, text, references, and what data contracts add to it, as JSON: `metadata` and `rules`, empty for
    none. Equal schemas have one id."""

    kind: str
    text: str
    references: tuple[SchemaReference, ...] = ()
    metadata: str = ""
    rules: str = ""

    @property
    def characters(self) -> int:
        """Number of characters of the schema."""
        return len(self.text) + len(self.metadata) + len(self.rules)

    @property
    def guid(self) -> UUID:
        """The id of the schema in all registries of this kind: a digest of its content."""
        content = json.dumps([self.kind, self.text, self.references, self.metadata, self.rules])
        return UUID(bytes=md5(content.encode("utf-8", "surrogatepass"), usedforsecurity=False).digest())

    def with_text(self, text: str) -> Schema:
        """Return the schema with another text."""
        return replace(self, text=text)

    def with_contract_of(self, other: Schema) -> Schema:
        """Return the schema with the metadata and the rules of another one where it has none."""
        return replace(self, metadata=self.metadata or other.metadata, rules=self.rules or other.rules)

    def fields(self) -> dict[str, Any]:
        """Return the members of the schema in records and in answers. The format AVRO is not written."""
        found: dict[str, Any] = {}
        if self.kind != AVRO:
            found["schemaType"] = self.kind
        if self.references:
            found["references"] = [each._asdict() for each in self.references]
        if self.metadata:
            found["metadata"] = json.loads(self.metadata)
        if self.rules:
            found["ruleSet"] = json.loads(self.rules)
        found["schema"] = self.text
        return found


class SubjectVersion(NamedTuple):
    """A version of a subject. `is_deleted`: softly: it can still be read by its id."""

    subject: str
    version: int
    schema_id: int
    is_deleted: bool


class SubjectSettings(NamedTuple):
    """Settings of a subject, or of all. None: not set."""

    compatibility: Compatibility | None = None
    normalize: bool | None = None
    alias: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the members of the record."""
        found: dict[str, Any] = {}
        if self.alias is not None:
            found["alias"] = self.alias
        if self.normalize is not None:
            found["normalize"] = self.normalize
        if self.compatibility is not None:
            found["compatibilityLevel"] = self.compatibility.value
        return found
