"""Schema check: an invalid value is reported with its position and its error; valid and missing values are not."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from mansio.errors import ConfigError
from mansio.pipelines.schema_check import (
    REASON_LENGTH_MAX,
    RECORD_COLUMNS,
    ValueValidator,
    check_schema,
    select_invalid_rows,
)
from mansio.spark.arrow.schema import record_schema

SCHEMA = {
    "type": "object",
    "required": ["carrier"],
    "properties": {
        "carrier": {"type": "string"},
        "legs": {"type": "array", "items": {"properties": {"to": {"enum": ["EWR", "JFK"]}}}},
    },
}


@pytest.mark.parametrize(
    ("value", "place", "rule"),
    [
        (b'{"carrier": 5}', "$.carrier", "type"),
        (b"{}", "$.carrier", "required"),
        (b'{"carrier": "UA", "legs": [{"to": "JFK"}, {"to": "X"}]}', "$.legs[*].to", "enum"),
        (b'"text"', "$", "type"),
        (b"{", "$", "json"),
        (b"", "$", "json"),
        (b"\xff\xfe\x00", "$", "json"),
        (b"[" * 100_000, "$", "json"),
        (b"1" * 10_000, "$", "json"),
        (b"NaN", "$", "json"),
        (b'{"carrier": "UA", "delay": -Infinity}', "$", "json"),
    ],
)
def test_bad_value_is_named_by_place_and_rule(value: bytes, place: str, rule: str) -> None:
    found = ValueValidator(SCHEMA)(value)
    assert found is not None
    assert found[:2] == (place, rule)
    assert found[2]
    assert "\n" not in found[2]
    assert len(found[2]) <= REASON_LENGTH_MAX


@pytest.mark.parametrize(
    ("schema", "value", "place", "reason"),
    [
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"c": {"$ref": "#/$defs/n"}}}}},
            b'{"c":' * 900 + b"1" + b"}" * 900,
            "$",
            "the value is nested too deep",
        ),
        ({"multipleOf": 0.01}, b"1e400", "$", "the value has a number that is too large"),
        (
            {"additionalProperties": {"type": "string"}},
            b'{"\\ud800": 1}',
            "$",
            "ud800",
        ),
        ({"additionalProperties": {"type": "string"}}, b'{"%s": 1}' % (b"k" * 9_999), "$.kkk", "$.kkk"),
    ],
    ids=["deep", "large number", "half a character", "long name"],
)
def test_one_unexpected_record_does_not_end_the_check(
    schema: object, value: bytes, place: str, reason: str
) -> None:
    rows = [{"value": value}, {"value": b"no json"}]
    batch = pa.RecordBatch.from_pylist(rows, record_schema(RECORD_COLUMNS))
    (found,) = select_invalid_rows(json.dumps(schema), iter([batch]))
    assert found.column("place")[0].as_py().startswith(place)
    assert reason in found.column("reason")[0].as_py()
    assert found.num_rows == 2
    assert max(len(text) for text in found.column("place").to_pylist()) <= REASON_LENGTH_MAX


@pytest.mark.parametrize("value", [None, b'{"carrier": "UA"}', '{"carrier": "ÄÖ", "more": [1]}'.encode()])
def test_good_value_and_none_at_all_are_left_alone(value: bytes | None) -> None:
    assert ValueValidator(SCHEMA)(value) is None


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strin"}, "no JSON Schema"),
        ({"properties": {"a": {"$ref": "http://127.0.0.1:1/x.json"}}}, "leads out of the schema"),
    ],
)
def test_what_is_no_schema_of_its_own_is_refused_before_anything_runs(schema: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_schema(schema)


def test_only_bad_rows_go_on_and_as_they_were() -> None:
    values = [b'{"carrier": "UA"}', None, b"{}", b"no json", b'{"carrier": "AA"}']
    rows = [
        {"key": b"%d" % offset, "value": value, "topic": "t", "partition": 0, "offset": offset}
        | {"timestamp": offset, "headers": [{"key": "h", "value": None}] if offset % 2 else None}
        for offset, value in enumerate(values)
    ]
    batch = pa.RecordBatch.from_pylist(rows, record_schema(RECORD_COLUMNS))
    (found,) = select_invalid_rows(json.dumps(SCHEMA), iter([batch, batch.slice(0, 2)]))
    assert found.select(RECORD_COLUMNS).to_pylist() == batch.take([2, 3]).to_pylist()
    assert found.column("place").to_pylist() == ["$.carrier", "$"]
    assert found.column("rule").to_pylist() == ["required", "json"]
