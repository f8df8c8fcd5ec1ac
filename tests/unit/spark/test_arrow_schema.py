"""Columns of a topic: Spark's default ones, others by name, and an error for unknown ones."""

from __future__ import annotations

import pytest

from mansio.errors import InvalidRequest
from mansio.spark.arrow.schema import RECORD_SCHEMA, record_schema, select_columns, spark_schema


def test_default_columns_are_those_of_sparks_kafka_source_with_headers_only_when_asked_for() -> None:
    expected = (
        "key binary, value binary, topic string, partition int, offset bigint, "
        "timestamp timestamp, timestampType int"
    )
    assert spark_schema() == expected
    assert (
        spark_schema(include_headers=True) == expected + ", headers array<struct<key: string, value: binary>>"
    )


def test_chosen_columns_keep_their_order_and_types() -> None:
    names = ["offset", "lane", "key"]
    assert select_columns(names, include_headers=True) == ("offset", "lane", "key", "headers")
    assert record_schema(names).types == [RECORD_SCHEMA.field(name).type for name in names]
    assert select_columns(["headers"], include_headers=True) == ("headers",)


@pytest.mark.parametrize(
    ("names", "words"),
    [(["key", "Value"], "no column 'Value'"), (["key", "key"], "twice"), ([], "no columns")],
)
def test_wrong_choice_lists_what_there_is(names: list[str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        select_columns(names)
