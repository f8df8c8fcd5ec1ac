"""Iceberg schema of a DataFrame, for the result table into which it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)
from pyspark.sql import types as spark_types

from mansio.iceberg.errors import IncompatibleSchema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyiceberg.types import IcebergType

_PRIMITIVES: Final[dict[type[spark_types.DataType], IcebergType]] = {
    spark_types.BooleanType: BooleanType(),
    spark_types.ByteType: IntegerType(),
    spark_types.ShortType: IntegerType(),
    spark_types.IntegerType: IntegerType(),
    spark_types.LongType: LongType(),
    spark_types.FloatType: FloatType(),
    spark_types.DoubleType: DoubleType(),
    spark_types.DateType: DateType(),
    spark_types.TimestampType: TimestamptzType(),
    spark_types.TimestampNTZType: TimestampType(),
    spark_types.StringType: StringType(),
    spark_types.BinaryType: BinaryType(),
}
"""Iceberg's type of each primitive type of Spark."""


def to_iceberg_schema(schema: spark_types.StructType) -> Schema:
    """Return the Iceberg schema of a DataFrame; all columns are optional.

    Raises:
        IncompatibleSchema: Iceberg has no type for a column, or two columns have the same name.
    """
    ids = iter(range(1, 1 << 31))
    names = [field.name for field in schema.fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise IncompatibleSchema(f"the result has two columns {twice[0]}: rename one")
    # Ids of the columns come first, as Iceberg's own assignment has them.
    numbered = [(next(ids), field) for field in schema.fields]
    return Schema(
        *(
            NestedField(number, field.name, _to_iceberg_type(field.dataType, field.name, ids))
            for number, field in numbered
        )
    )


def _to_iceberg_type(found: spark_types.DataType, column: str, ids: Iterator[int]) -> IcebergType:
    if isinstance(found, spark_types.DecimalType):
        return DecimalType(found.precision, found.scale)
    if isinstance(found, spark_types.StructType):
        numbered = [(next(ids), field) for field in found.fields]
        return StructType(
            *(
                NestedField(
                    number, field.name, _to_iceberg_type(field.dataType, f"{column}.{field.name}", ids)
                )
                for number, field in numbered
            )
        )
    if isinstance(found, spark_types.ArrayType):
        number = next(ids)
        return ListType(number, _to_iceberg_type(found.elementType, column, ids), element_required=False)
    if isinstance(found, spark_types.MapType):
        key, value = next(ids), next(ids)
        key_type = _to_iceberg_type(found.keyType, column, ids)
        value_type = _to_iceberg_type(found.valueType, column, ids)
        return MapType(key, key_type, value, value_type, value_required=False)
    for spark_type, iceberg_type in _PRIMITIVES.items():
        if isinstance(found, spark_type):
            return iceberg_type
    raise IncompatibleSchema(
        f"column {column} is {found.simpleString()}, which Iceberg does not have: cast it"
    )
