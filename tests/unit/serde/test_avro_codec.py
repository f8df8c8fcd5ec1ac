"""Avro values: what fastavro writes is read, what is written fastavro reads, and hostile bytes are typed errors."""

from __future__ import annotations

import io
import json
import resource
import string
import time
from datetime import UTC, date, datetime
from datetime import time as day_time
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.serde.codecs.avro import AvroCodec
from mansio.serde.codecs.paths import VALUE_DEPTH_MAX
from mansio.serde.definition import ReferencedSchema
from mansio.serde.errors import MalformedValue, UnsupportedSchema

LINKED = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("null", st.none()),
    ("boolean", st.booleans()),
    ("int", st.integers(-(1 << 31), (1 << 31) - 1)),
    ("long", st.integers(-(1 << 63), (1 << 63) - 1)),
    ("float", st.floats(allow_nan=False, width=32)),
    ("double", st.floats(allow_nan=False)),
    ("bytes", st.binary()),
    ("string", st.text(st.characters(exclude_categories=["Cs"]))),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        st.integers(-(10**9) + 1, 10**9 - 1).map(lambda one: Decimal(one).scaleb(-2)),
    ),
    ({"type": "int", "logicalType": "date"}, st.dates()),
    ({"type": "long", "logicalType": "time-micros"}, st.times()),
    (
        {"type": "long", "logicalType": "timestamp-micros"},
        st.datetimes(timezones=st.just(UTC)),
    ),
    ({"type": "long", "logicalType": "local-timestamp-micros"}, st.datetimes()),
    ({"type": "string", "logicalType": "uuid"}, st.uuids()),
]


@st.composite
def schemas(draw: st.DrawFn, depth: int = 3) -> tuple[Any, st.SearchStrategy[Any]]:
    """A schema, and a strategy of its values."""
    number = iter(range(10_000))

    def build(level: int) -> tuple[Any, st.SearchStrategy[Any]]:
        what = draw(st.sampled_from(["leaf", "leaf", "array", "map", "record", "union", "enum", "fixed"]))
        name = f"n{depth - level}.T{next(number)}"
        if what == "enum":
            return {"type": "enum", "name": name, "symbols": ["A", "B"]}, st.sampled_from(["A", "B"])
        if what == "fixed":
            return {"type": "fixed", "name": name, "size": 3}, st.binary(min_size=3, max_size=3)
        if what == "leaf" or not level:
            return draw(st.sampled_from(LEAVES))
        if what == "array":
            schema, values = build(level - 1)
            return {"type": "array", "items": schema}, st.lists(values, max_size=3)
        if what == "map":
            schema, values = build(level - 1)
            return {"type": "map", "values": schema}, st.dictionaries(st.text("abc"), values, max_size=3)
        if what == "union":
            schema, values = build(level - 1)
            if isinstance(schema, list) or schema == "null":
                return schema, values
            return ["null", schema], st.none() | values
        fields = {one: build(level - 1) for one in string.ascii_lowercase[: draw(st.integers(0, 4))]}
        return {
            "type": "record",
            "name": name,
            "fields": [{"name": one, "type": schema} for one, (schema, _) in fields.items()],
        }, st.fixed_dictionaries({one: values for one, (_, values) in fields.items()})

    return build(depth)


def written(schema: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def read(schema: Any, data: bytes) -> Any:
    return fastavro.schemaless_reader(io.BytesIO(data), fastavro.parse_schema(schema), None)


def codec(schema: Any, *references: Any) -> AvroCodec:
    return AvroCodec(json.dumps(schema), [ReferencedSchema("r", json.dumps(one)) for one in references])


@given(st.data())
def test_fastavro_reads_what_is_written_and_the_other_way_round(data: st.DataObject) -> None:
    schema, values = data.draw(schemas())
    value, one = data.draw(values), codec(schema)
    encoded = one.encode(value)
    assert encoded == written(schema, value)
    assert one.decode(encoded) == read(schema, encoded) == value


@given(st.data())
def test_plain_json_leads_back_to_the_same_bytes(data: st.DataObject) -> None:
    schema, values = data.draw(schemas())
    value, one = data.draw(values), codec(schema)
    encoded = one.encode(value)
    assert one.encode_json(json.loads(json.dumps(one.decode_json(encoded)))) == encoded


@pytest.mark.full
@given(st.data(), st.binary(max_size=60))
def test_any_bytes_are_decoded_or_malformed(data: st.DataObject, content: bytes) -> None:
    schema, _ = data.draw(schemas())
    one = codec(schema)
    for decode in (one.decode, one.decode_json):
        try:
            decode(content)
        except MalformedValue as error:
            message = str(error)
        else:
            continue
        assert message.startswith("$")
        assert "\n" not in message


def test_logical_types_are_plain_json() -> None:
    one = codec(
        {
            "type": "record",
            "name": "All",
            "fields": [
                {"name": "raw", "type": "bytes"},
                {
                    "name": "price",
                    "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2},
                },
                {"name": "day", "type": {"type": "int", "logicalType": "date"}},
                {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
                {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
                {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
                {"name": "ratio", "type": "double"},
            ],
        }
    )
    plain = {
        "raw": "/w==",
        "price": "12.50",
        "day": "2026-01-31",
        "at": "2026-01-31T12:00:00+00:00",
        "clock": "12:30:00",
        "id": "00000000-0000-0000-0000-000000000001",
        "ratio": "NaN",
    }
    encoded = one.encode_json(plain)
    assert one.decode_json(encoded) == plain
    python = one.decode(encoded)
    assert python.pop("ratio") != 0
    assert python == {
        "raw": b"\xff",
        "price": Decimal("12.50"),
        "day": date(2026, 1, 31),
        "at": datetime(2026, 1, 31, 12, tzinfo=UTC),
        "clock": day_time(12, 30),
        "id": UUID(int=1),
    }
    numbers = {**plain, "price": 12.5, "day": 20484, "at": 1769860800000, "clock": 45_000_000}
    assert one.encode_json(numbers) == encoded


UNION = [
    "null",
    "string",
    "long",
    {"type": "record", "name": "n.A", "fields": [{"name": "x", "type": "int"}]},
    {"type": "record", "name": "n.B", "fields": [{"name": "x", "type": "int"}]},
    {"type": "map", "values": "int"},
]


@pytest.mark.parametrize(
    ("plain", "branch", "shown"),
    [
        (None, None, None),
        ("a", ("string", "a"), "a"),
        ({"string": "a"}, ("string", "a"), "a"),
        (5, ("long", 5), 5),
        ({"n.B": {"x": 1}}, ("n.B", {"x": 1}), {"n.B": {"x": 1}}),
        ({"y": 1, "z": 2}, ("map", {"y": 1, "z": 2}), {"y": 1, "z": 2}),
        ({"string": 3}, ("map", {"string": 3}), {"string": 3}),
    ],
)
def test_a_union_needs_a_tag_only_where_it_is_ambiguous(plain: Any, branch: Any, shown: Any) -> None:
    one = codec(UNION)
    encoded = one.encode_json(plain)
    assert encoded == one.encode(branch) == written(UNION, branch)
    assert one.decode_json(encoded) == shown


def test_an_ambiguous_value_of_a_union_is_refused() -> None:
    for encode in (codec(UNION).encode, codec(UNION).encode_json):
        with pytest.raises(
            MalformedValue, match=r"^\$ fits several branches of the union, n.A, n.B, map: name"
        ):
            encode({"x": 1})


@pytest.mark.parametrize(
    ("schema", "value", "message"),
    [
        ("int", 1 << 31, r"^\$ does not fit into an Avro int"),
        ("int", True, r"^\$ is a boolean, not an int"),
        ("int", 1.5, r"^\$ is of type float, not an int"),
        ("string", b"a", r"^\$ is of type bytes, not a string"),
        ({"type": "array", "items": "int"}, [1, "a"], r"^\$\[1\] is a string, not an int"),
        ({"type": "map", "values": ["null", "int"]}, {"k": "a"}, r"^\$\.k is a string, not an int"),
        (LINKED, {"next": {"next": {}}}, r"^\$\.next\.next has no field 'next'"),
        (LINKED, {"next": None, "other": 1}, r"^\$ has a field 'other' that Node does not have"),
        ({"type": "fixed", "name": "F", "size": 2}, b"abc", r"^\$ has 3 bytes, not 2 as F"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "B", r"^\$ is 'B', not a symbol of E"),
        (
            {"type": "long", "logicalType": "timestamp-millis"},
            datetime(2026, 1, 1),  # noqa: DTZ001
            r"^\$ is a time without a zone",
        ),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 1},
            Decimal("1.25"),
            r"^\$ has more than 1 digits after the point",
        ),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 1},
            Decimal(1000),
            r"^\$ has more than 3 digits",
        ),
    ],
)
def test_the_error_of_a_value_names_the_path(schema: Any, value: Any, message: str) -> None:
    with pytest.raises(MalformedValue, match=message):
        codec(schema).encode(value)


def test_the_error_of_malformed_bytes_names_the_path() -> None:
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "a", "type": {"type": "array", "items": ["null", "boolean"]}}],
    }
    with pytest.raises(MalformedValue, match=r"^\$\.a\[1\] is branch 2 of a union of 2"):
        codec(schema).decode(b"\x04\x00\x04\x00")
    with pytest.raises(MalformedValue, match=r"^\$\.a is cut off"):
        codec(schema).decode(b"\x04\x02\x01\x00")
    with pytest.raises(MalformedValue, match=r"^\$ has 2 bytes after the end"):
        codec(schema).decode(b"\x00\x00\x00")


def test_a_value_is_read_as_a_later_schema() -> None:
    old = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "a", "type": "int"}, {"name": "b", "type": "int"}],
    }
    new = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "a", "type": "long"}, {"name": "c", "type": "string", "default": "none"}],
    }
    data = codec(old).encode({"a": 1, "b": 2})
    assert (
        codec(old).decode(data, codec(new))
        == codec(old).decode_json(data, codec(new))
        == {"a": 1, "c": "none"}
    )
    with pytest.raises(MalformedValue, match="cannot be read with its Avro schema"):
        codec(old).decode(data, codec("string"))


def test_a_field_that_is_missing_has_its_default() -> None:
    fields = [
        {"name": "raw", "type": "bytes", "default": "\u00ff"},
        {"name": "some", "type": ["null", "int"], "default": None},
        {"name": "more", "type": {"type": "array", "items": "int"}, "default": [7]},
    ]
    one = codec({"type": "record", "name": "R", "fields": fields})
    found = {"raw": b"\xff", "some": None, "more": [7]}
    assert one.decode(one.encode({})) == one.decode(one.encode_json({})) == found


def test_named_types_of_references_are_used() -> None:
    plane = {"type": "record", "name": "x.Plane", "fields": [{"name": "tail", "type": "string"}]}
    flight = {"type": "record", "name": "x.Flight", "fields": [{"name": "plane", "type": "Plane"}]}
    one = codec(flight, plane, plane)
    assert one.name == "x.Flight"
    assert one.decode(one.encode({"plane": {"tail": "N1"}})) == {"plane": {"tail": "N1"}}


# -- hostile values and schemas --------


def number(value: int) -> bytes:
    return written("long", value)


def diamonds(levels: int) -> Any:
    """A record without fields, used twice by a record that is used twice, and so on: 2**levels values of no bytes."""
    inner: Any = {"type": "record", "name": "R0", "fields": []}
    for level in range(1, levels):
        both = [{"name": "a", "type": inner}, {"name": "b", "type": f"R{level - 1}"}]
        inner = {"type": "record", "name": f"R{level}", "fields": both}
    return inner


DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
BOMBS = [
    ({"type": "array", "items": "null"}, number(1 << 60) + b"\0"),
    ({"type": "array", "items": "null"}, number(-(1 << 60)) + number(1) + b"\0"),
    ({"type": "array", "items": "boolean"}, number(1 << 60) + b"\1"),
    ({"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}}, number(1 << 60) + b"\0"),
    ({"type": "map", "values": "null"}, number(1 << 60) + b"\0"),
    ("string", number(1 << 60) + b"abc"),
    ("bytes", number(-(1 << 60)) + b"abc"),
    (diamonds(40), b""),
    ({"type": "array", "items": diamonds(20)}, number(10) + b"\0"),
    (DECIMAL, number(1_000_000) + b"\x7f" * 1_000_000),
    (LINKED, b"\2" * 1_000_000),
    ({"type": "fixed", "name": "G", "size": 1 << 40}, b"abc"),
]


@pytest.mark.parametrize(("schema", "data"), BOMBS)
def test_hostile_bytes_cost_little_time_and_memory(schema: Any, data: bytes) -> None:
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(MalformedValue, match=r"^\$"):
        codec(schema).decode(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"
    assert time.process_time() - begin < 10


def test_depth_of_a_recursive_value_is_bounded() -> None:
    one = codec(LINKED)
    value: Any = None
    for _ in range(VALUE_DEPTH_MAX):
        value = {"next": value}
    assert one.decode(one.encode(value)) == value
    with pytest.raises(MalformedValue, match="nested more than 100 levels"):
        one.encode({"next": {"next": value}})
    with pytest.raises(MalformedValue, match="nested more than 100 levels"):
        one.decode(b"\2" * (VALUE_DEPTH_MAX + 5) + b"\0")
    loop: Any = {}
    loop["next"] = loop
    with pytest.raises(MalformedValue):
        one.encode(loop)


@pytest.mark.full
def test_attempts_to_find_branches_are_bounded() -> None:
    both: list[Any] = [
        {"type": "record", "name": name, "fields": [{"name": "next", "type": ["null", "A", "B"]}]}
        for name in ("A", "B")
    ]
    both[0]["fields"].insert(0, {"name": "o", "type": {"type": "array", "items": both.pop()}, "default": []})
    value: Any = {"next": None}
    for _ in range(60):
        value = {"next": value}
    begin = time.process_time()
    with pytest.raises(MalformedValue, match="costs too much: name the branches"):
        codec(both[0]).encode_json(value)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"type": "array", "items": ' * 200 + '"int"' + "}" * 200,
        '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "Other"}]}',
        json.dumps([{"type": "fixed", "name": f"F{one}", "size": 1} for one in range(30_000)]),
        json.dumps({"type": "bytes", "logicalType": "decimal", "precision": 1 << 20}),
    ],
)
def test_a_schema_that_is_none_or_exceeds_a_bound_is_a_typed_error(text: str) -> None:
    with pytest.raises(UnsupportedSchema):
        AvroCodec(text)
