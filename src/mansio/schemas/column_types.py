"""Arrow types of decoded columns: their Spark types, and how they change when a schema changes.

Every schema language is mapped to these types: boolean, int32, int64, float, double, string, binary, decimal128,
date32, timestamp (us, UTC), timestamp (us), list, map, and struct. Spark, Parquet and Iceberg all have them.

Invariants:
* All fields, elements and values are nullable: a decoded column can lack any field of a later schema.
* A type is never narrowed: the changes of `merge_types` are those that Iceberg allows in a table with data (Iceberg
  specification, Schema Evolution).
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from mansio.serde.errors import UnsupportedSchema

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
LOCAL_TIMESTAMP: Final = pa.timestamp("us")

FIELDS_MAX: Final = 2_000
"""Maximum number of fields of a schema, nested ones included. Named types that are used many times multiply them."""
DEPTH_MAX: Final = 64
DECIMAL_PRECISION_MAX: Final = 38

_SPARK_NAMES: Final = {
    pa.bool_(): "boolean",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    TIMESTAMP: "timestamp",
    LOCAL_TIMESTAMP: "timestamp_ntz",
}
_WIDER: Final = {(pa.int32(), pa.int64()), (pa.float32(), pa.float64())}


class IncompatibleTypes(UnsupportedSchema):
    """A type cannot be changed to another one while the old values stay readable."""


def struct_type(fields: list[tuple[str, pa.DataType]]) -> pa.StructType:
    """Return a struct of these fields. Raises `UnsupportedSchema` for names that differ only in case, which Spark SQL
    does not distinguish.
    """
    seen: dict[str, str] = {}
    for name, _ in fields:
        other = seen.setdefault(name.lower(), name)
        if other is not name:
            raise UnsupportedSchema(
                f"the fields {other!r} and {name!r} have the same name for Spark SQL: rename one of them"
            )
    return pa.struct([pa.field(name, kind) for name, kind in fields])


def list_type(element: pa.DataType) -> pa.ListType:
    """Return a list with Spark's name of the elements."""
    return pa.list_(pa.field("element", element))


def map_type(key: pa.DataType, value: pa.DataType) -> pa.MapType:
    """Return a map; its keys are not null, as Arrow requires."""
    return pa.map_(key, pa.field("value", value))


def normalized(kind: pa.DataType) -> pa.DataType:
    """Return the type with the field names and nullability of this module; Spark and Iceberg have others."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, normalized(one.type)) for one in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return list_type(normalized(kind.value_type))
    if pa.types.is_map(kind):
        return map_type(normalized(kind.key_type), normalized(kind.item_type))
    if pa.types.is_timestamp(kind):
        return TIMESTAMP if kind.tz else LOCAL_TIMESTAMP
    if pa.types.is_large_string(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) else kind


def conform(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the array as a type that `merge_types` has made of its type: fields that it lacks are null."""
    if array.type == kind:
        return array
    if pa.types.is_struct(kind):
        names = [one.name for one in array.type]
        fields = [
            conform(array.field(names.index(one.name)), one.type)
            if one.name in names
            else pa.nulls(len(array), one.type)
            for one in kind
        ]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind):
        array = _unsliced(array)
        values = conform(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, type=kind, mask=_null_mask(array))
    if pa.types.is_map(kind):
        array = _unsliced(array)
        items = conform(array.items, kind.item_type)
        return pa.MapArray.from_arrays(
            array.offsets, array.keys.cast(kind.key_type), items, type=kind, mask=_null_mask(array)
        )
    return array.cast(kind)


def _unsliced(array: pa.Array) -> pa.Array:
    """Return the same rows in an array that begins at its first row: the offsets of a slice cannot have a mask."""
    return (
        pa.concat_arrays([array]) if not array.offset else array.take(pa.array(range(len(array)), pa.int64()))
    )


def _null_mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def check_size(kind: pa.DataType) -> pa.DataType:
    """Return the type. Raises `UnsupportedSchema` if it has more than `FIELDS_MAX` fields or `DEPTH_MAX` levels."""
    count, level = 0, [kind]
    for _ in range(DEPTH_MAX):
        level = [one.field(index).type for one in level for index in range(one.num_fields)]
        count += len(level)
        if count > FIELDS_MAX:
            raise UnsupportedSchema(f"the schema has more than {FIELDS_MAX} fields, nested ones included")
        if not level:
            return kind
    raise UnsupportedSchema(f"the schema is nested more than {DEPTH_MAX} levels deep")


def spark_type(kind: pa.DataType) -> str:
    """Return the Spark type as SQL text, such as ``struct<`id`: bigint, `tags`: array<string>>``."""
    if pa.types.is_struct(kind):
        inner = ", ".join(f"{quoted(one.name)}: {spark_type(one.type)}" for one in kind)
        return f"struct<{inner}>"
    if pa.types.is_list(kind):
        return f"array<{spark_type(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{spark_type(kind.key_type)}, {spark_type(kind.item_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _SPARK_NAMES[kind]


def arrow_type(kind: Any) -> pa.DataType:
    """Return the Arrow type of a Spark type (`pyspark.sql.types.DataType`), the inverse of `spark_type`. Raises
    `UnsupportedSchema` for a type that no schema has.
    """
    name = kind.typeName()
    if name == "struct":
        return struct_type([(one.name, arrow_type(one.dataType)) for one in kind.fields])
    if name == "array":
        return list_type(arrow_type(kind.elementType))
    if name == "map":
        return map_type(arrow_type(kind.keyType), arrow_type(kind.valueType))
    if name == "decimal":
        return pa.decimal128(kind.precision, kind.scale)
    text = kind.simpleString()
    for arrow, spark in _SPARK_NAMES.items():
        if spark == text:
            return arrow
    raise UnsupportedSchema(f"a decoded column cannot have the type {text}")


def quoted(name: str) -> str:
    """Return a name as an identifier of Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def merge_types(old: pa.DataType, new: pa.DataType, path: str = "") -> pa.DataType:
    """Return the type that holds values of both types: fields are added at the end, and int, float and decimal are
    widened.

    Raises `IncompatibleTypes` with the path of the field for any other difference.
    """
    if old == new:
        return old
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        merged = {one.name: one.type for one in old}
        for one in new:
            inner = f"{path}.{one.name}" if path else one.name
            merged[one.name] = (
                merge_types(merged[one.name], one.type, inner) if one.name in merged else one.type
            )
        return struct_type(list(merged.items()))
    if pa.types.is_list(old) and pa.types.is_list(new):
        return list_type(merge_types(old.value_type, new.value_type, f"{path}[]"))
    if pa.types.is_map(old) and pa.types.is_map(new) and old.key_type == new.key_type:
        return map_type(old.key_type, merge_types(old.item_type, new.item_type, f"{path}{{}}"))
    if pa.types.is_decimal(old) and pa.types.is_decimal(new) and old.scale == new.scale:
        return old if old.precision >= new.precision else new
    if (old, new) in _WIDER:
        return new
    if (new, old) in _WIDER:
        return old
    where = f"field {path}" if path else "the value"
    raise IncompatibleTypes(f"{where} changes from {spark_type(old)} to {spark_type(new)}")


def common_type(kind: pa.DataType, target: pa.DataType) -> pa.DataType:
    """Return the part of `kind` that `target` has: fields of structs that `target` lacks are omitted."""
    if pa.types.is_struct(kind) and pa.types.is_struct(target):
        return struct_type(
            [
                (one.name, common_type(one.type, target.field(one.name).type))
                for one in kind
                if target.get_field_index(one.name) >= 0
            ]
        )
    if pa.types.is_list(kind) and pa.types.is_list(target):
        return list_type(common_type(kind.value_type, target.value_type))
    if pa.types.is_map(kind) and pa.types.is_map(target):
        return map_type(kind.key_type, common_type(kind.item_type, target.item_type))
    return kind


def check_readable(kind: pa.DataType, target: pa.DataType) -> None:
    """Check that values of `kind` can be read into columns of type `target`: fields that `target` lacks are ignored, no
    common field is wider. Raises `IncompatibleTypes`.
    """
    merged = merge_types(target, common_type(kind, target))
    if merged != target:
        raise IncompatibleTypes(f"{spark_type(merged)} is wider than {spark_type(target)}")
