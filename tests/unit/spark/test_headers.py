"""Trace context in rows that a sink writes: behind the headers of a row, and never beside a context of its own."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import ConfigError
from mansio.spark.arrow.encode import encode_batches
from mansio.spark.arrow.headers import with_trace_context
from mansio.spark.arrow.schema import HEADERS_TYPE
from mansio.spark.options import SinkOptions

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ADDED = {"key": "traceparent", "value": CONTEXT.encode()}

header = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["a", "b", "", "traceparent", "tracestate"]),
        "value": st.one_of(st.none(), st.binary(max_size=5)),
    }
)
columns = st.lists(st.one_of(st.none(), st.lists(header, max_size=4)), min_size=1, max_size=12)


def rows_with(column: list[list[dict[str, object]] | None]) -> pa.RecordBatch:
    values = [b"%d" % number for number in range(len(column))]
    return pa.RecordBatch.from_arrays(
        [pa.array(values), pa.array(column, HEADERS_TYPE)],
        schema=pa.schema([("value", pa.binary()), ("headers", HEADERS_TYPE)]),
    )


@given(columns, st.integers(0, 3))
def test_context_is_appended_to_the_rows_without_one(
    column: list[list[dict[str, object]] | None], begin: int
) -> None:
    rows = rows_with(column).slice(min(begin, len(column) - 1))
    found = with_trace_context(rows, CONTEXT)
    for before, after in zip(rows.column(1).to_pylist(), found.column(1).to_pylist(), strict=True):
        own = before or []
        keeps = any(one["key"] in ("traceparent", "tracestate") for one in own)
        assert after == (own if keeps else [*own, ADDED])
    assert found.column(0) == rows.column(0)
    assert len(list(encode_batches(found, partition_count=1, bytes_max=1 << 20))) == 1


def test_rows_without_headers_get_the_column() -> None:
    rows = pa.RecordBatch.from_pydict({"value": [b"1", b"2", None]})
    found = with_trace_context(rows, CONTEXT)
    assert found.to_pydict() == {"value": [b"1", b"2", None], "headers": [[ADDED]] * 3}


@pytest.mark.parametrize("text", ["", "x", CONTEXT[:-1], CONTEXT.upper(), f"{CONTEXT}\n"])
def test_option_that_is_no_context_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="option traceparent"):
        SinkOptions.parse({"kafka.bootstrap.servers": "b:1", "topic": "t", "traceparent": text})
    found = SinkOptions.parse({"kafka.bootstrap.servers": "b:1", "topic": "t", "traceparent": CONTEXT})
    assert found.traceparent == CONTEXT
