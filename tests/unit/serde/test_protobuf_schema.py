"""Protobuf schemas as clients register them: texts, serialized descriptors, references, identity, normalized form."""

from __future__ import annotations

import ast
import base64
import contextlib
import re
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

import confluent_kafka
import grpc_tools
import pytest
from google.protobuf import descriptor_pb2, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.serde.definition import ReferencedSchema
from mansio.serde.errors import InvalidSchema, MalformedValue, UnsupportedSchema
from mansio.serde.formats.protobuf import ProtobufSchema, parse
from support.protobuf_evolution import random_file
from support.tiers import examples

THREE = 'syntax = "proto3"; '
ORDER = THREE + 'package shop; import "money.proto"; message Order { bank.Money price = 1; }'
MONEY = THREE + "package bank; message Money { int64 units = 1; }"
REFERENCE = ReferencedSchema("money.proto", MONEY)

EVERYTHING = """
package shop.v1;
import public "google/protobuf/timestamp.proto";
import "google/protobuf/descriptor.proto";
import "confluent/meta.proto";
import "confluent/type/decimal.proto";
import "google/type/date.proto";
option java_package = "com.\\"shop\\"\\n";
message Settings {
  optional int32 level = 1;
  map<string, int32> limits = 2;
  repeated Settings inner = 3;
  optional bytes key = 4;
  optional Kind kind = 5;
  extensions 100 to 199, 500 to max;
}
enum Kind { option allow_alias = true; NONE = 0; LESS = -1; EMPTY = 0 [deprecated = true]; reserved 5 to 9, 20;
  reserved "OLD"; }
extend google.protobuf.MessageOptions { optional Settings settings = 50001; repeated int32 codes = 50002; }
extend google.protobuf.MessageOptions { optional Kind kind = 50003; }
extend google.protobuf.FieldOptions { optional Settings field_settings = 50001; optional double rate = 50002; }
extend Settings { optional group Extra = 101 { optional int32 a = 1; } optional int32 more = 102 [default = -5]; }
message Order {
  option (settings) = { level: 5 limits { key: "é" value: 3 } inner { level: 1 } key: "\\001\\377" kind: LESS };
  option (codes) = 1;
  option (codes) = 2;
  option (kind) = LESS;
  optional double ratio = 3 [default = -inf, (field_settings).level = 3, (rate) = 1.5, json_name = "R"];
  required float weight = 2 [default = 1.5e10];
  optional bytes mark = 4 [default = "\\001a\\"\\377"];
  optional string name = 24 [default = "Zürich\\n"];
  map<int32, shop.v1.Note> notes = 5;
  message Line { optional group Part = 1 { required int32 i = 1; } }
  map<int32, Note> more_notes = 6 [(confluent.field_meta) = { doc: "x" params: [{ key: "a" value: "b" }] tags: "t" }];
  oneof choice { int32 number = 7; group Pair = 8 {} string text = 9; }
  optional google.type.Date date = 10;
  repeated int32 counts = 21 [packed = true];
  extensions 1000 to 2000;
  reserved 11 to 13, 15;
  reserved "foo", "bar";
  optional google.protobuf.Timestamp at = 20;
  optional confluent.type.Decimal sum = 22;
  message MoreNotesEntryLike {}
}
message Note {}
service Orders {
  rpc Watch(stream Order) returns (stream Note) { option deprecated = true; }
  rpc Get(Order) returns (Note);
}
"""
EDITION = """
edition = "2023";
import "google/protobuf/cpp_features.proto";
option features.field_presence = IMPLICIT;
message Order {
  reserved old, older;
  int32 a = 1 [features.field_presence = LEGACY_REQUIRED];
  Order part = 2 [features.message_encoding = DELIMITED];
  repeated int32 c = 3 [features.repeated_field_encoding = EXPANDED];
  string d = 4 [features.(pb.cpp).string_type = VIEW, features.field_presence = EXPLICIT];
  oneof e { int32 f = 5; }
}
enum Kind { option features.enum_type = CLOSED; ONE = 1; }
"""
EDITION_2024 = 'edition = "2024"; local message Hidden {} export enum Kind { ZERO = 0; } message Order {}'


def round_trip(schema: ProtobufSchema, references: tuple[ReferencedSchema, ...] = ()) -> ProtobufSchema:
    """The schema as confluent-kafka registers it."""
    return parse(schema.serialized(), references)


def test_text_of_a_client_is_kept() -> None:
    text = THREE + "// orders\nmessage Order {  int32 a = 1; }\n"
    assert parse(text).text == text


def test_comments_and_white_space_do_not_matter_and_the_order_of_messages_does() -> None:
    text = parse(THREE + "message A { int32 a = 1; } message B {}")
    assert text.identity == parse(THREE + "/* x */ message A\n{ int32 a = 1; }\n// y\nmessage B { }").identity
    assert text.identity != parse(THREE + "message B {} message A { int32 a = 1; }").identity
    assert text.identity != parse(THREE + "message A { int64 a = 1; } message B {}").identity


def test_default_name_in_json_does_not_matter() -> None:
    text = THREE + "message A { int32 first_name = 1%s; }"
    assert parse(text % "").identity == parse(text % '[json_name = "firstName"]').identity
    assert parse(text % "").identity != parse(text % '[json_name = "name"]').identity


@pytest.mark.parametrize("text", [EVERYTHING, EDITION, EDITION_2024, "", THREE], ids=range(5))
def test_serialized_descriptor_becomes_the_text_of_the_same_descriptor(text: str) -> None:
    schema = parse(text)
    found = round_trip(schema)
    assert found.identity == schema.identity
    assert found.text != text
    assert round_trip(found).text == found.text


def test_indexes_of_messages_survive_printing() -> None:
    schema = round_trip(parse(EVERYTHING))
    names = {
        "shop.v1.Settings": (0,),
        "shop.v1.Order": (2,),
        "shop.v1.Order.NotesEntry": (2, 0),
        "shop.v1.Order.Line": (2, 1),
        "shop.v1.Order.Line.Part": (2, 1, 0),
        "shop.v1.Order.Pair": (2, 3),
        "shop.v1.Order.MoreNotesEntryLike": (2, 4),
        "shop.v1.Note": (3,),
    }
    for name, indexes in names.items():
        assert schema.message_indexes(name) == indexes
        assert schema.message_name(indexes) == name


@pytest.mark.parametrize("indexes", [(), (9,), (-1,), (0, 0, 0)])
def test_unknown_indexes_are_refused(indexes: tuple[int, ...]) -> None:
    with pytest.raises(MalformedValue):
        parse(EVERYTHING).message_name(indexes)


@pytest.mark.parametrize("name", ["", "Order", "shop.v1", "shop.v1.Order.Nothing", "other.Order"])
def test_unknown_name_of_a_message_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedSchema, match="no message"):
        parse(EVERYTHING).message_indexes(name)


@settings(max_examples=examples(test=20, full=200))
@given(st.integers(0, 2**32))
def test_any_schema_survives_serialization_and_normalization(seed: int) -> None:
    random = Random(seed)
    file = random_file(random)
    schema = parse(file.text)
    assert round_trip(schema).identity == schema.identity
    normalized = parse(file.text, normalize=True)
    for message in file.all_messages:
        oneofs = sorted({one.oneof for one in message.fields}, key=lambda _: random.random())
        places = {one.number: random.random() for one in message.fields}
        message.fields.sort(key=lambda one: (oneofs.index(one.oneof), places[one.number]))
    shuffled = parse(file.text, normalize=True)
    assert shuffled.text == normalized.text
    assert shuffled.identity == normalized.identity == parse(normalized.text).identity


def test_normalized_schema_has_one_order() -> None:
    one = (
        'import "b.proto"; import public "a.proto"; message M { reserved 9; reserved 5; optional int32 b = 2; '
        "map<int32, int32> z = 4; message N {} map<int32, int32> a = 3; oneof o { int32 d = 8; int32 c = 1; } }"
        "enum E { B = 1; C = 2; A = 0; }"
    )
    other = (
        'import public "a.proto"; import "b.proto"; enum E { B = 1; A = 0; C = 2; } message M { '
        "oneof o { int32 c = 1; int32 d = 8; } optional int32 b = 2; map<int32, int32> a = 3; message N {} "
        "map<int32, int32> z = 4; reserved 5, 9; }"
    )
    references = [ReferencedSchema(name, THREE) for name in ("a.proto", "b.proto")]
    first, second = (parse(text, references, normalize=True) for text in (one, other))
    assert first.text == second.text
    assert first.identity == second.identity
    assert parse(one, references).identity != parse(other, references).identity
    assert first.message_indexes("M.N") == (0, 1)


def test_reference_is_imported_by_its_name() -> None:
    schema = parse(ORDER, [REFERENCE])
    assert schema.file.message_types_by_name["Order"].fields[0].message_type.full_name == "bank.Money"
    other = parse(ORDER, [ReferencedSchema("money.proto", parse(MONEY).serialized())])
    assert other.identity == schema.identity
    assert round_trip(schema, (REFERENCE,)).identity == schema.identity


def test_references_of_references() -> None:
    shop = THREE + 'import "shop/order.proto"; message Shop { shop.Order order = 1; }'
    schema = parse(shop, [REFERENCE, ReferencedSchema("shop/order.proto", ORDER)])
    order = schema.file.message_types_by_name["Shop"].fields[0].message_type
    assert order.fields_by_name["price"].message_type.full_name == "bank.Money"


def test_serialized_schema_has_the_name_that_is_asked_for() -> None:
    found = descriptor_pb2.FileDescriptorProto.FromString(
        base64.b64decode(parse(MONEY).serialized("a/b.proto"))
    )
    assert found.name == "a/b.proto"
    assert found.message_type[0].name == "Money"


def test_files_that_clients_do_not_register_can_be_imported() -> None:
    schema = parse(EVERYTHING)
    order = message_factory.GetMessageClass(schema.file.message_types_by_name["Order"])
    message = order(weight=1)
    message.sum.value, message.sum.scale, message.date.year = b"\x01", 2, 2026
    assert order.FromString(message.SerializeToString()) == message


def test_reference_replaces_no_file_that_protoc_brings() -> None:
    false = ReferencedSchema("google/protobuf/timestamp.proto", THREE + "message Timestamp { string x = 1; }")
    text = THREE + 'import "google/protobuf/timestamp.proto"; message A { google.protobuf.Timestamp at = 1; }'
    schema = parse(text, [false])
    assert schema.file.message_types_by_name["A"].fields[0].message_type.fields_by_name.keys() == [
        "seconds",
        "nanos",
    ]


ERRORS = [
    ("message A { int32 a = 1; }", '1:13: Expected "required", "optional", or "repeated".'),
    (THREE + "\nmessage A {\n  Foo a = 1; }", '3:3: "Foo" is not defined.'),
    (THREE + 'import "money.proto"; message A {}', '1:20: Import "money.proto" was not found or had errors.'),
    (
        THREE + "message A { int32 a = 1; int32 b = 1; }",
        '1:55: Field number 1 has already been used in "A" by field "a".',
    ),
    ("{}", '1:1: Expected top-level statement (e.g. "message").'),
    ('edition = "2099";', '1:11: Unknown edition "2099".'),
    ("\ufeff\nmessage A {", "2:12: Reached end of input in message definition (missing '}')."),
    ("\x00", "1:1: Invalid control characters encountered in text."),
    ("QUJD", '1:1: Expected top-level statement (e.g. "message").'),
]


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_error_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        parse(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_error_in_a_reference_names_it() -> None:
    with pytest.raises(InvalidSchema, match=r"^money.proto:2:17: Expected"):
        parse(ORDER, [ReferencedSchema("money.proto", "\nmessage Money { int32 a = 1; }")])


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for text in (
        "",
        "message A {}",
        EVERYTHING,
        THREE + 'import "google/protobuf/any.proto";',
        "\n// a\nimport 1",
        'option syntax = "proto3";',
        THREE + 'message A { reserved "no name"; }',
    ):
        with contextlib.suppress(InvalidSchema):
            parse(text)
    assert capfd.readouterr() == ("", "")


def test_descriptor_that_protoc_does_not_make_is_refused() -> None:
    file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(parse(EVERYTHING).serialized()))
    changes = [
        lambda one: one.message_type[2].nested_type.reverse(),
        lambda one: one.message_type[2].field[0].ClearField("number"),
        lambda one: one.message_type[2].field.add(name="x", oneof_index=99),
        lambda one: one.message_type.add(name="A {} message B"),
        lambda one: one.message_type[2].nested_type[0].field.add(name="third"),
        lambda one: one.message_type[2].field.add().CopyFrom(one.message_type[2].field[7]),
    ]
    for change in changes:
        changed = descriptor_pb2.FileDescriptorProto.FromString(file.SerializeToString())
        change(changed)
        with pytest.raises(InvalidSchema):
            parse(base64.b64encode(changed.SerializeToString()).decode())


def shipped_files() -> dict[str, str]:
    """Texts of the files that protoc and googleapis-common-protos bring."""
    directory = Path(grpc_tools.__file__).with_name("_proto")
    found = {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*.proto")}
    for path in metadata.files("googleapis-common-protos") or ():
        if path.suffix == ".proto":
            found[str(path)] = Path(path.locate()).read_text()
    return found


def imported(text: str, files: dict[str, str], found: dict[str, str]) -> tuple[ReferencedSchema, ...]:
    """What a file imports, each after what it imports itself."""
    for name in re.findall(r'^import (?:public )?"(.*)";', text, re.MULTILINE):
        if name not in found:
            imported(files[name], files, found)
            found[name] = files[name]
    return tuple(ReferencedSchema(name, content) for name, content in found.items())


@pytest.mark.full
def test_files_of_others_survive_serialization_and_normalization() -> None:
    files = shipped_files()
    assert len(files) > 50
    for name, text in files.items():
        references = imported(text, files, {})
        schema = parse(text, references)
        assert round_trip(schema, references).identity == schema.identity, name
        normalized = parse(text, references, normalize=True)
        assert parse(normalized.text, references, normalize=True).text == normalized.text, name


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("meta_pb2.py", "confluent/meta.proto"),
        ("type/decimal_pb2.py", "confluent/type/decimal.proto"),
        ("type/variant_pb2.py", "confluent/type/variant.proto"),
        ("types/decimal_pb2.py", "confluent/types/decimal.proto"),
    ],
)
def test_files_for_clients_of_confluent_are_those_of_its_client(module: str, name: str) -> None:
    # The package itself needs more than the client of Kafka does.
    place = Path(confluent_kafka.__file__).with_name("schema_registry") / "confluent" / module
    calls = [node for node in ast.walk(ast.parse(place.read_text())) if isinstance(node, ast.Call)]
    content = next(call.args[0] for call in calls if ast.unparse(call.func).endswith(".AddSerializedFile"))
    schema = parse(base64.b64encode(ast.literal_eval(content)).decode())
    ours = parse(THREE + f'import "{name}";').file.dependencies[0]
    for one in ("message_type", "extension", "package", "dependency", "public_dependency"):
        assert getattr(proto(ours), one) == getattr(schema.descriptor, one)


def proto(file: Any) -> Any:
    found = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(found)
    return found
