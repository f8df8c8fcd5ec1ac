"""Schema registry service: subjects, their versions, and what is compatible, with the rights of the caller.

Requests and results are JSON objects as in Confluent's REST API, because all protocols pass them on unchanged:
`describe` changes nothing, `alter` does. A caller needs READ for a subject to see its schemas, WRITE to register,
DELETE, DESCRIBE_CONFIGS and ALTER_CONFIGS for its settings and mode; the latter two for the cluster, for those of all
subjects. A schema is found by its id if one of its subjects may be read.

Invariant: a refusal for missing rights is the same whether the subject exists or not.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.broker.coordinator.registry.schema_checks import SchemaText
from mansio.broker.coordinator.registry.schema_uses import CONTAINS, decode_use
from mansio.errors import InvalidRequest, SchemaRegistryRefusal
from mansio.serde.frames import schema_key_bytes
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.registry import refusals
from mansio.state.registry.registry import LATEST, VERSION_MAX, schema_of
from mansio.state.registry.schema import SCHEMA_TYPES, Compatibility, Mode, SubjectSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from mansio.broker.coordinator.registry.schema_checks import SchemaChecks
    from mansio.broker.coordinator.registry.schema_coordinator import SchemaCoordinator
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.metadata.model import BrokerState
    from mansio.state.registry.registry import SchemaRegistryState
    from mansio.state.registry.schema import Schema, SubjectVersion

    Arguments = dict[str, Any]
    Action = Callable[[str | None, Arguments, Caller], Awaitable[Any]]

SUBJECT_CHARACTERS_MAX: Final = 1_000
LIST_MAX: Final = 1_000
"""Schemas of one answer with whole schemas, if the request does not ask for fewer."""
LIST_CHARACTERS_MAX: Final = 8 << 20
CONTEXT: Final = ":."
DEFAULT_CONTEXT: Final = ":.:"
ALL_CONTEXTS: Final = ":*:"
"""What the names of subjects begin with that are in a context."""

UNSUPPORTED: Final = 42205
_UNSUPPORTED_SETTINGS: Final = frozenset(
    {"compatibilityGroup", "defaultMetadata", "defaultRuleSet", "overrideMetadata", "overrideRuleSet"}
)
SERIALIZED: Final = "serialized"
"""Format of a schema of Protobuf: a `FileDescriptorProto` in base64."""


class SchemaRegistryService:
    """The schema registry of a broker. All methods run on its event loop."""

    def __init__(
        self, coordinator: SchemaCoordinator, *, checks: SchemaChecks, authorization: Authorization
    ) -> None:
        """Serve the registry. `checks`: of this broker, which may not be the one that leads the registry's topic."""
        self._coordinator = coordinator
        self._checks = checks
        self._authorization = authorization
        self._reading: dict[str, Action] = {
            "subjects": self._subjects,
            "versions": self._versions,
            "version": self._version,
            "referenced-by": self._referenced_by,
            "schemas": self._schemas,
            "by-id": self._by_id,
            "by-guid": self._by_guid,
            "uses": self._uses,
            "look-up": self._look_up,
            "check": self._check,
            "settings": self._settings,
            "mode": self._mode,
            CONTAINS: self._contains,
            "resolved": self._resolved,
        }
        self._changing: dict[str, Action] = {
            "register": self._register,
            "delete": self._delete,
            "set-settings": self._set_settings,
            "delete-settings": self._delete_settings,
            "set-mode": self._set_mode,
            "delete-mode": self._delete_mode,
        }

    async def find_coordinator(self) -> BrokerState | None:
        """Return the broker that answers requests; None if this broker does."""
        return await self._coordinator.find_coordinator()

    async def describe(
        self, operation: str, subject: str | None, arguments: Arguments, *, caller: Caller
    ) -> Any:
        """Return the result of an operation that changes nothing. Raises `InvalidRequest` for an unknown one,
        `SchemaRegistryRefusal`, `ClusterAuthorizationFailed`, and the errors of the coordinator."""
        return await self._action(self._reading, operation)(_checked(subject), arguments, caller)

    async def alter(
        self, operation: str, subject: str | None, arguments: Arguments, *, caller: Caller
    ) -> Any:
        """Do an operation that changes something; raises as `describe`."""
        return await self._action(self._changing, operation)(_checked(subject), arguments, caller)

    @staticmethod
    def _action(known: dict[str, Action], operation: str) -> Action:
        found = known.get(operation)
        if found is None:
            raise InvalidRequest(f"the schema registry has no operation {operation[:40]!r}")
        return found

    # ------------------------------------------------------------------ rights

    def _check_right(self, caller: Caller, operation: Operation, subject: str | None) -> None:
        if subject is None:
            self._authorization.check_cluster(caller, operation)
        else:
            self._authorization.check(caller, operation, ResourceType.SUBJECT, subject)

    async def _allowed_place(self, caller: Caller, operation: Operation, subject: str | None) -> str:
        """Return the subject that a request is about: the one of which the named one is an alias. Raises
        `ClusterAuthorizationFailed` unless the caller has the right for both."""
        subject = _required(subject)
        self._check_right(caller, operation, subject)
        place = (await self._coordinator.read()).subject_of_alias(subject)
        if place != subject:
            self._check_right(caller, operation, place)
        return place

    async def _check_references(self, caller: Caller, schema: Schema) -> None:
        """Raise `ClusterAuthorizationFailed` unless the caller may read all subjects that a schema refers to, directly
        or not; those that it names itself also if they do not exist."""
        if schema.references and self._authorization.is_enforced_for(caller):
            state = await self._coordinator.read()
            for each in sorted(state.referenced_subjects(schema.references)):
                self._check_right(caller, Operation.READ, each)

    def _readable(self, caller: Caller, subjects: Iterable[str]) -> list[str]:
        return self._authorization.allowed_names(caller, Operation.READ, ResourceType.SUBJECT, subjects)

    def _check_readable_schema(self, state: SchemaRegistryState, schema_id: int, caller: Caller) -> None:
        """Raise the refusal 40403 unless the caller may read a subject of the schema."""
        if not self._authorization.is_enforced_for(caller):
            return
        allows = self._authorization.allows
        for subject in state.subjects_of(schema_id):
            if allows(caller, Operation.READ, ResourceType.SUBJECT, subject):
                return
        raise refusals.schema_not_found(str(schema_id))

    # ------------------------------------------------------------------ reads

    async def _subjects(self, _: str | None, arguments: Arguments, caller: Caller) -> list[str]:
        state = await self._coordinator.read()
        found = state.subjects(
            _prefix(arguments),
            deleted=bool(arguments.get("deleted")),
            deleted_only=bool(arguments.get("deletedOnly")),
        )
        return _page(self._readable(caller, found), arguments)

    async def _versions(self, subject: str | None, arguments: Arguments, caller: Caller) -> list[int]:
        subject = await self._allowed_place(caller, Operation.READ, subject)
        state = await self._coordinator.read()
        found = state.require_versions(
            subject,
            deleted=bool(arguments.get("deleted")),
            deleted_only=bool(arguments.get("deletedOnly")),
        )
        return _page([each.version for each in found], arguments)

    async def _version(self, subject: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        subject = await self._allowed_place(caller, Operation.READ, subject)
        state = await self._coordinator.read()
        one = state.version(
            subject,
            version_number(arguments.get("version")),
            deleted=bool(arguments.get("deleted")),
        )
        return await self._formatted(_version_fields(one, state.schema(one.schema_id)), arguments)

    async def _referenced_by(self, subject: str | None, arguments: Arguments, caller: Caller) -> list[int]:
        subject = await self._allowed_place(caller, Operation.READ, subject)
        state = await self._coordinator.read()
        one = state.version(subject, version_number(arguments.get("version")), deleted=True)
        return state.referring(subject, one.version)

    async def _schemas(self, _: str | None, arguments: Arguments, caller: Caller) -> list[Arguments]:
        state = await self._coordinator.read()
        prefix = _prefix(arguments)
        readable = set(self._readable(caller, state.subjects(prefix, deleted=True)))
        every = state.all_versions(
            prefix, deleted=bool(arguments.get("deleted")), latest_only=bool(arguments.get("latestOnly"))
        )
        start, limit = _bounds(arguments, LIST_MAX)
        found: list[Arguments] = []
        characters = 0
        for each in islice((one for one in every if one.subject in readable), start, start + limit):
            fields = _version_fields(each, state.schema(each.schema_id))
            characters += len(fields["schema"])
            if found and characters > LIST_CHARACTERS_MAX:
                break
            found.append(fields)
        return found

    async def _by_id(self, _: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        state = await self._coordinator.read()
        schema_id = _number(arguments, "id")
        schema = state.schema(schema_id)
        self._check_readable_schema(state, schema_id, caller)
        fields = {"guid": str(schema.guid), **schema.fields()}
        if arguments.get("fetchMaxId"):
            fields["maxId"] = state.last_id
        return await self._formatted(fields, arguments)

    async def _by_guid(self, _: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        state = await self._coordinator.read()
        schema_id = _id_of_guid(state, arguments)
        self._check_readable_schema(state, schema_id, caller)
        schema = state.schema(schema_id)
        fields = {"guid": str(schema.guid), "id": schema_id, **schema.fields()}
        return await self._formatted(fields, arguments)

    async def _uses(self, _: str | None, arguments: Arguments, caller: Caller) -> list[Arguments]:
        state = await self._coordinator.read()
        schema_id = _number(arguments, "id")
        state.schema(schema_id)
        self._check_readable_schema(state, schema_id, caller)
        uses = state.uses(schema_id, deleted=bool(arguments.get("deleted")))
        readable = set(self._readable(caller, {each.subject for each in uses}))
        return [
            {"subject": each.subject, "version": each.version} for each in uses if each.subject in readable
        ]

    async def _look_up(self, subject: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        subject = await self._allowed_place(caller, Operation.READ, subject)
        wanted = _schema(arguments)
        await self._check_references(caller, wanted)
        one, schema = await self._coordinator.look_up(
            subject,
            wanted,
            normalize=bool(arguments.get("normalize")),
            deleted=bool(arguments.get("deleted")),
        )
        return await self._formatted(_version_fields(one, schema), arguments)

    async def _check(self, subject: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        subject = await self._allowed_place(caller, Operation.READ, subject)
        wanted = _schema(arguments)
        await self._check_references(caller, wanted)
        version = arguments.get("version")
        found = await self._coordinator.check(
            subject,
            wanted,
            None if version is None else version_number(version),
            normalize=bool(arguments.get("normalize")),
        )
        answer: Arguments = {"is_compatible": not found}
        if arguments.get("verbose"):
            answer["messages"] = found
        return answer

    async def _settings(self, subject: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        self._check_right(caller, Operation.DESCRIBE_CONFIGS, subject)
        state = await self._coordinator.read()
        return state.settings(subject, default=bool(arguments.get("defaultToGlobal"))).fields()

    async def _mode(self, subject: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        self._check_right(caller, Operation.DESCRIBE_CONFIGS, subject)
        state = await self._coordinator.read()
        return {"mode": state.mode(subject, default=bool(arguments.get("defaultToGlobal"))).value}

    async def _resolved(self, subject: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        """Return a schema, by its id or GUID or as the latest of the subject, with the texts of what it refers to.
        `serialized`: of Protobuf as a `FileDescriptorProto` in base64, each."""
        version = 0
        if subject is None:
            state = await self._coordinator.read()
            schema_id = _id_of_guid(state, arguments) if "guid" in arguments else _number(arguments, "id")
            state.schema(schema_id)
            self._check_readable_schema(state, schema_id, caller)
        else:
            subject = await self._allowed_place(caller, Operation.READ, subject)
            state = await self._coordinator.read()
            latest = state.version(subject, LATEST)
            version, schema_id = latest.version, latest.schema_id
        schema = state.schema(schema_id)
        if self._authorization.is_enforced_for(caller):
            for each in sorted(state.referenced_subjects(schema.references)):
                self._check_right(caller, Operation.READ, each)
        text = SchemaText(schema.kind, schema.text, state.resolved_references(schema.references))
        if arguments.get("serialized") and schema.kind == "PROTOBUF":
            text = await self._checks.serialized(text)
        return {"id": schema_id, "guid": str(schema.guid), "version": version, **text.fields()}

    async def encode(self, resolved: Arguments, values: Sequence[Any]) -> list[bytes]:
        """Return values of plain JSON as the schema of a "resolved" result encodes them, each after its frame. Raises
        `InvalidRecord`, which names the value and the path in it."""
        references = [(name, text) for name, text in resolved["references"]]
        encoded = await self._checks.encode(
            SchemaText(resolved["kind"], resolved["text"], references), values
        )
        frame = schema_key_bytes(resolved["id"])
        return [frame + each for each in encoded]

    async def _contains(self, _: str | None, arguments: Arguments, caller: Caller) -> list[bool]:
        """Return for each use of a schema whether its subject has it; for brokers."""
        self._authorization.check_cluster(caller, Operation.CLUSTER_ACTION)
        try:
            uses = [decode_use(each) for each in arguments["uses"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InvalidRequest("the uses are objects with id or guid, subject and prefix") from None
        return await self._coordinator.contains(uses)

    # ------------------------------------------------------------------ changes

    async def _register(self, subject: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        subject = await self._allowed_place(caller, Operation.WRITE, subject)
        wanted = _schema(arguments)
        await self._check_references(caller, wanted)
        try:
            one, schema = await self._coordinator.register(
                subject,
                wanted,
                normalize=bool(arguments.get("normalize")),
                schema_id=max(_number(arguments, "id", 0), 0),
                version=max(_number(arguments, "version", 0), 0),
            )
        except SchemaRegistryRefusal as error:
            if error.code == refusals.INCOMPATIBLE_SCHEMA and not self._authorization.allows(
                caller, Operation.READ, ResourceType.SUBJECT, subject
            ):  # the reasons would tell what is in the earlier schemas
                raise refusals.refusal(
                    error.code,
                    f"the schema is not compatible with subject '{subject}', which you may not READ",
                ) from None
            raise
        return await self._formatted(_version_fields(one, schema), arguments)

    async def _delete(self, subject: str | None, arguments: Arguments, caller: Caller) -> list[int]:
        subject = await self._allowed_place(caller, Operation.DELETE, subject)
        version = arguments.get("version")
        number = None if version is None else version_number(version)
        permanent = bool(arguments.get("permanent"))
        return await self._coordinator.change(
            lambda state: state.plan_deletion(subject, number, permanent=permanent)
        )

    async def _set_settings(self, subject: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        self._check_right(caller, Operation.ALTER_CONFIGS, subject)
        if (alias := arguments.get("alias")) is not None:
            self._check_right(caller, Operation.READ, _required(_checked(str(alias))))
        if others := _UNSUPPORTED_SETTINGS & {name for name, value in arguments.items() if value is not None}:
            raise refusals.refusal(UNSUPPORTED, f"{min(others)} is not supported")
        changed = SubjectSettings(
            _compatibility(arguments.get("compatibility")),
            None if arguments.get("normalize") is None else bool(arguments["normalize"]),
            None if arguments.get("alias") is None else str(arguments["alias"]),
        )
        await self._coordinator.change(lambda state: (state.plan_settings(subject, changed), None))
        return {key: arguments[key] for key in ("alias", "normalize", "compatibility") if key in arguments}

    async def _delete_settings(self, subject: str | None, _: Arguments, caller: Caller) -> Arguments:
        self._check_right(caller, Operation.ALTER_CONFIGS, subject)
        before = await self._coordinator.change(lambda state: state.plan_settings_deletion(subject))
        return before.fields()

    async def _set_mode(self, subject: str | None, arguments: Arguments, caller: Caller) -> Arguments:
        self._check_right(caller, Operation.ALTER_CONFIGS, subject)
        mode = _mode(arguments.get("mode"))
        if mode is Mode.IMPORT:  # it chooses ids, which all subjects share
            self._authorization.check_cluster(caller, Operation.ALTER_CONFIGS)
        force = bool(arguments.get("force"))
        await self._coordinator.change(lambda state: (state.plan_mode(subject, mode, force=force), None))
        return {"mode": mode.value}

    async def _delete_mode(self, subject: str | None, _: Arguments, caller: Caller) -> Arguments:
        self._check_right(caller, Operation.ALTER_CONFIGS, subject)
        before = await self._coordinator.change(lambda state: state.plan_mode_deletion(subject))
        return {"mode": before.value}

    async def _formatted(self, fields: Arguments, arguments: Arguments) -> Arguments:
        """Return the members of an answer with the schema in the format that the request asks for."""
        if arguments.get("format") == SERIALIZED and fields.get("schemaType") == "PROTOBUF":
            fields["schema"] = await self._coordinator.serialized(_schema(fields))
        return fields


def _checked(subject: str | None) -> str | None:
    """Return the name of a subject, without the name of the default context. Raises the refusal 42208."""
    if subject is not None:
        subject = subject.removeprefix(DEFAULT_CONTEXT)
        if subject.startswith(CONTEXT):
            raise refusals.refusal(
                refusals.INVALID_SUBJECT, "contexts other than the default one are not supported"
            )
    if subject is not None and (not 1 <= len(subject) <= SUBJECT_CHARACTERS_MAX or not subject.isprintable()):
        raise refusals.refusal(
            refusals.INVALID_SUBJECT,
            f"a subject has 1 to {SUBJECT_CHARACTERS_MAX} printable characters",
        )
    return subject


def _prefix(arguments: Arguments) -> str:
    """Return the beginning of the names that a list has. Clients ask for those of all contexts, too."""
    return str(arguments.get("prefix") or "").removeprefix(ALL_CONTEXTS).removeprefix(DEFAULT_CONTEXT)


def _required(subject: str | None) -> str:
    if subject is None:
        raise InvalidRequest("this operation needs a subject")
    return subject


def _schema(arguments: Arguments) -> Schema:
    try:
        schema = schema_of(arguments)
    except (KeyError, TypeError, ValueError):
        raise refusals.refusal(
            refusals.INVALID_SCHEMA,
            "a schema has a text as schema, and subject, version and name of references",
        ) from None
    if schema.kind not in SCHEMA_TYPES:
        raise refusals.invalid_schema(f"there is no schema type {schema.kind[:40]!r}")
    contracts = [arguments.get(name) for name in ("metadata", "ruleSet")]
    try:
        json.dumps(contracts, allow_nan=False, ensure_ascii=False).encode()
        schema.text.encode()
    except (ValueError, RecursionError):
        raise refusals.invalid_schema("it has a number that is not finite, or a lone surrogate") from None
    if not all(isinstance(each, dict | None) for each in contracts):
        raise refusals.invalid_schema("metadata and ruleSet are JSON objects")
    return schema


def version_number(version: Any) -> int:
    """Return the number of a version: a number from 1 on, or `LATEST` for "latest" and -1. Raises the refusal 42202."""
    if version in ("latest", LATEST, str(LATEST)):
        return LATEST
    if isinstance(version, str) and version.isascii() and version.isdigit() and len(version) <= 10:
        version = int(version)
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise refusals.refusal(
            refusals.INVALID_VERSION,
            f"The specified version '{str(version)[:40]}' is not a valid version id. Allowed values are between"
            ' [1, 2^31-1] and the string "latest"',
        )
    return version


def _number(arguments: Arguments, name: str, default: int | None = None) -> int:
    value = arguments.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or not -1 <= value <= VERSION_MAX:
        raise InvalidRequest(f"{name} is a number up to {VERSION_MAX}")
    return value


def _id_of_guid(state: SchemaRegistryState, arguments: Arguments) -> int:
    try:
        return state.id_of_guid(UUID(str(arguments.get("guid"))))
    except ValueError:
        raise refusals.schema_not_found(str(arguments.get("guid"))[:40]) from None


def _compatibility(level: Any) -> Compatibility | None:
    if level is None:
        return None
    try:
        return Compatibility(str(level).upper())
    except ValueError:
        raise refusals.refusal(
            refusals.INVALID_COMPATIBILITY,
            f"Invalid compatibility level. Valid values are {', '.join(sorted(Compatibility))}",
        ) from None


def _mode(mode: Any) -> Mode:
    try:
        return Mode(str(mode).upper())
    except ValueError:
        raise refusals.refusal(
            refusals.INVALID_MODE, f"Invalid mode. Valid values are {', '.join(Mode)}"
        ) from None


def _bounds(arguments: Arguments, limit_max: int) -> tuple[int, int]:
    start, limit = max(_number(arguments, "offset", 0), 0), _number(arguments, "limit", -1)
    return start, min(limit, limit_max) if limit >= 0 else limit_max


def _page(found: list[Any], arguments: Arguments) -> list[Any]:
    start, limit = _bounds(arguments, len(found))
    return found[start : start + limit]


def _version_fields(one: SubjectVersion, schema: Schema) -> Arguments:
    found: Arguments = {
        "subject": one.subject,
        "version": one.version,
        "id": one.schema_id,
        "guid": str(schema.guid),
        **schema.fields(),
    }
    if one.is_deleted:
        found["deleted"] = True
    return found
