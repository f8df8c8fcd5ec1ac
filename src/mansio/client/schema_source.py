"""The registry of the brokers as the source of a `mansio.serde.Serde`; available as `client.admin.schemas.source`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from mansio.errors import SchemaRegistryRefusal
from mansio.serde.definition import ReferencedSchema, SchemaType
from mansio.serde.errors import SchemaNotFound, SchemaRegistryError
from mansio.serde.source import RegisteredSchema, SubjectVersion

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from mansio.client.admin.schemas import SchemaAdmin
    from mansio.serde.definition import SchemaDefinition

NOT_FOUND = range(40400, 40500)
"""Codes of refusals for what does not exist."""


class ClientSchemaSource:
    """A `SchemaSource` that asks the brokers, without HTTP."""

    def __init__(self, schemas: SchemaAdmin) -> None:
        self._schemas = schemas

    async def schema_by_id(self, schema_id: int) -> RegisteredSchema:
        return _schema(await self._resolved(None, {"id": schema_id}))

    async def schema_by_guid(self, guid: UUID) -> RegisteredSchema:
        return _schema(await self._resolved(None, {"guid": str(guid)}))

    async def latest(self, subject: str) -> SubjectVersion:
        found = await self._resolved(subject, {})
        return SubjectVersion(subject, int(found["version"]), int(found["id"]), _schema(found))

    async def register(self, subject: str, definition: SchemaDefinition) -> int:
        found = await _answer(
            self._schemas.register(
                subject, definition.text, kind=definition.kind, references=definition.references
            )
        )
        return int(found.schema_id)

    async def look_up(self, subject: str, definition: SchemaDefinition) -> int:
        found = await _answer(
            self._schemas.look_up(
                subject, definition.text, kind=definition.kind, references=definition.references
            )
        )
        return int(found.schema_id)

    async def _resolved(self, subject: str | None, arguments: dict[str, Any]) -> Any:
        return await _answer(self._schemas.request("resolved", subject, {**arguments, "serialized": True}))


async def _answer(request: Awaitable[Any]) -> Any:
    try:
        return await request
    except SchemaRegistryRefusal as error:
        kind = SchemaNotFound if error.code in NOT_FOUND else SchemaRegistryError
        raise kind(error.message) from error


def _schema(found: dict[str, Any]) -> RegisteredSchema:
    references = tuple(ReferencedSchema(name, text) for name, text in found["references"])
    return RegisteredSchema(
        SchemaType(found["kind"]), found["text"], references, int(found["id"]), UUID(found["guid"])
    )
