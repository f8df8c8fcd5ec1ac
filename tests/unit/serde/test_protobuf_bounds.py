"""A hostile Protobuf schema costs bounded time and memory, and reads no file of the machine."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING

import pytest
from google.protobuf import descriptor_pb2

from mansio.serde.compatibility.protobuf import incompatibilities
from mansio.serde.definition import ReferencedSchema
from mansio.serde.errors import InvalidSchema
from mansio.serde.formats.protobuf import parse
from support.machine import scaled
from support.tiers import smoke_first

if TYPE_CHECKING:
    from pathlib import Path

THREE = 'syntax = "proto3"; '
TWO = 'syntax = "proto2"; '
OPTIONS = (
    THREE
    + 'import "google/protobuf/descriptor.proto"; message O { O o = 1; int32 x = 2; repeated O r = 3; } '
    + "extend google.protobuf.MessageOptions { O o = 50001; } message A { option %s; }"
)


def many(pattern: str, count: int) -> str:
    return "".join(pattern.replace("#", str(number)) for number in range(1, count + 1))


HOSTILE = {
    "options within options": OPTIONS % ("(o) = " + "{ o: " * 5_000 + "{ x: 1 }" + "}" * 5_000),
    "one megabyte": THREE + "message A {" + "x" * 1_000_000 + "}",
    "one megabyte of fields": THREE + "message A {" + "int32 b = 1;" * 80_000 + "}",
    "one megabyte of comments": "/*" * 500_000,
    "one megabyte of strings": THREE + 'option java_package = "' + '\\"' * 499_990,
    "messages within messages": THREE + "message A {" * 1_000 + "}" * 1_000,
    "groups within groups": TWO + "message A {" + many("optional group G# = 1 {", 1_000) + "}" * 1_001,
    "options within options in angles": OPTIONS
    % ("(o) = {" + "o <" * 100_000 + "x: 1" + ">" * 100_000 + "}"),
    "options within options in lists": OPTIONS % ("(o) = {" + "r: [{" * 1_000 + "x: 1" + "}]" * 1_000 + "}"),
    "options within options, unclosed": OPTIONS % ("(o) = " + "{ o" * 100_000),
    "name of an option": OPTIONS % ("(o)" + ".o" * 50_000 + ".x = 1"),
    "name of a package": THREE + "package " + "a." * 100_000 + "a;",
    "name of a type": THREE + "message A { " + "A." * 100_000 + "A a = 1; }",
    "parentheses": THREE + "message A { option " + "(" * 100_000,
    "values of an enum": THREE + "enum E {" + many("V# = #;", 100_000) + "}",
    "messages": THREE + many("message M# {}", 60_000),
    "maps": THREE + "message A {" + many("map<int32, A> m# = #;", 15_000) + "}",
    "oneofs": THREE + "message A {" + many("oneof o# { int32 b# = #; }", 10_000) + "}",
    "reserved numbers": THREE + "message A { reserved " + many("#, ", 100_000) + "200000; }",
    "methods": THREE + "message A {} service S {" + many("rpc R#(A) returns (A);", 20_000) + "}",
    "itself": THREE + 'import "schema.proto"; message A {}',
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("name", smoke_first(*HOSTILE))
def test_hostile_text_is_refused_quickly(name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(InvalidSchema) as caught:
        parse(HOSTILE[name])
    assert time.monotonic() - begin < scaled(3)
    assert len(str(caught.value)) < 600


WIDE = {
    "maps": THREE + "message A {" + many("map<int32, A> m# = #;", 1_990) + "}",
    "messages": THREE + many("message M# {}", 1_990),
    "same field": THREE + "message A {" + "int32 b = 1;" * 9_900 + "}",
    "fields": THREE + "message A {" + many("int32 f# = #;", 9_900) + "}",
    "values": THREE + "enum E { Z = 0;" + many("V# = #;", 9_900) + "}",
    "reserved": THREE + "message A { reserved " + many("#, ", 9_900) + "20000; }",
    "comments": THREE + "//" + "x" * 990_000 + "\nmessage A {}",
}


@pytest.mark.full
@pytest.mark.parametrize("name", WIDE)
def test_largest_schemas_cost_bounded_time(name: str) -> None:
    begin = time.monotonic()
    try:
        schema = parse(WIDE[name], normalize=True)
        assert incompatibilities(schema, schema) == []
    except InvalidSchema:
        assert name == "same field"
    assert time.monotonic() - begin < scaled(15)


@pytest.mark.parametrize(
    "name",
    smoke_first(
        "/etc/passwd", "../secret.proto", "a/../../secret.proto", "./secret.proto", "{directory}/secret.proto"
    ),
)
def test_import_reaches_no_file_of_the_machine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for place in (tmp_path, inner):
        (place / "secret.proto").write_text(THREE + "message Secret {}")
    monkeypatch.chdir(inner)
    with pytest.raises(InvalidSchema, match="was not found or had errors") as caught:
        parse(THREE + f'import "{name.format(directory=tmp_path)}"; message A {{ Secret s = 1; }}')
    assert "root:" not in str(caught.value)


def test_import_does_not_reach_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.proto").write_text(THREE + "message Secret {}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidSchema, match="was not found"):
        parse(THREE + 'import "secret.proto"; message A { Secret s = 1; }')


@pytest.mark.parametrize(
    "name",
    [
        "/etc/x.proto",
        "../x.proto",
        "a/../../x.proto",
        "",
        ".",
        "..",
        "a//b",
        "a/",
        "a\\b",
        "a\nb",
        "a\0b",
        "x" * 300,
        "é",
    ],
)
def test_reference_with_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidSchema, match="the name of the reference"):
        parse(THREE, [ReferencedSchema(name, THREE)])


def test_reference_that_is_the_directory_of_another_one_is_refused() -> None:
    names = ["a/b.proto", "a"]
    for order in (names, names[::-1]):
        with pytest.raises(InvalidSchema, match="directory"):
            parse(THREE, [ReferencedSchema(name, THREE) for name in order])


def test_references_that_import_each_other_are_refused() -> None:
    references = [
        ReferencedSchema("a.proto", THREE + 'import "b.proto";'),
        ReferencedSchema("b.proto", THREE + 'import "a.proto";'),
    ]
    with pytest.raises(InvalidSchema, match=r"recursively imports itself: a\.proto -> b\.proto -> a\.proto"):
        parse(THREE + 'import "a.proto";', references)


def test_long_chain_of_public_imports_is_bounded() -> None:
    chain = [
        ReferencedSchema(f"r{number}.proto", THREE + f'import public "r{number - 1}.proto";')
        for number in range(1, 100)
    ]
    chain.insert(0, ReferencedSchema("r0.proto", THREE + "message A {}"))
    begin = time.monotonic()
    assert parse(THREE + 'import "r99.proto"; message B { A a = 1; }', chain)
    assert time.monotonic() - begin < scaled(5)
    with pytest.raises(InvalidSchema, match="more than 100 references"):
        parse(THREE, [*chain, ReferencedSchema("r100.proto", THREE)])


def test_two_references_of_one_name_must_be_equal() -> None:
    one, other = ReferencedSchema("a.proto", THREE), ReferencedSchema("a.proto", THREE + "message A {}")
    assert parse(THREE, [one, one])
    with pytest.raises(InvalidSchema, match="two references with different schemas"):
        parse(THREE, [one, other])


def test_bounds_apply_to_schema_and_references_together() -> None:
    half = THREE + many("message M# {}", 1_100)
    with pytest.raises(InvalidSchema, match="more than 2000 types"):
        parse(half, [ReferencedSchema("a.proto", half)])
    comment = THREE + "//" + "x" * 990_000
    with pytest.raises(InvalidSchema, match="more than 4000000 bytes"):
        parse(THREE, [ReferencedSchema(f"{name}.proto", comment) for name in "abcde"])


def test_hostile_descriptor_is_refused_quickly() -> None:
    groups = descriptor_pb2.FileDescriptorProto(name="x.proto")
    scope, name = groups.message_type.add(name="A"), ".A"
    for _ in range(20):  # each field would print the messages below once more
        scope.nested_type.add(name="G")
        for number in range(1, 11):
            scope.field.add(name="g", number=number, label=1, type=10, type_name=f"{name}.G")
        scope, name = scope.nested_type[0], f"{name}.G"
    wide = descriptor_pb2.FileDescriptorProto(name="x.proto")
    wide.enum_type.add(name="E").value.extend(
        descriptor_pb2.EnumValueDescriptorProto(name=f"V{number}", number=number) for number in range(60_000)
    )
    imports = descriptor_pb2.FileDescriptorProto(
        name="x.proto", dependency=["/etc/passwd", 'a"; message B {} "']
    )
    for descriptor in (groups, wide, imports):
        begin = time.monotonic()
        with pytest.raises(InvalidSchema):
            parse(base64.b64encode(descriptor.SerializeToString()).decode())
        assert time.monotonic() - begin < scaled(3)
