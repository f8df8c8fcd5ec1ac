"""Compatibility of Avro schemas: a table of cases, and readers that decode what they are found compatible with."""

from __future__ import annotations

import io
import json
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.serde.compatibility import avro as checker
from mansio.serde.compatibility.avro import incompatibilities
from mansio.serde.errors import InvalidSchema
from mansio.serde.formats.avro import parse
from support.avro_schemas import SchemaGenerator, ValueGenerator, evolved
from support.tiers import examples

if TYPE_CHECKING:
    from mansio.serde.definition import Incompatibility

CASES = json.loads((Path(__file__).parent / "avro_cases.json").read_text())
"""Cases whose verdicts were compared with Karapace's. `docs/reference/schema-compatibility.md` has the differences."""

PAIRS = examples(test=15, full=500)


def reasons(reader: Any, writer: Any) -> list[Incompatibility]:
    return incompatibilities(parse(json.dumps(reader)), parse(json.dumps(writer)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_verdict_of_a_case(case: dict[str, Any]) -> None:
    found = reasons(case["reader"], case["writer"])
    assert [f"{one.rule} {one.path}" for one in found] == case["faults"]
    assert all(one.message and "\n" not in one.message for one in found)


@settings(max_examples=PAIRS)
@given(st.integers(0, 1 << 30))
def test_reader_that_is_compatible_decodes_what_the_writer_wrote(seed: int) -> None:
    random = Random(seed)
    writer = SchemaGenerator(random).record()
    for reader in (evolved(writer, random) for _ in range(20)):
        if _is_valid(reader) and not reasons(reader, writer):
            break
    else:
        return
    written, read = fastavro.parse_schema(writer), fastavro.parse_schema(reader)
    for _ in range(3):
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, written, ValueGenerator(random, writer).value())
        size = stream.tell()
        stream.seek(0)
        fastavro.schemaless_reader(stream, written, read)
        assert stream.tell() == size


def _is_valid(schema: Any) -> bool:
    try:
        parse(json.dumps(schema))
    except InvalidSchema:
        return False
    return True


@settings(max_examples=PAIRS)
@given(st.integers(0, 1 << 30))
def test_schema_is_compatible_with_itself_and_with_its_normalized_form(seed: int) -> None:
    schema = parse(json.dumps(SchemaGenerator(Random(seed)).record()))
    normalized = parse(schema.text, normalize=True)
    assert parse(normalized.text, normalize=True).text == normalized.text
    for reader, writer in ((schema, schema), (schema, normalized), (normalized, schema)):
        assert incompatibilities(reader, writer) == []


def _chain(length: int, last: str) -> Any:
    """A record whose fields define types, each of which contains the one before."""
    fields = []
    for index in range(length):
        part = f"C{index - 1}" if index else last
        kind = {"type": "record", "name": f"C{index}", "fields": [{"name": "x", "type": part}]}
        fields.append({"name": f"f{index}", "type": kind})
    return {"type": "record", "name": "R", "fields": fields}


@pytest.mark.full
def test_long_chains_of_types_are_compared_without_recursion() -> None:
    found = reasons(_chain(5_000, "int"), _chain(5_000, "string"))
    assert [one.rule for one in found] == ["TYPE_MISMATCH"]


def _wide(count: int, kind: str) -> Any:
    field = {"name": "a", "type": kind}
    return [{"type": "record", "name": f"R{index}", "fields": [field]} for index in range(count)]


@pytest.mark.full
def test_wide_unions_are_compared_by_name() -> None:
    assert reasons(_wide(8_000, "long"), _wide(8_000, "int")) == []
    assert len(reasons(_wide(8_000, "int"), _wide(8_000, "long"))) == checker.REPORTED_MAX


def _ring(length: int, last: str) -> Any:
    """Records that contain each other in a ring, all under one name without their namespaces."""
    schema: Any = None
    for index in reversed(range(length)):
        part = schema if schema is not None else "n0.R"
        fields = [{"name": "x", "type": part}, {"name": "y", "type": last if index == 0 else "int"}]
        schema = {"type": "record", "name": f"n{index}.R", "fields": fields}
    return schema


def test_rings_of_different_lengths_are_compared_once_per_pair() -> None:
    assert reasons(_ring(36, "int"), _ring(35, "int")) == []
    assert len(reasons(_ring(36, "string"), _ring(35, "int"))) == 1


def test_schemas_with_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "PAIRS_MAX", 1_000)
    with pytest.raises(InvalidSchema, match="too large"):
        reasons(_ring(36, "int"), _ring(35, "int"))
