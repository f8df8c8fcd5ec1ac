"""Sources of registered schemas: what a registry returns, and the interface of what asks one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mansio.serde.definition import ReferencedSchema, SchemaDefinition, SchemaType

if TYPE_CHECKING:
    from uuid import UUID

__all__ = ["ReferencedSchema", "RegisteredSchema", "SchemaSource", "SubjectVersion"]


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema of a registry. `text`: the schema; for Protobuf a serialized `FileDescriptorProto` in base64, which
    registries return for `format=serialized`. `references`: the schemas that it uses, directly or not, each after those
    that it uses itself. `schema_id`, `guid`: its names in frames, as far as they are known.
    """

    kind: SchemaType
    text: str
    references: tuple[ReferencedSchema, ...] = ()
    schema_id: int | None = None
    guid: UUID | None = None


@dataclass(frozen=True, slots=True)
class SubjectVersion:
    """A version of a subject and its schema."""

    subject: str
    version: int
    schema_id: int
    schema: RegisteredSchema


class SchemaSource(Protocol):
    """What a `Serde` asks for schemas. Results about an id or a GUID never change, and the `Serde` caches them."""

    async def schema_by_id(self, schema_id: int) -> RegisteredSchema:
        """Return the schema with this id. Raises `SchemaNotFound`, `SchemaRegistryError`."""

    async def schema_by_guid(self, guid: UUID) -> RegisteredSchema:
        """Return the schema with this GUID. Raises `SchemaNotFound`, `SchemaRegistryError`."""

    async def latest(self, subject: str) -> SubjectVersion:
        """Return the latest version of a subject. Raises `SchemaNotFound`, `SchemaRegistryError`."""

    async def register(self, subject: str, definition: SchemaDefinition) -> int:
        """Return the id of a schema in a subject, which gets it as a new version if it does not have it.

        Raises `SchemaRegistryError`, also if the schema is incompatible with the earlier versions.
        """

    async def look_up(self, subject: str, definition: SchemaDefinition) -> int:
        """Return the id of a schema that the subject has. Raises `SchemaNotFound`, `SchemaRegistryError`."""
