"""Pairs of Protobuf schemas and the rules that keep the second from reading what the first wrote.

Each text is the content of `message M`, or a whole file if it begins with `syntax` or `edition`. The verdicts were
compared once with those of Karapace.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Case(NamedTuple):
    name: str
    writer: str
    reader: str
    rules: tuple[str, ...] = ()


_TWO: Final = 'syntax = "proto2"; message M { %s }'
_THREE: Final = 'syntax = "proto3"; %s'
_SCALAR: Final = ("FIELD_SCALAR_KIND_CHANGED",)
_KIND: Final = ("FIELD_KIND_CHANGED",)
_NUMERIC_LABEL: Final = ("FIELD_NUMERIC_LABEL_CHANGED",)

CASES: Final = (
    Case("same", "int32 a = 1;", "int32 a = 1;"),
    Case("field added", "int32 a = 1;", "int32 a = 1; string b = 2;"),
    Case("field removed", "int32 a = 1; string b = 2;", "int32 a = 1;"),
    Case("field renamed", "int32 a = 1;", "int32 b = 1;"),
    Case("field reserved", "int32 a = 1; string b = 2;", 'int32 a = 1; reserved 2; reserved "b";'),
    Case("field renumbered", "int32 a = 1;", "int32 a = 2;", ("FIELD_NUMBER_CHANGED",)),
    Case(
        "field inserted",
        "string a = 1; string b = 2;",
        "string a = 1; string c = 2; string b = 3;",
        ("FIELD_NUMBER_CHANGED",),
    ),
    Case("int32 to int64", "int32 a = 1;", "int64 a = 1;"),
    Case("int64 to uint32", "int64 a = 1;", "uint32 a = 1;"),
    Case("uint64 to bool", "uint64 a = 1;", "bool a = 1;"),
    Case("int32 to sint32", "int32 a = 1;", "sint32 a = 1;", _SCALAR),
    Case("sint32 to sint64", "sint32 a = 1;", "sint64 a = 1;"),
    Case("fixed32 to sfixed32", "fixed32 a = 1;", "sfixed32 a = 1;"),
    Case("fixed64 to sfixed64", "fixed64 a = 1;", "sfixed64 a = 1;"),
    Case("fixed32 to fixed64", "fixed32 a = 1;", "fixed64 a = 1;", _SCALAR),
    Case("float to double", "float a = 1;", "double a = 1;", _SCALAR),
    Case("float to fixed32", "float a = 1;", "fixed32 a = 1;", _SCALAR),
    Case("double to sfixed64", "double a = 1;", "sfixed64 a = 1;", _SCALAR),
    Case("string to bytes", "string a = 1;", "bytes a = 1;"),
    Case("bytes to string", "bytes a = 1;", "string a = 1;"),
    Case("string to int32", "string a = 1;", "int32 a = 1;", _SCALAR),
    Case("enum to int32", "E a = 1; enum E { X = 0; }", "int32 a = 1; enum E { X = 0; }"),
    Case("int64 to enum", "int64 a = 1;", "E a = 1; enum E { X = 0; }"),
    Case("enum to string", "E a = 1; enum E { X = 0; }", "string a = 1;", _SCALAR),
    Case("enum to another enum", "E a = 1; enum E { X = 0; }", "F a = 1; enum F { Y = 0; }"),
    Case("value of enum added", "E a = 1; enum E { X = 0; }", "E a = 1; enum E { X = 0; Y = 1; }"),
    Case("value of enum removed", "E a = 1; enum E { X = 0; Y = 1; }", "E a = 1; enum E { X = 0; }"),
    Case("value of enum renamed", "E a = 1; enum E { X = 0; }", "E a = 1; enum E { Z = 0; }"),
    Case("int32 to repeated", "int32 a = 1;", "repeated int32 a = 1;", _NUMERIC_LABEL),
    Case("repeated to double", "repeated double a = 1;", "double a = 1;", _NUMERIC_LABEL),
    Case(
        "enum to repeated",
        "E a = 1; enum E { X = 0; }",
        "repeated E a = 1; enum E { X = 0; }",
        _NUMERIC_LABEL,
    ),
    Case("string to repeated", "string a = 1;", "repeated string a = 1;"),
    Case("repeated to bytes", "repeated bytes a = 1;", "bytes a = 1;"),
    Case("message to repeated", "N a = 1; message N {}", "repeated N a = 1; message N {}"),
    Case("packed to unpacked", "repeated int32 a = 1;", "repeated int32 a = 1 [packed = false];"),
    Case("implicit to optional", "int32 a = 1;", "optional int32 a = 1;"),
    Case("optional to implicit", "optional string a = 1;", "string a = 1;"),
    Case("message to scalar", "N a = 1; message N {}", "int32 a = 1; message N {}", _KIND),
    Case("message to bytes", "N a = 1; message N {}", "bytes a = 1; message N {}", _KIND),
    Case("string to message", "string a = 1; message N {}", "N a = 1; message N {}", _KIND),
    Case(
        "another message",
        "N a = 1; message N {} message O {}",
        "O a = 1; message N {} message O {}",
        ("FIELD_NAMED_TYPE_CHANGED",),
    ),
    Case(
        "field of nested message",
        "N a = 1; message N { int32 b = 1; }",
        "N a = 1; message N { string b = 1; }",
        _SCALAR,
    ),
    Case("nested message removed", "message N {}", "", ("MESSAGE_REMOVED",)),
    Case("nested message added", "", "message N {}"),
    Case("recursive message", "M a = 1; int32 b = 2;", "M a = 1; int64 b = 2; string c = 3;"),
    Case("recursive message changed", "M a = 1; int32 b = 2;", "M a = 1; float b = 2;", _SCALAR),
    Case("map added", "", "map<string, int32> a = 1;"),
    Case("map removed", "map<string, int32> a = 1;", ""),
    Case("value of map widened", "map<string, int32> a = 1;", "map<string, int64> a = 1;"),
    Case("value of map changed", "map<string, int32> a = 1;", "map<string, string> a = 1;", _SCALAR),
    Case("key of map changed", "map<string, int32> a = 1;", "map<int32, int32> a = 1;", _SCALAR),
    Case(
        "value of map to message",
        "map<string, int32> a = 1; message N {}",
        "map<string, N> a = 1; message N {}",
        _KIND,
    ),
    Case(
        "message in map",
        "map<string, N> a = 1; message N { int32 b = 1; }",
        "map<string, N> a = 1; message N { float b = 1; }",
        _SCALAR,
    ),
    Case(
        "map to repeated message",
        "map<string, int32> a = 1; message N {}",
        "repeated N a = 1; message N {}",
        _KIND,
    ),
    Case("oneof added", "int32 a = 1;", "int32 a = 1; oneof o { int32 b = 2; int32 c = 3; }"),
    Case("oneof removed with its fields", "int32 a = 1; oneof o { int32 b = 2; }", "int32 a = 1;"),
    Case("oneof dissolved", "oneof o { int32 a = 1; int32 b = 2; }", "int32 a = 1; int32 b = 2;"),
    Case("oneof renamed", "oneof o { int32 a = 1; int32 b = 2; }", "oneof p { int32 a = 1; int32 b = 2; }"),
    Case("field added to oneof", "oneof o { int32 a = 1; }", "oneof o { int32 a = 1; int32 b = 2; }"),
    Case(
        "field removed from oneof",
        "oneof o { int32 a = 1; int32 b = 2; }",
        "oneof o { int32 a = 1; }",
        ("ONEOF_FIELD_REMOVED",),
    ),
    Case(
        "field moved out of oneof",
        "oneof o { int32 a = 1; int32 b = 2; }",
        "oneof o { int32 a = 1; } int32 b = 2;",
        ("ONEOF_FIELD_REMOVED",),
    ),
    Case("field moved to new oneof", "int32 a = 1;", "oneof o { int32 a = 1; int32 b = 2; }"),
    Case(
        "fields moved to oneof",
        "int32 a = 1; int32 b = 2;",
        "oneof o { int32 a = 1; int32 b = 2; }",
        ("MULTIPLE_FIELDS_MOVED_TO_ONEOF",),
    ),
    Case(
        "optional fields moved to oneof",
        "optional int32 a = 1; optional int32 b = 2;",
        "oneof o { int32 a = 1; int32 b = 2; }",
        ("MULTIPLE_FIELDS_MOVED_TO_ONEOF",),
    ),
    Case(
        "field moved to existing oneof",
        "int32 a = 1; oneof o { int32 b = 2; }",
        "oneof o { int32 a = 1; int32 b = 2; }",
        ("FIELD_MOVED_TO_EXISTING_ONEOF",),
    ),
    Case(
        "oneofs merged",
        "oneof o { int32 a = 1; } oneof p { int32 b = 2; }",
        "oneof q { int32 a = 1; int32 b = 2; }",
        ("MULTIPLE_FIELDS_MOVED_TO_ONEOF",),
    ),
    Case(
        "oneof divided",
        "oneof o { int32 a = 1; int32 b = 2; }",
        "oneof p { int32 a = 1; } oneof q { int32 b = 2; }",
    ),
    Case("type in oneof changed", "oneof o { int32 a = 1; }", "oneof o { string a = 1; }", _SCALAR),
    Case("type in renamed oneof changed", "oneof o { int32 a = 1; }", "oneof p { string a = 1; }", _SCALAR),
    Case("required added", _TWO % "", _TWO % "required int32 a = 1;", ("REQUIRED_FIELD_ADDED",)),
    Case("required removed", _TWO % "required int32 a = 1;", _TWO % "", ("REQUIRED_FIELD_REMOVED",)),
    Case(
        "optional to required",
        _TWO % "optional int32 a = 1;",
        _TWO % "required int32 a = 1;",
        ("REQUIRED_FIELD_ADDED",),
    ),
    Case("required to optional", _TWO % "required int32 a = 1;", _TWO % "optional int32 a = 1;"),
    Case(
        "default changed",
        _TWO % "optional int32 a = 1 [default = 1];",
        _TWO % "optional int32 a = 1 [default = 2];",
    ),
    Case(
        "group kept",
        _TWO % "optional group G = 1 { optional int32 a = 1; }",
        _TWO % "optional group G = 1 { optional int64 a = 1; }",
    ),
    Case(
        "group changed",
        _TWO % "optional group G = 1 { optional int32 a = 1; }",
        _TWO % "optional group G = 1 { optional float a = 1; }",
        _SCALAR,
    ),
    Case(
        "group renamed",
        _TWO % "optional group G = 1 { optional int32 a = 1; }",
        _TWO % "optional group H = 1 { optional int32 a = 1; }",
    ),
    Case("group removed", _TWO % "optional group G = 1 {}", _TWO % ""),
    Case(
        "group to message", _TWO % "optional group G = 1 {}", _TWO % "optional N g = 1; message N {}", _KIND
    ),
    Case("proto2 to proto3", _TWO % "optional int32 a = 1;", _THREE % "message M { int32 a = 1; }"),
    Case("proto3 to edition", "int32 a = 1;", 'edition = "2023"; message M { int64 a = 1; }'),
    Case(
        "message removed", _THREE % "message M {} message N {}", _THREE % "message M {}", ("MESSAGE_REMOVED",)
    ),
    Case("message renamed", _THREE % "message M {}", _THREE % "message N {}", ("MESSAGE_REMOVED",)),
    Case("message moved", _THREE % "message M {} message N {}", _THREE % "message N {} message M {}"),
    Case(
        "message to enum",
        _THREE % "message M {} message N {}",
        _THREE % "message M {} enum N { X = 0; }",
        ("MESSAGE_REMOVED",),
    ),
    Case("enum removed", _THREE % "message M {} enum E { X = 0; }", _THREE % "message M {}"),
    Case(
        "package changed",
        _THREE % "package a; message M { N n = 1; } message N {}",
        _THREE % "package b; message M { N n = 1; } message N {}",
    ),
    Case("package added", _THREE % "message M { M m = 1; }", _THREE % "package b.c; message M { M m = 1; }"),
    Case(
        "service removed",
        _THREE % "message M {} service S { rpc A(M) returns (M); }",
        _THREE % "message M {}",
    ),
)


def file_text(text: str) -> str:
    """The text of the file of a case."""
    return text if text.startswith(("syntax", "edition")) else _THREE % f"message M {{ {text} }}"
