"""Avro: schemas as Arrow types, decoder and encoder of single values (Apache Avro 1.12, binary encoding).

Types are those of Spark's Avro support, with two exceptions that make tables portable: a field of type null or of a
record without fields has no column, and `uuid` is a string.

* record -> struct; array, map; enum and string -> string; fixed and bytes -> binary
* decimal -> decimal; date -> date; timestamp-millis, -micros -> timestamp; local-timestamp-* -> timestamp_ntz
* time-millis -> int, time-micros -> bigint, as the number in the encoding: Spark has no portable type for a time of day
* union with null -> the other type; int and long -> bigint; float and double -> double
* other unions -> struct with a field `member0`, `member1`, ... for each type, of which one is not null

A union of several types is decoded as a union of records with one field: both have the same encoding, and the name of
the field shows which branch was written.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import fastavro
import pyarrow as pa

from mansio.schemas.column_types import (
    DECIMAL_PRECISION_MAX,
    DEPTH_MAX,
    FIELDS_MAX,
    LOCAL_TIMESTAMP,
    TIMESTAMP,
    check_size,
    list_type,
    map_type,
    spark_type,
    struct_type,
)
from mansio.serde.codecs.avro_schemas import parse_avro
from mansio.serde.errors import MalformedValue, UnsupportedSchema, reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import time

    Convert = Callable[[Any], Any]

_PRIMITIVES: Final = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL_TYPES: Final = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.int32(),
    ("long", "time-micros"): pa.int64(),
    ("long", "timestamp-millis"): TIMESTAMP,
    ("long", "timestamp-micros"): TIMESTAMP,
    ("long", "local-timestamp-millis"): LOCAL_TIMESTAMP,
    ("long", "local-timestamp-micros"): LOCAL_TIMESTAMP,
    ("string", "uuid"): pa.string(),
}
_BRANCH_NAMESPACE: Final = "mansio.branch."
_NULL_NAMESPACE: Final = "mansio.unnamed."
"""Namespace of types that have none: inside a record with a namespace, Avro could not refer to them."""
TOP_LEVEL_NAME: Final = "topLevelRecord"
"""Name of the record of a schema that is derived from a column, as in Spark."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A schema: its column type (None: no column), the schema to decode with, and the conversions of its values."""

    type: pa.DataType | None
    schema: Any
    from_avro: Convert | None = None
    """Conversion of a decoded value to what Arrow accepts; None: no conversion."""
    to_avro: Convert | None = None


class AvroSchema:
    """A parsed Avro schema: its column type, and decoding and encoding of values."""

    def __init__(self, text: str, references: Sequence[str] = ()) -> None:
        """Compile the schema. `references`: texts of the schemas whose named types the schema uses, each after those
        that it uses itself.

        Raises `UnsupportedSchema`.
        """
        parsed, named = parse_avro(text, references)
        compiled = _Compiler(named).compile(parsed)
        if compiled.type is None:
            raise UnsupportedSchema("the Avro schema has no value: it is null, or a record without fields")
        self.text = text
        self.type: pa.DataType = check_size(compiled.type)
        self._compiled = compiled
        self._schema: Any = fastavro.parse_schema(compiled.schema)

    def decoder(self, reader: AvroSchema | None = None) -> Callable[[bytes], Any]:
        """Return a function that decodes a value that was written with this schema, as `reader` if given (schema
        resolution) and otherwise as this schema. It raises `MalformedValue`.

        Raises `UnsupportedSchema` if no value of this schema can be read as `reader`.
        """
        writer_schema, reader_schema = self._schema, None if reader is None else reader._schema
        convert = (reader or self)._compiled.from_avro
        read = fastavro.schemaless_reader

        def decode(value: bytes) -> Any:
            stream = BytesIO(value)
            try:
                found = read(stream, writer_schema, reader_schema)
                if convert is not None:
                    found = convert(found)
            except Exception as error:  # fastavro raises errors of many types for malformed bytes
                raise MalformedValue(f"the value does not match its Avro schema: {_cause(error)}") from error
            if stream.tell() != len(value):
                raise MalformedValue(
                    f"the value has {len(value) - stream.tell()} bytes after the end of its Avro encoding"
                )
            return found

        return decode

    def encode(self, value: Any) -> bytes:
        """Encode a value as Arrow returns it. Raises `MalformedValue` if it does not match the schema."""
        stream = BytesIO()
        try:
            if self._compiled.to_avro is not None:
                value = self._compiled.to_avro(value)
            fastavro.schemaless_writer(stream, self._schema, value, strict_allow_default=True)
        except Exception as error:  # fastavro raises errors of many types for a value that does not match
            raise MalformedValue(f"the row does not match the Avro schema: {_cause(error)}") from error
        return stream.getvalue()


def _cause(error: Exception) -> str:
    text = reason(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Compiler:
    """Visitor of a parsed schema. Named types are compiled once; later uses refer to them by name."""

    def __init__(self, named: dict[str, Any]) -> None:
        self._named = named
        self._done: dict[str, _Compiled] = {}
        self._open: list[str] = []
        self._fields = 0
        self._depth = 0

    def compile(self, node: Any) -> _Compiled:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise UnsupportedSchema(f"the schema is nested more than {DEPTH_MAX} levels deep")
        try:
            return self._compile(node)
        finally:
            self._depth -= 1

    def _compile(self, node: Any) -> _Compiled:
        if isinstance(node, list):
            return self._union(node)
        if isinstance(node, str):
            if node == "null":
                return _Compiled(None, "null")
            if node in _PRIMITIVES:
                return _Compiled(_PRIMITIVES[node], node)
            return self._reference(node)
        kind = node["type"]
        if isinstance(kind, (list, dict)):
            return self.compile(kind)
        if kind in ("record", "error", "enum", "fixed"):
            return self._definition(node)
        if kind == "array":
            return self._array(node)
        if kind == "map":
            return self._map(node)
        if kind in _PRIMITIVES and node.get("logicalType") is not None:
            return _logical(node, kind)
        return self.compile(kind)

    def _reference(self, name: str) -> _Compiled:
        if name in self._open:
            raise UnsupportedSchema(
                f"the Avro type {name} contains itself, and a column type cannot: decode it in a function of your own"
            )
        if name in self._done:
            found = self._done[name]
            return _Compiled(found.type, _qualified(name), found.from_avro, found.to_avro)
        return self._definition(self._named[name])

    def _definition(self, node: dict[str, Any]) -> _Compiled:
        name = node["name"]
        if name in self._done or name in self._open:
            return self._reference(name)
        self._open.append(name)
        if node["type"] == "enum":
            found = _Compiled(pa.string(), _without_internals(node))
        elif node["type"] == "fixed":
            found = _logical(node, "fixed")
        else:
            found = self._record(node)
        self._open.pop()
        self._done[name] = found
        return found

    def _record(self, node: dict[str, Any]) -> _Compiled:
        fields: list[tuple[str, pa.DataType]] = []
        schemas: list[Any] = []
        inward: dict[str, Convert] = {}
        outward: dict[str, Convert] = {}
        for one in node["fields"]:
            self._fields += 1
            if self._fields > FIELDS_MAX:
                raise UnsupportedSchema(f"the schema has more than {FIELDS_MAX} fields")
            compiled = self.compile(one["type"])
            schema = {**one, "type": compiled.schema}
            if "default" in one:
                schema["default"] = _wrapped_default(compiled.schema, one["default"])
            schemas.append(schema)
            if compiled.type is not None:
                fields.append((one["name"], compiled.type))
            if compiled.from_avro is not None:
                inward[one["name"]] = compiled.from_avro
            if compiled.to_avro is not None:
                outward[one["name"]] = compiled.to_avro
        return _Compiled(
            struct_type(fields) if fields else None,
            {**_without_internals(node), "fields": schemas},
            _fields_converter(inward),
            _fields_converter(outward),
        )

    def _array(self, node: dict[str, Any]) -> _Compiled:
        items = self.compile(node["items"])
        if items.type is None:
            raise UnsupportedSchema("the Avro schema has an array of nulls or of records without fields")
        return _Compiled(
            list_type(items.type),
            {"type": "array", "items": items.schema},
            _list_converter(items.from_avro),
            _list_converter(items.to_avro),
        )

    def _map(self, node: dict[str, Any]) -> _Compiled:
        values = self.compile(node["values"])
        if values.type is None:
            raise UnsupportedSchema("the Avro schema has a map of nulls or of records without fields")
        inner, outer = values.from_avro, values.to_avro

        def from_avro(value: Any) -> Any:
            return [(key, one if inner is None or one is None else inner(one)) for key, one in value.items()]

        def to_avro(value: Any) -> Any:
            return {key: one if outer is None or one is None else outer(one) for key, one in value}

        return _Compiled(
            map_type(pa.string(), values.type), {"type": "map", "values": values.schema}, from_avro, to_avro
        )

    def _union(self, branches: list[Any]) -> _Compiled:
        present = [one for one in branches if one != "null"]
        if not present:
            return _Compiled(None, branches)
        if len(present) == 1:
            only = self.compile(present[0])
            schema = [one if one == "null" else only.schema for one in branches]
            return _Compiled(only.type, schema, only.from_avro, only.to_avro)
        names = {one for one in present if isinstance(one, str)}
        for wide, both in ((pa.int64(), {"int", "long"}), (pa.float64(), {"float", "double"})):
            if len(present) == 2 and names == both:
                return _Compiled(wide, branches)
        return self._union_of_several(branches)

    def _union_of_several(self, branches: list[Any]) -> _Compiled:
        fields: list[tuple[str, pa.DataType]] = []
        schemas: list[Any] = []
        inward: dict[str, tuple[str, Convert | None]] = {}
        outward: dict[str, tuple[str, str, Convert | None]] = {}
        for branch in branches:
            if branch == "null":
                schemas.append("null")
                continue
            compiled, member = self.compile(branch), f"member{len(inward)}"
            name = _branch_name(branch, compiled.schema)
            record = _BRANCH_NAMESPACE + name
            schemas.append(
                {"type": "record", "name": record, "fields": [{"name": name, "type": compiled.schema}]}
                if record not in self._done
                else record
            )
            self._done.setdefault(record, compiled)
            inward[name] = (member, compiled.from_avro)
            outward[member] = (record, name, compiled.to_avro)
            if compiled.type is not None:
                fields.append((member, compiled.type))

        def from_avro(value: Any) -> Any:
            if value is None:
                return None
            ((name, one),) = value.items()
            member, convert = inward[name]
            return {member: one if convert is None or one is None else convert(one)}

        def to_avro(value: Any) -> Any:
            if value is None:
                return None
            for member, (record, name, convert) in outward.items():
                one = value.get(member)
                if one is not None:
                    return record, {name: one if convert is None else convert(one)}
            return None

        return _Compiled(struct_type(fields), schemas, from_avro, to_avro)


def _logical(node: dict[str, Any], kind: str) -> _Compiled:
    """Return a primitive or fixed type with a logical type. An unknown or invalid one is ignored (Avro
    specification).
    """
    name = node.get("logicalType")
    plain = _without_internals(node)
    if name == "decimal" and kind in ("bytes", "fixed"):
        precision, scale = node.get("precision"), node.get("scale", 0)
        if isinstance(precision, int) and isinstance(scale, int) and 0 <= scale <= precision:
            if precision > DECIMAL_PRECISION_MAX:
                raise UnsupportedSchema(
                    f"a decimal of {precision} digits does not fit into a column: {DECIMAL_PRECISION_MAX} do"
                )
            return _Compiled(pa.decimal128(precision, scale), plain)
    found = _LOGICAL_TYPES.get((kind, name or ""))
    if found is None:
        plain.pop("logicalType", None)
        if kind == "fixed":
            return _Compiled(pa.binary(), plain)
        return _Compiled(_PRIMITIVES[kind], plain)
    if name == "time-millis":
        return _Compiled(found, plain, _milliseconds)
    if name == "time-micros":
        return _Compiled(found, plain, _microseconds)
    return _Compiled(found, plain, str if name == "uuid" else None)


def _microseconds(value: time) -> int:
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond


def _milliseconds(value: time) -> int:
    return _microseconds(value) // 1000


def _qualified(name: str) -> str:
    return name if "." in name else _NULL_NAMESPACE + name


def _without_internals(node: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without the marks of fastavro, and with a qualified name."""
    found = {name: value for name, value in node.items() if not name.startswith("__")}
    return {**found, "name": _qualified(found["name"])} if "name" in found else found


def _branch_name(branch: Any, schema: Any) -> str:
    """Return a name for a branch of a union that is valid in Avro, and the same wherever the branch has the same
    type.
    """
    if isinstance(branch, dict):
        if branch["type"] in ("record", "error", "enum", "fixed"):
            return str(branch["name"]).replace("_", "__").replace(".", "_")
        return f"{branch['type']}_{zlib.crc32(json.dumps(schema, sort_keys=True).encode()):08x}"
    return str(branch).replace("_", "__").replace(".", "_")


def _wrapped_default(schema: Any, default: Any) -> Any:
    """Return the default of a field whose union is decoded as a union of records: a default is of the first branch."""
    first = schema[0] if isinstance(schema, list) and schema else None
    if isinstance(first, dict) and str(first.get("name", "")).startswith(_BRANCH_NAMESPACE):
        return {first["fields"][0]["name"]: default}
    return default


def _fields_converter(converters: dict[str, Convert]) -> Convert | None:
    if not converters:
        return None

    def convert(record: Any) -> Any:
        changed = {
            name: one(value) for name, one in converters.items() if (value := record.get(name)) is not None
        }
        return record | changed

    return convert


def _list_converter(element: Convert | None) -> Convert | None:
    if element is None:
        return None
    return lambda value: [None if one is None else element(one) for one in value]


# -- schema of a column --------


def schema_of_type(kind: pa.DataType) -> str:
    """Return the Avro schema for values of a column type, as Spark's `to_avro` derives it: every field is nullable."""
    return json.dumps(_Deriver().schema(kind, TOP_LEVEL_NAME))


class _Deriver:
    """Derives an Avro schema from an Arrow type. Each struct becomes a record named after its path."""

    def schema(self, kind: pa.DataType, name: str) -> Any:
        if pa.types.is_struct(kind):
            fields = [
                {"name": one.name, "type": self._nullable(one.type, f"{name}_{one.name}"), "default": None}
                for one in kind
            ]
            return {"type": "record", "name": name, "fields": fields}
        if pa.types.is_list(kind):
            return {"type": "array", "items": self._nullable(kind.value_type, name)}
        if pa.types.is_map(kind):
            return {"type": "map", "values": self._nullable(kind.item_type, name)}
        if pa.types.is_decimal(kind):
            return {
                "type": "bytes",
                "logicalType": "decimal",
                "precision": kind.precision,
                "scale": kind.scale,
            }
        if pa.types.is_timestamp(kind):
            return {
                "type": "long",
                "logicalType": "timestamp-micros" if kind.tz else "local-timestamp-micros",
            }
        if pa.types.is_date(kind):
            return {"type": "int", "logicalType": "date"}
        if pa.types.is_int8(kind) or pa.types.is_int16(kind):
            return "int"
        for avro, arrow in _PRIMITIVES.items():
            if arrow == kind:
                return avro
        raise UnsupportedSchema(f"a column of type {spark_type_or_name(kind)} has no Avro type: cast it")

    def _nullable(self, kind: pa.DataType, name: str) -> Any:
        return ["null", self.schema(kind, name)]


def spark_type_or_name(kind: pa.DataType) -> str:
    """Return the Spark type for a message; Arrow's name if it has none here."""
    try:
        return spark_type(kind)
    except KeyError:
        return str(kind)
