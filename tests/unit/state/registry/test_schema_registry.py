"""The state of the schema registry: ids and versions are assigned once, and the log gives the same state again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import CorruptLog, SchemaRegistryRefusal
from mansio.state.registry.registry import LATEST, SchemaRegistryState
from mansio.state.registry.schema import Compatibility, Mode, Schema, SchemaReference, SubjectSettings
from mansio.wire.internal_records.schema_records import (
    KeyType,
    SchemaKey,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    KeyValue = tuple[bytes, bytes | None]

SUBJECTS = ("a", "b")


def replay(records: Iterable[KeyValue], state: SchemaRegistryState | None = None) -> SchemaRegistryState:
    state = state or SchemaRegistryState()
    for key, value in records:
        decoded = decode_key(key)
        assert decoded is not None
        state.apply(decoded, None if value is None else decode_value(value))
    return state


def compacted(records: list[KeyValue]) -> list[KeyValue]:
    """The last record of each key, without deletions: what compaction leaves of a log in the end."""
    last = {key: number for number, (key, _) in enumerate(records)}
    return [each for number, each in enumerate(records) if last[each[0]] == number and each[1] is not None]


def contents(state: SchemaRegistryState) -> dict[str, Any]:
    """All that clients can see."""
    versions = [
        (each, state.schema(each.schema_id))
        for each in state.all_versions("", deleted=True, latest_only=False)
    ]
    return {
        "versions": versions,
        "uses": {each.schema_id: state.uses(each.schema_id, deleted=True) for each, _ in versions},
        "ids": {schema.guid: state.id_of_guid(schema.guid) for _, schema in versions},
        "referring": {each: state.referring(each.subject, each.version) for each, _ in versions},
        "settings": [state.settings(each, default=True) for each in (None, *SUBJECTS)],
        "modes": [state.mode(each, default=True) for each in (None, *SUBJECTS)],
        "last id": state.last_id,
    }


class Registry:
    """A registry and its log."""

    def __init__(self) -> None:
        self.state = SchemaRegistryState()
        self.log: list[KeyValue] = []
        self.given: dict[int, Schema] = {}

    def append(self, records: list[KeyValue]) -> None:
        self.log += records
        replay(records, self.state)

    def register(self, subject: str, text: str, refers_to: str | None = None) -> tuple[int, int]:
        """Register a schema, and return its version and id."""
        references: tuple[SchemaReference, ...] = ()
        if refers_to is not None and (versions := self.state.versions(refers_to)):
            references = (SchemaReference("other", refers_to, versions[-1].version),)
        schema = Schema("AVRO", text, references)
        found = self.state.find(subject, schema)
        if found is None:
            known_ids = {
                each.schema_id for each in self.state.all_versions("", deleted=True, latest_only=False)
            }
            records, found = self.state.plan_registration(subject, schema)
            if found.schema_id not in known_ids:
                assert found.schema_id not in self.given, "an id is assigned once"
            self.append(records)
        self.given[found.schema_id] = schema
        return found.version, found.schema_id

    def delete(self, subject: str, version: int | None, *, permanent: bool) -> None:
        records, _ = self.state.plan_deletion(subject, version, permanent=permanent)
        self.append(records)


texts = st.sampled_from(["1", "2", "3"])
subjects = st.sampled_from(SUBJECTS)
steps = st.one_of(
    st.tuples(st.just("register"), subjects, texts, st.none() | subjects),
    st.tuples(st.just("delete"), subjects, st.none() | st.integers(1, 4) | st.just(LATEST), st.booleans()),
    st.tuples(st.just("level"), st.none() | subjects, st.sampled_from(Compatibility)),
    st.tuples(st.just("unset"), st.none() | subjects),
    st.tuples(st.just("mode"), st.none() | subjects, st.sampled_from(Mode)),
)


def take(registry: Registry, step: tuple[Any, ...]) -> None:
    state = registry.state
    name, *given_ = step
    if name == "register":
        registry.register(*given_)
    elif name == "delete":
        registry.delete(given_[0], given_[1], permanent=given_[2])
    elif name == "level":
        registry.append(state.plan_settings(given_[0], SubjectSettings(given_[1])))
    elif name == "unset":
        registry.append(state.plan_settings_deletion(given_[0])[0])
    else:
        registry.append(state.plan_mode(given_[0], given_[1]))


@given(st.lists(steps, max_size=30))
def test_the_log_and_what_compaction_leaves_of_it_give_the_same_state(history: list[tuple[Any, ...]]) -> None:
    registry = Registry()
    for step in history:
        before = contents(registry.state)
        try:
            take(registry, step)
        except SchemaRegistryRefusal:
            assert contents(registry.state) == before, "a refused change changes nothing"
    expected = contents(registry.state)
    assert contents(replay(registry.log)) == expected
    assert contents(replay(compacted(registry.log))) == expected
    for each in registry.state.all_versions("", deleted=False, latest_only=False):
        for reference in registry.state.schema(each.schema_id).references:
            assert not registry.state.version(reference.subject, reference.version, deleted=True).is_deleted


def test_an_id_is_not_assigned_again_after_its_schema_is_removed_and_the_log_compacted() -> None:
    registry = Registry()
    registry.register("a", "1")
    registry.register("a", "2")
    for permanent in (False, True):
        registry.delete("a", 2, permanent=permanent)
    registry.state = replay(compacted(registry.log))
    with pytest.raises(SchemaRegistryRefusal, match="Schema 2 not found"):
        registry.state.schema(2)
    assert registry.register("a", "3") == (2, 3)


def test_equal_schemas_of_two_subjects_have_one_id_and_a_deleted_version_gives_a_new_one() -> None:
    registry = Registry()
    assert registry.register("a", "1") == (1, 1)
    assert registry.register("b", "1") == (1, 1)
    registry.delete("a", None, permanent=False)
    assert registry.state.uses(1) == registry.state.versions("b")
    assert registry.register("a", "1") == (2, 1)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda one: one.delete("none", None, permanent=False), 40401),
        (lambda one: one.delete("a", 7, permanent=False), 40402),
        (lambda one: one.state.schema(9), 40403),
        (lambda one: one.delete("gone", None, permanent=False), 40404),
        (lambda one: one.delete("a", None, permanent=True), 40405),
        (lambda one: one.delete("gone", 1, permanent=False), 40406),
        (lambda one: one.delete("a", 1, permanent=True), 40407),
        (lambda one: one.state.settings("a"), 40408),
        (lambda one: one.state.mode("a"), 40409),
        (lambda one: one.delete("referred", 1, permanent=False), 42206),
        (lambda one: one.state.plan_registration("a", Schema("AVRO", "9"), schema_id=7), 42205),
        (lambda one: one.state.plan_mode(None, Mode.IMPORT), 42205),
        (lambda one: one.state.plan_mode("a", Mode.READONLY_OVERRIDE), 42204),
        (lambda one: one.state.resolved_references([SchemaReference("x", "none", 1)]), 42201),
        (lambda one: one.register("read-only", "1"), 42205),
    ],
)
def test_a_refusal_has_the_code_of_the_rest_api(change: Callable[[Registry], object], code: int) -> None:
    registry = Registry()
    registry.register("a", "1")
    registry.register("gone", "2")
    registry.delete("gone", None, permanent=False)
    registry.register("referred", "3")
    registry.register("referring", "4", refers_to="referred")
    registry.append(registry.state.plan_mode("read-only", Mode.READONLY))
    with pytest.raises(SchemaRegistryRefusal) as refused:
        change(registry)
    assert refused.value.code == code


def test_a_read_only_registry_keeps_the_settings_of_all_subjects() -> None:
    registry = Registry()
    registry.append(registry.state.plan_mode("writable", Mode.READWRITE))
    registry.append(registry.state.plan_mode(None, Mode.READONLY))
    for change in (
        lambda: registry.state.plan_settings(None, SubjectSettings(Compatibility.NONE)),
        lambda: registry.state.plan_settings_deletion(None),
    ):
        with pytest.raises(SchemaRegistryRefusal, match="The registry is in read-only mode"):
            change()
    registry.append(registry.state.plan_settings("writable", SubjectSettings(Compatibility.NONE)))
    registry.append(registry.state.plan_mode(None, Mode.READWRITE))
    registry.append(registry.state.plan_settings(None, SubjectSettings(Compatibility.NONE)))


def test_references_are_resolved_each_after_its_own_and_loops_are_refused() -> None:
    registry = Registry()
    registry.register("c", "1")
    registry.register("b", "2", refers_to="c")
    found = registry.state.resolved_references(
        [SchemaReference("b", "b", 1), SchemaReference("c", "c", 1), SchemaReference("again", "b", 1)]
    )
    assert found == [("other", "1"), ("b", "2"), ("c", "1"), ("again", "2")]
    loop = Schema("AVRO", "3", (SchemaReference("self", "l", 1),))
    registry.append(registry.state.plan_mode("l", Mode.IMPORT))
    registry.append(registry.state.plan_registration("l", Schema("AVRO", "4"))[0])
    registry.append(registry.state.plan_registration("l", loop, version=1)[0])
    with pytest.raises(SchemaRegistryRefusal, match="circle"):
        registry.state.resolved_references(loop.references)


def test_a_reference_that_was_removed_during_a_check_is_refused() -> None:
    registry = Registry()
    registry.register("a", "1")
    schema = Schema("AVRO", "2", (SchemaReference("a", "a", 1),))
    for permanent in (False, True):
        registry.delete("a", None, permanent=permanent)
    with pytest.raises(SchemaRegistryRefusal, match="no schema for the reference"):
        registry.state.plan_registration("b", schema)


def test_a_content_that_was_imported_twice_is_found_until_its_last_id_is_removed() -> None:
    registry = Registry()
    registry.append(registry.state.plan_mode(None, Mode.IMPORT))
    schema = Schema("AVRO", "1")
    for subject, schema_id in (("a", 50), ("b", 60)):
        registry.append(registry.state.plan_registration(subject, schema, schema_id=schema_id)[0])
    for permanent in (False, True):
        registry.delete("a", None, permanent=permanent)
    assert registry.state.id_of(schema) == registry.state.id_of_guid(schema.guid) == 60
    assert contents(replay(registry.log)) == contents(registry.state)


def test_the_next_registry_of_an_import_continues_after_its_ids() -> None:
    registry = Registry()
    registry.append(registry.state.plan_mode(None, Mode.IMPORT))
    registry.append(registry.state.plan_registration("a", Schema("AVRO", "1"), schema_id=100, version=7)[0])
    registry.append(registry.state.plan_mode(None, Mode.READWRITE))
    assert registry.register("a", "2") == (8, 101)


def test_a_subject_that_another_registry_deletes_is_deleted() -> None:
    """Older registries write one record for all versions of a subject."""
    registry = Registry()
    registry.register("a", "1")
    registry.register("a", "2")
    deleted = encode_value({"subject": "a", "version": 2})
    registry.append([(encode_key(SchemaKey(KeyType.DELETE_SUBJECT, "a")), deleted)])
    assert registry.state.versions("a") == []
    assert registry.register("a", "1") == (3, 1)
    registry.append([(encode_key(SchemaKey(KeyType.CLEAR_SUBJECT, "a")), encode_value({"subject": "a"}))])
    assert [each.version for each in registry.state.versions("a", deleted=True)] == [3]


@pytest.mark.parametrize(
    "record",
    [
        (b"no json", b"{}"),
        (b"[]", b"{}"),
        (b"{}", b"{}"),
        (b'{"keytype":"SCHEMA","magic":1}', b"{}"),
        (b'{"keytype":"SCHEMA","subject":"a","version":1,"magic":1}', b'{"id":"x"}'),
        (b'{"keytype":"MODE","subject":null,"magic":0}', b'{"mode":"OTHER"}'),
    ],
)
def test_a_record_that_is_not_valid_is_damage_and_never_a_change(record: KeyValue) -> None:
    with pytest.raises(CorruptLog):
        replay([record])


def test_a_key_of_an_unknown_type_is_skipped() -> None:
    assert decode_key(b'{"keytype":"CONTEXT","magic":0}') is None
