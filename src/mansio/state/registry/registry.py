"""State of the schema registry: what the records of `_schemas` give, and the records that a change adds.

The state changes only by `apply`, in the order of the log. A change is planned against the state (`plan_...`): it
returns the records to append, or raises the refusal that clients get.

Invariants:
* Each id has one content (`Schema`), and a content one id, unless it is imported with another one. An id is never
  assigned again, also when its schema is removed and the broker restarted: the greatest id is kept in a record of its
  own then.
* The number of a new version of a subject is one more than the greatest one that it has, deleted versions included.
* A version to which a version that is not deleted refers is not deleted.
* `revision_of` a subject changes with each change that could alter the outcome of a check for it.

Model: the REST API of Confluent's schema registry.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import CorruptLog
from mansio.state.registry import refusals
from mansio.state.registry.schema import (
    AVRO,
    Compatibility,
    Mode,
    Schema,
    SchemaReference,
    SubjectSettings,
    SubjectVersion,
)
from mansio.wire.internal_records.schema_records import (
    SCHEMAS_TOPIC,
    KeyType,
    SchemaKey,
    encode_key,
    encode_value,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

VERSION_MAX: Final = 2**31 - 1
LATEST: Final = -1
"""Number that stands for the latest version of a subject."""

SCHEMAS_MAX: Final = 200_000
"""Maximum number of schemas."""
SCHEMA_CHARACTERS_MAX: Final = 512 << 20
"""Maximum total length of all schemas: of their texts and what data contracts add."""

CONTRACT_CHARACTERS_MAX: Final = 64 << 10
"""Maximum length of `metadata`, and of the rules, of a schema."""

VERSIONS_MAX: Final = 400_000
"""Maximum number of versions of all subjects."""

SETTINGS_MAX: Final = 200_000
"""Maximum number of subjects with settings, and with a mode."""

REFERENCES_MAX: Final = 100
"""Maximum number of schemas that one schema refers to, directly or not."""

KeyValue = tuple[bytes, bytes | None]

DEFAULT_COMPATIBILITY: Final = Compatibility.BACKWARD


class Revision(NamedTuple):
    """State of a subject and of the settings of all: equal if nothing has changed that matters to a check."""

    subject: int
    settings: int


class RegisteredSchema(NamedTuple):
    """A schema with its id."""

    schema_id: int
    schema: Schema


class SchemaRegistryState:
    """The subjects, schemas and settings of one registry."""

    def __init__(self) -> None:
        self._schemas: dict[int, Schema] = {}
        self._ids: dict[Schema, set[int]] = {}
        """Each content has one id, unless a registry has imported it with a second one."""
        self._by_guid: dict[UUID, Schema] = {}
        self._uses: dict[int, set[tuple[str, int]]] = defaultdict(set)
        """The versions that have a schema, by its id."""
        self._subjects: dict[str, dict[int, SubjectVersion]] = {}
        """The versions of subjects, in ascending order."""
        self._referring: dict[tuple[str, int], set[int]] = defaultdict(set)
        """Ids of the schemas that refer to a version."""
        self._settings: dict[str | None, SubjectSettings] = {}
        self._modes: dict[str | None, Mode] = {}
        self._revisions: dict[str, int] = defaultdict(int)
        self._settings_revision = 0
        self._characters = 0
        self._version_count = 0
        self.last_id = 0
        """The greatest id that was assigned."""

    # ------------------------------------------------------------------ records

    def apply(self, key: SchemaKey, value: dict[str, Any] | None) -> None:
        """Apply a record; None removes what the key names. Raises `CorruptLog` for an invalid value."""
        subject = key.subject
        try:
            if key.kind is KeyType.SCHEMA:
                assert subject is not None
                self._apply_version(subject, key.version, value)
            elif key.kind is KeyType.DELETE_SUBJECT and value is not None:
                assert subject is not None
                self._delete_up_to(subject, int(value["version"]))
            elif key.kind is KeyType.CLEAR_SUBJECT and value is not None:
                assert subject is not None
                for each in [one for one in self.versions(subject, deleted=True) if one.is_deleted]:
                    self._remove_version(subject, each.version)
            elif key.kind is KeyType.CONFIG:
                self._apply_settings(subject, value)
            elif key.kind is KeyType.MODE:
                self._apply_mode(subject, value)
            elif key.kind is KeyType.LAST_ID and value is not None:
                self.last_id = max(self.last_id, int(value["id"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptLog(f"{SCHEMAS_TOPIC}: an invalid value of {key}: {error}") from error

    def _apply_version(self, subject: str, version: int, value: dict[str, Any] | None) -> None:
        self._remove_version(subject, version)
        if value is None:
            return
        schema_id, schema = int(value["id"]), schema_of(value)
        known = self._schemas.get(schema_id)
        if known is None:
            self._add_schema(schema_id, schema)
        elif known != schema:  # only a registry in mode IMPORT writes another content with the same id
            self._drop_schema(schema_id)
            self._add_schema(schema_id, schema)
        self._uses[schema_id].add((subject, version))
        self._version_count += 1
        versions = self._subjects.setdefault(subject, {})
        is_last = not versions or next(reversed(versions)) < version
        versions[version] = SubjectVersion(subject, version, schema_id, bool(value.get("deleted")))
        if not is_last:
            self._subjects[subject] = dict(sorted(versions.items()))
        self.last_id = max(self.last_id, schema_id)
        self._revisions[subject] += 1

    def _delete_up_to(self, subject: str, version: int) -> None:
        for number, one in self._subjects.get(subject, {}).items():
            if number <= version:
                self._subjects[subject][number] = one._replace(is_deleted=True)
        self._revisions[subject] += 1

    def _remove_version(self, subject: str, version: int) -> None:
        versions = self._subjects.get(subject)
        one = None if versions is None else versions.pop(version, None)
        if one is None or versions is None:
            return
        if not versions:
            del self._subjects[subject]
        self._version_count -= 1
        self._revisions[subject] += 1
        uses = self._uses[one.schema_id]
        uses.discard((subject, version))
        if not uses:
            self._drop_schema(one.schema_id)

    def _add_schema(self, schema_id: int, schema: Schema) -> None:
        self._schemas[schema_id] = schema
        self._ids.setdefault(schema, set()).add(schema_id)
        self._by_guid[schema.guid] = schema
        self._characters += schema.characters
        for each in schema.references:
            self._referring[each.subject, each.version].add(schema_id)

    def _drop_schema(self, schema_id: int) -> None:
        schema = self._schemas.pop(schema_id)
        ids = self._ids[schema]
        ids.discard(schema_id)
        if not ids:
            del self._ids[schema]
            del self._by_guid[schema.guid]
        self._characters -= schema.characters
        if not self._uses[schema_id]:
            del self._uses[schema_id]
        for each in schema.references:
            referring = self._referring[each.subject, each.version]
            referring.discard(schema_id)
            if not referring:
                del self._referring[each.subject, each.version]

    def _apply_settings(self, subject: str | None, value: dict[str, Any] | None) -> None:
        if value is None:
            self._settings.pop(subject, None)
        else:
            level = value.get("compatibilityLevel")
            normalize = value.get("normalize")
            self._settings[subject] = SubjectSettings(
                None if level is None else Compatibility(level),
                None if normalize is None else bool(normalize),
                value.get("alias"),
            )
        self._count_settings(subject)

    def _apply_mode(self, subject: str | None, value: dict[str, Any] | None) -> None:
        if value is None:
            self._modes.pop(subject, None)
        else:
            self._modes[subject] = Mode(value["mode"])
        self._count_settings(subject)

    def _count_settings(self, subject: str | None) -> None:
        if subject is None:
            self._settings_revision += 1
        else:
            self._revisions[subject] += 1

    def clear(self) -> None:
        """Remove everything."""
        self.__init__()  # type: ignore[misc]

    # ------------------------------------------------------------------ queries

    def revision_of(self, subject: str) -> Revision:
        """Return the revision of a subject."""
        return Revision(self._revisions.get(subject, 0), self._settings_revision)

    def subjects(self, prefix: str = "", *, deleted: bool = False, deleted_only: bool = False) -> list[str]:
        """Return the names of subjects in alphabetical order. `deleted`: also those of which all versions are deleted;
        `deleted_only`: only those."""
        found = []
        for subject, versions in self._subjects.items():
            if subject.startswith(prefix):
                is_deleted = all(each.is_deleted for each in versions.values())
                if (is_deleted and (deleted or deleted_only)) or (not is_deleted and not deleted_only):
                    found.append(subject)
        return sorted(found)

    def versions(self, subject: str, *, deleted: bool = False) -> list[SubjectVersion]:
        """Return the versions of a subject in ascending order. `deleted`: also the deleted ones."""
        found = self._subjects.get(subject, {}).values()
        return [each for each in found if deleted or not each.is_deleted]

    def require_versions(
        self, subject: str, *, deleted: bool = False, deleted_only: bool = False
    ) -> list[SubjectVersion]:
        """Like `versions`, of a subject that has some. Raises the refusal 40401."""
        found = self.versions(subject, deleted=deleted or deleted_only)
        if deleted_only:
            found = [each for each in found if each.is_deleted]
        if not found:
            raise refusals.subject_not_found(subject)
        return found

    def version(self, subject: str, version: int, *, deleted: bool = False) -> SubjectVersion:
        """Return a version of a subject, or with `LATEST` the latest one. Raises the refusals 40401, 40402."""
        found = self.require_versions(subject, deleted=deleted)
        if version == LATEST:
            return found[-1]
        one = self._subjects[subject].get(version)
        if one is None or (one.is_deleted and not deleted):
            raise refusals.version_not_found(version)
        return one

    def schema(self, schema_id: int) -> Schema:
        """Return the schema with an id, also if all versions with it are deleted. Raises the refusal 40403."""
        found = self._schemas.get(schema_id)
        if found is None:
            raise refusals.schema_not_found(str(schema_id))
        return found

    def id_of_guid(self, guid: UUID) -> int:
        """Return the id of the schema with a GUID. Raises the refusal 40403."""
        schema = self._by_guid.get(guid)
        if schema is None:
            raise refusals.schema_not_found(str(guid))
        return min(self._ids[schema])

    def id_of(self, schema: Schema) -> int | None:
        """Return the id of a schema, None if it is not registered."""
        ids = self._ids.get(schema)
        return min(ids) if ids else None

    def uses(self, schema_id: int, *, deleted: bool = False) -> list[SubjectVersion]:
        """Return the versions that have a schema. `deleted`: also the deleted ones. Raises the refusal 40403."""
        self.schema(schema_id)
        found = [self._subjects[subject][version] for subject, version in sorted(self._uses[schema_id])]
        return [each for each in found if deleted or not each.is_deleted]

    def subjects_of(self, schema: int | UUID) -> frozenset[str]:
        """Return the subjects that have a schema, by its id or GUID, deleted versions included; empty for an unknown
        one."""
        ids: Iterable[int] = (schema,) if isinstance(schema, int) else ()
        if not isinstance(schema, int) and (known := self._by_guid.get(schema)) is not None:
            ids = self._ids[known]
        return frozenset(subject for each in ids for subject, _ in self._uses.get(each, ()))

    def referring(self, subject: str, version: int) -> list[int]:
        """Return the ids of schemas that refer to a version and have a version that is not deleted."""
        found = self._referring.get((subject, version), ())
        return sorted(each for each in found if self.uses(each))

    def all_versions(self, prefix: str, *, deleted: bool, latest_only: bool) -> Iterator[SubjectVersion]:
        """Yield the versions of all subjects whose names begin with a prefix, in order."""
        for subject in sorted(self._subjects):
            if subject.startswith(prefix):
                versions = self.versions(subject, deleted=deleted)
                yield from versions[-1:] if latest_only else versions

    def find(self, subject: str, schema: Schema, *, deleted: bool = False) -> SubjectVersion | None:
        """Return the latest version of a subject with this schema, None if there is none."""
        ids = self._ids.get(schema, ())
        found = [each for each in self.versions(subject, deleted=deleted) if each.schema_id in ids]
        return found[-1] if found else None

    def referenced_subjects(self, references: Iterable[SchemaReference]) -> set[str]:
        """Return the subjects that a schema refers to, directly or not, as far as they exist; those that it refers to
        directly also if they do not."""
        pending, seen = list(references), set[SchemaReference]()
        while pending and len(seen) <= REFERENCES_MAX:
            reference = pending.pop()
            if reference not in seen:
                seen.add(reference)
                one = self._subjects.get(reference.subject, {}).get(reference.version)
                if one is not None:
                    pending += self._schemas[one.schema_id].references
        return {each.subject for each in seen}

    def resolved_references(self, references: Iterable[SchemaReference]) -> list[tuple[str, str]]:
        """Return name and text of the schemas that a schema refers to, directly or not, each after those that it refers
        to itself. Raises the refusal 42201."""
        found: dict[SchemaReference, tuple[str, str]] = {}
        pending: list[tuple[SchemaReference, bool]] = [(each, False) for each in reversed(tuple(references))]
        open_: set[tuple[str, int]] = set()
        while pending:
            reference, is_done = pending.pop()
            place = (reference.subject, reference.version)
            if is_done:
                open_.discard(place)
                found[reference] = (reference.name, self._referenced(reference).text)
                continue
            if reference in found:
                continue
            if place in open_ or len(found) + len(open_) >= REFERENCES_MAX:
                raise refusals.invalid_schema(
                    f"references that lead in a circle, or to more than {REFERENCES_MAX} schemas"
                )
            open_.add(place)
            pending.append((reference, True))
            pending += [(each, False) for each in reversed(self._referenced(reference).references)]
        return list(found.values())

    def _referenced(self, reference: SchemaReference) -> Schema:
        one = self._subjects.get(reference.subject, {}).get(reference.version)
        if one is None:
            raise refusals.invalid_schema(
                f"no schema for the reference {reference.name!r}: subject {reference.subject!r} has no version"
                f" {reference.version}"
            )
        return self._schemas[one.schema_id]

    # ------------------------------------------------------------------ settings

    def compatibility(self, subject: str | None) -> Compatibility:
        """Return the level of a subject, or of all: its own or the general one."""
        for place in (subject, None):
            settings = self._settings.get(place)
            if settings is not None and settings.compatibility is not None:
                return settings.compatibility
        return DEFAULT_COMPATIBILITY

    def normalizes(self, subject: str) -> bool:
        """Whether schemas of a subject are normalized without a request for it."""
        for place in (subject, None):
            settings = self._settings.get(place)
            if settings is not None and settings.normalize is not None:
                return settings.normalize
        return False

    def subject_of_alias(self, subject: str) -> str:
        """Return the subject for which a name is an alias, or the name."""
        settings = self._settings.get(subject)
        return subject if settings is None or not settings.alias else settings.alias

    def settings(self, subject: str | None, *, default: bool = False) -> SubjectSettings:
        """Return the settings of a subject, or of all. `default`: of a subject without own ones those of all. Raises
        the refusal 40408."""
        found = self._settings.get(subject)
        if found is None and (subject is None or default):
            found = self._settings.get(None, SubjectSettings())
        if found is None:
            raise refusals.refusal(
                refusals.NO_SUBJECT_COMPATIBILITY,
                f"Subject '{subject}' does not have subject-level compatibility configured",
            )
        if found.compatibility is None:
            found = found._replace(compatibility=self.compatibility(subject))
        return found

    def mode(self, subject: str | None, *, default: bool = False) -> Mode:
        """Return the mode of a subject, or of all. `default`: of a subject without own one that of all. Raises the
        refusal 40409."""
        found = self._modes.get(subject)
        if found is None and (subject is None or default):
            found = self._modes.get(None, Mode.READWRITE)
        if found is None:
            raise refusals.refusal(
                refusals.NO_SUBJECT_MODE, f"Subject '{subject}' does not have subject-level mode configured"
            )
        return found

    def _effective_mode(self, subject: str | None) -> Mode:
        """Return the mode that counts for a subject; None: for the settings of all subjects."""
        general = self._modes.get(None, Mode.READWRITE)
        return general if general is Mode.READONLY_OVERRIDE else self._modes.get(subject, general)

    def is_importing(self, subject: str) -> bool:
        """Whether schemas of a subject are registered with their ids."""
        return self._effective_mode(subject) is Mode.IMPORT

    def check_writable(self, subject: str | None) -> None:
        """Raise the refusal 42205 if a subject is read-only; None: the settings of all subjects."""
        if self._effective_mode(subject) in (Mode.READONLY, Mode.READONLY_OVERRIDE):
            name = "The registry" if subject is None else f"Subject {subject}"
            raise refusals.not_permitted(f"{name} is in read-only mode")

    # ------------------------------------------------------------------ changes

    def plan_registration(
        self, subject: str, schema: Schema, *, schema_id: int = 0, version: int = 0
    ) -> tuple[list[KeyValue], SubjectVersion]:
        """Plan the registration of a schema that the subject does not have. `schema_id`, `version`: those of an import,
        0 for the next ones. Return the records and the version. Raises the refusals 42201, 42205."""
        self.check_writable(subject)
        if (schema_id or version) and not self.is_importing(subject):
            raise refusals.not_permitted(f"Subject {subject} is not in import mode")
        self.resolved_references(schema.references)  # they may have been removed since they were checked
        known_id = self.id_of(schema)
        if schema_id:
            content = self._schemas.get(schema_id)
            if content is not None and content != schema:
                raise refusals.not_permitted(f"Overwrite new schema with id {schema_id} is not permitted.")
        versions = self._subjects.get(subject, {})
        schema_id = schema_id or known_id or self.last_id + 1
        version = version or (next(reversed(versions)) + 1 if versions else 1)
        if not 1 <= version <= VERSION_MAX or not 1 <= schema_id <= VERSION_MAX:
            raise refusals.invalid_schema("ids and versions are numbers from 1 to 2^31 - 1")
        self._check_room(schema, is_new=schema_id not in self._schemas)
        one = SubjectVersion(subject, version, schema_id, is_deleted=False)
        records = [self._version_record(one, schema)]
        replaced = versions.get(version)
        if replaced is not None:
            self._check_unreferenced(replaced)
            records = self._last_id_records([replaced]) + records
        return records, one

    def _check_room(self, schema: Schema, *, is_new: bool) -> None:
        if max(len(schema.metadata), len(schema.rules)) > CONTRACT_CHARACTERS_MAX:
            raise refusals.invalid_schema(
                f"metadata and ruleSet have at most {CONTRACT_CHARACTERS_MAX} characters each"
            )
        is_full = self._version_count >= VERSIONS_MAX or (
            is_new
            and (
                len(self._schemas) >= SCHEMAS_MAX
                or self._characters + schema.characters > SCHEMA_CHARACTERS_MAX
            )
        )
        if is_full:
            raise refusals.invalid_schema(
                f"the registry is full: it has {self._version_count} versions, and {len(self._schemas)} schemas of"
                f" {self._characters} characters"
            )

    def _check_unreferenced(self, one: SubjectVersion) -> None:
        if self.referring(one.subject, one.version):
            raise refusals.refusal(
                refusals.REFERENCE_EXISTS,
                "One or more references exist to the schema"
                f" {{magic=1,keytype=SCHEMA,subject={one.subject},version={one.version}}}.",
            )

    def _last_id_records(self, removed: Iterable[SubjectVersion]) -> list[KeyValue]:
        """Return the record that keeps the greatest id, if one of the versions that are removed has it."""
        if all(each.schema_id != self.last_id for each in removed):
            return []
        return [(encode_key(SchemaKey(KeyType.LAST_ID)), encode_value({"id": self.last_id}))]

    def plan_deletion(
        self, subject: str, version: int | None = None, *, permanent: bool = False
    ) -> tuple[list[KeyValue], list[int]]:
        """Plan the deletion of a version of a subject, of the latest one (`LATEST`) or of all (None). Return the
        records and the numbers of the deleted versions. Raises the refusals 40401 to 40407, 42205, 42206."""
        self.check_writable(subject)
        chosen = self._chosen_for_deletion(subject, version, permanent=permanent)
        for each in chosen:
            self._check_unreferenced(each)
        numbers = [each.version for each in chosen]
        if not permanent:
            if version is None:  # one record, however large the versions are
                value = encode_value({"subject": subject, "version": numbers[-1]})
                return [(encode_key(SchemaKey(KeyType.DELETE_SUBJECT, subject)), value)], numbers
            deleted = chosen[0]._replace(is_deleted=True)
            return [self._version_record(deleted, self._schemas[deleted.schema_id])], numbers
        records = self._last_id_records(chosen)
        records += [(encode_key(SchemaKey(KeyType.SCHEMA, subject, each)), None) for each in numbers]
        if version is None:
            records.append((encode_key(SchemaKey(KeyType.DELETE_SUBJECT, subject)), None))
            records += [
                (encode_key(SchemaKey(kind, subject)), None)
                for kind, known in ((KeyType.CONFIG, self._settings), (KeyType.MODE, self._modes))
                if subject in known
            ]
        return records, numbers

    def _chosen_for_deletion(
        self, subject: str, version: int | None, *, permanent: bool
    ) -> list[SubjectVersion]:
        every = self.require_versions(subject, deleted=True)
        active = [each for each in every if not each.is_deleted]
        if version is None:
            if permanent and active:
                raise refusals.refusal(
                    refusals.SUBJECT_NOT_SOFT_DELETED,
                    f"Subject '{subject}' was not deleted first before being permanently deleted",
                )
            if not permanent and not active:
                raise refusals.refusal(
                    refusals.SUBJECT_SOFT_DELETED,
                    f"Subject '{subject}' was soft deleted.Set permanent=true to delete permanently",
                )
            return every if permanent else active
        if version == LATEST:
            one = self.version(subject, LATEST, deleted=permanent)
        else:
            one = self.version(subject, version, deleted=True)
        if permanent and not one.is_deleted:
            raise refusals.refusal(
                refusals.VERSION_NOT_SOFT_DELETED,
                f"Subject '{subject}' Version {one.version} was not deleted first before being permanently"
                " deleted",
            )
        if not permanent and one.is_deleted:
            raise refusals.refusal(
                refusals.VERSION_SOFT_DELETED,
                f"Subject '{subject}' Version {one.version} was soft deleted.Set permanent=true to delete"
                " permanently",
            )
        return [one]

    def plan_settings(self, subject: str | None, changed: SubjectSettings) -> list[KeyValue]:
        """Plan a change of settings; a setting that is None stays as it is. Raises the refusal 42205."""
        self.check_writable(subject)
        self._check_settings_room(subject, self._settings)
        known = self._settings.get(subject, SubjectSettings())
        merged = known._replace(
            **{name: value for name, value in changed._asdict().items() if value is not None}
        )
        return [(encode_key(SchemaKey(KeyType.CONFIG, subject)), encode_value(merged.fields()))]

    @staticmethod
    def _check_settings_room(subject: str | None, known: Mapping[str | None, object]) -> None:
        if subject not in known and len(known) >= SETTINGS_MAX:
            raise refusals.not_permitted(f"{SETTINGS_MAX} subjects have settings of their own")

    def plan_settings_deletion(self, subject: str | None) -> tuple[list[KeyValue], SubjectSettings]:
        """Plan that a subject, or all, have no settings of their own. Return the records and the settings before.
        Raises the refusals 40401, 42205."""
        self.check_writable(subject)
        if subject is not None and subject not in self._settings:
            raise refusals.subject_not_found(subject)
        found = self.settings(subject)
        return [(encode_key(SchemaKey(KeyType.CONFIG, subject)), None)], found

    def plan_mode(self, subject: str | None, mode: Mode, *, force: bool = False) -> list[KeyValue]:
        """Plan a change of the mode. `force`: to IMPORT although there are schemas. Raises the refusals 42204,
        42205."""
        if subject is not None and mode is Mode.READONLY_OVERRIDE:
            raise refusals.refusal(refusals.INVALID_MODE, "READONLY_OVERRIDE is a mode of all subjects only")
        if mode is Mode.IMPORT and not force:
            exists = self.subjects() if subject is None else self.versions(subject)
            before = self._modes.get(subject, self._modes.get(None, Mode.READWRITE))
            if exists and before is not Mode.IMPORT:
                raise refusals.not_permitted("Cannot import since found existing subjects")
        self._check_settings_room(subject, self._modes)
        return [(encode_key(SchemaKey(KeyType.MODE, subject)), encode_value({"mode": mode.value}))]

    def plan_mode_deletion(self, subject: str | None) -> tuple[list[KeyValue], Mode]:
        """Plan that a subject, or all, have no mode of their own. Return the records and the mode before. Raises the
        refusal 40401."""
        if subject is None:
            found = self.mode(None)
        elif subject in self._modes:
            found = self._modes[subject]
        else:
            raise refusals.subject_not_found(subject)
        return [(encode_key(SchemaKey(KeyType.MODE, subject)), None)], found

    def _version_record(self, one: SubjectVersion, schema: Schema) -> KeyValue:
        fields = schema.fields()
        text = fields.pop("schema")
        value = {
            "subject": one.subject,
            "version": one.version,
            "id": one.schema_id,
            "guid": str(schema.guid),
            **fields,
            "schema": text,
            "deleted": one.is_deleted,
        }
        return encode_key(SchemaKey(KeyType.SCHEMA, one.subject, one.version)), encode_value(value)


def schema_of(value: dict[str, Any]) -> Schema:
    """Return the schema of the value of a record, or of a body of the REST API. Raises `KeyError`, `TypeError`,
    `ValueError`."""
    text, kind = value["schema"], value.get("schemaType") or AVRO
    if not isinstance(text, str) or not isinstance(kind, str):
        raise TypeError("the schema and its type are strings")
    return Schema(
        kind,
        text,
        references_of(value.get("references") or ()),
        _json(value.get("metadata")),
        _json(value.get("ruleSet")),
    )


def references_of(found: Sequence[dict[str, Any]]) -> tuple[SchemaReference, ...]:
    """Return the references of a record or body. Raises `KeyError`, `TypeError`, `ValueError`."""
    return tuple(
        SchemaReference(str(each["name"]), str(each["subject"]), int(each["version"])) for each in found
    )


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":")) if value else ""
