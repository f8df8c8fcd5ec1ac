"""Coordinator of the schema registry: the view of the topic `_schemas`, and the changes of it.

The broker that leads the only partition of the topic answers all requests, after it has loaded the log. The topic is
created with the first change.

Invariants:
* A request is answered when everything that the answer shows is committed, so that no later answer contradicts it.
* A change is planned and appended in one step of the event loop. A check of a new schema takes longer; if the subject
  has changed meanwhile, it is repeated. So two requests with the same new schema get one id.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from mansio.broker.coordinator.group.error_mapping import coordinator_errors
from mansio.broker.coordinator.registry.schema_checks import SchemaText
from mansio.broker.coordinator.runtime import CoordinatorRuntime
from mansio.broker.routing.routes import coordinator_of
from mansio.errors import Unavailable
from mansio.logs import fields
from mansio.state.registry import refusals
from mansio.state.registry.registry import LATEST, SchemaRegistryState
from mansio.state.registry.schema import Compatibility
from mansio.wire.internal_records.schema_records import SCHEMAS_TOPIC, decode_key, decode_value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from mansio.broker.coordinator.registry.schema_checks import ParsedText, SchemaChecks
    from mansio.broker.coordinator.view import CoordinatorPartition, CoordinatorReplica
    from mansio.broker.features.feature_ports import SchemaUse
    from mansio.broker.routing.routes import CoordinatorLookup
    from mansio.errors import StorageError
    from mansio.metadata.model import BrokerState
    from mansio.ports import Clock, Scheduler
    from mansio.state.registry.registry import KeyValue
    from mansio.state.registry.schema import Schema, SubjectVersion

    Result = TypeVar("Result")

logger = logging.getLogger(__name__)

PARTITION: Final = 0
ATTEMPTS_MAX: Final = 20
"""Number of checks of one new schema, each after a change of the subject by another request."""

NAMES_KEPT_MAX: Final = 10_000
"""Number of schemas whose record names are kept."""

COMMIT_WAITS_MAX: Final = 100
"""Number of changes by others for which a read waits."""


class _Prepared(NamedTuple):
    """A schema as it is stored, and what the worker has found about it."""

    schema: Schema
    parsed: ParsedText
    normalize: bool


class SchemaCoordinator:
    """The schema registry of one broker (`CoordinatorView` of `_schemas`). All methods run on its event loop.

    Requests raise `NotCoordinator`, `CoordinatorNotAvailable` or `CoordinatorLoadInProgress`, and refusals of the
    registry.
    """

    def __init__(
        self,
        *,
        node_id: int,
        clock: Clock,
        scheduler: Scheduler,
        create_topic: Callable[[], Awaitable[Sequence[CoordinatorPartition | StorageError]]],
        is_own_topic: Callable[[], bool],
        checks: SchemaChecks,
        lookup: CoordinatorLookup | None = None,
    ) -> None:
        """`is_own_topic`: whether no client may write to the topic, if it exists. `lookup`: metadata of the topic, None
        on a single node."""
        self._node_id = node_id
        self._lookup = lookup
        self._is_own_topic = is_own_topic
        self._checks = checks
        self._state = SchemaRegistryState()
        self._closed = False
        self._names: dict[int, Sequence[str]] = {}
        """Names of the records that schemas describe, by id."""
        self.topic = CoordinatorRuntime(
            SCHEMAS_TOPIC,
            view=self,
            create=create_topic,
            scheduler=scheduler,
            clock=clock,
            partition_count=None if lookup is None else lookup.partition_count,
            replays_every_record=True,
        )

    # ------------------------------------------------------------------ start and close

    async def start(self, partitions: Sequence[CoordinatorPartition | StorageError]) -> None:
        """Load the topic, on a single node."""
        await self.topic.start(partitions)

    def handle_role_change(self, partition: CoordinatorReplica) -> None:
        """Apply this broker's role for a partition of the topic, in a cluster; idempotent."""
        if partition.index == PARTITION:
            self.topic.apply_role(partition, is_closed=self._closed)

    async def close(self) -> None:
        """Close the topic."""
        self._closed = True
        self._checks.close()
        await self.topic.close()

    async def find_coordinator(self) -> BrokerState | None:
        """Return the broker that answers requests; None if it is this broker, or any, because the topic does not
        exist."""
        if self._lookup is None or not self._lookup.partition_count():
            return None
        broker = coordinator_of(SCHEMAS_TOPIC, self._lookup)
        return None if broker.node_id == self._node_id else broker

    # ------------------------------------------------------------------ view

    def apply(self, _index: int, key: bytes, value: bytes | None, offset: int) -> None:
        decoded = decode_key(key)
        if decoded is None:
            known = fields(topic=SCHEMAS_TOPIC, partition=PARTITION, offset=offset)
            logger.warning("unknown_record_skipped", extra=known)
            return
        self._state.apply(decoded, None if value is None else decode_value(value))

    def snapshot(self, _index: int) -> Iterator[tuple[bytes, bytes]]:
        raise NotImplementedError  # every record is replayed

    def finish_load(self, _index: int) -> None:
        logger.info("schemas_loaded", extra=fields(subjects=len(self._state.subjects(deleted=True))))

    def unload(self, _index: int) -> None:
        self._state.clear()
        self._names.clear()

    # ------------------------------------------------------------------ requests

    async def read(self) -> SchemaRegistryState:
        """Return the state, of which everything is committed. The caller uses it before it awaits anything."""
        self._check_topic()
        if self._lookup is None:
            self.topic.check_available()
        if not self.topic.partition_count:
            return self._state
        with coordinator_errors():
            for _ in range(COMMIT_WAITS_MAX):
                await self.topic.wait_until_committed(PARTITION)
                if self.topic.is_committed(PARTITION):
                    return self._state
        raise Unavailable("the schema registry changes too often; try again")

    async def change(
        self, plan: Callable[[SchemaRegistryState], tuple[Sequence[KeyValue], Result]]
    ) -> Result:
        """Append the records that `plan` returns for the state, and return its result when they are committed."""
        with coordinator_errors():
            self._check_topic()
            await self.topic.ensure_topic_exists()
            self.topic.check_loaded(PARTITION)
            records, result = plan(self._state)
            if records:
                await self.topic.append(PARTITION, records, atomic=True)
            else:
                await self.topic.wait_until_committed(PARTITION)
        return result

    async def register(
        self, subject: str, schema: Schema, *, normalize: bool, schema_id: int = 0, version: int = 0
    ) -> tuple[SubjectVersion, Schema]:
        """Register a schema, and return its version and what is stored. A subject that has it keeps its version.
        `schema_id`, `version`: of an import, 0 otherwise.

        Raises the refusals 409, 42201, 42205."""
        for _ in range(ATTEMPTS_MAX):
            state = await self.read()
            state.check_writable(subject)
            revision, is_import = state.revision_of(subject), state.is_importing(subject)
            prepared = await self._prepared(state, subject, schema, normalize=normalize)
            stored = prepared.schema
            found = await self._find(await self.read(), subject, prepared)
            if found is not None and (version in (0, found.version)) and schema_id in (0, found.schema_id):
                return found, (await self.read()).schema(found.schema_id)
            if not is_import:
                await self._check_compatible(await self.read(), subject, stored)

            def plan(
                now: SchemaRegistryState, stored: Schema = stored, revision: object = revision
            ) -> tuple[Sequence[KeyValue], SubjectVersion | None]:
                if now.revision_of(subject) != revision:
                    return (), None
                return now.plan_registration(subject, stored, schema_id=schema_id, version=version)

            registered = await self.change(plan)
            if registered is not None:
                self._keep_names(registered.schema_id, prepared.parsed.names)
                return registered, stored
        raise Unavailable(f"subject {subject!r} changes too often; try again")

    async def look_up(
        self, subject: str, schema: Schema, *, normalize: bool, deleted: bool
    ) -> tuple[SubjectVersion, Schema]:
        """Return the version of a subject that has a schema, and the schema. Raises the refusals 40401, 40403,
        42201."""
        state = await self.read()
        state.require_versions(subject, deleted=deleted)
        prepared = await self._prepared(state, subject, schema, normalize=normalize)
        found = await self._find(await self.read(), subject, prepared, deleted=deleted)
        if found is None:
            raise refusals.schema_not_found()
        return found, (await self.read()).schema(found.schema_id)

    async def check(self, subject: str, schema: Schema, version: int | None, *, normalize: bool) -> list[str]:
        """Return why a schema is not compatible with a version of a subject, with `LATEST` the latest one, or (None)
        with those to which its level applies; empty if it is. Raises the refusals 40401, 40402, 42201."""
        state = await self.read()
        if version is not None:
            state.version(subject, version)
        prepared = await self._prepared(state, subject, schema, normalize=normalize)
        return await self._incompatibilities(await self.read(), subject, prepared.schema, version)

    async def _prepared(
        self, state: SchemaRegistryState, subject: str, schema: Schema, *, normalize: bool
    ) -> _Prepared:
        """Parse a schema for a subject. What it leaves out of a data contract is that of the latest version, so that
        serializers, which have only the text, keep it."""
        latest = state.versions(subject)[-1:]
        if latest:
            schema = schema.with_contract_of(state.schema(latest[0].schema_id))
        normalize = normalize or state.normalizes(subject)
        parsed = await self._checks.parse(self._text(state, schema), normalize=normalize)
        return _Prepared(schema.with_text(parsed.text), parsed, normalize)

    async def contains(self, uses: Sequence[SchemaUse]) -> list[bool]:
        """Return for each use of a schema whether its subject has the schema, deleted versions included: records that
        were written before the deletion may be published again."""
        state = await self.read()
        found: list[bool] = []
        by_record: list[tuple[int, SchemaUse, frozenset[str]]] = []
        for number, use in enumerate(uses):
            subjects = state.subjects_of(use.schema)
            found.append(use.subject in subjects)
            if use.subject is None and any(each.startswith(use.record_prefix) for each in subjects):
                by_record.append((number, use, subjects))
        for number, use, subjects in by_record:
            schema_id = use.schema if isinstance(use.schema, int) else state.id_of_guid(use.schema)
            schema = state.schema(schema_id)
            names = self._names.get(schema_id)
            if names is None:
                names = await self._checks.record_names(self._text(state, schema))
                self._keep_names(schema_id, names)
            found[number] = any(use.record_prefix + name in subjects for name in names)
        return found

    def _keep_names(self, schema_id: int, names: Sequence[str]) -> None:
        """Keep the names of the records that a schema describes, so that publishing does not wait for the worker."""
        self._names[schema_id] = names
        while len(self._names) > NAMES_KEPT_MAX:
            del self._names[next(iter(self._names))]

    async def serialized(self, schema: Schema) -> str:
        """Return a schema of Protobuf as a `FileDescriptorProto` in base64."""
        return (await self._checks.serialized(self._text(await self.read(), schema))).text

    async def _find(
        self, state: SchemaRegistryState, subject: str, prepared: _Prepared, *, deleted: bool = False
    ) -> SubjectVersion | None:
        """Return the latest version of the subject with an equal schema: with the same text, or the same identity."""
        stored = prepared.schema
        found = state.find(subject, stored, deleted=deleted)
        if found is not None:
            return found
        candidates = [
            (each, schema)
            for each in state.versions(subject, deleted=deleted)
            if (schema := state.schema(each.schema_id)).with_text("") == stored.with_text("")
        ]
        if not candidates:
            return None
        texts = [self._text(state, schema) for _, schema in candidates]
        identities = await self._checks.identities(stored.kind, texts, normalize=prepared.normalize)
        equal = [
            each
            for (each, _), identity in zip(candidates, identities, strict=True)
            if identity == prepared.parsed.identity
        ]
        return equal[-1] if equal else None

    async def _check_compatible(self, state: SchemaRegistryState, subject: str, schema: Schema) -> None:
        level = state.compatibility(subject)
        found = await self._incompatibilities(state, subject, schema, None)
        if found:
            raise refusals.refusal(
                refusals.INCOMPATIBLE_SCHEMA,
                "Schema being registered is incompatible with an earlier schema for subject"
                f" '{subject}', details: [{'; '.join(found)}], compatibility: {level}",
            )

    async def _incompatibilities(
        self, state: SchemaRegistryState, subject: str, schema: Schema, version: int | None
    ) -> list[str]:
        level = state.compatibility(subject)
        if level is Compatibility.NONE:
            return []
        if version is not None:
            versions = [state.version(subject, version)]
        else:
            versions = state.versions(subject)
            versions = versions if level.is_transitive else versions[LATEST:]
        earlier = [(each.version, self._text(state, state.schema(each.schema_id))) for each in versions]
        return await self._checks.incompatibilities(level.value, self._text(state, schema), earlier)

    @staticmethod
    def _text(state: SchemaRegistryState, schema: Schema) -> SchemaText:
        return SchemaText(schema.kind, schema.text, state.resolved_references(schema.references))

    def _check_topic(self) -> None:
        if not self._is_own_topic():
            raise refusals.refusal(
                refusals.STORE_ERROR,
                f"topic {SCHEMAS_TOPIC} was created by a client: another schema registry uses it",
            )
