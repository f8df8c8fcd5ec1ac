"""The schema registry; available as `client.admin.schemas`. Requests are Mansio's own; they go to the leader of the
topic `_schemas`, and need no HTTP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.errors import SchemaRegistryRefusal
from mansio.net.cluster import SCHEMAS_KEY_TYPE
from mansio.net.retry import raise_for_code
from mansio.serde.definition import ReferencedSchema, SchemaType
from mansio.serde.errors import SchemaNotFound, SchemaRegistryError
from mansio.serde.source import RegisteredSchema, SubjectVersion
from mansio.state.registry.schema import SchemaReference
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping

    from mansio.net.cluster import Cluster
    from mansio.serde.definition import SchemaDefinition
    from mansio.serde.source import SchemaSource

COORDINATOR_KEY: Final = "_schemas"
CHANNEL: Final = "schemas"
"""Channel of connections: registering a schema may take seconds, and delays what is behind it."""
ATTEMPT_MS_MAX: Final = 60_000

NOT_FOUND: Final = range(40400, 40500)
"""Codes of refusals for what does not exist."""

AVRO: Final = "AVRO"
LATEST: Final = "latest"


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """A version of a subject with its schema. `kind`: AVRO, JSON or PROTOBUF. `is_deleted`: softly; it is still found
    by its id."""

    subject: str
    version: int
    schema_id: int
    guid: str
    kind: str
    text: str
    references: tuple[SchemaReference, ...] = ()
    is_deleted: bool = False


@dataclass(frozen=True, slots=True)
class SchemaById:
    """A schema as it is found by its id or GUID. `schema_id`: None if it was found by another one."""

    guid: str
    kind: str
    text: str
    references: tuple[SchemaReference, ...] = ()
    schema_id: int | None = None


@dataclass(frozen=True, slots=True)
class CompatibilityResult:
    """Whether a schema is compatible, and why not."""

    is_compatible: bool
    messages: tuple[str, ...] = ()


class SchemaAdmin:
    """The schema registry of one cluster; available as `client.admin.schemas`.

    All methods raise `SchemaRegistryRefusal`, whose `code` is that of Confluent's REST API (40401: no such subject,
    409: not compatible, 42201: no valid schema, ...), and `ClusterAuthorizationFailed`.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def source(self) -> SchemaSource:
        """The registry as the source of a `mansio.serde.Serde`."""
        return ClientSchemaSource(self)

    async def register(
        self,
        subject: str,
        text: str,
        *,
        kind: str = AVRO,
        references: Iterable[SchemaReference] = (),
        normalize: bool = False,
    ) -> RegisteredVersion:
        """Register a schema in a subject, and return its version. A subject that has it already keeps its version. It
        needs WRITE for the subject."""
        arguments = _schema(text, kind, references, normalize=normalize)
        return _version(await self.request("register", subject, arguments, changes=True))

    async def look_up(
        self,
        subject: str,
        text: str,
        *,
        kind: str = AVRO,
        references: Iterable[SchemaReference] = (),
        normalize: bool = False,
        deleted: bool = False,
    ) -> RegisteredVersion:
        """Return the version of a subject that has a schema. `deleted`: also a deleted one."""
        arguments = {**_schema(text, kind, references, normalize=normalize), "deleted": deleted}
        return _version(await self.request("look-up", subject, arguments))

    async def check(
        self,
        subject: str,
        text: str,
        *,
        kind: str = AVRO,
        references: Iterable[SchemaReference] = (),
        version: int | str | None = None,
        normalize: bool = False,
    ) -> CompatibilityResult:
        """Check whether a schema is compatible with a version of a subject, or (None) with those to which the level of
        the subject applies."""
        arguments = _schema(text, kind, references, normalize=normalize)
        arguments |= {"verbose": True, "version": version}
        found = await self.request("check", subject, arguments)
        return CompatibilityResult(bool(found["is_compatible"]), tuple(found["messages"]))

    async def subjects(self, prefix: str = "", *, deleted: bool = False) -> list[str]:
        """Names of the subjects that begin with a prefix and that the user may READ. `deleted`: also those of which all
        versions are deleted."""
        found: list[str] = await self.request("subjects", None, {"prefix": prefix, "deleted": deleted})
        return found

    async def versions(self, subject: str, *, deleted: bool = False) -> list[int]:
        """Numbers of the versions of a subject. `deleted`: also of the deleted ones."""
        found: list[int] = await self.request("versions", subject, {"deleted": deleted})
        return found

    async def version(
        self, subject: str, version: int | str = LATEST, *, deleted: bool = False, serialized: bool = False
    ) -> RegisteredVersion:
        """A version of a subject. `deleted`: also a deleted one. `serialized`: a schema of Protobuf as a
        `FileDescriptorProto` in base64."""
        arguments = {"version": version, "deleted": deleted, **_format(serialized=serialized)}
        return _version(await self.request("version", subject, arguments))

    async def by_id(self, schema_id: int, *, serialized: bool = False) -> SchemaById:
        """The schema with an id. `serialized`: see `version`."""
        found = await self.request("by-id", None, {"id": schema_id, **_format(serialized=serialized)})
        return _by_id(found, schema_id)

    async def by_guid(self, guid: str, *, serialized: bool = False) -> SchemaById:
        """The schema with a GUID, as text. `serialized`: see `version`."""
        found = await self.request("by-guid", None, {"guid": guid, **_format(serialized=serialized)})
        return _by_id(found, int(found["id"]))

    async def uses(self, schema_id: int, *, deleted: bool = False) -> list[tuple[str, int]]:
        """Subject and version of each version with the schema of an id. `deleted`: also the deleted ones."""
        found = await self.request("uses", None, {"id": schema_id, "deleted": deleted})
        return [(str(each["subject"]), int(each["version"])) for each in found]

    async def delete(
        self, subject: str, version: int | str | None = None, *, permanent: bool = False
    ) -> list[int]:
        """Delete a version of a subject, or (None) all; return their numbers. `permanent`: remove those that are
        deleted already. It needs DELETE for the subject. After a lost connection the request is repeated, and may find
        that the version is deleted."""
        arguments = {"version": version, "permanent": permanent}
        found: list[int] = await self.request("delete", subject, arguments, changes=True)
        return found

    async def compatibility(self, subject: str | None = None) -> str:
        """The level of a subject, its own or the general one, or (None) the general one. It needs DESCRIBE_CONFIGS for
        the subject, or for the cluster."""
        found = await self.request("settings", subject, {"defaultToGlobal": True})
        return str(found["compatibilityLevel"])

    async def set_compatibility(self, level: str | None, subject: str | None = None) -> None:
        """Set the level of a subject, or (None) the general one. `level`: None for the general one, or for BACKWARD. It
        needs ALTER_CONFIGS for the subject, or for the cluster."""
        if level is None:
            try:
                await self.request("delete-settings", subject, {}, changes=True)
            except SchemaRegistryRefusal as error:
                if error.code not in NOT_FOUND:  # it has no settings of its own
                    raise
        else:
            await self.request("set-settings", subject, {"compatibility": level}, changes=True)

    async def request(
        self, operation: str, subject: str | None, arguments: Mapping[str, Any], *, changes: bool = False
    ) -> Any:
        """Do an operation of `mansio.broker.services.schema_registry`, and return its result. `changes`: it changes
        something."""
        response = await self._cluster.request_coordinator(
            COORDINATOR_KEY,
            ApiKey.ALTER_SCHEMAS if changes else ApiKey.DESCRIBE_SCHEMAS,
            {"operation": operation, "subject": subject, "arguments": json.dumps(arguments).encode()},
            key_type=SCHEMAS_KEY_TYPE,
            check=_check,
            channel=CHANNEL,
            timeout_ms=ATTEMPT_MS_MAX,
        )
        return json.loads(response.result)


class ClientSchemaSource:
    """A `SchemaSource` that asks the brokers, without HTTP."""

    def __init__(self, schemas: SchemaAdmin) -> None:
        self._schemas = schemas

    async def schema_by_id(self, schema_id: int) -> RegisteredSchema:
        return _registered(await self._resolved(None, {"id": schema_id}))

    async def schema_by_guid(self, guid: UUID) -> RegisteredSchema:
        return _registered(await self._resolved(None, {"guid": str(guid)}))

    async def latest(self, subject: str) -> SubjectVersion:
        found = await self._resolved(subject, {})
        return SubjectVersion(subject, int(found["version"]), int(found["id"]), _registered(found))

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


def _registered(found: dict[str, Any]) -> RegisteredSchema:
    references = tuple(ReferencedSchema(name, text) for name, text in found["references"])
    return RegisteredSchema(
        SchemaType(found["kind"]), found["text"], references, int(found["id"]), UUID(found["guid"])
    )


def _check(response: Any) -> None:
    if response.registry_code:
        raise SchemaRegistryRefusal.of(response.registry_code, response.error_message or "")
    raise_for_code(response.error_code, response.error_message)


def _schema(
    text: str, kind: str, references: Iterable[SchemaReference], *, normalize: bool
) -> dict[str, Any]:
    return {
        "schema": text,
        "schemaType": kind,
        "references": [each._asdict() for each in references],
        "normalize": normalize,
    }


def _format(*, serialized: bool) -> dict[str, str]:
    return {"format": "serialized"} if serialized else {}


def _references(found: Mapping[str, Any]) -> tuple[SchemaReference, ...]:
    return tuple(
        SchemaReference(str(each["name"]), str(each["subject"]), int(each["version"]))
        for each in found.get("references") or ()
    )


def _version(found: Mapping[str, Any]) -> RegisteredVersion:
    return RegisteredVersion(
        str(found["subject"]),
        int(found["version"]),
        int(found["id"]),
        str(found["guid"]),
        str(found.get("schemaType") or AVRO),
        str(found["schema"]),
        _references(found),
        bool(found.get("deleted")),
    )


def _by_id(found: Mapping[str, Any], schema_id: int | None) -> SchemaById:
    return SchemaById(
        str(found["guid"]),
        str(found.get("schemaType") or AVRO),
        str(found["schema"]),
        _references(found),
        schema_id,
    )
