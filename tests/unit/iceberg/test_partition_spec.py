"""Partition values are those of pyiceberg, value by value, and rows are split by them without loss."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    TruncateTransform,
    YearTransform,
)
from pyiceberg.types import (
    BinaryType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
)

from mansio.errors import ConfigError
from mansio.iceberg.result_table.partition_spec import (
    PartitionField,
    SortField,
    check_transform,
    parse_partition_by,
    parse_sort_by,
    partition_values,
    split_by_partition,
)

if TYPE_CHECKING:
    from collections.abc import Callable

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
MICROSECONDS = st.integers(-(10**16), 10**16)
DAYS = st.integers(-100_000, 100_000)
UTC_TIME = pa.timestamp("us", tz="UTC")


def times(values: list[int | None]) -> pa.Array:
    return pa.array(values, UTC_TIME)


def dates(values: list[int | None]) -> pa.Array:
    return pa.array(values, pa.int32()).cast(pa.date32())


CASES: list[tuple[str, Any, Any, Any, Callable[[list[Any]], pa.Array]]] = [
    ("bucket(16, c)", BucketTransform(16), LongType(), INT64, lambda v: pa.array(v, pa.int64())),
    ("bucket(7, c)", BucketTransform(7), IntegerType(), INT32, lambda v: pa.array(v, pa.int32())),
    ("bucket(16, c)", BucketTransform(16), StringType(), st.text(), lambda v: pa.array(v, pa.string())),
    ("bucket(3, c)", BucketTransform(3), BinaryType(), st.binary(), lambda v: pa.array(v, pa.binary())),
    ("bucket(5, c)", BucketTransform(5), TimestamptzType(), MICROSECONDS, times),
    ("bucket(5, c)", BucketTransform(5), DateType(), DAYS, dates),
    ("truncate(10, c)", TruncateTransform(10), LongType(), INT64.filter(lambda n: n > -(2**63) + 10),
     lambda v: pa.array(v, pa.int64())),
    ("truncate(3, c)", TruncateTransform(3), StringType(), st.text(), lambda v: pa.array(v, pa.string())),
    ("c", IdentityTransform(), DateType(), DAYS, dates),
    ("c", IdentityTransform(), TimestampType(), MICROSECONDS, lambda v: pa.array(v, pa.timestamp("us"))),
    ("year(c)", YearTransform(), TimestamptzType(), MICROSECONDS, times),
    ("month(c)", MonthTransform(), TimestamptzType(), MICROSECONDS, times),
    ("days(c)", DayTransform(), TimestamptzType(), MICROSECONDS, times),
    ("hour(c)", HourTransform(), TimestamptzType(), MICROSECONDS, times),
    ("year(c)", YearTransform(), DateType(), DAYS, dates),
    ("month(c)", MonthTransform(), DateType(), DAYS, dates),
    ("day(c)", DayTransform(), DateType(), DAYS, dates),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]} of {case[2]}" for case in CASES])
@given(data=st.data())
def test_partition_values_are_those_of_pyiceberg(case: Any, data: st.DataObject) -> None:
    text, transform, column_type, values, column = case
    given_values = data.draw(st.lists(st.none() | values, max_size=20))
    one_value = transform.transform(column_type)
    rows = column(given_values)
    (field,) = parse_partition_by(text)
    check_transform(field, rows.type)
    assert partition_values(field, rows).to_pylist() == [one_value(value) for value in given_values]


@given(
    rows=st.lists(
        st.tuples(st.none() | st.integers(0, 3), st.none() | st.sampled_from("xyz"), st.integers()),
        max_size=30,
    )
)
def test_split_rows_are_all_rows_once_in_order_and_each_part_has_one_partition(rows: list[Any]) -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "a": pa.array([row[0] for row in rows], pa.int32()),
            "b": pa.array([row[1] for row in rows], pa.string()),
            "n": pa.array(range(len(rows)), pa.int64()),
        }
    )
    parts = list(split_by_partition(parse_partition_by("a, b"), batch))
    assert len({partition for partition, _ in parts}) == len(parts)
    expected: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        expected.setdefault(row[:2], []).append(number)
    assert {partition: part.column("n").to_pylist() for partition, part in parts} == expected


def test_texts_of_options_are_parsed_and_printed() -> None:
    fields = parse_partition_by("day(ts), bucket(16, key),country , Truncate(4, name)")
    assert fields == (
        PartitionField("ts", "day"),
        PartitionField("key", "bucket", 16),
        PartitionField("country"),
        PartitionField("name", "truncate", 4),
    )
    assert ", ".join(map(str, fields)) == "day(ts), bucket(16, key), country, truncate(4, name)"
    assert parse_sort_by("ts, key DESC") == (SortField("ts"), SortField("key", descending=True))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("days(3, ts)", "day has no parameter"),
        ("bucket(key)", r"needs a number from 1 to \d+: bucket\(16, key\)"),
        ("bucket(0, key)", "needs a number"),
        ("week(ts)", "names no partition transform"),
        ("bucket(16, key", "is no partition field"),
        ("", "is no partition field"),
        ("a b", "is no partition field"),
    ],
)
def test_text_that_is_no_partition_spec_is_refused_with_the_forms_that_are(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_partition_by(text)


@pytest.mark.parametrize("text", ["", "a b c", "a up"])
def test_text_that_is_no_sort_order_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no sort field"):
        parse_sort_by(text)


@pytest.mark.parametrize(
    ("text", "column"),
    [("day(c)", pa.string()), ("hour(c)", pa.date32()), ("c", pa.float64()), ("truncate(3, c)", pa.bool_())],
)
def test_transform_that_a_type_does_not_have_is_refused(text: str, column: pa.DataType) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"column c is {column}")):
        check_transform(parse_partition_by(text)[0], column)
