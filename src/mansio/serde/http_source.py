"""A schema registry with Confluent's HTTP API as a `SchemaSource`: each request runs on a thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mansio.serde.http_registry import RegistryCredentials, SchemaRegistry

if TYPE_CHECKING:
    from uuid import UUID

    from mansio.serde.definition import SchemaDefinition
    from mansio.serde.source import RegisteredSchema, SubjectVersion


class HttpSource:
    """A schema registry by its address."""

    def __init__(self, url: str, credentials: RegistryCredentials | None = None) -> None:
        """`credentials`: by default those of the environment. Raises `ConfigError` as `SchemaRegistry` does."""
        self._registry = SchemaRegistry(url, credentials)

    async def schema_by_id(self, schema_id: int) -> RegisteredSchema:
        return await asyncio.to_thread(self._registry.schema_by_id, schema_id)

    async def schema_by_guid(self, guid: UUID) -> RegisteredSchema:
        return await asyncio.to_thread(self._registry.schema_by_guid, guid)

    async def latest(self, subject: str) -> SubjectVersion:
        return await asyncio.to_thread(self._registry.latest_version, subject)

    async def register(self, subject: str, definition: SchemaDefinition) -> int:
        return await asyncio.to_thread(
            self._registry.register, subject, definition.text, definition.kind, definition.references
        )

    async def look_up(self, subject: str, definition: SchemaDefinition) -> int:
        return await asyncio.to_thread(self._registry.look_up, subject, definition)
