"""Where a result table is looked up, and which changes of its columns are made: all others are refused in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType, NestedField, StringType
from pyspark.sql import types as t

from mansio.errors import ConfigError
from mansio.iceberg.archive.open_elsewhere import open_elsewhere
from mansio.iceberg.errors import IncompatibleSchema
from mansio.iceberg.result_table.partition_spec import parse_partition_by, parse_sort_by
from mansio.iceberg.result_table.table import TableTarget, open_result_table
from mansio.iceberg.result_table.table_name import TableName, parse_table_name, to_pyiceberg_properties
from mansio.iceberg.result_table.table_schema import plan_changes, write_schema
from mansio.spark.sink.result_schema import to_iceberg_schema
from support.result_tables import COLUMNS, open_result

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("t", TableName("", ("mansio",), "t")),
        ("ns.t", TableName("", ("ns",), "t")),
        ("lab.ns.t", TableName("lab", ("ns",), "t")),
        ("lab.a.b.t", TableName("lab", ("a", "b"), "t")),
        ("mansio.ns.t", TableName("", ("ns",), "t")),
    ],
)
def test_name_of_a_table_has_a_catalog_from_three_parts_on(text: str, name: TableName) -> None:
    assert parse_table_name(text) == name


@pytest.mark.parametrize("text", ["", "a..b", "a b", "a/b", "`a`.b"])
def test_text_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no table"):
        parse_table_name(text)


def test_catalog_is_found_in_the_settings_of_spark_or_of_pyiceberg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_spark = {
        "spark.sql.catalog.lab": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lab.type": "jdbc",
        "spark.sql.catalog.lab.uri": f"jdbc:sqlite:{tmp_path}/lab.db",
        "spark.sql.catalog.lab.warehouse": f"file://{tmp_path}/lab",
    }
    made = open_result_table(TableTarget("lab.ns.t"), to_iceberg_schema(COLUMNS), by_spark)
    monkeypatch.setenv("PYICEBERG_CATALOG__LAB__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAB__URI", f"sqlite:///{tmp_path}/lab.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAB__WAREHOUSE", f"file://{tmp_path}/lab")
    found = open_result_table(TableTarget("lab.ns.t"), to_iceberg_schema(COLUMNS), {})
    assert found.iceberg.metadata.table_uuid == made.iceberg.metadata.table_uuid
    assert str(found.name) == "lab.ns.t"
    assert made.iceberg.location().startswith(f"file://{tmp_path}/lab")


def test_catalog_that_is_not_configured_is_refused_with_the_ways_to_do_it(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no catalog lab: configure it in \.pyiceberg\.yaml, by PYICEBERG_CATALOG__LAB"
    ):
        open_result_table(TableTarget("lab.ns.t", str(tmp_path)), to_iceberg_schema(COLUMNS), {})
    with pytest.raises(ConfigError, match="give --warehouse DIR"):
        open_result_table(TableTarget("ns.t"), to_iceberg_schema(COLUMNS), {})


@pytest.mark.parametrize(
    ("settings", "properties"),
    [
        (
            {"type": "rest", "uri": "http://h:1", "token": "s", "io-impl": "x"},
            {"type": "rest", "uri": "http://h:1", "token": "s"},
        ),
        (
            {
                "catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
                "uri": "jdbc:postgresql://h:5/d",
                "jdbc.user": "u",
                "jdbc.password": "p",
            },
            {"type": "sql", "uri": "postgresql+psycopg2://u:p@h:5/d"},
        ),
    ],
)
def test_settings_of_spark_are_translated_to_those_of_pyiceberg(
    settings: dict[str, str], properties: dict[str, str]
) -> None:
    assert to_pyiceberg_properties("lab", settings) == properties


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"type": "hadoop"}, "is of type hadoop: set spark.sql.catalog.lab.type to rest"),
        ({"uri": "http://h"}, "has no type"),
        ({"type": "jdbc", "uri": "jdbc:oracle:x"}, "of JDBC, sqlite, postgresql and mysql are known"),
    ],
)
def test_catalogs_that_python_cannot_write_to_are_refused(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        to_pyiceberg_properties("lab", settings)


def test_layout_of_an_existing_table_is_used_and_another_one_is_refused(tmp_path: Path) -> None:
    spec, order = (
        parse_partition_by("day(ts), bucket(4, id), truncate(2, name)"),
        parse_sort_by("ts desc, id"),
    )
    open_result(tmp_path, partition_by=spec, sort_by=order)
    again = open_result(tmp_path)
    assert again.partition_by == spec
    assert again.sort_by == order
    with pytest.raises(
        ConfigError, match=r"has another --partition-by \(day\(ts\), bucket\(4, id\), truncate"
    ):
        open_result(tmp_path, partition_by=spec[:1])
    with pytest.raises(ConfigError, match=r"has another --sort-by \(ts desc, id\)"):
        open_result(tmp_path, sort_by=order[:1])


def fields(**columns: Any) -> t.StructType:
    return t.StructType([t.StructField(name, column) for name, column in columns.items()])


def test_columns_are_added_and_widened_and_narrower_or_missing_ones_are_written_as_they_are(
    tmp_path: Path,
) -> None:
    point = t.StructType([t.StructField("x", t.IntegerType())])
    open_result(
        tmp_path, fields(a=t.IntegerType(), b=t.FloatType(), c=t.DecimalType(5, 2), d=t.StringType(), p=point)
    )
    wider = t.StructType([t.StructField("x", t.LongType()), t.StructField("y", t.ArrayType(t.DateType()))])
    second = open_result(
        tmp_path, fields(a=t.LongType(), b=t.DoubleType(), c=t.DecimalType(9, 2), p=wider, e=t.BinaryType())
    )
    assert str(second.changes) == "e added, a widened, b widened, c widened, p widened"
    schema = write_schema(second.iceberg.schema())
    assert [str(schema.field(name).type) for name in "abcde"] == [
        "int64",
        "double",
        "decimal128(9, 2)",
        "string",
        "binary",
    ]
    assert str(schema.field("p").type) == "struct<x: int64, y: list<element: date32[day]>>"
    third = open_result(tmp_path, fields(a=t.ShortType(), b=t.FloatType()))
    assert not third.changes
    assert third.iceberg.schema() == second.iceberg.schema()


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (fields(a=t.StringType()), "column a is int in the table and string in the result: cast it"),
        (fields(a=t.ArrayType(t.IntegerType())), "column a is int in the table and list"),
        (fields(d=t.BinaryType()), "column d is string in the table and binary"),
        (fields(v=t.NullType()), "column v is void, which Iceberg does not have: cast it"),
        (t.StructType([t.StructField("x", t.DateType()), t.StructField("x", t.DateType())]), "two columns x"),
    ],
)
def test_other_differences_of_columns_are_refused(tmp_path: Path, columns: t.StructType, reason: str) -> None:
    open_result(tmp_path, fields(a=t.IntegerType(), d=t.StringType()))
    with pytest.raises(IncompatibleSchema, match=reason):
        open_result(tmp_path, columns)


def test_rename_is_applied_once_and_a_required_column_has_to_be_in_the_result() -> None:
    table = Schema(NestedField(1, "a", IntegerType(), required=True), NestedField(2, "old", StringType()))
    result = to_iceberg_schema(fields(a=t.IntegerType(), new=t.StringType()))
    changes = plan_changes(table, result, {"old": "new"})
    assert str(changes) == "old renamed to new"
    renamed = Schema(NestedField(1, "a", IntegerType(), required=True), NestedField(2, "new", StringType()))
    assert not plan_changes(renamed, result, {"old": "new"})
    both = Schema(NestedField(1, "new", LongType()), NestedField(2, "old", StringType()))
    with pytest.raises(IncompatibleSchema, match="has columns old and new"):
        plan_changes(both, result, {"old": "new"})
    with pytest.raises(IncompatibleSchema, match="requires column a"):
        plan_changes(table, to_iceberg_schema(fields(old=t.StringType())), {})


def test_lines_for_other_engines_have_no_credentials(tmp_path: Path) -> None:
    table = open_result(tmp_path)
    spark, python, duckdb = open_elsewhere(table.iceberg)
    assert f"uri=jdbc:sqlite:{tmp_path}/catalog.db" in spark
    assert "`mansio`.`ns`.`t`" in spark
    imports, _, expression = python.removeprefix("pyiceberg: ").partition("; ")
    namespace: dict[str, Any] = {}
    exec(imports, namespace)
    assert len(eval(expression, namespace)) == 0
    assert table.iceberg.metadata_location in duckdb
    table.iceberg.catalog.properties |= {"uri": "postgresql+psycopg2://u:secret@h/d", "token": "secret"}
    assert "secret" not in "".join(open_elsewhere(table.iceberg))
